"""A decoder call whose sequences are shared by the ranks of a group: each rank passes its slice and gets hidden states of it.

    decoder(slice r of the arguments) on every rank r   =   slice r of decoder(the whole sequence)

Slices are contiguous and of equal length, as DeepSpeed's `UlyssesSPDataLoaderAdapter` cuts them. Inside the call tokens lie in
the order of `engine.ulysses`, so ids and positions are dealt out before the decoder's own forward and its hidden states brought
back after it; what comes before and after (labels, the head, a user's own loss) never sees that order.

Shapes: B batch, T tokens of the sequence, or of a slice where it says so, E model width.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from streamgrad.attention.masks import CausalMask, DenseMask, rows_without_keys
from streamgrad.config import KEEP_POLICIES
from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.ulysses import ALONE, SequenceSharing, Ulysses
from streamgrad.hf.discover import follows_length, sliding_window
from streamgrad.hf.mask_seam import documents_of_sequence
from streamgrad.hf.step_plan import Planner

# What a model passes on to its decoder, and no decoder layer looks at.
_OF_THE_LOSS = {"shift_labels", "num_items_in_batch"}
_DEEPSPEED_STATE = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


@dataclass(frozen=True)
class SequenceGroup:
    """A process group, as it stands on a model: a copy of the model is in the same one."""

    group: dist.ProcessGroup

    def __deepcopy__(self, memo: dict) -> SequenceGroup:
        return self


def sequence_group(decoder: Any, given: SequenceGroup | None) -> dist.ProcessGroup | None:
    """The ranks that share this call's sequences; None where the call has whole sequences.

    `given`, or else the group that DeepSpeed's own Ulysses (Accelerate's `sp_size`) has made, whose attention function is not
    called while streaming. As there, in training mode only: evaluation and generation have whole sequences.
    """
    if not decoder.training:
        if given is not None and torch.is_grad_enabled():
            raise ValueError(
                "the model is in a group whose ranks share sequences, and in evaluation mode, in which it takes whole ones: "
                "gradients of slices would be wrong. Call model.train(), or sequence_parallel(model, None) to leave the group."
            )
        return None
    group = getattr(sys.modules.get(_DEEPSPEED_STATE), "_SEQUENCE_PARALLEL_GROUP", None) if given is None else given.group
    return None if group is None or dist.get_world_size(group) == 1 else group


def check_heads(config: Any, ranks: int) -> None:
    """Ranks that share a sequence share its heads as well."""
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or groups % ranks:
        raise ValueError(
            f"{heads} attention heads and {groups} key/value heads cannot be shared by {ranks} ranks: each rank attends with an "
            f"equal number of both. Let the number of ranks of a sequence divide {heads} and {groups}."
        )


def _dtype_number(tensor: Tensor | None) -> int:
    """Its place among those that tokens and models have: bytes of two dtypes would be taken for each other's."""
    dtypes = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return dtypes.index(tensor.dtype) if tensor is not None and tensor.dtype in dtypes else len(dtypes)


class WholeSequences:
    """A call whose tokens are all here."""

    sharing: SequenceSharing = ALONE

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def masks(self) -> AbstractContextManager[None]:
        """Around the decoder's forward, which makes its masks."""
        return nullcontext()

    def mask(self, mask: CausalMask | DenseMask) -> CausalMask | DenseMask:
        """The sequence's mask, from the one that was made for the tokens here."""
        return mask

    def output(self, output: Any) -> Any:
        """What the caller gets of what the decoder returned."""
        return output


