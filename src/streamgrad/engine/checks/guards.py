"""Checks that a layer's re-run in backward is the computation whose output went into the loss.

Between forward and backward a program may switch an adapter, or load weights. Gradients of the re-run would then belong to
another function. Autograd notices such changes for the tensors it saved; a streamed layer saves its input only, so what it reads
through the module is checked here, but for what is put back (`engine.switches`).
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from streamgrad.engine.checks.kept_graphs import leaves_from
from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.module_walk import buffers_in, modules_of, parameters_in
from streamgrad.ops.autograd import after_backward, backward_pass, without_autocast
from streamgrad.ops.deferred import Deferred, values_of

_REMEDY = "Call backward before changing the model, or call streamgrad.disable(model) for such a step."


def _nothing(modules: Sequence[nn.Module]) -> list[Any]:
    return []


@dataclass(frozen=True)
class AdapterFacts:
    """What only an adapter library knows about its modules; by default nothing.

    `state` returns copies of modules' switches, which a program may change without changing a parameter. `versionless` returns
    parameters that the modules' forwards set and restore, so that their version tells nothing.
    """

    state: Callable[[Sequence[nn.Module]], list[Any]] = _nothing
    versionless: Callable[[Sequence[nn.Module]], list[Tensor]] = _nothing


NO_ADAPTERS = AdapterFacts()


_Summary = dict[Hashable, Tensor]  # of a chunk, by what is compared


class RerunGuard:
    """Holds what was true of a layer, and what each of its chunks gave, when it ran forward."""

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[Tensor], name: str, adapters: AdapterFacts) -> None:
        self.parameters, self.name, self.adapters = parameters, name, adapters
        self._held = parameters_in(modules)  # so that no other parameter can have one's id
        self._versions = _versions_of(modules, self._held, adapters)
        self._buffers = [(buffer, buffer._version) for buffer in buffers_in(modules)]
        self._state = adapters.state(modules)
        self._noted: list[_Summary] = []
        self._noted_again: dict[int, _Summary] = {}

    def note(self, out_BLE: Tensor, others: Sequence[Tensor] = (), *, combined: bool = False) -> None:
        """Keep the last token of a chunk's output, which depends on nearly everything that the layer reads, and the norm of all.

        `others` are more tensors of the last token: queries, keys and values, which the output of a re-run does not depend on
        where it is given the attention output that was kept. With `combined`, a weighted sum of all tokens is kept too: it can be
        computed of an output that is deferred.
        """
        summary = _summary(out_BLE) | dict(enumerate(others))
        if combined and out_BLE.dim() == 3:
            with without_autocast(out_BLE.device.type):
                summary["combined"] = (_weights_like(out_BLE) @ out_BLE.detach()).float()
        self._noted.append(summary)

    def check_unchanged(self, modules: Sequence[nn.Module]) -> None:
        """Raise if the layer, which has these modules now, is not what it was in forward."""
        parameters = parameters_in(modules)
        versions = _versions_of(modules, parameters, self.adapters)
        if versions.keys() != self._versions.keys():
            raise RuntimeError(
                f"parameters of {self.name} were replaced between forward and backward (by load_state_dict(assign=True), "
                f"functional_call or assignment), so gradients would be wrong. {_REMEDY}"
            )
        if versions != self._versions:
            raise RuntimeError(
                f"a parameter of {self.name} was modified in place between forward and backward, so gradients would be wrong. "
                f"{_REMEDY}"
            )
        buffers = buffers_in(modules)
        if len(buffers) != len(self._buffers) or any(
            now is not then or now._version != version for now, (then, version) in zip(buffers, self._buffers, strict=True)
        ):
            raise RuntimeError(
                f"a buffer of {self.name} was changed between forward and backward (a router's bias that balances experts, "
                "buffers that DDP broadcasts in every forward), so gradients would be wrong. Change it after backward, pass "
                "broadcast_buffers=False to DDP, or call streamgrad.disable(model) for such a step."
            )
        known = {id(parameter) for parameter in self.parameters}
        if any(parameter.requires_grad and id(parameter) not in known for parameter in parameters):
            raise RuntimeError(
                f"a parameter of {self.name} that was frozen in forward is trainable in backward (an adapter was switched, or a "
                f"layer unfrozen), so gradients would be wrong. {_REMEDY}"
            )
        if self.adapters.state(modules) != self._state:
            raise RuntimeError(
                f"{self.name} was changed between forward and backward (an adapter was switched or scaled, or a hook on one), so "
                f"gradients would be wrong. {_REMEDY}"
            )

    def note_again(self, index: int, out_BLE: Tensor, others: Sequence[Tensor] = ()) -> None:
        """Keep of the re-run of chunk `index` what `note` keeps; of an output that is not computed, a sum for the norm."""
        if isinstance(out_BLE, Deferred) and "combined" in self._noted[index]:
            rows_B2E = out_BLE.last_and_combined(_weights_like(out_BLE)).detach().float()
            summary: _Summary = {"last token": rows_B2E[:, 0], "combined": rows_B2E[:, 1:]}
        else:
            summary = _summary(values_of(out_BLE))
        self._noted_again[index] = summary | dict(enumerate(others))

    def check_outcome_later(self, *, in_16_bits: bool) -> None:
        """Compare the two when the current backward pass ends, so that no layer waits for the device."""
        # Far above the effect of another kernel or order of sums, far below that of another mask or adapter.
        allowed = 0.05 if in_16_bits else 1e-3
        _Outcomes.of_this_pass().add(self.name, allowed, self._largest_deviation())

    def _largest_deviation(self) -> Tensor:
        """Return how far the re-run of any chunk is from what was noted, by a few launches for all chunks."""
        # What only one of them has is left out: a re-run may have attended anew.
        chunks = [(noted, self._noted_again[index]) for index, noted in enumerate(self._noted)]
        pairs = [(noted[part], again[part]) for noted, again in chunks for part in noted.keys() & again.keys()]
        noted, again = map(list, zip(*pairs, strict=True))
        self._noted_again.clear()
        sizes = torch.stack(torch._foreach_norm(noted))
        deviations = torch.stack(torch._foreach_norm(torch._foreach_sub(again, noted)))
        deviations = deviations / sizes.clamp_min(torch.finfo(torch.float32).tiny)
        # What was not finite in forward is not compared; what has become so differs.
        return torch.where(sizes.isfinite(), deviations.nan_to_num(nan=torch.inf), 0.0).max()


def _summary(out_BLE: Tensor) -> _Summary:
    """Return the last token of a chunk's output, and the norm of all, which tells of what happens to others alone."""
    out_BLE = out_BLE.detach()
    norm = torch.linalg.vector_norm(out_BLE, dtype=torch.float32 if out_BLE.dtype.itemsize == 2 else None)
    return {"last token": out_BLE[:, -1].to(torch.float32, copy=True), "all": norm.to(torch.float32)}


