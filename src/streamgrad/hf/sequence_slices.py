"""A decoder call on sequences that the ranks of a group share: each rank passes a slice and gets the slice's hidden states.

    decoder(slice r of the arguments) on every rank r   =   slice r of decoder(the whole sequence)

Slices are contiguous and of equal length, as DeepSpeed's `UlyssesSPDataLoaderAdapter` cuts them. Inside the decoder, tokens lie
in the chunk order of `engine.ulysses`: ids and positions are brought into it before the decoder's own forward, and hidden states
back into slice order after it. What comes before and after (labels, the head, a user's own loss) never sees chunk order.

Shapes: B batch, T tokens of the whole sequence (of a slice in `sharing.positions_T` and in targets), E model width.
"""

from __future__ import annotations

import sys
import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from streamgrad.attention.masks import CausalMask, DenseMask, rows_without_keys
from streamgrad.attention.trees import Tree, TreeMask
from streamgrad.config import KEEP_POLICIES
from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.ring import Ring
from streamgrad.engine.ulysses import ALONE, SequenceSharing, Ulysses
from streamgrad.hf.configs import layer_configs
from streamgrad.hf.discover import follows_length, sliding_window
from streamgrad.hf.libraries.deepspeed import ulysses_group
from streamgrad.hf.mask_checks import accept_blind_predictions
from streamgrad.hf.patching import InstalledForward, tokens_of
from streamgrad.hf.seams import attends_by_flash, documents_of_flash, documents_of_sequence
from streamgrad.hf.step_plan import Planner
from streamgrad.memory.traffic import smallest_ring

# Arguments that a model passes on to its decoder and that no decoder layer reads.
_LOSS_ARGUMENTS = {"shift_labels", "num_items_in_batch"}


@dataclass(frozen=True)
class SequenceGroup:
    """The process group of a model, which a copy of the model shares; with a ring, also the parts of it that this rank is in.

    `in_evaluation`: in evaluation mode too.
    """

    group: dist.ProcessGroup
    in_evaluation: bool = False
    heads: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None

    def __deepcopy__(self, memo: dict[str, Any]) -> SequenceGroup:
        return self

    @classmethod
    def with_ring(cls, group: dist.ProcessGroup, ring: int, *, in_evaluation: bool = False) -> SequenceGroup:
        """Make the groups of a ring of `ring` ranks, each of which trades heads with its neighbours in `group`."""
        if ring == 1:
            return cls(group, in_evaluation)
        ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
        size = len(ranks) // ring
        place = ranks.index(own)
        first = place // size * size
        heads = None if size == 1 else _part_of(group, ranks[first : first + size])
        return cls(group, in_evaluation, heads, _part_of(group, ranks[place % size :: size]))

    def sharing(self, length: int, chunk_size: int, device: torch.device) -> Ulysses:
        if self.ring is None:
            return Ulysses(self.group, length, chunk_size, device)
        return Ring(self.group, self.heads, self.ring, length, chunk_size, device)


WHOLE = SequenceGroup(cast(dist.ProcessGroup, None))  # of a call with whole sequences, whichever ranks share others


def _part_of(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """Return a new group of some ranks, with the timeout of `group`; only these ranks need to call this."""
    timeout = group._get_backend(group._device_types[0]).options._timeout
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)


def sequence_group(decoder: Any, given: SequenceGroup | None) -> SequenceGroup | None:
    """Return the ranks that share this call's sequences, or None if the call has whole sequences.

    They are `given`, or else the group of DeepSpeed's own Ulysses (Accelerate's `sp_size`), whose attention function is not
    called while streaming. Ranks share sequences in training mode only, as with DeepSpeed: evaluation has whole sequences,
    unless `given` says otherwise.
    """
    _refuse_context_parallel()
    if given is WHOLE:
        return None
    if not decoder.training and not (given is not None and given.in_evaluation):
        if given is not None and torch.is_grad_enabled():
            raise ValueError(
                "the model's ranks share sequences, but in evaluation mode it takes whole ones, so gradients of slices would be "
                "wrong. Call model.train(), or sequence_parallel(model, None) to leave the group."
            )
        return None
    if given is None and (group := ulysses_group()) is not None:
        given = SequenceGroup(group)
    return None if given is None or dist.get_world_size(given.group) == 1 else given