class Slices(WholeSequences):
    """A call with this rank's slices: arguments in the order of `exchange`, and what masks must know of the whole sequence."""

    sharing: Ulysses

    def __init__(
        self, sharing: Ulysses, arguments: dict[str, Any], documents_BT: Tensor | None, padding_BT: Tensor | None
    ) -> None:
        super().__init__(arguments)
        self.sharing, self.documents_BT, self.padding_BT = sharing, documents_BT, padding_BT

    @classmethod
    def of(cls, decoder: Any, arguments: dict[str, Any], group: dist.ProcessGroup, planner: Planner) -> Slices:
        _refuse(decoder, arguments)
        for module in decoder.modules():
            if follows_length(module):
                raise SeamError(f"{type(module).__name__} follows the longest position it is shown, and a rank is shown its own")
        dealt, names = dict(arguments), ("input_ids", "inputs_embeds")
        name = next(name for name in names if arguments.get(name) is not None)
        tokens, positions, padding = arguments[name], arguments.get("position_ids"), arguments.get("attention_mask")
        batch, length = tokens.shape[:2]
        for other, tensor in (("position_ids", positions), ("attention_mask", padding)):
            if tensor is not None and (tensor.ndim != 2 or tensor.shape[1] != length):
                raise ValueError(
                    f"{other} has shape {tuple(tensor.shape)} and the rank's slice {length} tokens. Where ranks share a "
                    f"sequence, pass each its own slice of it, (batch, {length})."
                )
        sharing = Ulysses(group, length, planner.chunk_size(batch, length), tokens.device)
        check_heads(decoder.config, sharing.ranks)
        sharing.check_agreement(
            {
                "batch size": batch, "tokens of a slice": length, "chunk_size": sharing.chunk_size,
                "keep": KEEP_POLICIES.index(planner.config.keep), "whether inputs_embeds are passed": int(name == names[1]),
                "whether position_ids are passed": int(positions is not None),
                "whether an attention_mask is passed": int(padding is not None),
                "whether there is a memory_budget": int(planner.config.memory_budget is not None),
                "dtype of input_ids": _dtype_number(arguments.get("input_ids")),
                "dtype of position_ids": _dtype_number(positions),
                "dtype of the model": _dtype_number(next(decoder.parameters())),
                "whether gradients are computed": int(torch.is_grad_enabled()),
            }
        )  # fmt: skip
        dealt[name] = sharing.to_chunk_order(tokens)
        documents_BT = padding_BT = None
        if positions is None:
            dealt["position_ids"] = sharing.positions_T.unsqueeze(0)
        else:
            positions_BT = sharing.gather(positions)
            documents_BT = find_packed_sequence_indices(positions_BT)
            dealt["position_ids"] = positions_BT[:, sharing.positions_T]
        if padding is not None:
            padding_BT = sharing.gather((padding != 0).byte()).bool()
            dealt["attention_mask"] = padding_BT[:, sharing.positions_T]
            targets, ignore_index = arguments.get("shift_labels"), arguments.get("ignore_index", -100)
            _check_targets(targets, ignore_index, padding_BT, sharing, sliding_window(decoder.config))
        return cls(sharing, dealt, documents_BT, padding_BT)

    def masks(self) -> AbstractContextManager[None]:
        return documents_of_sequence(self.documents_BT)

    def mask(self, mask: CausalMask | DenseMask) -> CausalMask:
        """Windows and documents go by places in the sequence already."""
        assert isinstance(mask, CausalMask)
        if mask.has_other_rule:
            raise SeamError("its attention mask has a rule beside windows and documents, and ranks share its sequences")
        return CausalMask(mask.rule, self.padding_BT, mask.window, mask.documents_BT, batch=mask.batch)

    def output(self, output: Any) -> Any:
        """In the order of the slice again."""
        if isinstance(output, tuple):
            return self.sharing.to_slice_order(output[0]), *output[1:]
        output["last_hidden_state"] = self.sharing.to_slice_order(output["last_hidden_state"])
        return output


def _check_targets(
    targets_BT: Tensor | None, ignore_index: int, padding_BT: Tensor, sharing: Ulysses, window: int | None
) -> None:
    """As `hf.causal_lm.check_labels` does for whole sequences; if one rank has such a target, all ranks raise."""
    hidden_BT = rows_without_keys(padding_BT, window)[:, sharing.rank * sharing.length :][:, : sharing.length]
    bad = 0 if targets_BT is None else int(((targets_BT != ignore_index) & hidden_BT.to(targets_BT.device)).sum())
    counts = sharing.numbers_of_ranks((bad,))
    if any(count for (count,) in counts):
        raise ValueError(
            "labels would be predicted from tokens from which the attention mask hides every key, which is noise: "
            + ", ".join(f"{count:g} on rank {rank}" for rank, (count,) in enumerate(counts) if count)
            + ". Set their shift_labels to -100 (with left padding: those of padding tokens), or pad on the right."
        )


def _refuse(decoder: Any, arguments: dict[str, Any]) -> None:
    wants_all = arguments.get("output_hidden_states")
    if wants_all if wants_all is not None else getattr(decoder.config, "output_hidden_states", False):
        raise ValueError(
            "output_hidden_states=True cannot be had where ranks share a sequence: inside the decoder, tokens are dealt out in "
            "another order. Pass output_hidden_states=False."
        )
    if arguments.get("past_key_values") is not None:
        raise ValueError(
            "past_key_values were passed to a model whose sequences are shared by several ranks, and a cache belongs to whole "
            "sequences. Call model.eval() to generate."
        )
    mask = arguments.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise ValueError(
            "an attention_mask other than (batch, tokens) cannot be cut into slices for ranks that share a sequence. Tell packed "
            "documents apart by position_ids that restart, without an attention_mask."
        )
    known = {"input_ids", "inputs_embeds", "position_ids", "attention_mask"} | _OF_THE_LOSS
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name not in known:
            raise ValueError(
                f"{name} cannot be passed where ranks share a sequence: how the slices of it belong together is not known. Tell "
                "packed documents apart by position_ids that restart."
            )
