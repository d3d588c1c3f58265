"""Training as people do it: precisions, accumulation, adapters, dropout, frozen parts, and everything else a loop may call."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import batches
import streamgrad
from gradients import assert_same_step, no_float32, relative_error, run_step, total_gradient_error, worst_gradient_error
from lora import with_lora
from streamgrad.engine.checks.guards import RerunGuard
from streamgrad.memory.live_bytes import LiveBytes
from tiny import tiny_model, tokens

OPTIONS = {"chunk_size": 7, "head_chunk_size": 5}


def both_ways(model, batch, tolerance: float = 1e-10, **options) -> None:
    """Stock step, then streamed step, on the same model and batch."""
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, **(OPTIONS | options))
        assert_same_step(run_step(model, batch), expected, tolerance)


# --- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_over_fp32_weights(dtype):
    """Under autocast both sides round to 16 bits, so the yardstick is stock autocast's own error against fp32."""
    model = tiny_model("llama", dtype=torch.float32)
    batch = batches.plain(model)
    truth = run_step(model, batch)

    def autocast_forward(model, batch):
        with torch.autocast("cpu", dtype=dtype):
            return model(**batch).loss

    stock = run_step(model, batch, forward=autocast_forward)
    streamgrad.enable(model, **OPTIONS)
    streamed = run_step(model, batch, forward=autocast_forward)
    stock_error = total_gradient_error(stock.gradients, truth.gradients)
    assert stock_error > 1e-4, "autocast was not in force"
    # One tiny batch: the two errors are single draws of rounding noise. test_bf16.py makes the strict comparison.
    assert total_gradient_error(streamed.gradients, truth.gradients) <= 1.25 * stock_error


