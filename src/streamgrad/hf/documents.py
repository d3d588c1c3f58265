"""Packed documents in layers that hand a state from token to token, and what such layers cannot be called with.

Shapes: B batch, T sequence.
"""

from __future__ import annotations

from torch import Tensor, nn

from streamgrad.engine.kv_chunk import SeamError
from streamgrad.hf.discover import names_in
from streamgrad.hf.layer_args import LayerArguments, is_causal_mask
from streamgrad.hf.sequence_slices import WholeSequences


class Documents:
    """Where documents begin in one call of a decoder, found once for all its layers."""

    def __init__(self, sequences: WholeSequences) -> None:
        self._sequences = sequences
        self._starts: dict[int, list[int]] = {}  # by the id of seq_idx, which the call's arguments keep

    def starts(self, modules: list[nn.Module], arguments: LayerArguments) -> list[int]:
        """Return where documents begin beside the first one, by the arguments with which stock layers begin with new states.

        Raise where a layer of these modules cannot be streamed with its arguments.
        """
        _refuse(modules, arguments, self._sequences)
        numbers_BT, boundaries = (arguments.others.get(name) for name in ("seq_idx", "cu_seq_lens_q"))
        if numbers_BT is None:
            return []
        if id(numbers_BT) not in self._starts:
            starts = (1 + (numbers_BT[0, 1:] != numbers_BT[0, :-1]).nonzero().flatten()).tolist()
            if boundaries is not None and sorted({0, *boundaries.tolist()}) != [0, *starts, numbers_BT.shape[1]]:
                raise ValueError("cu_seq_lens_q and seq_idx disagree about where documents begin. Pass those of one batch.")
            self._starts[id(numbers_BT)] = starts
        return self._starts[id(numbers_BT)]


def _refuse(modules: list[nn.Module], arguments: LayerArguments, sequences: WholeSequences) -> None:
    if sequences.tree is not None:
        raise SeamError("some of its layers hand a state from token to token, and its sequences share their beginnings")
    if sequences.sharing.ranks > 1:
        raise SeamError("some of its layers hand a state from token to token, and ranks share its sequences")
    boundaries, numbers_BT = (arguments.others.get(name) for name in ("cu_seq_lens_q", "seq_idx"))
    reads_boundaries = "cu_seq_lens_q" in names_in(modules)
    if (boundaries is not None and numbers_BT is None) or (boundaries is None and numbers_BT is not None and reads_boundaries):
        passed, missing = ("seq_idx", "cu_seq_lens_q") if boundaries is None else ("cu_seq_lens_q", "seq_idx")
        raise SeamError(
            f"it was called with {passed} and without {missing}, so that not all states of its layers would begin anew with a "
            "document; pass both, as DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True) does"
        )
    if numbers_BT is not None and not (numbers_BT == numbers_BT[:1]).all():
        raise SeamError("its rows have documents of different lengths in seq_idx; pass all documents in one row")
    mask = arguments.attention_mask
    if mask is not None and not is_causal_mask(mask) and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise SeamError(f"its recurrent layers are given a {type(mask).__name__} as their mask, and not which tokens are padding")
