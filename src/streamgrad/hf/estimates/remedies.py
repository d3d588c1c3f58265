"""Says why a model fits a GPU at no length, and which other options make it fit: each is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamgrad.memory.planner import HOST_SHARE

if TYPE_CHECKING:
    from streamgrad.hf.estimates.estimate import Estimator

Change = dict[str, Any]  # options by name
Changes = list[Change]

_MOST_GPUS = 64


def in_python(changes: Changes) -> str:
    """Return the changes as arguments of `estimate`."""
    return ", ".join(" with ".join(f"{name}={value!r}" for name, value in change.items()) for change in changes)


def as_flags(changes: Changes) -> str:
    """Return the changes as options of `streamgrad plan`."""
    return ", ".join(" ".join(f"--{name} {value}" for name, value in change.items()) for change in changes)


def why_nothing_fits(estimator: Estimator, spelled: Callable[[Changes], str]) -> str:
    """Return what takes the memory of the GPU, or of the host, and what to change."""
    options, state = estimator.options, estimator.state
    if options.host_left(state) < 0:
        room = f"{options.machine.host_bytes / 2**30:.0f} GiB of host memory, of which {100 * HOST_SHARE:.0f}% are free"
        held = f"what waits there alone takes {state.host_bytes * options.ranks.on_a_host / 2**30:.1f} GiB"
        larger = "a larger host"
    else:
        room = f"{options.machine.gpu_bytes / 2**30:.1f} GiB, not even batch={options.batch} of 128 tokens"
        there = {name: count for name, count in estimator.held.items() if count}
        held, larger = f"{', '.join(there)}: these alone take {sum(there.values()) / 2**30:.1f} GiB on each GPU", "a larger GPU"
    fitting = [change for change in _changes(estimator) if _fits(estimator, change)]
    lora = f" Adapters need less: {spelled([{'method': 'lora'}])}." if options.method == "full" else ""
    ways = f"{spelled(fitting)}, or {larger}" if fitting else larger
    return f"nothing fits {room}. {held[0].upper()}{held[1:]}. What fits: {ways}.{lora}"


def _changes(estimator: Estimator) -> Iterator[Change]:
    """Yield options to try. `method` is none of them: a model with adapters has another shape."""
    options = estimator.options
    if options.batch > 1:
        yield {"batch": 1}
    if options.method == "lora" and options.quantization == "none":
        yield {"quantization": "nf4"}
    if options.optimizer != "none":
        yield from ({"optimizer": place} for place in ("in-backward", "host") if place != options.optimizer)
    if options.weights == "device":
        # FSDP2 keeps an optimizer with the weights. One that is left out is not brought in.
        yield {"weights": "host"} if options.optimizer in ("host", "none") else {"optimizer": "host", "weights": "host"}
    engine: Change = {} if options.engine in ("fsdp2", "zero3") else {"engine": "zero3"}
    gpus = options.gpus if engine and options.gpus > 1 else 2 * options.gpus
    while gpus <= _MOST_GPUS:
        if _fits(estimator, change := engine | {"gpus": gpus}):
            yield change
            break
        gpus *= 2


def _fits(estimator: Estimator, change: Change) -> bool:
    shape = estimator.shape.quantized(change["quantization"]) if "quantization" in change else estimator.shape
    try:
        return replace(estimator, shape=shape, options=replace(estimator.options, **change)).longest() > 0
    except ValueError:  # it does not go together with the other options
        return False
