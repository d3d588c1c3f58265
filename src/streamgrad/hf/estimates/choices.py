"""Returns what other places for optimizer, gradients and weights would save; `streamgrad plan` prints it below its table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from streamgrad.hf.estimates.estimate import Estimator

# Each option in the order in which more goes elsewhere.
_OTHERS = {"optimizer": ("adamw8bit", "in-backward", "host"), "weights": ("host",)}


@dataclass(frozen=True)
class Choice:
    """An option's other value, and the bytes of one GPU and of its share of the host that it changes."""

    option: str
    value: str
    saved_bytes: float
    more_on_host: float
    fits_host: bool

    def __str__(self) -> str:
        host = f", and {self.more_on_host / 2**30:,.1f} GiB more on the host" if self.more_on_host > 0 else ""
        short = "" if self.fits_host else ", which is too small for it"
        return f"--{self.option} {self.value}: {self.saved_bytes / 2**30:,.1f} GiB less on the GPU{host}{short}"


def choices(estimator: Estimator) -> list[Choice]:
    """Return the choices that would save memory on the GPU. An optimizer that is left out is not brought in."""
    options = estimator.options
    found = []
    for option, values in _OTHERS.items():
        current = getattr(options, option)
        for value in values if current != "none" else ():
            changed: dict[str, Any] = {option: value}
            try:
                other = Estimator(estimator.shape, replace(options, **changed))
            except ValueError:
                continue  # it does not go together with the engine
            saved = sum(estimator.held.values()) - sum(other.held.values())
            if value != current and saved > 0:
                more = other.state.host_bytes - estimator.state.host_bytes
                found.append(Choice(option, value, saved, more, options.host_left(other.state) >= 0))
    return found
