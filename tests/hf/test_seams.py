"""The seams of transformers that streaming relies on. A new release that moves one of them fails here, by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import streamgrad
from families import small_model
from gradients import assert_same_step, no_float32, run_step
from streamgrad.engine.kv_chunk import Chunk, KeyValueStream, SeamError, spans
from streamgrad.hf.seams import IMPLEMENTATION, layer_mask, stream_attention_forward, stream_mask, streamed_attention_in
from tiny import FAMILIES, tiny_model, tokens


def test_registered_by_name():
    assert AttentionInterface()[IMPLEMENTATION] is stream_attention_forward
    assert AttentionMaskInterface()[IMPLEMENTATION] is stream_mask


def test_mask_function_takes_what_transformers_passes():
    known = inspect.signature(stream_mask).parameters
    assert {"batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask", "use_vmap"} <= set(
        known
    )
    assert set(inspect.signature(masking_utils.sdpa_mask).parameters) >= {"q_length", "kv_length", "mask_function", "use_vmap"}


@pytest.mark.parametrize("family", ["afmoe", "jetmoe"])
def test_layers_that_view_what_attention_returns(family):
    """Stock attention functions return a contiguous tensor, whatever the kernel."""
    model, ids = small_model(family), tokens(2, 9)
    batch = {"input_ids": ids, "labels": ids}
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=4, attention="eager")
        assert_same_step(run_step(model, batch), expected, 1e-10)
    dropping = small_model(family, attention_dropout=0.5)
    step = run_step(streamgrad.enable(dropping, chunk_size=4), batch)
    assert all(gradient.isfinite().all() for gradient in step.gradients.values() if gradient is not None)


def test_window_and_documents_are_read_from_the_closures():
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    function = masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(3), masking_utils.packed_sequence_mask_function(documents)
    )
    mask = stream_mask(1, 5, 5, mask_function=function)
    assert mask.window == 3
    assert mask.documents_BT is documents
    assert not mask.has_other_rule
    dense = masking_utils.sdpa_mask(1, 5, 5, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(mask.visible(0, 5, 0, torch.device("cpu")), dense)


def test_masks_that_are_not_causal_are_refused_where_a_layer_is_given_one():
    for function in (
        masking_utils.bidirectional_mask_function,
        masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function),
        masking_utils.and_masks(masking_utils.bidirectional_mask_function, masking_utils.sliding_window_overlay(3)),
        masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.zeros(1, 5))),
        masking_utils.or_masks(
            masking_utils.causal_mask_function, *(masking_utils.blockwise_overlay(torch.full((1, 5), i)) for i in range(2))
        ),
    ):
        with pytest.raises(SeamError, match="is not causal"):
            layer_mask(stream_mask(1, 5, 5, mask_function=function), 5, chunk_size=5)
    custom = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k > 0)
    with pytest.raises(SeamError, match="custom mask function"):
        stream_mask(1, 5, 5, mask_function=custom, use_vmap=True)


# Two images in the first row, one in the second; a block that lies apart, as PaliGemma's prompt and right padding do.
IMAGES = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, -1], [-1, -1, -1, -1, -1, -1, -1, 0, 0, -1]])
APART = torch.tensor([[0, 0, 0, -1, -1, -1, -1, -1, 0, 0], [0, 0, 0, 0, 0, -1, -1, -1, -1, -1]])
RIGHT, LEFT = torch.ones(2, 10), torch.ones(2, 10)
RIGHT[0, 7:], LEFT[1, :2] = 0, 0


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("padding", [None, RIGHT, LEFT], ids=["no padding", "right", "left"])
@pytest.mark.parametrize("ids", [IMAGES, APART], ids=["images", "apart"])
@pytest.mark.parametrize("windowed", ["not", "images too", "but for images"])
def test_blocks_that_see_each_other_both_ways_are_cut_nowhere(windowed, ids, padding, chunk_size):
    """Chunks of the mask, side by side, are transformers' own mask, as Gemma 3 and PaliGemma 2 compose it."""
    causal, window = masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(3)
    blocks = masking_utils.blockwise_overlay(ids)
    function = {
        "not": masking_utils.or_masks(causal, blocks),
        "images too": masking_utils.and_masks(masking_utils.or_masks(causal, blocks), window),
        "but for images": masking_utils.or_masks(masking_utils.and_masks(window, causal), blocks),
    }[windowed]
    options = {"mask_function": function, "attention_mask": None if padding is None else padding.bool()}
    dense = masking_utils.sdpa_mask(2, 10, 10, **options, allow_is_causal_skip=False, use_vmap=True)
    mask = stream_mask(2, 10, 10, **options, use_vmap=True)
    parts = spans(10, chunk_size, mask.uncut)
    assert [stop for _, stop in parts[:-1]] == [start for start, _ in parts[1:]] and (parts[0][0], parts[-1][1]) == (0, 10)
    for start, stop in parts:
        part, expected = mask.part(start, stop, 2), dense[:, :, start:stop]
        assert not expected[..., stop:].any(), "a token sees a later chunk"
        assert not expected[..., : part.first].any(), "a key that is seen is left out"
        assert torch.equal(mask.visible(start, stop, part.first, torch.device("cpu")), expected[..., part.first : stop])
        assert part.masked or not (ids[:, start:stop] >= 0).any()
        longest = max((last - first for first, last in mask.uncut if start <= first and last <= stop), default=0)
        assert stop - start <= max(chunk_size, longest)
    assert len(parts) > 1 or chunk_size == 10 or (ids is APART and padding is not RIGHT)


