"""Language-modelling heads that are no plain linear map: streamed exactly, or refused by name."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step
from tiny import VOCABULARY, tiny_model

OPTIONS = {"chunk_size": 7, "head_chunk_size": 5}


def assert_exact(change, *, steps: int = 1) -> None:
    """Compare `steps` steps of two models that `change` is applied to, one of them enabled; buffers must agree too."""
    stock, model = (tiny_model("llama") for _ in range(2))
    for each in (stock, model):
        torch.manual_seed(3)
        change(each)
    streamgrad.enable(model, **OPTIONS)
    batch = batches.right_padded(model)
    with no_float32():
        for _ in range(steps):
            assert_same_step(run_step(model, batch), run_step(stock, batch), 1e-10)
    for (name, ours), theirs in zip(model.named_buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=name)


# --- parametrized ---------------------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """A parametrization that counts how often a weight is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * (1.0 + 0.1 * self.calls)


@pytest.mark.parametrize("parametrization", ["spectral_norm", "weight_norm", "orthogonal", "counted"])
def test_a_parametrized_head_is_evaluated_once_a_step(parametrization):
    def change(model):
        if parametrization == "counted":
            parametrize.register_parametrization(model.lm_head, "weight", Counted())
        else:
            getattr(parametrizations, parametrization)(model.lm_head)

    assert_exact(change, steps=2)


# --- weights of a class of their own --------------------------------------------------------------------------------------


class TenfoldLinear(nn.Parameter):
    """A weight that is multiplied by ten in linear maps, as a quantised one is by its scale."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            return 10.0 * result if function is F.linear else result


def with_tenfold_head(model, *, trainable: bool) -> None:
    model.lm_head.weight = Tensor._make_subclass(TenfoldLinear, 0.1 * model.lm_head.weight.detach(), trainable)


@pytest.mark.parametrize("trainable", [False, True])
def test_a_weight_of_a_class_of_its_own(trainable):
    assert_exact(lambda model: with_tenfold_head(model, trainable=trainable))


def test_a_parametrization_that_gives_a_class_of_its_own_is_refused():
    class ToTenfold(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.as_subclass(Tenfold)

    class Tenfold(Tensor):
        __torch_function__ = TenfoldLinear.__torch_function__

    model = tiny_model("llama")
    parametrize.register_parametrization(model.lm_head, "weight", ToTenfold())
    streamgrad.enable(model, **OPTIONS)
    with pytest.raises(TypeError, match=r"Tenfold.*disable"):
        model(**batches.plain(model))


@pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
def test_the_heads_functions_refuse_weights_of_a_class_of_their_own(function):
    weight = Tensor._make_subclass(TenfoldLinear, torch.randn(9, 4), False)
    with pytest.raises(TypeError, match="TenfoldLinear"):
        function(torch.randn(6, 4, requires_grad=True), weight, torch.arange(6))


# --- modules of several parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_a_head_in_a_sequential(parts):
    def change(model):
        model.lm_head = nn.Sequential(*[nn.Linear(24, 24).double(), nn.GELU()][2 * (2 - parts) :], model.lm_head)

    assert_exact(change)


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_head_that_is_a_part_of_another_module(place):
    def change(model):
        head = model.lm_head
        model.lm_head = (
            nn.Sequential(head, nn.Identity()) if place == "first" else nn.Sequential(nn.Linear(24, 24).double(), head)
        )
        model.get_output_embeddings = lambda: head

    assert_exact(change)


def test_what_follows_the_head_in_its_module_is_not_left_out():
    model = tiny_model("llama")
    head = model.lm_head
    model.lm_head = nn.Sequential(head, nn.Tanh())
    model.get_output_embeddings = lambda: head
    streamgrad.enable(model, **OPTIONS)
    with pytest.raises(ValueError, match="treats the logits differently"):
        model(**batches.plain(model))


class Centred(nn.Linear):
    """Subtracts the mean over the tokens that it is shown."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden - hidden.mean(dim=1, keepdim=True))


class ByPlace(nn.Linear):
    """Favours one token of the vocabulary by how many tokens stand before."""

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden)
        return logits + torch.arange(hidden.shape[1], dtype=hidden.dtype).unsqueeze(1) * F.one_hot(torch.tensor(3), VOCABULARY)