def _refuse_context_parallel() -> None:
    """Raise under Accelerate's `cp_size`, which cuts batches for torch's own ring attention."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    parallelism = None if state is None else state._shared_state.get("parallelism_config")
    if parallelism is not None and parallelism.cp_size > 1:
        raise ValueError(
            f"cp_size={parallelism.cp_size} cuts sequences for torch's context_parallel, whose attention is not called while "
            "streaming. Set sp_size in its place (examples/accelerate_configs/ulysses.yaml), by which ranks share sequences "
            "that are streamed, or call streamgrad.parallel.sequence_parallel(model, group, ring=...) in a loop of your own."
        )


def shared_sequence_group(model: Any) -> dist.ProcessGroup | None:
    """Return the ranks that share the sequences of a call of `model`, or None."""
    decoder = model.get_decoder()
    installed = InstalledForward.on(decoder)
    found = None if installed is None else sequence_group(decoder, installed.stream.group)
    return None if found is None else found.group


def with_whole_mask(model: Any, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments with the whole sequence's mask if ranks share it and a balance loss is asked for; else None.

    The model's own forward computes that loss of the whole sequence's router logits and of the mask that it is given.
    """
    group, tokens, mask_BT = shared_sequence_group(model), tokens_of(arguments), arguments.get("attention_mask")
    asked = arguments.get("output_router_logits")
    wanted = getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked
    if group is None or tokens is None or not wanted:
        return None
    sharing = Ulysses(group, tokens.shape[1], tokens.shape[1], tokens.device)
    has_mask = isinstance(mask_BT, Tensor) and mask_BT.shape == tokens.shape[:2]  # others are refused by the decoder
    sharing.check_agreement({"tokens of a slice": sharing.length, "whether an attention_mask is passed": int(has_mask)})
    if mask_BT is None or not has_mask:
        return None
    return arguments | {"attention_mask": sharing.gather(mask_BT.double()).to(mask_BT.dtype)}


def check_heads(config: Any, ranks: int, ring: int = 1) -> None:
    """Raise unless `ranks / ring` divides the numbers of query heads, which so many ranks share beside the sequence."""
    sharing = ranks // ring
    for each in layer_configs(config.get_text_config(decoder=True)):
        heads = each.num_attention_heads
        if heads % sharing:
            raise ValueError(
                f"{heads} attention heads cannot be shared by {sharing} ranks: each rank needs an equal number of them. Choose a "
                f"number of ranks that divides {heads}; that of the key/value heads need not be divisible. Or let fewer ranks "
                f"share heads, and gather keys: sequence_parallel(model, group, ring={smallest_ring(ranks, heads)})."
            )


def _dtype_number(tensor: Tensor | None) -> int:
    """Return a number for the tensor's dtype, on which ranks must agree: each would misread the other's bytes."""
    dtypes = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return dtypes.index(tensor.dtype) if tensor is not None and tensor.dtype in dtypes else len(dtypes)


class WholeSequences:
    """A decoder call whose tokens are all in this process."""

    sharing: SequenceSharing = ALONE

    def __init__(self, arguments: dict[str, Any], tree: Tree | None = None) -> None:
        self.arguments, self.tree = arguments, tree
        names = ("input_ids", "inputs_embeds")
        shapes = [tuple(arguments[name].shape[:2]) for name in names if arguments.get(name) is not None]
        if tree is not None and shapes != [(1, tree.length)]:
            raise ValueError(f"tokens of shape {shapes} were passed for a shared row of {tree.length}. Pass its input_ids.")

    def masks(self) -> AbstractContextManager[None]:
        """Return the context in which the decoder's forward makes its masks."""
        return nullcontext()

    def mask(self, mask: CausalMask | DenseMask) -> CausalMask | DenseMask | TreeMask:
        """Return the mask of the whole sequence, given the one made for the tokens of this process."""
        if self.tree is None:
            return mask
        if not isinstance(mask, CausalMask) or mask.has_other_rule or mask.padding_BT is not None or mask.blocks:
            raise SeamError("its sequences share their beginnings, and its mask has other rules than causality and a window")
        return TreeMask(self.tree, mask.window)

    def output(self, output: Any) -> Any:
        """Return what the caller gets, given what the decoder returned."""
        return output


