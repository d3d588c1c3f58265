"""Sets up the methods that streamgrad is measured beside, and engines that it is measured under, as their authors would.

`mst` is the Mini-Sequence Transformer (Luo et al. 2024, arXiv 2407.15892), in plain PyTorch from its description: gradient
checkpointing, the MLP run on one piece of the sequence after the other, and head and cross entropy likewise, with each piece's
logits made again in backward. The sizes of the pieces are the defaults of its authors' code.

Shapes: B sequences, T tokens, E model width, V vocabulary.
"""

from __future__ import annotations

import importlib
import os
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from streamgrad.attention.backends import flash_implementation
from streamgrad.hf.discover import decoder_layers
from streamgrad.parallel.zero3 import make_zero3_leaves

_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)

MLP_PIECE_TOKENS = 4096
HEAD_PIECES = 16


def apply_liger(model_type: str, *, fused_loss: bool) -> None:
    """Give every model of this type that the process builds from now on Liger's kernels."""
    try:
        liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ModuleNotFoundError as error:
        raise ValueError("the methods liger and streamgrad-liger need liger-kernel. Run: pip install liger-kernel") from error
    patch = liger.MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if patch is None:
        raise ValueError(f"liger-kernel has no kernels for {model_type}. Leave the methods with liger out.")
    patch(fused_linear_cross_entropy=fused_loss)


def add_trl_head(network: PreTrainedModel) -> None:
    """Give the model the head that TRL's trainers score completions with, with what they log: log-probabilities and entropies."""
    try:
        utils = importlib.import_module("trl.trainer.utils")
    except ModuleNotFoundError as error:
        raise ValueError("the method trl needs TRL. Run: pip install trl") from error
    utils.add_fused_lm_head(network, outputs=("log_probs", "entropy"))


def shard_for_one_rank(network: PreTrainedModel, device: torch.device, *, on_host: bool) -> None:
    """Shard by FSDP2 as for several GPUs, with this process as the only rank: what the engine itself costs a step.

    With `on_host`, weights wait in pinned memory and their gradients go there, as with `streamgrad train --weights host`.
    """
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy()
    _be_the_only_rank(device)
    mesh = init_device_mesh(device.type, (1,))
    ends = [network.get_input_embeddings(), network.get_output_embeddings()]
    # Units of their own, or both would stay gathered for the whole step; a weight that they share can be in one unit only.
    apart = [] if ends[0].weight is ends[1].weight else ends
    for unit in [*apart, *decoder_layers(network.get_decoder()), network]:
        fully_shard(unit, mesh=mesh, offload_policy=policy)


def zero3_for_one_rank(network: PreTrainedModel, device: torch.device) -> Any:
    """Return DeepSpeed's engine, ZeRO-3 as for several GPUs, with this process as the only rank.

    Its weights and gradients have the model's own dtype, so that it holds what a step without it does, and its buffers have the
    sizes that Accelerate and transformers give them for "auto".
    """
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        raise ValueError("the method streamgrad-zero3 needs deepspeed. Run: pip install deepspeed") from error
    _be_the_only_rank(device)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # which DeepSpeed reads whoever has made the group
    make_zero3_leaves(network)
    own_dtype, width = network.dtype == torch.bfloat16, network.config.hidden_size
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": own_dtype, "bf16_master_weights_and_grads": own_dtype, "bf16_optimizer_states": own_dtype},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": width**2,
            "stage3_prefetch_bucket_size": int(0.9 * width**2),
            "stage3_param_persistence_threshold": 10 * width,
            # Nothing stays gathered that is not in use: layers are gathered as a whole, and there is memory for few of them.
            "stage3_max_live_parameters": width**2,
            "stage3_max_reuse_distance": width**2,
        },
    }
    engine, *_ = deepspeed.initialize(model=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.0), config=config)
    return engine


def _be_the_only_rank(device: torch.device) -> None:
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def use_flash(implementation: str) -> None:
    """Let torch's flash operators run FlashAttention-3 or 4 from now on, for every method ("FA3", "FA4"), or torch's own ("FA2").

    torch's scaled_dot_product_attention, which the peers call, prefers cuDNN to flash, and is told not to take it.
    """
    if implementation == flash_name():
        return
    if implementation == "FA2":
        torch.nn.attention.restore_flash_attention_impl()
        torch.backends.cuda.enable_cudnn_sdp(True)
        return
    try:
        torch.nn.attention.activate_flash_attention_impl(implementation)
    except ImportError as error:
        raise ValueError(
            f"flash={implementation!r} needs the package flash-attn-{implementation[-1]}, which is not installed here ({error}). "
            "Install it, or leave flash out."
        ) from error
    torch.backends.cuda.enable_cudnn_sdp(False)


def flash_name() -> str:
    """Return the name of what torch's flash operators run."""
    return flash_implementation() or "FA2"


def compile_layers(network: PreTrainedModel) -> None:
    """Compile each layer by itself, for all lengths at once."""
    for layer in decoder_layers(network.get_decoder()):
        layer.compile(dynamic=True)


def save_products() -> Any:
    """Return the contexts of torch's selective checkpointing that keep products and attention, and run the rest again."""
    return create_selective_checkpoint_contexts(list(_PRODUCTS))


def split_mlps(network: PreTrainedModel) -> None:
    """Run each layer's MLP on pieces of `MLP_PIECE_TOKENS` tokens of the sequence."""
    for layer in decoder_layers(network.get_decoder()):
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, nn.Module):
            raise ValueError(f"{type(layer).__name__} has no module named mlp to split. Leave the method mst out.")
        mlp.__dict__["forward"] = MethodType(_forward_in_pieces, mlp)


def _forward_in_pieces(mlp: nn.Module, h_BTE: Tensor) -> Tensor:
    return torch.cat([type(mlp).forward(mlp, piece) for piece in h_BTE.split(MLP_PIECE_TOKENS, dim=1)], dim=1)


def mini_sequence_loss(network: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Return `network(input_ids=ids, labels=ids).loss`, with the logits of one of `HEAD_PIECES` pieces at a time."""
    h_BTE = network.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
    targets_BT = ids_BT[:, 1:]
    head = network.get_output_embeddings()

    def summed(h_BLE: Tensor, targets_BL: Tensor) -> Tensor:
        logits_NV = head(h_BLE).flatten(0, 1)
        # As transformers' own loss: in fp32, where the model is not in more.
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        return F.cross_entropy(logits_NV, targets_BL.flatten(), reduction="sum")

    pieces = zip(h_BTE.chunk(HEAD_PIECES, dim=1), targets_BT.chunk(HEAD_PIECES, dim=1), strict=True)
    losses = [checkpoint(summed, *piece, use_reentrant=False) for piece in pieces]
    return torch.stack(losses).sum() / targets_BT.numel()
