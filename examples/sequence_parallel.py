"""A plain torch loop in which all ranks share every sequence, each with a contiguous slice of its tokens:

    torchrun --nproc_per_node 2 examples/sequence_parallel.py Qwen/Qwen3-0.6B

It trains on random tokens; put your own data in their place. The lines that matter for streamgrad are marked.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import streamgrad
from streamgrad.parallel import sequence_loss, sequence_parallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="name or folder of a causal language model")
    parser.add_argument("--length", type=int, default=65_536, help="tokens of a sequence")
    parser.add_argument("--chunk-size", type=int, default=1024, help="tokens of one rank that a layer processes at a time")
    parser.add_argument("--ring", type=int, default=1, help="ranks that gather keys instead of trading heads, across nodes")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", help="folder for the trained model")
    options = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    group = dist.group.WORLD  # for several sequences at a time: init_device_mesh(...)["sequence"].get_group()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    model = AutoModelForCausalLM.from_pretrained(options.model).to(device).train()
    streamgrad.enable(model, chunk_size=options.chunk_size)
    sequence_parallel(model, group, ring=options.ring)  # <- each rank passes its slice from now on
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    seeded = torch.Generator().manual_seed(0)  # every rank reads the same sequences
    padding = -options.length % ranks
    for _ in range(options.steps):
        ids = torch.randint(model.config.vocab_size, (1, options.length), generator=seeded).to(device)
        targets = torch.nn.functional.pad(ids[:, 1:], (0, 1 + padding), value=-100)  # <- shifted before they are cut
        ids = torch.nn.functional.pad(ids, (0, padding))
        own_ids, own_targets = (tensor.chunk(ranks, dim=1)[rank] for tensor in (ids, targets))
        loss = wrapped(input_ids=own_ids, labels=own_targets, shift_labels=own_targets).loss
        loss = sequence_loss(loss, own_targets, group)  # <- the whole sequence's, for gradients that are averaged over ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"loss {loss.item():.6f}")
    if options.output and rank == 0:
        model.save_pretrained(options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