def test_unknown_causal_overlays_are_kept_and_never_taken_for_plain():
    overlay = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k % 2 == 0)
    mask = stream_mask(1, 6, 6, mask_function=overlay)
    assert mask.has_other_rule
    assert mask.part(0, 6, 1).masked
    assert not mask.visible(2, 6, 0, torch.device("cpu"))[..., 1::2].any()


def test_a_rule_may_treat_the_rows_of_a_batch_differently():
    """Overlays get the batch index; every row must be asked, not the first for all."""
    first_seen = torch.tensor([0, 3])
    overlay = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k >= first_seen[b])
    mask = stream_mask(2, 6, 6, mask_function=overlay)
    dense = masking_utils.sdpa_mask(2, 6, 6, mask_function=overlay, allow_is_causal_skip=False)
    assert torch.equal(mask.visible(2, 6, 0, torch.device("cpu")), dense[:, :, 2:])
    assert not torch.equal(dense[0], dense[1])


def test_masks_made_anew_for_each_layer_are_not_mixed_up():
    """Masks are remembered by identity within a call; without a graph nothing else holds one once its layer has run."""
    model, other = tiny_model("llama", num_hidden_layers=4), tiny_model("llama", num_hidden_layers=4)
    for patched in (model, other):
        for index, layer in enumerate(patched.model.layers):
            hidden = torch.ones(9, 9, dtype=torch.bool).tril()[None, None].clone()
            hidden[..., 5:, index] = False

            def with_own_mask(module, args, kwargs, visible=hidden):
                return args, kwargs | {"attention_mask": visible.clone()}

            layer.register_forward_pre_hook(with_own_mask, with_kwargs=True)
    streamgrad.enable(model, chunk_size=4)
    batch = {"input_ids": tokens(1, 9), "labels": tokens(1, 9), "use_cache": False}
    with no_float32():
        assert_same_step(run_step(model, batch), run_step(other, batch), 1e-10)
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).logits, other(**batch).logits, rtol=1e-10, atol=1e-12)


def test_implementation_swap_is_private_to_one_config():
    config = PretrainedConfig()
    config._attn_implementation = "sdpa"
    with streamed_attention_in([config]):
        assert config._attn_implementation == IMPLEMENTATION
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_checkpointing_layers_with_a_cache_argument(family):
    model = tiny_model(family)
    assert all(isinstance(layer, GradientCheckpointingLayer) for layer in model.get_decoder().layers)
    assert type(model)._supports_attention_backend


def test_a_layer_that_goes_around_a_seam_is_refused():
    model = streamgrad.enable(tiny_model("llama"), chunk_size=4)
    attention = model.model.layers[1].self_attn
    plain = attention.forward
    batch = {"input_ids": tokens(1, 9)}

    attention.forward = lambda *args, past_key_values=None, **kwargs: plain(*args, past_key_values=None, **kwargs)
    with pytest.raises(ValueError, match="LlamaModel cannot be streamed: its layer never called past_key_values.update"):
        model(**batch)
    attention.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ValueError, match="never called past_key_values.update"):
        model(**batch)
    attention.forward = lambda *args, **kwargs: plain(*args, position_bias=torch.zeros(1), **kwargs)
    with pytest.raises(ValueError, match="called with position_bias"):
        model(**batch)
    attention.forward = lambda *args, attention_mask=None, **kwargs: plain(*args, attention_mask=None, **kwargs)
    with pytest.raises(ValueError, match="replaces the mask"):
        model(**batch)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("chunk_size", [4, 64])