class Counting(nn.Linear):
    """Changes a buffer whenever it is called in training."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(hidden) * self.calls


@pytest.mark.parametrize("head_chunk_size", [5, 1000])
@pytest.mark.parametrize(("kind", "words"), [(Centred, "mixes tokens"), (ByPlace, "gives other outputs"), (Counting, "buffer")])
def test_a_head_that_is_another_one_in_chunks_is_refused(kind, words, head_chunk_size):
    model = tiny_model("llama")
    model.lm_head = kind(24, VOCABULARY).double()
    streamgrad.enable(model, chunk_size=7, head_chunk_size=head_chunk_size)
    with pytest.raises(ValueError, match=words):
        model(**batches.plain(model))


@pytest.mark.parametrize("saved", [["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_a_head_that_says_its_columns_are_its_rows(saved):
    """PEFT makes one for `ensure_weight_tying`, with the embeddings' weight."""
    config = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=saved, ensure_weight_tying=True)
    with no_float32():
        model = get_peft_model(tiny_model("qwen3"), config)
        head = model.get_base_model().get_output_embeddings()
        assert (head.out_features, len(head.weight)) == (24, VOCABULARY)
        batch = batches.plain(model)
        expected = run_step(model, batch)
        streamgrad.enable(model, **OPTIONS)
        assert_same_step(run_step(model, batch), expected, tolerance=1e-10)


def test_a_head_with_fewer_rows_than_it_says_is_refused():
    model = streamgrad.enable(tiny_model("llama"), **OPTIONS)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:40].detach())
    with pytest.raises(ValueError, match="40"):
        model(**batches.plain(model))


def test_a_gradient_that_is_not_proportional_is_refused():
    """A module head is differentiated before the loss's own gradient is known."""

    class Clipping(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            logits = super().forward(hidden) * 1.0
            if logits.requires_grad:
                logits.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            return logits

    model = tiny_model("llama")
    model.lm_head = Clipping(24, VOCABULARY).double()
    streamgrad.enable(model, **OPTIONS)
    with pytest.raises(ValueError, match="not proportional"):
        model(**batches.plain(model))


def test_backward_hooks_inside_a_head_are_refused():
    model = tiny_model("llama")
    model.lm_head = nn.Sequential(nn.Linear(24, 24).double(), model.lm_head)
    model.lm_head[0].register_full_backward_hook(lambda *_: None)
    streamgrad.enable(model, **OPTIONS)
    with pytest.raises(ValueError, match="backward hook on the language-modelling head"):
        model(**batches.plain(model))


def test_a_hook_that_changes_the_logits_is_named():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 2)
    streamgrad.enable(model, **OPTIONS)
    with pytest.raises(ValueError, match="a forward hook on its head changes the logits.*remove it"):
        model(**batches.plain(model))


class OfTwoTerms(LlamaForCausalLM):
    """Adds to the loss, which it has from its own class, one of hidden states."""

    def forward(self, input_ids=None, labels=None, **options):
        output = super().forward(input_ids=input_ids, labels=labels, output_hidden_states=True, **options)
        if labels is not None:
            output.loss = output.loss + 0.1 * output.hidden_states[-1].pow(2).mean()
        return output


class OfItsOwnLoss(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **options):
        logits = self.lm_head(self.model(input_ids=input_ids)[0])
        return CausalLMOutputWithPast(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits=logits)


@pytest.mark.parametrize("kind", [OfTwoTerms, OfItsOwnLoss])
def test_a_forward_of_the_users_own_is_told_to_stream_its_layers_alone(kind):
    """And that is then exact."""
    stock, model = tiny_model("llama"), tiny_model("llama")
    stock.__class__ = model.__class__ = kind
    with pytest.raises(ValueError, match=r"cannot be streamed: .*streamgrad.enable\(model.get_decoder\(\)\) streams them alone"):
        streamgrad.enable(model, **OPTIONS)
    streamgrad.enable(model.get_decoder(), chunk_size=7)
    with no_float32():
        assert_same_step(run_step(model, batches.plain(model)), run_step(stock, batches.plain(stock)), 1e-10)