class Slices(WholeSequences):
    """A decoder call with this rank's slices: its arguments in chunk order, and the whole sequence's documents and padding."""

    sharing: Ulysses

    def __init__(
        self,
        sharing: Ulysses,
        arguments: dict[str, Any],
        documents_BT: Tensor | None,
        padding_BT: Tensor | None,
        tree: Tree | None,
    ) -> None:
        super().__init__(arguments)
        self.sharing, self.documents_BT, self.padding_BT, self.tree = sharing, documents_BT, padding_BT, tree

    @classmethod
    def of(
        cls, decoder: Any, arguments: dict[str, Any], group: SequenceGroup, planner: Planner, tree: Tree | None = None
    ) -> Slices:
        """Bring this rank's arguments into chunk order; raise for a call that cannot be cut into slices.

        `tree` is the whole sequence, of which the arguments are a slice.
        """
        _refuse(decoder, arguments)
        name = next(name for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
        tokens, positions, padding = arguments[name], arguments.get("position_ids"), arguments.get("attention_mask")
        batch, length = tokens.shape[:2]
        _check_lengths(length, position_ids=positions, attention_mask=padding)
        sharing = group.sharing(length, planner.chunk_size(batch, length), tokens.device)
        check_heads(decoder.config, sharing.ranks, sharing.ring_ranks)
        _check_agreement(sharing, batch, decoder, arguments, planner, tree)
        if tree is not None:
            _check_tree(tree, sharing, batch, positions, padding)
        if batch * length == 0:
            raise ValueError(
                f"every rank's slice of {name} has shape {tuple(tokens.shape[:2])}, so the sequence has no tokens. Pass each of "
                f"the {sharing.ranks} ranks at least one token, padded at the sequence's end with labels of -100."
            )
        in_chunk_order = arguments | {name: sharing.to_chunk_order(tokens)}
        documents_BT = padding_BT = None
        if positions is None:
            in_chunk_order["position_ids"] = sharing.positions_T.unsqueeze(0)
        else:
            positions_BT = sharing.gather(positions)
            by_flash = batch == 1 and attends_by_flash(decoder.config)
            if tree is None:
                documents_BT = (documents_of_flash if by_flash else find_packed_sequence_indices)(positions_BT)
            in_chunk_order["position_ids"] = positions_BT[:, sharing.positions_T]
        if padding is not None:
            padding_BT = sharing.gather((padding != 0).byte()).bool()
            in_chunk_order["attention_mask"] = padding_BT[:, sharing.positions_T]
            targets, ignore_index = arguments.get("shift_labels"), arguments.get("ignore_index", -100)
            _check_targets(targets, ignore_index, padding_BT, sharing, decoder)
            if positions is not None and by_flash and bool(padding_BT.all()):  # which FlashAttention takes for no mask
                in_chunk_order["attention_mask"] = padding_BT = None
        return cls(sharing, in_chunk_order, documents_BT, padding_BT, tree)

    def masks(self) -> AbstractContextManager[None]:
        return documents_of_sequence(self.documents_BT)

    def mask(self, mask: CausalMask | DenseMask) -> CausalMask | DenseMask | TreeMask:
        """Return `mask` with the padding of the whole sequence, to which its window and documents refer already."""
        if self.tree is not None:
            return super().mask(mask)
        assert isinstance(mask, CausalMask)
        if mask.has_other_rule or mask.blocks is not None:
            raise SeamError("its attention mask has a rule besides windows and documents, and ranks share its sequences")
        return CausalMask(mask.rule, self.padding_BT, mask.window, mask.documents_BT, batch=mask.batch)

    def output(self, output: Any) -> Any:
        """Return the decoder's output with its hidden states in slice order."""
        if isinstance(output, tuple):
            return self.sharing.to_slice_order(output[0]), *output[1:]
        output["last_hidden_state"] = self.sharing.to_slice_order(output["last_hidden_state"])
        return output


def _check_lengths(length: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.ndim != 2 or tensor.shape[1] != length):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and the rank's slice {length} tokens. Where ranks share a sequence, "
                f"pass each its own slice of it, (batch, {length})."
            )