@pytest.mark.parametrize("name", ["scaling", "softcap"])
def test_attention_with_a_trained_factor_is_refused(name, chunk_size):
    """Attention is differentiated by queries, keys and values alone."""
    model, ids = tiny_model("gemma2"), tokens(1, 9)
    attention = model.model.layers[1].self_attn
    attribute = {"scaling": "scaling", "softcap": "attn_logit_softcapping"}[name]
    value = getattr(attention, attribute)
    delattr(attention, attribute)
    setattr(attention, attribute, torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)))
    streamgrad.enable(model, chunk_size=chunk_size)
    with pytest.raises(ValueError, match=f"called with {name}, a tensor that is trained"):
        model(input_ids=ids, labels=ids)
    getattr(attention, attribute).requires_grad_(False)
    model(input_ids=ids, labels=ids).loss.backward()


class _Weighted(LlamaDecoderLayer):
    """Scales what attention adds by its largest weights, where it is given any."""

    def forward(self, hidden_states, **options):
        out, weights = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        hidden_states = hidden_states + (out if weights is None else out * (1 + weights.amax(-1).mean(1)[..., None]))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class _Returning(LlamaDecoderLayer):
    """Returns the weights of its attention beside its hidden states, as layers did."""

    def forward(self, hidden_states, **options):
        out, weights = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        return hidden_states + out, weights


def of_class(kind, implementation):
    model = tiny_model("llama")
    model.set_attn_implementation(implementation)
    for layer in model.model.layers:
        layer.__class__ = kind
    return model


@pytest.mark.parametrize("way", [{}, {"chunk_size": 4}, {"keep": "all"}], ids=str)
def test_attention_weights_that_stock_attention_returns_are_not_taken_for_none(way):
    ids = tokens(1, 9)
    with pytest.raises(ValueError, match="read the weights of their attention.*sdpa"):
        streamgrad.enable(of_class(_Weighted, "eager"), **way)(input_ids=ids, labels=ids)
    batch = {"input_ids": ids, "labels": ids}
    with no_float32():  # which returns None
        expected = run_step(of_class(_Weighted, "sdpa"), batch)
        assert_same_step(run_step(streamgrad.enable(of_class(_Weighted, "sdpa"), **way), batch), expected, 1e-10)


@pytest.mark.parametrize("way", [{}, {"chunk_size": 4}, {"keep": "all"}], ids=str)
def test_attention_weights_that_nobody_reads_may_be_returned(way):
    def made():
        model = of_class(_Returning, "eager")
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, out: out[0])
        return model

    batch = {"input_ids": tokens(1, 9), "labels": tokens(1, 9)}
    with no_float32():
        assert_same_step(run_step(streamgrad.enable(made(), **way), batch), run_step(made(), batch), 1e-10)


def attending_with(implementation, name):
    """A model whose attention passes an argument that its attention function need not read."""

    class Attention(LlamaAttention):
        def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **options):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            heads = [each(hidden_states).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)]
            query, key = modeling_llama.apply_rotary_pos_emb(*heads[:2], *position_embeddings)
            key, value = (key, heads[2]) if past_key_values is None else past_key_values.update(key, heads[2], self.layer_idx)
            eager = modeling_llama.eager_attention_forward
            attend = AttentionInterface().get_interface(self.config._attn_implementation, eager)
            given = {name: torch.ones(4, dtype=torch.float64) if name == "s_aux" else 1.0}
            out, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **given)
            return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None

    model = tiny_model("llama")
    model.set_attn_implementation(implementation)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Attention
    return model


