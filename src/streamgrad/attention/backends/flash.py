"""FlashAttention through torch (CUDA, 16-bit, no mask): dense and causal blocks of any shape, sliding windows, varlen batches.

The kernel is torch's built-in FlashAttention-2, or what `torch.nn.attention.activate_flash_attention_impl` has put in its place
(FlashAttention-3 or 4, if their packages are installed). All are called through the same operators.

Shapes: B batch, H query heads, G key/value heads, L queries, S keys, D head size, N queries and M keys of a varlen batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamgrad.attention.backends.block import Block
from streamgrad.attention.varlen import VarlenBatch
from streamgrad.engine.kv_chunk import Attended, KeyGradient

aten = torch.ops.aten


class FlashBackend:
    name = "flash"
    joins_segments = True

    def refusal(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> str | None:
        implementation = flash_implementation()
        if implementation is not None and block.window is not None and _torch_version() < (2, 13):
            return f"torch before 2.13 may call {implementation} without a sliding window in backward"
        largest_head = 128 if implementation == "FA4" else 256
        return needs_16_bit_cuda(query_BHLD, value_BGSD, block, largest_head)

    def forward(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> Attended:
        if block.varlen is not None:
            return _varlen_forward(query_BHLD, key_BGSD, value_BGSD, block)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query_BHLD, key_BGSD, value_BGSD))
        # Unlike scaled_dot_product_attention, this operator aligns is_causal at the last query and key, as `Block.causal` does.
        out_BLHD, lse_BHL, *_ = aten._flash_attention_forward(
            query, key, value, None, None, query.shape[1], key.shape[1], 0.0, block.causal, False, **_options(block, block.causal)
        )
        return Attended(out_BLHD.transpose(1, 2), lse_BHL)

    def backward(
        self, dout_BHLD: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, done: Attended, block: Block
    ) -> tuple[Tensor, list[KeyGradient]]:
        if block.varlen is not None:
            return _varlen_backward(dout_BHLD, query_BHLD, key_BGSD, value_BGSD, done, block)
        tensors = dout_BHLD, query_BHLD, key_BGSD, value_BGSD, done.out_BHLD
        dout, query, key, value, out = (tensor.transpose(1, 2) for tensor in tensors)
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        dquery, dkey, dvalue = aten._flash_attention_backward(
            dout, query, key, value, out, done.lse_BHL, None, None, query.shape[1], key.shape[1], 0.0, block.causal,
            seed, seed[:0], **_options(block, block.causal),
        )  # fmt: skip
        return dquery.transpose(1, 2), [(0, key.shape[1], dkey.transpose(1, 2), dvalue.transpose(1, 2))]


def flash_implementation() -> str | None:
    """Return what replaces torch's own FlashAttention-2 ("FA3" or "FA4"), or None."""
    return torch.nn.attention.current_flash_attention_impl()


def activate_fa4() -> None:
    """Let torch's flash operators run FlashAttention-4 from now on, as `attention="fa4"` asks for; raise if it is not there."""
    if flash_implementation() == "FA4":
        return
    try:
        torch.nn.attention.activate_flash_attention_impl("FA4")
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"attention='fa4' asks for FlashAttention-4, which cannot be used here: {error}. "
            "Run: pip install \"streamgrad[fa4]\" on a machine with a Hopper or Blackwell GPU, or pass attention='auto'."
        ) from error


def needs_16_bit_cuda(query_BHLD: Tensor, value_BGSD: Tensor, block: Block, largest_head: int) -> str | None:
    """Return why a 16-bit kernel without masks, for NVIDIA GPUs, cannot compute the block, or None if it can."""
    size = query_BHLD.shape[-1]
    if query_BHLD.device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, not device {query_BHLD.device.type!r}"
    if query_BHLD.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, not {query_BHLD.dtype}"
    if block.mask is not None:
        return "it takes no mask (padding with gaps, a window over padding, or a 4-D mask)"
    if block.softcap is not None or block.dropout > 0.0:
        return "it supports neither softcap nor dropout here"
    if size != value_BGSD.shape[-1] or size % 8 or size > largest_head:
        return f"it needs one head size, a multiple of 8 up to {largest_head}, for keys and values"
    return None


