"""`model(..., labels=...)` with a streamed head: the model's own forward runs, and no full logits exist.

Inside that forward, `lm_head(hidden)` computes the loss at once, in chunks, and returns a placeholder. It does so within the head
module's own call, where engines that shard parameters have gathered its weight. The placeholder records what the forward does to
"the logits" (scaling, softcap). If that is not what `traced_logit_map` saw when the model was enabled, the step is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.utils._pytree import register_pytree_node
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from streamgrad.config import StreamConfig
from streamgrad.engine.checks.guards import protect_gradients
from streamgrad.engine.checks.in_use import InUse
from streamgrad.engine.kv_chunk import SeamError, UnknownSeamAttribute
from streamgrad.engine.module_walk import modules_of, parameters_by_depth
from streamgrad.engine.shortage import ShortOfMemory
from streamgrad.engine.temporary import temporary_attribute
from streamgrad.head.cross_entropy import quotient, summed_cross_entropy
from streamgrad.head.linear_head import LogitMap
from streamgrad.head.module_head import summed_module_cross_entropy
from streamgrad.head.targets import IGNORED, TargetRows, flatten, is_plain
from streamgrad.hf.causal_loss import (
    check_labels,
    refuse_labels_to_be_shifted,
    refuse_other_arguments,
    why_full_logits,
)
from streamgrad.hf.decoder import masks_by_chunk
from streamgrad.hf.discover import cannot_be_streamed, names_in
from streamgrad.hf.libraries.deepspeed import check_head
from streamgrad.hf.libraries.sharded import device_at_work
from streamgrad.hf.libraries.tensor_parallel import refuse_cut_head
from streamgrad.hf.passage import Passage
from streamgrad.hf.patching import (
    InstalledForward,
    named_arguments,
    not_compiled,
    own_forward,
    signature_of,
    tokens_of,
    warn_once,
)
from streamgrad.hf.sequence_slices import with_whole_mask
from streamgrad.hf.step_facts import head_known_to_decoder, vocabulary_of
from streamgrad.hf.tied_embeddings import HeadWeight
from streamgrad.hf.unusable import NoLogits


@dataclass
class HeadStream:
    """The state that `enable` leaves on a model with a language-modelling head."""

    config: StreamConfig
    logit_map: LogitMap | None  # None where the model's forward makes its loss of full logits itself
    in_use: InUse = field(default_factory=InUse)


class LogitsPlaceholder(dict[str, Any]):
    """A stand-in for logits that are never made, which records as a `LogitMap` what is done to them.

    It is a dict that holds the loss's ticket (`hf.passage`) under its one key: engines that shard parameters (ZeRO-3, FSDP2) look
    for tensors in what a module returns, and gather the head's weight again when the gradient of one arrives. They may put
    their own tensor there.
    """

    def __init__(self, ticket: Tensor, logit_map: LogitMap | None = None) -> None:
        super().__init__(ticket=ticket)
        self.logit_map = logit_map or LogitMap()

    def mapped(self, logit_map: LogitMap) -> LogitsPlaceholder:
        return LogitsPlaceholder(self["ticket"], logit_map)

    def __getitem__(self, key: Any) -> Tensor:
        if key != "ticket":
            raise SeamError("its forward, or a hook, indexes logits that are never made while streaming")
        return super().__getitem__(key)

    def __mul__(self, factor: Any) -> LogitsPlaceholder:
        if isinstance(factor, Tensor) and factor.numel() == 1 and not factor.requires_grad:
            factor = factor.item()
        if not isinstance(factor, int | float):
            raise SeamError(f"its forward multiplies the logits by a {type(factor).__name__}")
        return self.mapped(replace(self.logit_map, scale=self.logit_map.scale * factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> LogitsPlaceholder:
        return self * (1.0 / divisor)

    def _refused(self, *_: Any) -> Any:
        raise SeamError("its forward, or a hook, computes with logits that are never made while streaming")

    __add__ = __radd__ = __sub__ = __rsub__ = __rtruediv__ = __matmul__ = __pow__ = __neg__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = _refused

    def tanh(self) -> LogitsPlaceholder:
        if self.logit_map.tanh:
            raise SeamError("its forward applies tanh to the logits twice")
        return self.mapped(LogitMap(tanh=True, inner_scale=self.logit_map.scale))

    def float(self) -> LogitsPlaceholder:
        return self

    contiguous = float

    def __getattr__(self, name: str) -> Any:
        raise UnknownSeamAttribute(f"its forward, or a hook, reads {name!r} of logits that are never made while streaming")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.tanh and isinstance(args[0], cls):
            return args[0].tanh()
        raise SeamError(f"its forward applies {getattr(function, '__name__', function)} to the logits")


register_pytree_node(
    LogitsPlaceholder,
    lambda placeholder: ([placeholder["ticket"]], placeholder.logit_map),
    lambda tickets, logit_map: LogitsPlaceholder(next(iter(tickets)), logit_map),
)


class _AnyOutput(BaseModelOutputWithPast):
    """A decoder output whose fields are all None but for the hidden states, whatever a family calls them."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _DtypeAlone:
    """The head's weight in a traced forward, which may cast hidden states to its dtype and do no more with it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        raise SeamError(_READS_WEIGHT)

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise SeamError(_READS_WEIGHT)


_READS_WEIGHT = (
    "its forward reads lm_head.weight itself, as Liger's fused linear cross entropy does; "
    "where Liger is applied, apply it with fused_linear_cross_entropy=False"
)


class _Stub(nn.Module):
    """A child module that returns a fixed value, with which a forward is traced without running anything.

    It has the attributes, but for those of nn.Module, of the module in whose place it is: some forwards read them (rope_deltas).
    """

    def __init__(self, value: Any, replaced: nn.Module) -> None:
        super().__init__()
        self.value = value
        # Not of its weight, which would be computed by reading it if it is parametrized.
        self.weight = _DtypeAlone(next((parameter.dtype for parameter in replaced.parameters()), torch.float32))
        kept = [name for name in vars(replaced) if not name.startswith("_") and name not in {*vars(self), "forward"}]
        self.__dict__.update({name: vars(replaced)[name] for name in kept})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.value


_LAYERS_ALONE = (
    "If its layers can be streamed, streamgrad.enable(model.get_decoder()) streams them alone: its own head and loss then run as "
    "they are, on logits of the whole sequence."
)


def traced_logit_map(model: PreTrainedModel, decoder: nn.Module, head: nn.Module) -> LogitMap | None:
    """Return what `type(model).forward` does to the logits before its loss, by running it on a copy whose children are stubs.

    Return None if it makes a loss of its own, as those of Bart's and Whisper's decoders do, which do not shift labels.
    """
    names = names_in([model])
    if "CrossEntropyLoss" in names and "loss_function" not in names:
        return None
    hidden = torch.zeros(1, 2, model.config.get_text_config().hidden_size, device="meta")
    probe = object.__new__(type(model))
    # A loss that is a module is a child under one of these names, where a function could not take its place.
    children = {name: child for name, child in model._modules.items() if name not in ("loss_function", "_loss_function")}
    probe.__dict__ = {**model.__dict__, "_modules": dict(children)}
    for name, child in children.items():
        path = next((path for path, module in child.named_modules() if module is decoder), None) if child is not None else None
        if path is None and child is not None and any(module is head for module in child.modules()):
            probe._modules[name] = _Stub(LogitsPlaceholder(torch.zeros(())), child)
        elif path is not None:
            probe._modules[name] = stub = _Stub(_AnyOutput(last_hidden_state=hidden), child)
            stub.__dict__.update(dict.fromkeys(path.split("."), stub))  # some forwards call model.decoder, others model
    recorded: list[Any] = []

    def record(logits: Any, *args: Any, **kwargs: Any) -> Tensor:
        refuse_other_arguments({"labels": tokens}, *args, **kwargs)
        recorded.append(logits)
        return torch.zeros(())

    probe.loss_function = record
    tokens = torch.zeros(1, 2, dtype=torch.long)
    # The loss of routers, whose logits the stubs do not make, comes after the one of tokens.
    without = {"output_router_logits": False} if "output_router_logits" in signature_of(type(model).forward).parameters else {}
    try:
        type(model).forward(probe, input_ids=tokens, labels=tokens, **without)
    except SeamError as error:
        raise cannot_be_streamed(model, error, remedy=_LAYERS_ALONE) from error
    except Exception as error:
        reason = f"its forward with labels could not be followed ({error})"
        raise cannot_be_streamed(model, reason, remedy=_LAYERS_ALONE) from error
    if len(recorded) != 1 or not isinstance(recorded[0], LogitsPlaceholder):
        raise cannot_be_streamed(model, "its forward does not pass the logits to self.loss_function", remedy=_LAYERS_ALONE)
    return recorded[0].logit_map


def causal_lm_forward(model: Any, stock: Callable[..., Any], stream: HeadStream, *args: Any, **kwargs: Any) -> Any:
    """Run the model with a streamed head if it computes a loss and gradients; `enable` installs this as its forward."""
    arguments = named_arguments(stock, args, kwargs)
    computes_loss = arguments.get("labels") is not None and torch.is_grad_enabled()
    if not computes_loss or stream.logit_map is None:  # else `check_labels` does
        refuse_labels_to_be_shifted(model, arguments)
    with ExitStack() as restore:
        if (given := with_whole_mask(model, arguments)) is not None:
            installed = InstalledForward.on(model.get_decoder())
            assert installed is not None
            restore.enter_context(temporary_attribute(installed.stream, "mask_BT", arguments["attention_mask"]))
            args, kwargs = (), given
        restore.enter_context(stream.in_use.claimed(type(model).__name__, alone=computes_loss))
        reason: str | None = "it was called without labels, as by Trainer for label_smoothing_factor and compute_loss_func"
        if computes_loss and stream.logit_map is None:
            for shifted in ({}, {"shift_labels": arguments["labels"]}):  # Bart's own loss takes labels as they are, others shift
                check_labels(model, arguments | shifted)
            reason = "its forward computes the loss from full logits itself"
        elif computes_loss:
            check_labels(model, arguments)
            reason = why_full_logits(model)
        if reason is not None:
            with masks_by_chunk(model, arguments):
                output = stock(*args, **kwargs)
            if torch.is_grad_enabled():
                protect_gradients(output[0], lambda: parameters_by_depth(model))
                _announce_full_logits(model, output, arguments, reason)
            return output
        assert stream.logit_map is not None
        head, vocabulary = model.get_output_embeddings(), model.config.get_text_config().vocab_size
        refuse_backward_hooks(head)
        job = _HeadJob(head, stream.config, stream.logit_map, arguments, vocabulary)
        restore.enter_context(not_compiled([job.head]))
        known = head_known_to_decoder(model, job.head, tokens=job.targets.numel(), config=stream.config)
        job.weight = restore.enter_context(known)
        restore.enter_context(temporary_attribute(job.head, "forward", job.head_forward))
        restore.enter_context(temporary_attribute(model, "_loss_function", job.loss_function))
        try:
            with masks_by_chunk(model, arguments):
                output = stock(*args, **kwargs)
        except SeamError as error:
            raise cannot_be_streamed(model, error, enabled=True) from error
        except ShortOfMemory as error:
            if job.is_started and (decoder := InstalledForward.on(model.get_decoder())) is not None:
                error.args = (f"{error} {decoder.stream.planner.note_shortage()}".rstrip(),)
            raise
    protect_gradients(output[0], lambda: parameters_by_depth(model))
    if isinstance(output, tuple):
        return tuple(NoLogits() if isinstance(item, LogitsPlaceholder) else item for item in output)
    output["logits"] = NoLogits()
    return output


class _HeadJob:
    """The head's part of one forward: it holds the targets and computes the loss."""

    def __init__(self, head: Any, config: StreamConfig, logit_map: LogitMap, arguments: dict[str, Any], vocabulary: int) -> None:
        self.head, self.logit_map, self.arguments = head, logit_map, arguments
        self.run = own_forward(head)
        self.is_linear = getattr(self.run, "__func__", None) is nn.Linear.forward
        self.items = arguments.get("num_items_in_batch")
        self.is_started = self.is_done = False
        self.passage = Passage()
        self.weight: HeadWeight  # for the call that is under way
        ignore_index = arguments.get("ignore_index", IGNORED)
        shifted = arguments.get("shift_labels")
        # Position t predicts token t + 1; the last position predicts nothing.
        next_ones = nn.functional.pad(arguments["labels"], (0, 1), value=ignore_index)[..., 1:]
        self.targets: Tensor = next_ones if shifted is None else shifted
        weight = next(head.parameters(), None)
        if weight is None:
            raise ValueError(
                f"the language-modelling head, a {type(head).__name__}, has no parameters of its own and cannot be streamed. "
                "Give it some, or call streamgrad.disable(model)."
            )
        # Built now, while the device is idle: counting targets waits for the device.
        self.rows = TargetRows(
            self.targets.reshape(-1).to(device=device_at_work(weight), dtype=torch.int64),
            vocabulary=vocabulary_of(head, vocabulary),
            ignore_index=ignore_index,
            chunk_size=config.head_chunk_size,
            # Autograd of another head holds logits in its dtype and in fp32, log-probabilities and gradients.
            itemsize=weight.element_size() if self.is_linear else 16,
            limit_bytes=config.budget_bytes,
        )

    def head_forward(self, hidden: Tensor) -> LogitsPlaceholder:
        if self.is_done:
            raise SeamError("its forward calls the language-modelling head more than once")
        self.is_started = True
        items = self.items.to(hidden.device) if isinstance(self.items, Tensor) else self.items
        # Only here, inside the head's call, are parameters that an engine shards what the head computes with.
        if self.is_linear and all(map(is_plain, self.head.parameters())):
            weight, bias = self.weight(), self.head.bias
            hidden_NE = flatten(hidden, weight, self.targets)[0]
            divisor = items.reshape(()) if isinstance(items, Tensor) else items
            total, count = summed_cross_entropy(hidden_NE, weight, bias, self.rows, self.logit_map, divisor=divisor)
        else:
            check_head(self.head)
            refuse_cut_head(self.head)
            hidden_NE = flatten(hidden, hidden, self.targets)[0]
            total, count = summed_module_cross_entropy(self.head, self.run, hidden_NE, self.rows, self.logit_map)
        self.is_done = True
        kind = hidden.device.type
        self.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        return LogitsPlaceholder(self.passage.leave(quotient(total, count, items)))

    def loss_function(self, logits: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss that the head has computed, to a forward that passes what `ForCausalLMLoss` takes."""
        if type(logits) is dict and logits.keys() == {"ticket"}:
            # An engine that casts what modules return has copied the placeholder to a dict.
            logits = LogitsPlaceholder(logits["ticket"])
        if not isinstance(logits, LogitsPlaceholder) or logits.logit_map != self.logit_map or not self.is_done:
            if self.head._forward_hooks:
                raise SeamError("a forward hook on its head changes the logits, which are never made while streaming; remove it")
            raise SeamError("its forward treats the logits differently from when it was enabled; enable it again")
        returned = logits["ticket"].dtype
        if torch.promote_types(returned, self.dtype) != returned:
            raise SeamError(
                f"an engine rounds the logits, which are {self.dtype}, to {returned}, and they are never made while streaming; "
                "leave out output_dtype of the head's MixedPrecisionPolicy, or let its param_dtype be the same"
            )
        refuse_other_arguments(self.arguments, *args, **kwargs)
        (loss,) = self.passage.arrive(logits["ticket"])
        return loss


def refuse_backward_hooks(head: nn.Module) -> None:
    """Raise if a backward hook watches `head`, which is streamed while gradients are computed."""
    hooks = any(module._backward_hooks or module._backward_pre_hooks for module in modules_of(head))
    if hooks or _module._global_backward_hooks or _module._global_backward_pre_hooks:
        raise ValueError(
            f"a backward hook on {'the language-modelling head' if hooks else 'all modules'} cannot be called: the streamed head "
            "is differentiated in forward, chunk by chunk, and has no gradient of all logits. Remove the hook, or call "
            "streamgrad.disable(model)."
        )


def _announce_full_logits(model: Any, output: Any, arguments: dict[str, Any], reason: str) -> None:
    """Warn once what the logits of all tokens take, where a stock head made them."""
    logits, tokens = getattr(output, "logits", None), tokens_of(arguments)
    if isinstance(logits, Tensor) and logits.requires_grad and tokens is not None and logits.shape[:2] == tokens.shape[:2]:
        warn_once(
            model,
            "full logits",
            f"streamgrad: {type(model).__name__} made the logits of all {logits[..., 0].numel():,} tokens, {logits.nbytes:,} "
            f"bytes, and their gradient takes as much again: {reason}. The layers are streamed, the head is not. Pass labels, or "
            "take the loss of hidden states by streamgrad.token_logprobs; StreamSFTTrainer streams label smoothing.",
        )
