"""The two seams of a Hugging Face model: the attention function and the mask function that its registries hand out.

Both are registered under the name "streamgrad". The mask function returns a `CausalMask`, which is built chunk by chunk.

Private details of transformers that this relies on, pinned by tests/hf/test_seams.py: `masking_utils` composes masks as closures,
`and_masks(...)` and `or_masks(...)` over leaves such as `causal_mask_function`; the closures hold the window, the ids of packed
documents and those of blocks that see each other both ways; and `masking_utils.find_packed_sequence_indices` finds the ids of
documents by restarting positions.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import causal_mask_function

from streamgrad.attention.backends import Kernels
from streamgrad.attention.blocks import Blocks
from streamgrad.attention.masks import CausalMask, DenseMask
from streamgrad.attention.streamed import streamed_attention
from streamgrad.engine.kv_chunk import Chunk, KeyValueStream, SeamError
from streamgrad.engine.replay import as_autocast
from streamgrad.engine.temporary import temporary_attribute
from streamgrad.hf.known_code import eager_attention_of, reads_argument
from streamgrad.hf.unusable import NoWeights, Unusable
from streamgrad.ops.autograd import untraced

IMPLEMENTATION = "streamgrad"

# Further arguments of attention functions that may be ignored: the mask carries them, or they do not concern attention.
_CARRIED_BY_THE_MASK = {"sliding_window", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_NOT_ABOUT_ATTENTION = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "output_hidden_states", "return_dict",
    "num_items_in_batch", "ignore_index", "labels", "shift_labels",
    "logits_to_keep", "past_key_values", "layer_past", "seq_idx", "output_router_logits",
}  # fmt: skip

# The function of `masking_utils` that lets tokens of the same block see each other both ways.
_BLOCKS = "blockwise_overlay"
_LEFT_UNREAD = _CARRIED_BY_THE_MASK | _NOT_ABOUT_ATTENTION


# --- Attention ------------------------------------------------------------------------------------------------------------


@untraced  # for a user who has compiled the attention module
def stream_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *by_position: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, NoWeights | None]:
    """Attend with the queries of one chunk, by the contract of `sdpa_attention_forward`.

    (B, H, L, D) in, ((B, L, H, D), weights) out, where the weights are None, or raise if stock attention returns some. The chunk
    is what the layer was given as its `attention_mask`, or the whole row, within `whole_rows_attend`.
    """
    if by_position:
        raise SeamError(
            "its attention is called with scaling or dropout by position, and kernels take these in different orders; pass both "
            "by name"
        )
    in_whole, length = _WHOLE.get(), key.shape[2]
    if in_whole is not None:
        given = in_whole.unmasked if attention_mask is None else attention_mask
        if isinstance(given, CausalMask):
            attention_mask = Chunk(0, length, KeyValueStream(length), in_whole.mask(given), in_whole.backends)
    if not isinstance(attention_mask, Chunk):
        raise SeamError(f"its attention replaces the mask it was given by a {type(attention_mask).__name__}")
    for name, argument in kwargs.items():
        if name not in _LEFT_UNREAD and argument is not None and argument is not False and not isinstance(argument, Unusable):
            raise SeamError(f"its attention is called with {name}={type(argument).__name__}, which streaming does not support")
    if type(scaling) not in _NUMBERS or type(softcap) not in _NUMBERS:
        _check_factors(scaling=scaling, softcap=softcap)
    stock = _replaced.get(id(getattr(module, "config", None)), (None, 0))[0]
    if s_aux is not None or softcap is not None:
        _check_read(module, stock, s_aux=s_aux, softcap=softcap)
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        _check_explicit(attention_mask)
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = map(as_autocast, (query, key, value))
    out_BHLD = streamed_attention(
        attention_mask,
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        dropout=dropout,
        sink_H=s_aux,
    )
    return out_BHLD.transpose(1, 2).contiguous(), NoWeights() if stock == "eager" else None


_NUMBERS = (float, type(None))


def _check_factors(**factors: Any) -> None:
    for name, factor in factors.items():
        if isinstance(factor, Tensor) and (factor.requires_grad or factor.numel() != 1):
            raise SeamError(f"its attention is called with {name}, a tensor that is trained or no single number")


def _check_read(module: nn.Module, stock: str | None, **given: Any) -> None:
    """Raise for an argument that stock attention would let pass, and streamed attention acts on."""
    names = {name for name, value in given.items() if value is not None}
    if names <= _read.get(module, {}).get(stock, set()):
        return
    functions = [each for each in eager_attention_of(module) if each is not None] if stock == "eager" else []
    for name in names:
        # What SDPA does with a softcap depends on the release: it raises, or leaves it out of a model that has one.
        ignored = stock == "sdpa" and name == "s_aux"
        if ignored or (functions and not any(reads_argument(each, name) for each in functions)):
            raise SeamError(f"its attention is called with {name}, which {stock} attention ignores; leave it out")
    _read.setdefault(module, {})[stock] = names


# The arguments of attention that stock attention, by its name, is known to read in a module.
_read: weakref.WeakKeyDictionary[nn.Module, dict[str | None, set[str]]] = weakref.WeakKeyDictionary()


def _check_explicit(chunk: Chunk) -> None:
    """Raise unless there is a mask: stock attention that is not causal sees all keys where it is given none."""
    mask = chunk.mask
    if not chunk.alone and (not isinstance(mask, CausalMask) or mask.blocks is None):
        raise SeamError(
            "its attention is not causal, and no argument says which tokens see each other both ways (PaliGemma's processor "
            "makes token_type_ids when it is given suffix=, the answers)"
        )


class _Whole(NamedTuple):
    """How layers attend that are called with a whole row and its mask, and not chunk by chunk."""

    mask: Callable[[CausalMask], object]
    backends: Kernels
    unmasked: CausalMask | None  # for layers that are given no mask


_WHOLE: ContextVar[_Whole | None] = ContextVar("how whole rows attend", default=None)


@contextmanager
def whole_rows_attend(
    mask: Callable[[CausalMask], object], backends: Kernels, unmasked: CausalMask | None = None
) -> Iterator[None]:
    """Let streamed attention take whole rows within the block, with what `mask` makes of the masks that layers are given.

    `unmasked` stands for the mask of a layer that is given none, which else is an error.
    """
    token = _WHOLE.set(_Whole(mask, backends, unmasked))
    try:
        yield
    finally:
        _WHOLE.reset(token)


def whole_rows() -> _Whole | None:
    """Return how whole rows attend here, or None outside of `whole_rows_attend`."""
    return _WHOLE.get()


# By id: what a configuration said before, and how many calls have replaced it. Models that are made of one share it,
# and may be run by several threads; the last call to leave puts back what was there.
_replaced: dict[int, tuple[str | None, int]] = {}
_replacing = threading.Lock()


def streamed_attention_in(configs: Sequence[Any]) -> AbstractContextManager[None]:
    """Let attention modules and mask functions that read one of `configs` use the two seams within the block."""
    return attention_replaced_in(configs, IMPLEMENTATION)


@contextmanager
def attention_replaced_in(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Let attention modules and mask functions that read one of `configs` use those that are registered as `name`."""
    entered = []
    try:
        for config in configs:
            with _replacing:
                before, calls = _replaced.get(id(config), (config._attn_implementation_internal, 0))
                entered.append(config)
                _replaced[id(config)] = before, calls + 1
                # Not by the public setter, which also writes into sub-configs: these may belong to other towers.
                config._attn_implementation_internal = name
        yield
    finally:
        for config in entered:
            with _replacing:
                before, calls = _replaced.pop(id(config))
                if calls > 1:
                    _replaced[id(config)] = before, calls - 1
                else:
                    config._attn_implementation_internal = before