def _varlen_forward(query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> Attended:
    """Attend with one call for causal segments and one for others; queries in no segment get 0 and a log-sum-exp of -inf."""
    assert block.varlen is not None
    batch, _, length, _ = query_BHLD.shape
    out_BHLD: Tensor | None = None
    lse_BHL: Tensor | None = None
    for varlen in block.varlen.batches(query_BHLD.device):
        query = varlen.queries.gather(query_BHLD)
        key, value = (varlen.keys.gather(tensor) for tensor in (key_BGSD, value_BGSD))
        out_NHD, lse_HN, *_ = aten._flash_attention_forward(
            query, key, value, *_extents(varlen), 0.0, varlen.causal, False, **_options(block, varlen.causal)
        )
        out_BHLD = varlen.queries.scatter(out_NHD, batch, length, into=out_BHLD)
        lse_BHL = varlen.queries.scatter(lse_HN.mT, batch, length, fill=float("-inf"), into=lse_BHL)
    if out_BHLD is None or lse_BHL is None:
        return Attended(
            torch.zeros_like(query_BHLD), query_BHLD.new_full(query_BHLD.shape[:3], float("-inf"), dtype=torch.float32)
        )
    return Attended(out_BHLD, lse_BHL.contiguous())


def _varlen_backward(
    dout_BHLD: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, done: Attended, block: Block
) -> tuple[Tensor, list[KeyGradient]]:
    assert block.varlen is not None
    batch, _, length, _ = query_BHLD.shape
    keys = key_BGSD.shape[2]
    seed = torch.zeros(2, dtype=torch.uint64, device=query_BHLD.device)
    dquery_BHLD: Tensor | None = None
    pieces: list[KeyGradient] = []
    for varlen in block.varlen.batches(query_BHLD.device):
        dout, query, out = (varlen.queries.gather(tensor) for tensor in (dout_BHLD, query_BHLD, done.out_BHLD))
        key, value = (varlen.keys.gather(tensor) for tensor in (key_BGSD, value_BGSD))
        lse_HN = varlen.queries.gather(done.lse_BHL).mT.contiguous()
        dquery, dkey, dvalue = aten._flash_attention_backward(
            dout, query, key, value, out, lse_HN, *_extents(varlen), 0.0, varlen.causal, seed, seed[:0],
            **_options(block, varlen.causal),
        )  # fmt: skip
        dquery_BHLD = varlen.queries.scatter(dquery, batch, length, into=dquery_BHLD)
        pieces += varlen.keys.gradients(dkey, dvalue, batch, keys)
    if dquery_BHLD is None:
        return torch.zeros_like(query_BHLD), [(0, keys, torch.zeros_like(key_BGSD), torch.zeros_like(value_BGSD))]
    return dquery_BHLD, pieces


def _extents(varlen: VarlenBatch) -> tuple[Tensor, Tensor, int, int]:
    """Return the operators' cum_seq_q, cum_seq_k, max_q and max_k."""
    # For max_q = 1, FlashAttention-2 switches to a kernel for decoding. max_q is only an upper bound, so it is at least 2 here.
    return varlen.queries.cu_seqlens_C, varlen.keys.cu_seqlens_C, max(2, varlen.queries.max_seqlen), varlen.keys.max_seqlen


def _options(block: Block, causal: bool) -> dict[str, float | int]:
    """Return the scale and, in a causal block with a window, how many keys before and after its own a query sees."""
    if block.window is None or not causal:
        return {"scale": block.scale}
    return {"scale": block.scale, "window_size_left": block.window - 1, "window_size_right": 0}


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
