"""Everything else that is called on a model while it is enabled: it must behave as the stock model, or say why not."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

import batches
import streamgrad
from gradients import assert_same_step, no_float32, relative_error, run_step
from lora import with_lora
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.unusable import NoLogits
from tiny import FAMILIES, tiny_model, tokens

OPTIONS = {"chunk_size": 7, "head_chunk_size": 5}


@pytest.fixture
def model():
    return streamgrad.enable(tiny_model("qwen3"), **OPTIONS)


def stock(family: str = "qwen3"):
    return tiny_model(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_disable_restores_the_model_bit_for_bit(family):
    model = tiny_model(family)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    config, batch = copy.deepcopy(model.config.to_dict()), batches.plain(model)
    logits = model(**batch).logits
    streamgrad.enable(model, **OPTIONS)
    assert streamgrad.is_enabled(model)
    run_step(model, batch)
    streamgrad.disable(model)
    assert not streamgrad.is_enabled(model)
    assert {name: vars(module).keys() for name, module in model.named_modules()} == {n: v.keys() for n, v in before.items()}
    assert model.config.to_dict() == config
    assert torch.equal(model(**batch).logits, logits)


def test_only_instance_attributes_of_two_modules_change():
    model = tiny_model("qwen3")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    streamgrad.enable(model)
    changed = {
        name: set(vars(module)) - before[name] for name, module in model.named_modules() if set(vars(module)) != before[name]
    }
    assert changed == {"": {"_streamgrad", "forward"}, "model": {"_streamgrad", "forward"}}


def test_logits_are_there_without_labels_and_in_eval(model):
    batch = batches.plain(model)
    with no_float32():
        expected = stock()(**batch).logits
        assert relative_error(model(input_ids=batch["input_ids"]).logits, expected) < 1e-12
        assert isinstance(model(**batch).logits, NoLogits)
        model.eval()
        with torch.no_grad():
            output = model(**batch)
        assert torch.equal(output.logits, stock().eval()(**batch).logits), "no_grad runs the stock path, bit for bit"
        assert output.loss is not None


def test_gradients_through_logits_are_exact(model):
    """A user's own loss on `.logits`: the layers are streamed, the head is stock."""
    batch = {"input_ids": tokens(2, batches.LENGTH)}

    def own_loss(model, batch):
        return (model(**batch).logits.softmax(-1) ** 2).sum()

    with no_float32():
        assert_same_step(run_step(model, batch, forward=own_loss), run_step(stock(), batch, forward=own_loss), 1e-10)


def test_gradients_through_the_bare_decoder_are_exact(model):
    """TRL and reward models call the decoder without the head."""
    batch = {"input_ids": tokens(2, batches.LENGTH)}

    def own_loss(model, batch):
        return model.model(**batch).last_hidden_state.square().sum() + 0.0 * model.lm_head.weight.sum()

    with no_float32():
        assert_same_step(run_step(model, batch, forward=own_loss), run_step(stock(), batch, forward=own_loss), 1e-10)


@pytest.mark.parametrize("streamed_eval", [False, True])
def test_long_inputs_without_a_graph_are_streamed_when_no_cache_is_wanted(model, streamed_eval):
    ids = tokens(2, batches.LENGTH)
    with no_float32(), torch.no_grad():
        expected = stock().eval()(input_ids=ids).logits
        model.eval()
        actual = model(input_ids=ids, use_cache=not streamed_eval).logits
    assert relative_error(actual, expected) < 1e-12
    assert torch.equal(actual, expected) is not streamed_eval


def test_what_only_stock_returns_is_returned_without_a_graph():
    model = tiny_model("qwen3_moe")
    batch = {"input_ids": tokens(1, 16), "output_router_logits": True, "use_cache": False}
    with torch.no_grad():
        expected = model(**batch).router_logits
        actual = streamgrad.enable(model, chunk_size=4)(**batch).router_logits
    assert len(actual) == 2 and all(map(torch.equal, actual, expected))


def test_options_hold_for_a_head_that_was_left_enabled():
    model = streamgrad.enable(tiny_model("llama"), head_chunk_size=8)
    streamgrad.disable(model.model)
    streamgrad.enable(model, head_chunk_size=16)
    assert InstalledForward.on(model).stream.config.head_chunk_size == 16


@pytest.mark.parametrize("family", ["phi3", "gpt_neox"])
def test_kept_values_are_alone(family):
    """They are a slice of one projection of queries, keys and values, which is not kept with them."""
    model, saved = streamgrad.enable(tiny_model(family), keep="attention"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        model.get_decoder()(input_ids=tokens(1, 9))
    heads = [tensor for tensor in saved if tensor.ndim == 4]
    assert len(heads) == 6 and all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in heads)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_generate_equals_stock(family, use_cache):
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": use_cache, "attention_mask": mask}
    expected = tiny_model(family, dtype=torch.float32).eval().generate(ids, **options)
    model = streamgrad.enable(tiny_model(family, dtype=torch.float32), **OPTIONS)
    run_step(model, batches.plain(model))
    assert torch.equal(model.eval().generate(ids, **options), expected)