@pytest.mark.parametrize("chunk_size", [4, 64])
@pytest.mark.parametrize(("implementation", "name"), [("sdpa", "s_aux"), ("eager", "s_aux"), ("eager", "softcap")])
def test_an_argument_that_stock_attention_lets_pass_is_refused(implementation, name, chunk_size):
    ids = tokens(1, 9)
    attending_with(implementation, name)(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(ValueError, match=f"called with {name}, which {implementation} attention ignores"):
        streamgrad.enable(attending_with(implementation, name), chunk_size=chunk_size, keep="input")(input_ids=ids, labels=ids)


class _Numbered:
    """A cache that adds its place to every key it returns, as code does that rotates cached keys by their place."""

    def __init__(self, cache):
        self.cache = cache

    def update(self, key, value, layer_idx):
        key, value = self.cache.update(key, value, layer_idx)
        return key + torch.arange(key.shape[-2])[:, None], value


def test_keys_that_depend_on_their_place_in_a_chunk_are_refused():
    model = streamgrad.enable(tiny_model("llama"), chunk_size=4)
    attention = model.model.layers[1].self_attn
    plain = attention.forward
    attention.forward = lambda *args, past_key_values, **kwargs: plain(
        *args, past_key_values=_Numbered(past_key_values), **kwargs
    )
    with pytest.raises(ValueError, match="LlamaDecoderLayer 1 gives other outputs"):
        model(input_ids=tokens(1, 9))


@pytest.mark.parametrize("shape", [(9, 24), (1, 1, 9, 9), (3,)])
def test_a_layer_argument_that_cannot_be_cut_is_refused_where_it_is_read(shape):
    """Layers hand on what they have no name for, and attention does not read it."""
    model, ids = streamgrad.enable(tiny_model("llama"), chunk_size=4), tokens(1, 9)
    expected = model.model(input_ids=ids).last_hidden_state
    assert torch.equal(model.model(input_ids=ids, other_states=torch.zeros(shape)).last_hidden_state, expected)

    class Reading(type(model.model.layers[1])):
        def forward(self, hidden_states, other_states=None, **options):
            return super().forward(hidden_states + other_states.mean(), **options)

    model.model.layers[1].__class__ = Reading
    with pytest.raises(ValueError, match="its layers read other_states of shape"):
        model.model(input_ids=ids, other_states=torch.zeros(shape))


def test_a_layer_argument_with_vectors_of_tokens_that_attention_is_given_is_refused():
    """It is cut like hidden states, and handed on to attention, which does not know it."""
    model = streamgrad.enable(tiny_model("llama"), chunk_size=4)
    with pytest.raises(ValueError, match="its attention is called with other_states"):
        model.model(input_ids=tokens(1, 9), other_states=torch.zeros(1, 9, 24))


@pytest.mark.parametrize("length", [9, 5])
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_attention_to_an_encoder_is_refused(length, chunk_size):
    """Also where it has as many tokens as the sequence, and so the shape of hidden states."""
    model, ids = streamgrad.enable(small_model("bart"), chunk_size=chunk_size), tokens(1, 9)
    encoded = torch.randn(1, length, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="cannot be streamed"):
        model(input_ids=ids, labels=ids, encoder_hidden_states=encoded)


def test_a_layer_argument_that_needs_a_gradient_is_refused():
    model = streamgrad.enable(tiny_model("llama"), chunk_size=4)
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda *args, **kwargs: tuple(t.requires_grad_() for t in plain(*args, **kwargs))
    with pytest.raises(ValueError, match="position_embeddings, which needs a gradient"):
        model(input_ids=tokens(1, 9))


def test_keys_written_twice_are_refused():
    chunk = Chunk(0, 2, stream=KeyValueStream(4), mask=None, backends=[])
    key = torch.zeros(1, 1, 2, 3)
    chunk.update(key, key, 0)
    with pytest.raises(SeamError, match="more than once"):
        chunk.update(key, key, 0)


def test_logits_that_are_treated_in_an_unknown_way_are_refused(monkeypatch):
    model = tiny_model("llama")
    plain = type(model.lm_head).forward
    monkeypatch.setattr(type(model), "forward", _forward_with_clamped_logits)
    with pytest.raises(ValueError, match="its forward applies clamp to the logits"):
        streamgrad.enable(model)
    assert type(model.lm_head).forward is plain
    assert "forward" not in vars(model)


def _forward_with_clamped_logits(self, input_ids=None, labels=None, **kwargs):
    logits = torch.clamp(self.lm_head(self.model(input_ids=input_ids).last_hidden_state), max=3.0)
    return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
