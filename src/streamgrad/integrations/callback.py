"""`StreamgradCallback`: streaming for a `transformers.Trainer`, or a trainer built on it, by one argument."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from streamgrad.config import StreamConfig
from streamgrad.hf.discover import unwrap
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.status import note_optimizer, peak_bytes_so_far
from streamgrad.hf.updates.in_backward import end_updates_by_others
from streamgrad.parallel.zero3 import enable_for_trainer

_GIB = 2**30


class StreamgradCallback(TrainerCallback):
    """Stream the model of a `transformers.Trainer`, or of any trainer built on it, TRL's among them.

    ```diff
    - trainer = Trainer(model=model, args=args, train_dataset=dataset)
    + trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[StreamgradCallback()])
    ```

    Args:
        config: a `StreamConfig`; `options` replace its fields by name. Without either, a model that is enabled already keeps its
            own options, and any other gets the defaults.

    The model is enabled at the end of the trainer's constructor, before an engine wraps it, and looked at again when training
    begins, when it is wrapped. Losses and updates are those of the same trainer without the callback. What the trainer logs gets
    the plan of the latest step and the peak of memory so far, in `log_history`, on the console, and in the reports to Weights &
    Biases, TensorBoard and others:

        streamgrad/chunk_tokens            tokens that a layer processes at a time
        streamgrad/layers_keep_input       layers that keep their input only; likewise _attention and _all
        streamgrad/layers_on_host          layers whose kept tensors wait in host memory
        streamgrad/planned_peak_gib        what the plan expects on the device; without a budget or a GPU there is none
        streamgrad/peak_memory_gib         the most that torch has allocated on the GPU; off CUDA, the process's largest size

    It stays enabled after training; `streamgrad.disable(model)` gives the stock model back.
    """

    def __init__(self, config: StreamConfig | None = None, **options: Any) -> None:
        self.config = StreamConfig.resolve(config, options) if config is not None or options else None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Enable the model while no engine has wrapped it, which is when ZeRO-3 can be told to gather whole layers."""
        if model is not None:  # else it is made by model_init, when training begins
            check_trainer_arguments(args)
            enable_for_trainer(model, self.config)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Enable the model if that was not possible before, and refuse what an engine has made of it meanwhile."""
        check_trainer_arguments(args)
        enable_for_trainer(model, self.config)
        end_updates_by_others(model.parameters(), kwargs.get("optimizer"))
        note_optimizer(model, kwargs.get("optimizer"))
        _go_before_reports(self)

    def on_log(
        self, args: Any, state: Any, control: Any, model: Any = None, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Add the plan and the peak of memory to what is logged."""
        if logs is None or not any(name in logs for name in ("loss", "train_loss")):
            return  # an evaluation, or something that a user logs
        numbers = step_numbers(model)
        logs.update(numbers)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(numbers)  # a copy that the trainer has made of the logs


def check_trainer_arguments(args: Any) -> None:
    """Raise for arguments of a trainer that work against streaming."""
    if getattr(args, "activation_offloading", False):
        raise ValueError(
            "activation_offloading moves every tensor that autograd keeps to the host, even those that a streamed layer makes "
            'and drops within its own backward. Set it to False. To offload what layers keep, pass offload="host" to streamgrad.'
        )


def _go_before_reports(callback: TrainerCallback) -> None:
    """Move `callback` to the front of the trainer's callbacks: those that report come before a user's, and see other logs.

    No argument of an event names the other callbacks; the handler that calls this one is in the stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            # Those after it are called next, as before: the order of the others does not change.
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)
            return
        frame = frame.f_back  # type: ignore[assignment]


def step_numbers(model: nn.Module) -> dict[str, float]:
    """Return the plan of the model's latest step with gradients and the peak of memory so far, as numbers by name."""
    inner = unwrap(model)
    installed = InstalledForward.on(inner.get_decoder())
    plan = None if installed is None else installed.stream.planner.latest
    numbers: dict[str, float] = {}
    if plan is not None:
        numbers["chunk_tokens"] = max(plan.chunk_sizes)
        for keep in ("input", "attention", "all"):
            numbers[f"layers_keep_{keep}"] = sum(policy.keep == keep and not policy.recomputed for policy in plan.policies)
        numbers["layers_on_host"] = sum(policy.on_host for policy in plan.policies)
        if plan.peak_bytes:
            numbers["planned_peak_gib"] = plan.peak_bytes / _GIB
    numbers["peak_memory_gib"] = peak_bytes_so_far(next(inner.parameters()).device) / _GIB
    return {f"streamgrad/{name}": round(value, 3) for name, value in numbers.items()}