def test_state_dict_and_save_pretrained_are_stock(model, tmp_path):
    assert model.state_dict().keys() == stock().state_dict().keys()
    model.save_pretrained(tmp_path / "streamed")
    stock().save_pretrained(tmp_path / "stock")
    for path in (tmp_path / "stock").iterdir():
        assert path.read_bytes() == (tmp_path / "streamed" / path.name).read_bytes(), path.name
    loaded = type(model).from_pretrained(tmp_path / "streamed", dtype=torch.float64).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stock().state_dict().items())


def new_head(model) -> torch.nn.Linear:
    torch.manual_seed(5)
    return torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=True).double()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: model], ids=["copy", "deepcopy", "itself"])
@pytest.mark.parametrize("shares_modules", [True, False])
@pytest.mark.parametrize("is_traced", [True, False])
def test_a_new_head_of_a_copy(copied, shares_modules, is_traced, monkeypatch):
    """A shallow copy has the same dictionary of submodules as the original, unless it is given its own.

    Tracers put a function of their own in the place of all calls of modules.
    """
    call, batch = torch.nn.Module._call_impl, batches.plain(None)
    if is_traced:
        monkeypatch.setattr(torch.nn.Module, "_call_impl", lambda *args, **kwargs: call(*args, **kwargs))
    steps = []
    for original in (tiny_model("llama"), streamgrad.enable(tiny_model("llama"), **OPTIONS)):
        model = copied(original)
        if not shares_modules:
            model._modules = dict(model._modules)
        model.lm_head = new_head(model)
        with no_float32():
            steps.append((run_step(model, batch), run_step(original, batch)))
    for ours, theirs in zip(steps[1], steps[0], strict=True):
        assert_same_step(ours, theirs, 1e-10)


def test_a_shallow_copy_is_disabled_by_itself(model):
    copied = copy.copy(model)
    copied._modules = dict(copied._modules)
    streamgrad.disable(model)
    assert not streamgrad.is_enabled(copied), "it has the same decoder"
    copied.lm_head = new_head(copied)
    streamgrad.enable(copied, **OPTIONS)
    other, batch = stock(), batches.plain(model)
    with no_float32():
        assert_same_step(run_step(streamgrad.disable(model), batch), run_step(other, batch), 1e-10)
        other.lm_head = new_head(other)
        streamgrad.enable(copied, **OPTIONS)
        assert_same_step(run_step(copied, batch), run_step(other, batch), 1e-10)
    assert "forward" not in vars(model)


def test_deepcopy_runs_its_own_weights(model):
    clone = copy.deepcopy(model)
    assert streamgrad.is_enabled(clone)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    batch = batches.plain(model)
    with no_float32():
        assert_same_step(run_step(clone, batch), run_step(stock(), batch), 1e-10)
    streamgrad.disable(clone)
    assert streamgrad.is_enabled(model)


def count_layer_calls(model, batch) -> int:
    """Forward calls of one projection in a step, the one for keys included."""
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    handle = model.get_decoder().layers[0].mlp.up_proj.register_forward_hook(count)
    run_step(model, batch)
    handle.remove()
    return calls


class Checkpointing(LlamaModel):
    """Checkpoints its layers itself, as decoders of remote code do."""

    gradient_checkpointing = False

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **options):
        h, positions = self.embed_tokens(input_ids), torch.arange(input_ids.shape[1])[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=h, attention_mask=None, past_key_values=None, position_ids=positions
        )
        angles = self.rotary_emb(h, positions)
        for layer in self.layers:
            call = layer.__call__
            if self.gradient_checkpointing and self.training:
                h = self._gradient_checkpointing_func(call, h, mask, positions, None, False, angles)
            else:
                h = call(h, mask, positions, past_key_values, False, angles)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(h))


