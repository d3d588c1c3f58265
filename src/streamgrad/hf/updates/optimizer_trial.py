"""Shows on a few small tensors that an optimizer may update one parameter at a time, and how large its states are.

An optimizer whose update of a parameter depends on others, by a norm or a counter that they share, or by a closure that it calls,
gives other values when it is stepped for each parameter alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamgrad.hf.libraries.quantized import bytes_of

_STEPS = 3
# The most elements of a tensor in the trial: as many as bitsandbytes needs to keep a state in pages, and in 8 bits.
_LARGEST = 1 << 17


@dataclass(frozen=True)
class StateSizes:
    """Bytes of state for a byte of a parameter, by its group's place and its number of dimensions."""

    ratios: dict[tuple[int, int], float]
    groups: dict[int, int]  # by the parameter's id

    def of(self, parameter: Tensor) -> float:
        return self.ratios.get((self.groups.get(id(parameter), 0), parameter.dim()), 0.0) * parameter.nbytes


class Alone:
    """Lets an optimizer's step see one parameter at a time: a step costs as much as the parameters that are in its groups.

    The first block leaves the groups whole, as optimizers may prepare their parameters in their first step.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._places = {
            id(parameter): (place, index)
            for place, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
        # bitsandbytes finds options that were overridden for some parameters by their place in the groups.
        manager = getattr(optimizer, "mng", None)
        self._keeps_places = manager is not None and (manager.pid2config or manager.module_weight_config_triple)
        self._prepared = False

    @contextmanager
    def only(self, parameter: Tensor) -> Iterator[None]:
        """Let `param_groups` have this parameter alone within the block."""
        if not self._prepared:
            self._prepared = True
            yield
            return
        groups, (place, index) = self._optimizer.param_groups, self._places[id(parameter)]
        group, empty = groups[place], torch.empty(0)
        parameters, ahead = group["params"], (place, index) if self._keeps_places else (0, 0)
        group["params"] = [empty] * ahead[1] + [parameter]
        self._optimizer.param_groups = [{"params": []}] * ahead[0] + [group]
        try:
            yield
        finally:
            group["params"], self._optimizer.param_groups = parameters, groups


def tried(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> StateSizes:
    """Return the sizes of the states of `kind(..., **options)`; raise if it cannot update one parameter at a time."""
    sides = []
    device = optimizer.param_groups[0]["params"][0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for alone in (False, True):
            torch.manual_seed(0)  # for optimizers that round at random
            groups = [_samples(group["params"]) for group in optimizer.param_groups]
            given = [
                {name: value for name, value in group.items() if name not in ("params", "param_names")} | {"params": samples}
                for group, samples in zip(optimizer.param_groups, groups, strict=True)
            ]
            started = [sample.detach().clone() for samples in groups for sample in samples]
            try:
                trial: Any = kind(given, **options)
                _train([sample for samples in groups for sample in samples], trial, alone=alone)
            except (TypeError, RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
                raise ValueError(
                    f"{kind.__name__} cannot run as an optimizer in backward: in a trial on small tensors, its step() raised "
                    f"{type(error).__name__}: {error}. Use it as an ordinary optimizer."
                ) from error
            sides.append([sample.detach() for samples in groups for sample in samples])
    for before, together, separate in zip(started, *sides, strict=True):
        _compare(kind, before, together, separate)
    ratios = {
        (place, sample.dim()): _state_bytes(trial.state[sample], sample) / sample.nbytes
        for place, samples in enumerate(groups)
        for sample in samples
    }
    return StateSizes(ratios, {id(p): place for place, group in enumerate(optimizer.param_groups) for p in group["params"]})


def _samples(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return two parameters of each number of dimensions, after the smallest one there is, or its first rows."""
    smallest: dict[int, Tensor] = {}
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        smallest[parameter.dim()] = parameter
    return [torch.nn.Parameter(_values(parameter, 0.1 + twin)) for parameter in smallest.values() for twin in (0, 1)]


def _values(like: Tensor, phase: float) -> Tensor:
    """Return numbers of both signs in the parameter's dtype, without drawing from a generator."""
    shape = list(like.shape)
    if shape:
        shape[0] = max(1, min(shape[0], _LARGEST * shape[0] // max(1, like.numel())))
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, device=like.device) * 1.7 + phase).reshape(shape).to(like.dtype)


def _train(samples: Sequence[Tensor], optimizer: torch.optim.Optimizer, *, alone: bool) -> None:
    one_by_one = Alone(optimizer)
    for step in range(_STEPS):
        gradients = [_values(sample, step + 0.3 * index) * (1 + index) for index, sample in enumerate(samples)]
        for together in [[index] for index in range(len(samples))] if alone else [list(range(len(samples)))]:
            for index in together:
                samples[index].grad = gradients[index]
            with one_by_one.only(samples[together[0]]) if alone else nullcontext():
                optimizer.step()
            for index in together:
                samples[index].grad = None


def _compare(kind: type, before: Tensor, together: Tensor, separate: Tensor) -> None:
    moved = (together - before).double().abs().max()
    room = 1e-3 * moved + 4 * torch.finfo(together.dtype).eps * together.double().abs().max()
    if not (together - separate).double().abs().max() <= room:
        raise ValueError(
            f"{kind.__name__} updates a parameter in another way when it is stepped for that parameter alone: something that its "
            "parameters share, such as a norm or a counter, goes into the update. Use it as an ordinary optimizer."
        )


def _state_bytes(state: Any, parameter: Tensor) -> int:
    """Return the bytes of a parameter's state on its device, but for pages that move to the host."""
    tensors = [tensor for tensor in tensors_in(state) if tensor.device == parameter.device and tensor.dim()]
    return bytes_of(tensor for tensor in tensors if not getattr(tensor, "is_paged", False))


def tensors_in(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state of one parameter."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)