def _check_tree(tree: Tree, sharing: Ulysses, batch: int, positions: Tensor | None, padding: Tensor | None) -> None:
    """Raise unless the slices of all ranks are the one row that is a tree."""
    if sharing.ring_ranks > 1:
        raise ValueError("a ring of ranks cannot share sequences that share their beginnings. Pass separate rows, or ring=1.")
    if (batch, sharing.ranks * sharing.length) != (1, tree.length) or positions is None or padding is not None:
        raise ValueError(
            f"{sharing.ranks} slices of {batch} x {sharing.length} tokens were passed for a shared row of {tree.length}. Pass "
            "the input_ids and position_ids of streamgrad.parallel.shared_slice, and no attention_mask."
        )


def _check_agreement(
    sharing: Ulysses, batch: int, decoder: Any, arguments: dict[str, Any], planner: Planner, tree: Tree | None
) -> None:
    """Raise on all ranks if one was called in another way."""
    ids, positions = arguments.get("input_ids"), arguments.get("position_ids")
    sharing.check_agreement(
        {
            "batch size": batch, "tokens of a slice": sharing.length, "chunk_size": sharing.chunk_size,
            "keep": KEEP_POLICIES.index(planner.config.keep), "whether inputs_embeds are passed": int(ids is None),
            "whether position_ids are passed": int(positions is not None),
            "whether an attention_mask is passed": int(arguments.get("attention_mask") is not None),
            "whether there is a memory_budget": int(planner.config.memory_budget is not None),
            "dtype of input_ids": _dtype_number(ids), "dtype of position_ids": _dtype_number(positions),
            "dtype of the model": _dtype_number(next(decoder.parameters())),
            "whether gradients are computed": int(torch.is_grad_enabled()),
            "the segments of a shared row (their checksum)": zlib.crc32(repr(tree).encode()),
        }
    )  # fmt: skip


def _check_targets(targets_BT: Tensor | None, ignore_index: int, padding_BT: Tensor, sharing: Ulysses, decoder: Any) -> None:
    """Warn or raise on all ranks if one has a target at a token that sees no key, as `check_labels` does for whole sequences."""
    blind_BT = rows_without_keys(padding_BT, sliding_window(decoder.config))
    hidden_BT = blind_BT.narrow(1, sharing.rank * sharing.length, sharing.length)
    bad = 0 if targets_BT is None else int(((targets_BT != ignore_index) & hidden_BT.to(targets_BT.device)).sum())
    counts = sharing.numbers_of_ranks((bad,))
    if any(count for (count,) in counts):
        where = ", ".join(f"{count:g} on rank {rank}" for rank, (count,) in enumerate(counts) if count)
        accept_blind_predictions(f"some labels ({where}) would be predicted from tokens that see no key", decoder)


def _refuse(decoder: Any, arguments: dict[str, Any]) -> None:
    """Raise for arguments and models that cannot be cut into slices."""
    wants_all = arguments.get("output_hidden_states")
    if wants_all if wants_all is not None else getattr(decoder.config, "output_hidden_states", False):
        raise ValueError(
            "output_hidden_states=True is not possible where ranks share a sequence: inside the decoder, tokens lie in chunk "
            "order, not in that of the slice. Pass output_hidden_states=False."
        )
    if arguments.get("past_key_values") is not None:
        raise ValueError(
            "past_key_values were passed to a model whose ranks share sequences, but a cache holds whole sequences. "
            "Call model.eval() to generate."
        )
    mask = arguments.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"an attention_mask other than (batch, tokens), here {given}, cannot be cut into slices for ranks that share a "
            "sequence. To separate packed documents, pass position_ids that restart and no attention_mask."
        )
    known = {"input_ids", "inputs_embeds", "position_ids", "attention_mask"} | _LOSS_ARGUMENTS
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name not in known:
            raise ValueError(
                f"{name} cannot be passed where ranks share a sequence: how to cut it into slices is not known. To separate "
                "packed documents, pass position_ids that restart."
            )
    for module in decoder.modules():
        if follows_length(module):
            raise SeamError(f"{type(module).__name__} follows the longest position that it sees, and a rank sees only its own")