def _weights_like(out_BLE: Tensor) -> Tensor:
    # Not from the cache in a dispatch mode, which may make tensors without values.
    make = _weights.__wrapped__ if torch._C._len_torch_dispatch_stack() else _weights
    return make(out_BLE.shape[1], out_BLE.dtype, out_BLE.device)


@functools.lru_cache(maxsize=16)
def _weights(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return weights (1, L) of tokens, each its own, for a sum that is about as large as one token.

    It has what tokens have in common once, so that the rounding of a large common part is small beside it, and all else with
    signs that change from token to token.
    """
    places = torch.arange(length, device=device, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    return (places.cos() * (2 / length) ** 0.5 + 1 / length).to(dtype)[None]


def _versions_of(modules: Sequence[nn.Module], parameters: Sequence[Tensor], adapters: AdapterFacts) -> dict[int, int | None]:
    """Return the version of each parameter, or None where it tells nothing."""
    restored = set(map(id, adapters.versionless(modules)))
    return {id(each): None if id(each) in restored else each._version for each in parameters}


# --- what a re-run gave ------------------------------------------------------------------------------------------------


class _Outcomes:
    """Collects how far the layers of one backward pass deviate, and reads it from the device once, when the pass ends.

    Only the pass holds them, by its callback, so they disappear with a pass that ends in an error.
    """

    _under_way: ClassVar[weakref.WeakValueDictionary[int, _Outcomes]] = weakref.WeakValueDictionary()
    _lock = threading.Lock()  # torch runs the layers of each device in a thread of their own

    def __init__(self) -> None:
        self._noted: list[tuple[str, float, Tensor]] = []
        self._without_gradient: dict[int, Tensor] = {}
        self._streams: set[torch.cuda.Stream] = set()

    @classmethod
    def of_this_pass(cls) -> _Outcomes:
        """Return the outcomes of the current backward pass; a pass inside another has its own."""
        task = backward_pass()
        with cls._lock:
            outcomes = cls._under_way.get(task)
            if outcomes is None:
                outcomes = cls()
                after_backward(outcomes.check)
                cls._under_way[task] = outcomes
        return outcomes

    def add(self, layer: str, allowed: float, deviation: Tensor) -> None:
        """Note a layer's deviation; above `allowed`, it computed something else."""
        self._noted.append((layer, allowed, deviation))
        if deviation.is_cuda:
            self._streams.add(torch.cuda.current_stream(deviation.device))

    def protect(self, parameters: Sequence[Tensor]) -> None:
        """Let a pass that fails leave no gradient in parameters that have none now: a half step would look like a whole one."""
        without = {id(parameter): parameter for parameter in parameters if parameter.grad is None}
        self._without_gradient = without | self._without_gradient

    def __del__(self) -> None:
        while self._without_gradient:  # emptied, as `check` calls this before
            self._without_gradient.popitem()[1].grad = None

    def check(self) -> None:
        """Raise for the layer that deviates most, if one does by more than is allowed."""
        noted, self._noted = self._noted, []
        for stream in self._streams:  # on which a layer ran, and which the pass need not have waited for
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        found: list[tuple[float, str]] = []
        for device in dict.fromkeys(deviation.device for _, _, deviation in noted):
            there = [each for each in noted if each[2].device == device]
            values = torch.stack([deviation for _, _, deviation in there]).tolist()
            found += [(value, layer) for value, (layer, allowed, _) in zip(values, there, strict=True) if not value <= allowed]
        if not found:
            self._without_gradient.clear()
        else:
            self.__del__()  # now, and not when the error is forgotten
            value, layer = max(found)
            raise RuntimeError(
                f"{layer} computed something else when it was run again for backward (relative difference {value:.1e}): an "
                "adapter, weights, what its code reads elsewhere or a random state of its own changed since forward, or another "
                f"thread drew from torch's generator in the middle of a chunk, so gradients would be wrong. {_REMEDY}"
            )


def protect_gradients(output: Tensor, parameters: Callable[[], Sequence[Tensor]]) -> None:
    """Let a backward pass through `output` that ends in an error leave no gradient where there was none before.

    Gradients that were there already are added to in place, layer by layer, and cannot be put back.
    """
    if output.requires_grad:
        output.register_hook(lambda gradient: _Outcomes.of_this_pass().protect(parameters()))


# --- what forward may not change ---------------------------------------------------------------------------------------


class Unchanged:
    """What chunks of a layer with these modules may not change in forward.

    That is its buffers and, if it is run again for backward, the hidden states that it is given and its parameters' gradients.
    """

    def __init__(self, modules: Sequence[nn.Module], h_BTE: Tensor, *, runs_again: bool) -> None:
        self._modules, self._buffers = modules, buffers_in(modules)
        self._versions = [buffer._version for buffer in self._buffers]
        self._h_BTE = h_BTE if runs_again and not h_BTE.is_inference() else None
        self._h_version = 0 if self._h_BTE is None else h_BTE._version
        trained = [p for p in parameters_in(modules) if p.requires_grad and p.is_leaf] if runs_again else []
        self._gradients = [(p, p.grad, _version_of(p.grad)) for p in trained]
        self._is_first = True

    def check(self) -> None:
        """Raise if a chunk has changed one."""
        replaced = self._is_first and self._looked_at_once()
        if replaced or [buffer._version for buffer in self._buffers] != self._versions:
            raise SeamError("its layers change a buffer in forward, which would happen once a chunk and again in backward")
        if self._h_BTE is not None and self._h_BTE._version != self._h_version:
            raise changed_in_place()

    def _looked_at_once(self) -> bool:
        """Return whether a buffer was replaced, and raise if gradients were made, by the first chunk: others do what it does."""
        self._is_first = False
        if any(p.grad is not gradient or _version_of(p.grad) != version for p, gradient, version in self._gradients):
            for parameter, gradient, _ in self._gradients:
                parameter.grad = gradient
            raise SeamError(
                'its layers call backward in forward, which would happen again when they are run again; keep="all" runs them once'
            )
        now = buffers_in(modules_of(self._modules[0]))  # of modules too that chunks have put in the place of others
        return not all(map(operator.is_, now, self._buffers))


def changed_in_place() -> SeamError:
    """Return the reason for refusing a layer that writes to its input."""
    return SeamError(
        "one of its layers, or a hook in it, changes in place the hidden states that it is given, which backward reads again; "
        "make new ones (h + delta, and not h.add_(delta))"
    )


def _version_of(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


# --- what a re-run reads -----------------------------------------------------------------------------------------------


def check_leaves(out: Tensor, leaves: Sequence[Tensor], name: str) -> None:
    """Raise if `out` depends on a trainable tensor that is not among `leaves`, such as one from a hook."""
    allowed = {id(leaf) for leaf in leaves}
    for variable in leaves_from(out.grad_fn):
        if id(variable) not in allowed:
            raise RuntimeError(
                f"{name} reads a trainable tensor of shape {tuple(variable.shape)} that is not among its parameters, or what was "
                "made of it before this call (by a hook, elsewhere in the model, or in an earlier call, as a weight that is made "
                "once and kept), and a streamed module cannot return its gradient. Register it as a parameter of the module, "
                "make what a call reads in that call, or call streamgrad.disable(model)."
            )


def check_versions(tensors: Sequence[Tensor], versions: Sequence[int], name: str) -> None:
    """Raise if one of `tensors`, which `name` takes beside its hidden states, has been written to since forward."""
    if [tensor._version for tensor in tensors] != list(versions):
        raise RuntimeError(
            f"an input of {name} was modified in place between forward and backward, so gradients would be wrong. Call backward "
            "before it is changed, or clone it."
        )


def gradient_of_input(leaf: Tensor, module: nn.Module) -> Tensor:
    """Return the gradient of a chunk's input; raise without one, as zeros in its place would differ from the stock model."""
    if leaf.grad is None:
        raise RuntimeError(
            f"{type(module).__name__} gives its input no gradient (it detaches it, or runs under no_grad), and a streamed module "
            "cannot pass that on. Freeze what comes before it, or call streamgrad.disable(model)."
        )
    return leaf.grad
