"""Rows that every rank of a group is given whole, and of which each computes a slice: DPO where ranks share sequences.

    scored_in_slices(score, ...) on every rank   =   score(the whole rows)

A loss of pairs needs the scores of whole rows. So rows are cut inside the call that scores them, and scores are put together
after it: what TRL computes before and after is the same on every rank, and the same as without such ranks.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import FusedCausalLMOutput

from streamgrad.engine.temporary import temporary_attributes
from streamgrad.head.targets import IGNORED
from streamgrad.hf.discover import unwrap
from streamgrad.hf.libraries.deepspeed import ulysses_group
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.sequence_slices import SequenceGroup
from streamgrad.parallel import whole_sequence


def scored_in_slices(
    score: Callable[..., FusedCausalLMOutput], group: dist.ProcessGroup, *, labels: Tensor, **arguments: Any
) -> FusedCausalLMOutput:
    """Return the scores of whole rows, of which `score` is given this rank's slice.

    Arguments with one entry per token are cut; whatever else is a tensor is refused by the decoder, by name.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    length = labels.shape[1]
    padding = -length % ranks

    def own(tensor_BT: Tensor) -> Tensor:
        return tensor_BT.chunk(ranks, dim=1)[rank].contiguous()

    targets_BT = pad(labels[:, 1:], (0, 1 + padding), value=IGNORED)
    cut = {
        name: own(pad(value, (0, padding))) if isinstance(value, Tensor) and value.shape == labels.shape else value
        for name, value in arguments.items()
    }
    output = score(**cut, shift_labels=own(targets_BT))
    per_token = {name: value for name, value in output.items() if value.ndim == 2}
    # The last position of a row has no target. The loss of a slice is left out: it is that of no row.
    whole = {name: whole_sequence(value, group)[:, : length - 1] for name, value in per_token.items()}
    return FusedCausalLMOutput(aux_loss=output.aux_loss, **whole)


class WholeBatches:
    """A data loader of P ranks that gives each of them the P batches that they have loaded, one after the other and whole."""

    def __init__(self, loader: Any, group: dist.ProcessGroup) -> None:
        self.loader, self.group = loader, group
        self.batch_sampler = getattr(loader, "batch_sampler", None)  # to which the Trainer tells the epoch, too

    @property
    def dataset(self) -> Any:
        """Raise: Accelerate asks for it to skip batches, and would make a loader that gives every rank other ones."""
        raise ValueError(
            "DPO whose ranks share sequences cannot be resumed within an epoch. Resume from a checkpoint at the end of one, or "
            "pass ignore_data_skip=True, which begins the epoch anew."
        )

    def __len__(self) -> int:
        return len(self.loader) * dist.get_world_size(self.group)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as for this epoch, which the loader cannot count: the Trainer does not ask it for the end of one."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            loaded: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(loaded, batch, group=self.group)
            yield from loaded


@contextmanager
def rows_cut_inside(*models: Any) -> Iterator[None]:
    """Let the ranks that share sequences cut the rows that these models score within the block, in evaluation mode too."""
    group = ulysses_group()
    settings = []
    for model in map(unwrap, models):
        scoring, decoder = InstalledForward.on(model), InstalledForward.on(model.get_decoder())
        assert scoring is not None and decoder is not None
        settings += [(scoring.stream, "rows_of", group), (decoder.stream, "group", SequenceGroup(group, in_evaluation=True))]
    with temporary_attributes(settings):
        yield
