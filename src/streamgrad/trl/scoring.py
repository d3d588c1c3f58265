"""TRL's scoring contract with a streamed head: `model(..., labels=..., fused_lm_head=True)` returns token scores, never logits.

TRL's trainers call their models in no other way: policy and reference pass, old log-probabilities, evaluation and metrics all go
through this call, which `trl.trainer.utils.add_fused_lm_head` adds to a model in the trainer's constructor.
`add_streamed_head` is that function for a model whose layers are streamed too.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # which all families use, as TRL does
from trl.trainer.utils import FusedCausalLMOutput

from streamgrad.config import StreamConfig
from streamgrad.engine.temporary import temporary_attribute
from streamgrad.head.linear_head import LogitMap
from streamgrad.head.targets import IGNORED
from streamgrad.head.token_scores import token_scores
from streamgrad.hf.causal_lm import HeadStream, causal_lm_forward, refuse_backward_hooks
from streamgrad.hf.causal_loss import check_labels
from streamgrad.hf.libraries.sharded import device_at_work
from streamgrad.hf.passage import Passage
from streamgrad.hf.patching import InstalledForward, named_arguments, own_forward, warn_once
from streamgrad.hf.sequence_slices import with_whole_mask
from streamgrad.hf.shared_prefixes import SharedBatch, has_gaps, share_prefixes
from streamgrad.hf.sharing_refusal import sharing_refusal
from streamgrad.hf.step_facts import head_known_to_decoder
from streamgrad.hf.tied_embeddings import HeadWeight
from streamgrad.parallel import shared_slice
from streamgrad.parallel.zero3 import enable_for_trainer
from streamgrad.trl.sliced_rows import scored_in_slices


@dataclass(kw_only=True)
class ScoringStream(HeadStream):
    """The state of a model that scores tokens: which scores a trainer needs, and how the head computes them.

    `logit_map`, with which the model computes its own loss, has no temperature; `scored_map` has.
    """

    fields: tuple[str, ...]
    scored_map: LogitMap
    in_float32: bool
    label_smoothing: float = 0.0
    share_prompts: bool = False
    rows_of: dist.ProcessGroup | None = None  # the ranks that cut whole rows among them


def scoring_forward(
    model: Any, stock: Callable[..., Any], stream: ScoringStream, *args: Any, fused_lm_head: bool = False, **kwargs: Any
) -> Any:
    """Score tokens if `fused_lm_head` is True; otherwise run the model as `enable` lets it run."""
    if fused_lm_head:
        return _scored(model, stream, *args, **kwargs)
    return causal_lm_forward(model, stock, stream, *args, **kwargs)


def _scored(
    model: Any,
    stream: ScoringStream,
    *args: Any,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> FusedCausalLMOutput:
    if shift_labels is None:
        if labels is None:
            raise ValueError("fused_lm_head=True scores tokens, but neither labels nor shift_labels were passed. Pass one.")
        # Position t is scored on token t + 1. The last position has no target and is cut off below: cutting the hidden
        # states instead would copy them.
        targets_BT = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        length = targets_BT.shape[1] - 1
    else:
        targets_BT, length = shift_labels, shift_labels.shape[1]
    given = named_arguments(model.base_model.forward, args, kwargs)
    group = stream.rows_of if shift_labels is None else None  # else these are slices already
    if group is None:
        check_labels(model, given | {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch})
    if torch.is_grad_enabled():
        refuse_backward_hooks(model.get_output_embeddings())
    text_config = model.config.get_text_config()
    if getattr(text_config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    shared = None
    if stream.share_prompts and labels is not None and shift_labels is None:
        shared = _shared(model, given | kwargs, labels)
    if group is not None:
        if shared is None:
            assert labels is not None
            score = partial(_scored, model, stream, *args)
            return scored_in_slices(score, group, labels=labels, num_items_in_batch=num_items_in_batch, **kwargs)
        shared = shared_slice(shared, group)
    scored = targets_BT if shared is None else shared.targets
    known = head_known_to_decoder(model, _linear_head(model), tokens=scored.numel(), config=stream.config)
    with known as weight:
        if shared is None:
            output = model.base_model(*args, **kwargs | {"use_cache": False})
            hidden_BTE = output.last_hidden_state
        else:
            hidden_BTE = shared.hidden_states_of(model)  # asked for a refusal above
    scores = _scores(model, stream, weight, hidden_BTE, scored)
    # Not views, in which an engine's hooks would be lost.
    scores = {name: score[:, :length].clone() if shared is None else shared.unshared(score) for name, score in scores.items()}
    mask = (targets_BT != IGNORED)[:, :length].to(scores["log_probs"].device)
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss, balance = -scores["log_probs"].sum() / count, None
    if kwargs.get("output_router_logits"):
        experts, chosen = text_config.num_experts, text_config.num_experts_per_tok
        whole = with_whole_mask(model, given | kwargs) or given
        balance = load_balancing_loss_func(output.router_logits, experts, chosen, whole.get("attention_mask"))
        loss = loss + getattr(text_config, "router_aux_loss_coef", 0.0) * balance
    return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=balance, **scores)


def _shared(model: Any, given: dict[str, Any], labels: Tensor) -> SharedBatch | None:
    """Return the batch with equal prompts computed once; None if that saves nothing, or if rows must be computed one by one."""
    refusal = sharing_refusal(model, labels.device)  # asked by all ranks, whatever their batches
    passed = {name for name, value in given.items() if value is not None and value is not False}
    if len(labels) == 1 or passed - {"input_ids", "attention_mask"}:
        return None
    attention_mask = given.get("attention_mask")
    if attention_mask is not None and (attention_mask.ndim != 2 or has_gaps(attention_mask)):
        return None
    is_scored = labels != IGNORED
    shared = share_prefixes(given["input_ids"], attention_mask, is_scored, same_padding=refusal.moved is not None)
    if not shared.saves_time(model.config.get_text_config(decoder=True).hidden_size, labels.device):
        return None
    if refusal.always is not None:
        warn_once(model, "share_prompts", f"streamgrad: equal prompts are computed in every row: {refusal.always}.")
        return None
    # Labels that are other tokens than the next ones, or that padding predicts, are scored in the rows as they are.
    is_next = torch.equal(shared.mask, is_scored[:, 1:]) and torch.equal(shared.targets[0], labels[:, 1:][shared.mask])
    return shared if is_next else None


def _scores(model: Any, stream: ScoringStream, weight: HeadWeight, hidden_BTE: Tensor, targets_BT: Tensor) -> dict[str, Tensor]:
    """Return the scores, computed inside the head module's own call, where engines that shard weights have gathered them."""
    outer, head = model.get_output_embeddings(), _linear_head(model)
    passage, names = Passage(), list[str]()

    def forward(hidden_BTE: Tensor) -> Tensor:
        scores = token_scores(
            hidden_BTE,
            weight(),
            targets_BT,
            fields=stream.fields,
            bias=head.bias,
            logit_map=stream.scored_map,
            label_smoothing=stream.label_smoothing,
            chunk_size=stream.config.head_chunk_size,
            limit_bytes=stream.config.budget_bytes,
        )
        names.extend(scores)
        return passage.leave(*scores.values())

    # In a model split over devices, the last layer may be on another device than the head.
    hidden_BTE = hidden_BTE.to(device_at_work(head.weight))
    with temporary_attribute(head, "forward", forward):
        if not stream.in_float32:
            ticket = outer(hidden_BTE)
        else:
            with torch.autocast(hidden_BTE.device.type, enabled=False):
                ticket = outer(hidden_BTE.float())
    return dict(zip(names, passage.arrive(ticket), strict=True))