def attention_name(config: Any) -> str | None:
    """Return which attention a model has, also while another is in its place."""
    return _replaced.get(id(config), (getattr(config, "_attn_implementation", None), 0))[0]


# --- Masks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NotCausal:
    """A mask that cannot be streamed, and that may never be used: decoders of encoder-decoders make one for the encoder."""

    reason: str
    shape: tuple[int, ...]  # as of a mask that is ready for a model's layers, and is not made anew

    ndim = 4


def stream_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | CausalMask | NotCausal | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> CausalMask | NotCausal:
    """Return the mask for the arguments of `masking_utils.sdpa_mask`, without a (T x T) tensor.

    It is causal but for blocks of tokens that see each other both ways, or says why it cannot be streamed.
    """
    if isinstance(attention_mask, CausalMask | NotCausal):  # made outside of the decoder
        return attention_mask
    if q_length != kv_length or q_offset or kv_offset:
        raise ValueError(
            f"{q_length} queries see {kv_length} keys: the attention mask or a key/value cache is not of the {q_length} tokens "
            "of this call, and gradients through others cannot be streamed. Pass a mask of as many tokens, and no cache."
        )
    leaves = list(_conjuncts(mask_function))
    # The functions of `masking_utils` itself take tensors of indices; others may need vmap.
    if use_vmap and any(leaf.__module__ != masking_utils.__name__ for leaf in leaves):
        raise SeamError("it overlays a custom mask function, which may let tokens see later ones")
    if causal_mask_function not in leaves or sum(_kind(leaf) == _BLOCKS for leaf in leaves) > 1:
        names = ", ".join(leaf.__qualname__ for leaf in leaves)
        return NotCausal(f"its attention mask ({names}) is not causal", (batch_size, 1, q_length, kv_length))
    window: int | None = None
    documents_BT: Tensor | None = None
    ids_BT: Tensor | None = None
    has_other_rule = False
    for leaf in leaves:
        kind = _kind(leaf)
        if kind == "sliding_window_overlay":
            size = _closure(leaf)["sliding_window"]
            window = size if window is None else min(window, size)
        elif kind == "packed_sequence_mask_function" and documents_BT is None:
            documents_BT = _closure(leaf)["packed_sequence_mask"]
        elif kind == _BLOCKS:
            ids_BT = _closure(leaf)["block_sequence_ids"]
        elif leaf is not causal_mask_function:
            has_other_rule = True
    padding_BT = attention_mask != 0 if attention_mask is not None else None  # a copy: programs reuse theirs before backward
    rule = None if leaves == [causal_mask_function] else mask_function
    blocks = None if ids_BT is None else _blocks(ids_BT, padding_BT, config)
    return CausalMask(rule, padding_BT, window, documents_BT, has_other_rule, batch_size, blocks, q_length)