@pytest.mark.parametrize("keep", ["input", "attention", "all", "auto"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_decoder_that_checkpoints_its_layers_itself(use_reentrant, keep):
    stock, model = tiny_model("llama"), tiny_model("llama")
    stock.model.__class__ = model.model.__class__ = Checkpointing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    streamgrad.enable(model, keep=keep, **OPTIONS)
    with no_float32():
        assert_same_step(run_step(model, batches.plain(None)), run_step(stock, batches.plain(None)), 1e-10)
    assert model.model.gradient_checkpointing


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"every_n_layers": 2}])
def test_gradient_checkpointing_neither_uninstalls_nor_nests(kwargs, wrapped):
    """TRL and Trainer call it again and again; a layer must still run forward exactly twice a chunk."""
    model = tiny_model("qwen3")
    if wrapped:
        model = with_lora(model)
    batch = batches.plain(None)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=batches.LENGTH)
        for _ in range(2):
            model.gradient_checkpointing_enable(**kwargs)
            assert model.is_gradient_checkpointing
            assert count_layer_calls(model, batch) == 2
            assert_same_step(run_step(model, batch), expected, 1e-10)
            model.gradient_checkpointing_disable()
            assert_same_step(run_step(model, batch), expected, 1e-10)
        model.gradient_checkpointing_enable(**kwargs)
        streamgrad.disable(model)
        assert model.is_gradient_checkpointing, "disable keeps what the user asked of the stock model"
        assert_same_step(run_step(model, batch), expected, 1e-10)


def test_output_hidden_states(model):
    batch = batches.plain(model) | {"output_hidden_states": True}

    def with_hidden_loss(model, batch):
        output = model(**batch)
        assert len(output.hidden_states) == 3
        return output.loss + sum(hidden.square().mean() for hidden in output.hidden_states)

    with no_float32():
        expected = run_step(stock(), batch, forward=with_hidden_loss)
        assert_same_step(run_step(model, batch, forward=with_hidden_loss), expected, 1e-10)


def test_submodules_patched_after_enable_are_used(model):
    """Liger and others replace forwards of submodules when training starts."""
    mlp = model.model.layers[0].mlp
    plain_forward = mlp.forward
    mlp.forward = lambda x: 2.0 * plain_forward(x)
    other = stock()
    other_mlp = other.model.layers[0].mlp
    other_forward = other_mlp.forward
    other_mlp.forward = lambda x: 2.0 * other_forward(x)
    batch = batches.plain(model)
    with no_float32():
        assert_same_step(run_step(model, batch), run_step(other, batch), 1e-10)


def test_a_layer_forward_patched_after_enable_is_used(model):
    batch = batches.plain(model)
    with no_float32():
        other = stock()
        for patched in (model, other):
            layer = patched.model.layers[1]
            own = type(layer).forward.__get__(layer)
            layer.forward = lambda hidden_states, past_key_values=None, own=own, **kwargs: (
                0.5 * own(hidden_states, past_key_values=past_key_values, **kwargs)
            )
        assert_same_step(run_step(model, batch), run_step(other, batch), 1e-10)


def test_keep_all_is_the_ordinary_graph_with_a_streamed_head():
    model = streamgrad.enable(tiny_model("qwen3"), **OPTIONS, keep="all")
    batch = batches.plain(model)
    assert count_layer_calls(model, batch) == 1
    with no_float32():
        assert_same_step(run_step(model, batch), run_step(stock(), batch), 1e-10)
    assert isinstance(model(**batch).logits, NoLogits)


def test_custom_loss_function_gets_logits_and_a_warning(model):
    batch = batches.plain(model)

    def own_loss(logits, labels, **kwargs):
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)

    other = stock()
    other.loss_function = model.loss_function = own_loss
    with no_float32(), pytest.warns(UserWarning, match="needs full logits"):
        assert_same_step(run_step(model, batch), run_step(other, batch), 1e-10)


def test_sequence_classification_streams_its_layers():
    model = tiny_model("qwen3", kind=AutoModelForSequenceClassification, num_labels=3)
    batch = {"input_ids": tokens(2, batches.LENGTH), "labels": torch.tensor([0, 2])}
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, **OPTIONS)
        assert_same_step(run_step(model, batch), expected, 1e-10)


def test_import_does_not_reseed():
    import subprocess
    import sys

    code = "import torch; before = torch.get_rng_state(); import streamgrad; assert torch.equal(before, torch.get_rng_state())"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)


def test_no_stale_mask_between_calls(model):
    """A padded batch, then one without a mask, of the same shape."""
    padded, plain = batches.right_padded(model), batches.plain(model)
    with no_float32():
        run_step(model, padded)
        assert_same_step(run_step(model, plain), run_step(stock(), plain), 1e-10)


def test_what_a_hook_takes_away_is_not_missed():
    """A layer's own forward, which others remove as well when they take out what they put in; nothing is left on any layer."""
    model = tiny_model("llama", num_hidden_layers=4)
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, **OPTIONS)
        handle = model.model.layers[1].register_forward_hook(lambda layer, *_: layer.__dict__.pop("forward", None) and None)
        run_step(model, batch)
        handle.remove()
        assert not any("forward" in vars(layer) for layer in model.model.layers)
        assert_same_step(run_step(model, batch), expected, 1e-10)
