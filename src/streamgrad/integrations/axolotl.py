"""A plugin for axolotl: two entries of its YAML stream the model that it trains.

plugins: [streamgrad.integrations.axolotl.StreamgradPlugin]
streamgrad: {chunk_size: 4096}      # options of StreamConfig; without the block, the defaults
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator, model_validator

from streamgrad.config import StreamConfig
from streamgrad.integrations.callback import StreamgradCallback
from streamgrad.parallel.zero3 import enable_for_trainer

# Settings of axolotl that work against streaming: what each does, and what to write in its place.
_CLASHES = {
    "activation_offloading": (
        "moves every tensor that autograd keeps to the host, even those that a streamed layer makes and drops within its own "
        "backward. Take it out, and write `streamgrad: {offload: host}`"
    ),
    "selective_checkpointing": (
        "chooses what checkpointed layers save, and a streamed layer is not checkpointed. Take it out, and write `streamgrad: "
        "{keep: attention}`"
    ),
    "layer_offloading": "moves the weights of layers in and out at each call. Take it out; QLoRA and ZeRO-3 hold fewer weights",
    "tiled_mlp": "cuts the MLP into pieces that add to gradients themselves. Take it out: streamed layers run in chunks anyway",
    "sdpa_varlen": "puts a function in place of transformers' attention, which is all that is streamed. Take it out",
    "context_parallel_size": (
        "cuts sequences between ranks for ring attention, which streamed layers do not call. Set it to 1; streamgrad.parallel "
        "shares sequences between ranks"
    ),
}


class StreamgradArgs(BaseModel):
    """What the plugin adds to axolotl's configuration: a block `streamgrad` with the options of `StreamConfig`."""

    streamgrad: dict[str, Any] | None = None

    @field_validator("streamgrad")
    @classmethod
    def check_options(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        """Raise for an option that does not exist or a value that cannot be."""
        stream_config({"streamgrad": options})
        return options

    @model_validator(mode="before")
    @classmethod
    def check_other_settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Raise for settings that work against streaming, and keep axolotl from replacing attention unasked where it packs."""
        check_settings(settings)
        settings["sdpa_varlen"] = False  # None lets axolotl choose
        return settings


class StreamgradPlugin(BasePlugin):
    """Stream the model, with its adapters, once axolotl has loaded it, and log plan and peak memory while it trains."""

    def get_input_args(self) -> str:
        """Return where axolotl finds the schema of the block."""
        return f"{__name__}.StreamgradArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Raise for settings that work against streaming before the model is loaded: axolotl has completed them by now."""
        check_settings(cfg)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Enable the model: axolotl has patched it and put adapters on it, and no engine has wrapped it."""
        enable_for_trainer(model, stream_config(cfg))

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback that looks at the model again once it is wrapped, and logs."""
        return [StreamgradCallback(stream_config(cfg))]


def stream_config(settings: Any) -> StreamConfig:
    """Return the configuration in the block `streamgrad` of axolotl's settings."""
    try:
        return StreamConfig.resolve(None, dict(settings.get("streamgrad") or {}))
    except TypeError as error:  # which pydantic would not take for a wrong value
        raise ValueError(f"streamgrad: {error}") from error


def check_settings(settings: Any) -> None:
    """Raise for settings of axolotl that work against streaming."""
    if isinstance(checkpointing := settings.get("gradient_checkpointing"), str):  # an older way to ask for offloading
        reason = _CLASHES["activation_offloading"]
        raise ValueError(f"gradient_checkpointing: {checkpointing} does not go together with streamgrad: it {reason}.")
    for name, reason in _CLASHES.items():
        if (value := settings.get(name)) and not (name == "context_parallel_size" and value == 1):
            raise ValueError(f"{name}: {value} does not go together with streamgrad: it {reason}.")