def _linear_head(model: Any) -> nn.Linear:
    """Return the linear map that makes the logits. PEFT's `modules_to_save` wraps it together with a frozen copy."""
    head = model.get_output_embeddings()
    for module in head.modules() if hasattr(head, "modules_to_save") else [head]:
        if isinstance(module, nn.Linear) and module.weight is head.weight:
            return module
    raise ValueError(
        f"the language-modelling head is a {type(head).__name__}, but tokens are scored by a linear head only: what it adds "
        "would be missing from the loss. Take the head out of the adapter's target_modules and trainable_token_indices."
    )


def scores_tokens(model: Any) -> bool:
    """Return whether the model was given the streamed head that scores tokens, and has it still."""
    installed = InstalledForward.on(model)
    return installed is not None and isinstance(installed.stream, ScoringStream)


def makes_plain_logits(model: Any) -> bool:
    """Return whether tokens are scored here, and the model's logits are the product with the head's weight that scores are of."""
    # Accelerate may have wrapped the forward, for autocast; a trainer of TRL may have put one of its own in its place.
    installed = InstalledForward.on(model)
    if not scores_tokens(model) or installed is None or not installed.is_called_by(model.forward):
        return False
    linear = _linear_head(model)
    heads = linear, model.get_output_embeddings()
    has_hooks = any(head._forward_hooks or head._forward_pre_hooks for head in heads)
    return not has_hooks and getattr(own_forward(linear), "__func__", None) is nn.Linear.forward


def add_streamed_head(
    model: Any,
    stream: StreamConfig | None,
    *,
    share_prompts: bool = False,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Enable `model` with `stream` and let it score tokens: `trl.trainer.utils.add_fused_lm_head`, streamed.

    Args:
        model: a causal language model, not yet wrapped by PEFT or an engine.
        stream: how to stream it, as for `enable_for_trainer`.
        share_prompts: whether rows with equal prompts compute them once.
        temperature, cast_lm_head_to_fp32, outputs: as in TRL.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive: logits are divided by it. Pass 1.0 to leave it out.")
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} has no language-modelling head to score tokens with. Pass a causal language model."
        )
    enable_for_trainer(model, stream)
    enabled = InstalledForward.on(model)
    assert enabled is not None and isinstance(enabled.stream, HeadStream)
    config, logit_map = enabled.stream.config, enabled.stream.logit_map
    if logit_map is None:
        raise ValueError(
            f"{type(model).__name__} computes its loss in its own forward, so its tokens cannot be scored while streaming. "
            "Train it with TRL's own trainer, and call streamgrad.enable(model) first."
        )
    scored_map = replace(logit_map, scale=logit_map.scale / temperature)
    scoring = ScoringStream(
        config,
        logit_map,
        fields=outputs,
        scored_map=scored_map,
        in_float32=cast_lm_head_to_fp32,
        share_prompts=share_prompts,
    )
    # In the place of the forward that `enable` installed, so that `disable` removes this one.
    InstalledForward(model, scoring_forward, scoring).install()


@contextmanager
def streamed_head_in(trainer: type, stream: StreamConfig | None, *, share_prompts: bool = False) -> Iterator[None]:
    """Let the constructor of TRL's `trainer` call `add_streamed_head` in place of `add_fused_lm_head` within the block.

    The constructor is the only place where both models exist, no engine has wrapped them, and nothing has been scored yet (DPO
    scores its reference in it).
    """
    module = importlib.import_module(trainer.__module__)
    stock = module.add_fused_lm_head

    def add(model: Any, *args: Any, **kwargs: Any) -> None:
        options = inspect.signature(stock).bind(model, *args, **kwargs).arguments
        add_streamed_head(options.pop("model"), stream, share_prompts=share_prompts, **options)

    with temporary_attribute(module, "add_fused_lm_head", add):
        yield