def test_autocast_leaves_no_casts_without_a_graph():
    """A stock forward after a streamed one, in the same autocast context, must still reach the fp32 weights."""
    model = tiny_model("llama", dtype=torch.float32)
    batch = batches.plain(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        streamgrad.enable(model, **OPTIONS)
        model(**batch)
        streamgrad.disable(model)
        loss = model(**batch).loss
    loss.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing


def test_fp16_with_a_loss_scale():
    """Scaled fp16 gradients are as close to fp32 as stock's: nothing underflows before the scale is applied.

    Pooled over models, as single errors are draws of noise.
    """
    scale, stock_squares, squares = 2.0**12, 0.0, 0.0
    for seed in range(4):
        half, truth_model = (tiny_model("llama", dtype=dtype, seed=seed) for dtype in (torch.float16, torch.float32))
        truth_model.load_state_dict(half.state_dict())
        ids = tokens(1, 300, seed=seed)
        batch = {"input_ids": ids, "labels": ids.clone()}
        truth = run_step(truth_model, batch).gradients

        def error(model, batch=batch, truth=truth) -> float:
            step = run_step(model, batch, forward=lambda model, batch: model(**batch).loss * scale)
            unscaled = {name: gradient.float() / scale for name, gradient in step.gradients.items()}
            return total_gradient_error(unscaled, truth)

        stock_squares += error(half) ** 2
        squares += error(streamgrad.enable(half, chunk_size=16, head_chunk_size=8)) ** 2
    assert squares <= 1.02**2 * stock_squares


def test_grad_scaler_object_skips_and_steps_as_stock():
    updated = []
    for streamed in (False, True):
        model = tiny_model("llama")
        batch = batches.plain(model)
        if streamed:
            streamgrad.enable(model, **OPTIONS)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            optimizer.zero_grad()
            with no_float32():
                scaler.scale(model(**batch).loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        updated.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    worst, name = worst_gradient_error(updated[1], updated[0])
    assert worst < 1e-10, name


# --- loops -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_fifty_steps_follow_the_stock_trajectory(family):
    """AdamW, clipping, gradient accumulation over ragged micro-batches, tied embeddings: 50 losses equal stock's."""
    trajectories = []
    for streamed in (False, True):
        model = tiny_model(family)
        if streamed:
            streamgrad.enable(model, **OPTIONS)
        with no_float32():
            trajectories.append(_train(model, steps=50))
    stock, streamed = trajectories
    assert stock[-1] < 0.7 * stock[0], "the model did not learn, so the trajectory proves little"
    torch.testing.assert_close(streamed, stock, rtol=1e-8, atol=0.0)


def _train(model, steps: int) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(2):
            ids = tokens(2, 12 + (step % 3 * 5 + micro * 7) % 13, seed=step % 3 * 2 + micro)
            labels = ids.masked_fill(torch.arange(ids.shape[1]) < 3 + micro, -100)
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=40).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return torch.tensor(losses, dtype=torch.float64)


def test_gradients_accumulate_over_backward_calls():
    model = tiny_model("qwen2")
    first, second = batches.plain(model), batches.right_padded(model)

    def two_batches(model, batch):
        model(**first).loss.backward()
        return model(**second).loss

    with no_float32():
        expected = run_step(model, {}, forward=two_batches)
        streamgrad.enable(model, **OPTIONS)
        assert_same_step(run_step(model, {}, forward=two_batches), expected, 1e-10)


@pytest.mark.parametrize("keep", ["input", "attention"])
def test_two_backward_passes_in_flight(keep):
    """Two forwards, then two backwards, in either order."""
    model = tiny_model("mistral")
    first, second = batches.plain(model), batches.packed(model)

    def interleaved(model, batch):
        losses = [model(**first).loss, model(**second).loss]
        losses[0].backward()
        return losses[1]

    with no_float32():
        expected = run_step(model, {}, forward=interleaved)
        streamgrad.enable(model, **OPTIONS, keep=keep)
        assert_same_step(run_step(model, {}, forward=interleaved), expected, 1e-10)


@pytest.mark.parametrize("keep", ["input", "attention"])
def test_nothing_outlives_a_step_or_a_forward_without_backward(keep):
    """Without help from the garbage collector, so no reference cycle holds tensors."""
    model = tiny_model("llama")
    streamgrad.enable(model, **OPTIONS, keep=keep)
    batch = batches.plain(model)
    model(**batch).loss.backward()
    model.zero_grad(set_to_none=False)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            model(**batch)
            assert live.peak_bytes > 0
            assert live.live_bytes == 0, "a forward without backward leaves tensors behind"
            model(**batch).loss.backward()
            assert live.live_bytes == 0, "a finished step leaves tensors behind"
    finally:
        gc.enable()


def test_what_was_noted_of_a_layer_is_gone_when_its_backward_is(monkeypatch):
    """And not only at the end of the step, when it is known whether layers did the same again."""
    model = tiny_model("llama")
    streamgrad.enable(model, **OPTIONS, keep="input")
    noted, alive = [], []
    make = RerunGuard.__init__

    def init(self, *args):
        make(self, *args)
        noted.append(weakref.ref(self))

    monkeypatch.setattr(RerunGuard, "__init__", init)
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(
        lambda module, args, out: out.register_hook(lambda grad: alive.extend(ref() is not None for ref in noted)) and None
    )
    model(**batches.plain(model)).loss.backward()
    assert len(alive) == len(model.model.layers) and not any(alive)


def test_backward_twice_through_a_retained_graph():
    model = tiny_model("llama")
    batch = batches.plain(model)

    def twice(model, batch):
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        return loss

    with no_float32():
        expected = run_step(model, batch, forward=twice)
        streamgrad.enable(model, **OPTIONS)
        assert_same_step(run_step(model, batch, forward=twice), expected, 1e-10)


def test_weights_changed_between_forward_and_backward_are_refused():
    model = tiny_model("llama")
    streamgrad.enable(model, **OPTIONS)
    loss = model(**batches.plain(model)).loss
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="was modified in place between forward and backward"):
        loss.backward()


def test_parameter_hooks_fire_once_with_the_whole_gradient():
    model = tiny_model("llama")
    batch = batches.plain(model)
    seen = []
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    streamgrad.enable(model, **OPTIONS)
    model(**batch).loss.backward()
    assert len(seen) == 1
    assert relative_error(seen[0], weight.grad) == 0.0


# --- frozen and adapted ------------------------------------------------------------------------------------------------


def test_tied_embeddings():
    both_ways(tiny_model("qwen3", tie_word_embeddings=True), batches.plain(None))


@pytest.mark.parametrize("frozen", ["lm_head", "embed_tokens", "layers.0", "layers.1", "layers", "k_proj", "self_attn"])
def test_frozen_parts_get_no_gradient_and_the_rest_is_exact(frozen):
    model = tiny_model("llama")
    matched = [parameter.requires_grad_(False) for name, parameter in model.named_parameters() if frozen in name]
    assert matched
    both_ways(model, batches.right_padded(model))