AttentionInterface.register(IMPLEMENTATION, stream_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, stream_mask)


def _kind(mask_function: Callable[..., Any]) -> str:
    """Return the name of the function of `masking_utils` that made it."""
    return mask_function.__qualname__.split(".")[0]


def _conjuncts(mask_function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the leaves of a mask that is an AND of leaves, and those of blocks that are added to one by OR.

    Any other OR counts as one leaf, since it may not be causal, and so does an AND that restricts attention to blocks.
    """
    kind = _kind(mask_function)
    parts = _closure(mask_function)["mask_functions"] if kind in ("and_masks", "or_masks") else ()
    others = sum(_kind(part) != _BLOCKS for part in parts)
    if others == {"and_masks": len(parts), "or_masks": 1}.get(kind):
        for part in parts:
            yield from _conjuncts(part)
    else:
        yield mask_function


def _blocks(ids_BT: Tensor, padding_BT: Tensor | None, config: Any) -> Blocks:
    name = attention_name(config)
    if name is not None and "flash" in name:
        raise ValueError(
            f"tokens of an image see each other both ways, and {name}, which this model has, cannot do so and would hide later "
            "ones from them. Call model.set_attn_implementation('sdpa'); streaming then takes the fastest kernel by itself."
        )
    return Blocks(ids_BT, padding_BT)


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def layer_mask(attention_mask: object, length: int, *, chunk_size: int) -> CausalMask | DenseMask:
    """Return a decoder layer's `attention_mask` as a mask that can be built by chunk; raise if it is not causal."""
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
        blind = mask.first_blind_in_use(chunk_size)
        if blind is not None:
            raise ValueError(
                f"the 4-D attention mask hides every key from token {blind[1]} of row {blind[0]}, which others see, by finite "
                "values, so softmax is over all keys, later ones included. Only causal masks can be streamed: let the token see "
                "itself, hide it from all others, or call streamgrad.disable(model) for this batch."
            )
        return mask
    if isinstance(attention_mask, NotCausal):
        raise SeamError(attention_mask.reason)
    raise SeamError(f"its layers receive a mask of type {type(attention_mask).__name__}, which cannot be cut into chunks")


def with_documents(mask: CausalMask, cu_seq_lens: Tensor, length: int) -> CausalMask:
    """Return `mask` without attention across documents, whose boundaries are `cu_seq_lens` = [0, end_1, end_2, ..., length]."""
    ends = cu_seq_lens.to(torch.long)
    boundaries = ends.tolist()
    if not boundaries or boundaries[0] != 0 or boundaries[-1] != length or boundaries != sorted(boundaries):
        listed = ", ".join(map(str, boundaries[:8])) + (", ..." if len(boundaries) > 8 else "")
        raise ValueError(
            f"cu_seq_lens=[{listed}] are not the boundaries of documents in a packed sequence of {length} tokens. They must "
            f"start at 0, never fall, and end at {length}."
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

    return CausalMask(rule, mask.padding_BT, mask.window, documents_BT, mask.has_other_rule, mask.batch, mask.blocks, length)


def documents_of_sequence(documents_BT: Tensor | None) -> AbstractContextManager[None]:
    """Let `masking_utils` find these packed documents within the block, whatever positions it is shown.

    Where ranks share a sequence, a rank's own positions do not tell where documents begin. A model that looks for documents then
    finds those of the whole sequence. One that does not look for any (gpt-oss) gets none.
    """

    def find(position_ids: Tensor) -> Tensor | None:
        return None if documents_BT is None else documents_BT.expand(position_ids.shape[0], -1)

    return temporary_attribute(masking_utils, "find_packed_sequence_indices", find)


def attends_by_flash(config: Any) -> bool:
    """Return whether the stock model attends by FlashAttention, which separates documents by a rule of its own."""
    return "flash" in str(attention_name(config))


def documents_of_flash(positions_BT: Tensor) -> Tensor | None:
    """Return the numbers of documents that FlashAttention separates in a row without padding, or None for a single one.

    A document begins where the positions are at their lowest, as `prepare_fa_kwargs_from_position_ids` has it. SDPA and eager
    attention separate them wherever a position does not follow the one before, and only where no mask is given at all.
    """
    documents_BT = (positions_BT == positions_BT.min()).cumsum(-1)
    return None if bool((documents_BT[:, -1] <= 1).all()) else documents_BT


def documents_as_stock(arguments: dict[str, Any], config: Any) -> AbstractContextManager[None]:
    """Return the context in which masks separate the documents that the stock model separates.

    FlashAttention takes the mask of one row without padding for none, so it is dropped from `arguments`.
    """
    mask_BT, positions_BT = arguments.get("attention_mask"), arguments.get("position_ids")
    if not attends_by_flash(config) or not isinstance(positions_BT, Tensor) or positions_BT.ndim != 2 or len(positions_BT) != 1:
        return nullcontext()
    if mask_BT is not None:
        if not isinstance(mask_BT, Tensor) or mask_BT.ndim != 2 or len(mask_BT) != 1 or not bool(mask_BT.all()):
            return nullcontext()
        arguments["attention_mask"] = None
    return documents_of_sequence(documents_of_flash(positions_BT))
