"""The mask seam: Hugging Face's mask functions become a `CausalMask` that is built chunk by chunk.

Private detail relied on (and pinned by tests/hf/test_seams.py): `masking_utils` composes masks as closures, `and_masks(...)` over
leaves such as `causal_mask_function`, and their closures hold the window and the packed-document ids, which
`masking_utils.find_packed_sequence_indices` finds by restarting positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function

from streamgrad.attention.masks import CausalMask, DenseMask
from streamgrad.engine.kv_chunk import SeamError


def stream_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> CausalMask:
    """Registered with `AttentionMaskInterface`: the same arguments as `masking_utils.sdpa_mask`, no (T x T) tensor."""
    if q_length != kv_length or q_offset or kv_offset:
        raise ValueError(
            f"{q_length} queries see {kv_length} keys: the attention mask or a key/value cache covers tokens that are not in "
            "this call, and gradients through those cannot be streamed. Pass a mask of the input's length and no cache."
        )
    if use_vmap:
        raise SeamError("it overlays a custom mask function, which may let tokens see later ones")
    leaves = list(_conjuncts(mask_function))
    if causal_mask_function not in leaves:
        names = ", ".join(leaf.__qualname__ for leaf in leaves)
        raise SeamError(f"its attention mask ({names}) is not causal")
    window: int | None = None
    documents_BT: Tensor | None = None
    has_other_rule = False
    for leaf in leaves:
        kind = leaf.__qualname__.split(".")[0]
        if kind == "sliding_window_overlay":
            size = _closure(leaf)["sliding_window"]
            window = size if window is None else min(window, size)
        elif kind == "packed_sequence_mask_function" and documents_BT is None:
            documents_BT = _closure(leaf)["packed_sequence_mask"]
        elif leaf is not causal_mask_function:
            has_other_rule = True
    padding_BT = attention_mask.bool() if attention_mask is not None else None
    rule = None if leaves == [causal_mask_function] else mask_function
    return CausalMask(rule, padding_BT, window, documents_BT, has_other_rule, batch_size)


def _conjuncts(mask_function: Callable) -> Iterator[Callable]:
    """The leaves of a mask that is an AND of leaves; an OR counts as one leaf, as it may not be causal."""
    if mask_function.__qualname__.split(".")[0] == "and_masks":
        for part in _closure(mask_function)["mask_functions"]:
            yield from _conjuncts(part)
    else:
        yield mask_function


def _closure(function: Callable) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def layer_mask(attention_mask: object, length: int, *, chunk_size: int) -> CausalMask | DenseMask:
    """What a decoder layer was given as `attention_mask`, as a mask that can be built by chunk."""
    if attention_mask is None:
        return CausalMask()
    if isinstance(attention_mask, CausalMask | DenseMask):
        return attention_mask
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
        if attention_mask.shape[-2:] != (length, length):
            raise ValueError(
                f"the 4-D attention mask has shape {tuple(attention_mask.shape)} for a sequence of {length} tokens. "
                f"Pass (batch, 1, {length}, {length})."
            )
        if attention_mask.requires_grad:
            raise SeamError("its attention mask needs a gradient, which a streamed layer would not give it")
        mask = DenseMask(attention_mask)
        ahead = mask.first_look_ahead(chunk_size)
        if ahead is not None:
            raise ValueError(
                f"the 4-D attention mask lets token {ahead[0]} see token {ahead[1]}, which comes after it. Only causal masks can "
                "be streamed: hide every key after its query, or call streamgrad.disable(model) for this batch."
            )
        return mask
    raise SeamError(f"its layers receive a mask of type {type(attention_mask).__name__} that cannot be cut into chunks")


def with_documents(mask: CausalMask, cu_seq_lens: Tensor, length: int) -> CausalMask:
    """`mask`, and no attention across the documents whose boundaries are `cu_seq_lens` = [0, end_1, end_2, ..., length]."""
    ends = cu_seq_lens.to(torch.long)
    if int(ends[0]) != 0 or int(ends[-1]) != length:
        raise ValueError(
            f"cu_seq_lens runs from {int(ends[0])} to {int(ends[-1])}, but the packed sequence has {length} tokens. "
            f"It must start at 0 and end at {length}."
        )
    positions_T = torch.arange(length, device=ends.device)
    documents_BT = torch.searchsorted(ends[1:].contiguous(), positions_T, right=True).unsqueeze(0)
    if mask.documents_BT is not None:
        # Both are ids of consecutive runs, so their sum changes exactly where either does.
        documents_BT = documents_BT.to(mask.documents_BT.device) + mask.documents_BT

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        first = torch.zeros_like(batch) if documents_BT.shape[0] == 1 else batch
        same = documents_BT[first, query] == documents_BT[first, key]
        return same if mask.rule is None else same & mask.rule(batch, head, query, key)

    return CausalMask(rule, mask.padding_BT, mask.window, documents_BT, mask.has_other_rule, mask.batch)


@contextmanager
def documents_of_sequence(documents_BT: Tensor | None) -> Iterator[None]:
    """Within the block, `masking_utils` finds these packed documents, whatever positions it is shown.

    Where ranks share a sequence, a rank's own positions do not tell where documents begin. A model that looks for documents then
    finds those of the sequence, and one that does not (gpt-oss) is not made to.
    """
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: (
        None if documents_BT is None else documents_BT.expand(position_ids.shape[0], -1)
    )
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found