def test_a_frozen_head_allocates_no_weight_gradient():
    model = tiny_model("llama", dtype=torch.float32, vocab_size=5000)
    model.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    streamgrad.enable(model, chunk_size=16, head_chunk_size=4)
    batch = batches.plain(model)
    with LiveBytes() as live:
        model(**batch).loss.backward()
    assert live.largest[0] < model.lm_head.weight.nbytes


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_attached_before_or_after_enable(when):
    batch = batches.plain(None)
    with no_float32():
        expected = run_step(with_lora(tiny_model("llama")), batch)
        model = tiny_model("llama")
        if when == "before":
            model = streamgrad.enable(with_lora(model), **OPTIONS)
        else:
            model = with_lora(streamgrad.enable(model, **OPTIONS))
        assert streamgrad.is_enabled(model)
        assert_same_step(run_step(model, batch), expected, 1e-10)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["adapter", "modules_to_save"])
def test_lora_on_the_head(how, when):
    options = {"targets": ["q_proj", "lm_head"]} if how == "adapter" else {"targets": ["q_proj"], "modules_to_save": ["lm_head"]}
    batch = batches.multi_turn(None)
    with no_float32():
        expected = run_step(with_lora(tiny_model("gemma2", tie_word_embeddings=False), **options), batch)
        model = tiny_model("gemma2", tie_word_embeddings=False)
        if when == "after":
            streamgrad.enable(model, **OPTIONS)
        model = with_lora(model, **options)
        if when == "before":
            streamgrad.enable(model, **OPTIONS)
        assert any("lm_head" in name for name, gradient in expected.gradients.items() if gradient is not None)
        assert_same_step(run_step(model, batch), expected, 1e-10)


def test_switching_and_disabling_adapters_between_steps():
    """`set_adapter` toggles requires_grad, so no list of trainable parameters may be kept."""
    model = with_lora(tiny_model("llama"))
    model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
    batch = batches.plain(None)
    for adapter in ("second", "default"):
        model.set_adapter(adapter)
        both_ways(model, batch)
        streamgrad.disable(model)


# --- dropout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["input", "attention"])
def test_lora_dropout_uses_one_mask_in_forward_and_backward(keep):
    """With a chunk as long as the sequence the random numbers are drawn as in plain checkpointing, so stock must agree."""
    model = with_lora(tiny_model("llama"), dropout=0.4)
    ids = tokens(2, batches.LENGTH)
    batch = {"input_ids": ids, "labels": ids}

    def seeded(model, batch):
        torch.manual_seed(5)
        return model(**batch).loss

    with no_float32():
        expected = run_step(model, batch, forward=seeded)
        streamgrad.enable(model, chunk_size=batches.LENGTH, keep=keep)
        assert_same_step(run_step(model, batch, forward=seeded), expected, 1e-10)


@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("source", ["lora", "attention", "residual"])
def test_dropout_gradient_is_that_of_the_loss_that_was_computed(source, keep):
    """Central differences of the seeded streamed loss: a mask that differs in the re-run would show at once."""
    changes = {"lora": {}, "attention": {"attention_dropout": 0.3}, "residual": {"hidden_dropout": 0.3}}[source]
    model = tiny_model("gpt_neox", **changes)
    if source == "lora":
        model = with_lora(model, dropout=0.4)
    streamgrad.enable(model, **OPTIONS, keep=keep)
    batch = batches.right_padded(model)

    def loss():
        torch.manual_seed(11)
        return model(**batch).loss

    generator = torch.Generator().manual_seed(3)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in trained]
    torch.autograd.backward(loss())
    slope = sum((p.grad * d).sum().item() for p, d in zip(trained, directions, strict=True))

    step = 3e-7
    values = []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            for parameter, direction in zip(trained, directions, strict=True):
                parameter.add_(direction, alpha=sign * step)
        values.append(loss().item())
        with torch.no_grad():
            for parameter, direction in zip(trained, directions, strict=True):
                parameter.sub_(direction, alpha=sign * step)
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)


def test_dropout_leaves_the_generator_where_stock_leaves_it():
    """The re-run in backward draws from a restored state; what comes after must not notice."""
    model = with_lora(tiny_model("llama"), dropout=0.4)
    streamgrad.enable(model, **OPTIONS)
    loss = model(**batches.plain(None)).loss
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())
