"""Engines for verl: those of FSDP2 with a streamed model, by `actor_rollout_ref.model.external_lib=streamgrad.integrations.verl`.

verl imports what `external_lib` names in each of its workers, before it looks for an engine, and prefers one that is registered
for the vendor of the device to one for the device. Importing this file registers such engines. Options of `StreamConfig` are read
as JSON from the environment variable STREAMGRAD.
"""

from __future__ import annotations

from typing import Any

from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from streamgrad.hf.discover import unwrap
from streamgrad.integrations.environment import config_from_environment
from streamgrad.parallel.zero3 import enable_for_trainer


class _Streamed:
    """Enables the model of an engine once it is sharded."""

    module: Any
    model_config: Any

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        if engine_config.strategy != "fsdp2":
            raise ValueError(f"strategy={engine_config.strategy} gathers layers at every chunk. Set strategy=fsdp2.")
        ranks = engine_config.ulysses_sequence_parallel_size
        if ranks > 1:
            raise ValueError(
                f"ulysses_sequence_parallel_size={ranks} cuts sequences between ranks inside FlashAttention, which streamed "
                "layers do not call. Set it to 1."
            )
        if model_config.enable_activation_offload:
            raise ValueError(
                "enable_activation_offload moves every tensor that autograd keeps to the host, even those that a streamed layer "
                'makes and drops within its own backward. Set it to False, and STREAMGRAD=\'{"offload": "host"}\'.'
            )
        self._stream_config = config_from_environment()
        super().__init__(model_config, engine_config, *args, **kwargs)  # type: ignore[call-arg]

    def initialize(self) -> None:
        """Build the model as verl does, and stream it."""
        super().initialize()  # type: ignore[misc]
        model = unwrap(self.module)
        # With one rank the function that verl puts into FlashAttention does nothing of its own, and streamed layers call neither.
        model.set_attn_implementation("sdpa")
        # verl's fused kernels are the model's forward, and take log-probabilities of hidden states.
        enable_for_trainer(model.get_decoder() if self.model_config.use_fused_kernels else self.module, self._stream_config)


_register = {"backend": ["fsdp", "fsdp2"], "device": get_device_name(), "vendor": get_vendor()}


@EngineRegistry.register(model_type="language_model", **_register)
class StreamedEngineWithLMHead(_Streamed, FSDPEngineWithLMHead):
    """verl's engine of FSDP2 for policies and references, streamed."""


@EngineRegistry.register(model_type="value_model", **_register)
class StreamedEngineWithValueHead(_Streamed, FSDPEngineWithValueHead):
    """verl's engine of FSDP2 for critics, streamed."""
