"""Decoders whose loop over the layers does nothing but call the next one, told by their source."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers.models.biogpt.modeling_biogpt import BioGptModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.opt.modeling_opt import OPTDecoder
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from streamgrad.hf.whole.layer_groups import _loops_alone, passes_on_alone


class Loops:
    """Loops over layers; only the first two do nothing else."""

    def passes_on(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def passes_on_indexed(self, x, names, **kwargs):
        for index, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            x = layer(x, names[self.config.layer_types[index]], mask=None, **kwargs)
        return self.norm(x)

    def drops(self, x):
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                continue
            x = layer(x)
        return x

    def collects(self, x):
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return states

    def adds(self, x):
        for layer in self.layers:
            x = layer(x) + 1
        return x

    def calls(self, x):
        for layer in self.layers:
            x = layer(x, torch.rand([]))
        return x

    def reads_another(self, x):
        y = x
        for layer in self.layers:
            x = layer(y)
        return x

    def looks_twice(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.layers[0](x)

    def has_modes(self, x):
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x)
        return x

    def runs_twice(self, x):
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x

    def runs_inside(self, x):
        def run(x):
            for layer in self.layers:
                x = layer(x)
            return x

        return run(run(x))

    def calls_something_else(self, x):
        for layer in self.layers:
            x = self.through(x, layer)
        return x

    def runs_backwards(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x

    def leaves_out(self, x):
        for layer in self.layers[::2]:
            x = layer(x)
        return x

    def ends_otherwise(self, x):
        for layer in self.layers:
            x = layer(x)
        else:
            x = x + 1
        return x

    def tells_the_number(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x, index=index)
        return x

    def calls_a_part(self, x):
        for _, (_layer, part) in enumerate(self.layers):
            x = part(x)
        return x


@pytest.mark.parametrize("name", [name for name in vars(Loops) if not name.startswith("_")])
def test_loops_that_only_pass_on_are_known_by_their_source(name):
    assert _loops_alone(getattr(Loops, name)) is name.startswith("passes_on")


def test_only_decoders_of_transformers_pass_on_alone():
    assert all(passes_on_alone(model.forward) for model in (Qwen3Model, LlamaModel, Gemma3TextModel))
    assert not any(passes_on_alone(model.forward) for model in (OPTDecoder, BioGptModel, Qwen3VLTextModel))
    assert not passes_on_alone(Loops.passes_on) and not passes_on_alone(torch.add)

    @functools.wraps(Qwen3Model.forward)
    def twice(self, *args, **kwargs):
        return Qwen3Model.forward(self, inputs_embeds=Qwen3Model.forward(self, *args, **kwargs)[0])

    assert not passes_on_alone(twice)
