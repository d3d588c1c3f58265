"""A training loop with Accelerate, the same for every engine:

    accelerate launch --config_file examples/accelerate_configs/fsdp2.yaml examples/accelerate_example.py Qwen/Qwen3-0.6B

(or `torchrun --nproc_per_node 2`, or plain `python`). It trains on random tokens; put your own data in their place. The lines
that matter for streamgrad are marked.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM

import streamgrad
from streamgrad.parallel import check_launch, make_zero3_leaves

GLOBAL_BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="name or folder of a causal language model")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--chunk-size", type=int, default=1024)
    parser.add_argument("--output", help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    accelerator = Accelerator()
    check_launch(accelerator)  # <- without GPUs, Accelerate would leave out the engine and say nothing
    if GLOBAL_BATCH % accelerator.num_processes:
        raise SystemExit(f"{accelerator.num_processes} processes cannot share a batch of {GLOBAL_BATCH} evenly.")
    accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type.value}")
    model = AutoModelForCausalLM.from_pretrained(options.model)
    model.train()
    streamgrad.enable(model, chunk_size=options.chunk_size)  # <- before or after prepare
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        make_zero3_leaves(model)  # <- before prepare

    seeded = torch.Generator().manual_seed(0)
    shape = options.steps * GLOBAL_BATCH, options.length
    tokens = torch.randint(model.config.vocab_size, shape, generator=seeded)
    loader = torch.utils.data.DataLoader(tokens, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for ids in loader:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(f"loss {mean_loss:.6f}")
    if options.output:
        weights = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            options.output, is_main_process=accelerator.is_main_process, state_dict=weights, save_function=accelerator.save
        )
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
