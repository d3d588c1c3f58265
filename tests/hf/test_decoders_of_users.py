"""Decoders as users write them around the layers of transformers: exact, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

import streamgrad
from gradients import assert_same_step, no_float32, run_step
from tiny import tiny_model, tokens

LENGTH, MEMORY = 24, 4
BATCH = {"input_ids": tokens(2, LENGTH), "labels": tokens(2, LENGTH), "use_cache": False}
OPTIONS = [{}, {"chunk_size": 5}, {"chunk_size": 7, "keep": "attention"}, {"chunk_size": 64, "keep": "input"}]


class OwnDecoder(LlamaModel):
    """Makes one mask, and calls its layers in its own way."""

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **_):
        h_BTE = self.embed_tokens(input_ids)
        mask = create_causal_mask(config=self.config, inputs_embeds=h_BTE, attention_mask=attention_mask, past_key_values=None)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(self.through_layers(h_BTE, mask)))

    def through_layers(self, h_BTE, mask):
        for layer in self.layers:
            h_BTE = self.call(layer, h_BTE, mask)
        return h_BTE

    def call(self, layer, h_BTE, mask):
        positions_BT = torch.arange(h_BTE.shape[1])[None]
        angles = self.rotary_emb(h_BTE, position_ids=positions_BT)
        return layer(h_BTE, attention_mask=mask, position_ids=positions_BT, position_embeddings=angles)


class WithMemory(OwnDecoder):
    """Puts trained tokens before the row after its mask was made."""

    def through_layers(self, h_BTE, mask):
        h_BTE = torch.cat([self.memory.expand(len(h_BTE), -1, -1), h_BTE], dim=1)
        return super().through_layers(h_BTE, mask)[:, MEMORY:]


class RowByRow(OwnDecoder):
    def through_layers(self, h_BTE, mask):
        return torch.cat([super(RowByRow, self).through_layers(row, mask) for row in h_BTE.split(1)])


class Halves(OwnDecoder):
    """Runs two halves of the tokens, each of which sees itself alone."""

    def through_layers(self, h_BTE, mask):
        return torch.cat([super(Halves, self).through_layers(half, mask) for half in h_BTE.chunk(2, dim=1)], dim=1)


class Checkpointed(OwnDecoder):
    use_reentrant = False

    def call(self, layer, h_BTE, mask):
        return checkpoint(super().call, layer, h_BTE, mask, use_reentrant=self.use_reentrant)


class CheckpointedWithoutMask(Checkpointed):
    """Whose layers could run again as in the stock model, with other draws of dropout."""

    def call(self, layer, h_BTE, mask):
        return super().call(layer, h_BTE, None)


def model_of(kind, **options):
    model = tiny_model("llama", **options)
    model.model.__class__ = kind
    if kind is WithMemory:
        torch.manual_seed(0)
        model.model.memory = nn.Parameter(torch.randn(MEMORY, model.config.hidden_size, dtype=model.dtype))
    return model


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", [OwnDecoder, WithMemory, RowByRow, Halves])
def test_layers_that_are_called_with_other_tokens_than_the_mask_is_made_for(kind, masked, options):
    """The stock model has no mask where all tokens are real, so layers may have any."""
    batch = BATCH | ({"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)} if masked else {})
    model = streamgrad.enable(model_of(kind), **options)
    with no_float32():
        expected = run_step(model_of(kind), batch)
        for _ in range(2):
            assert_same_step(run_step(model, batch), expected, 1e-10)


@pytest.mark.parametrize("kind", [WithMemory, RowByRow, Halves])
def test_a_mask_that_hides_some_of_other_tokens_is_refused(kind):
    """As in the stock model, where its shape is another than the scores'."""
    batch = BATCH | {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
    batch["attention_mask"][0, -3:] = 0
    with pytest.raises(RuntimeError):
        model_of(kind)(**batch)
    with pytest.raises(ValueError, match=r"called with \d x \d+ tokens and the mask of 2 x 24, which says of other tokens"):
        streamgrad.enable(model_of(kind), chunk_size=5)(**batch)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedWithoutMask])
def test_layers_that_a_decoder_checkpoints_are_refused(kind, use_reentrant):
    """They would run again in backward outside of the decoder. With everything kept they do so as in the stock model."""
    stock, model = model_of(kind, attention_dropout=0.5), model_of(kind, attention_dropout=0.5)
    stock.model.use_reentrant = model.model.use_reentrant = use_reentrant
    streamgrad.enable(model, chunk_size=5, keep="input")
    with pytest.raises(ValueError, match="its decoder checkpoints layers by itself"):
        model(**BATCH)
    assert all(parameter.grad is None for parameter in model.parameters())
    streamgrad.enable(streamgrad.disable(model).eval(), keep="all")
    with no_float32():
        assert_same_step(run_step(model, BATCH), run_step(stock.eval(), BATCH), 1e-10)
