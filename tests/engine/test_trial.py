"""A layer in which tokens meet outside of attention is refused before its first step in chunks, whatever makes them meet."""

from __future__ import annotations

import random
from types import MethodType

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step
from lora import with_lora
from streamgrad.engine.checks import trial
from tiny import FAMILIES, tiny_model, tokens

WIDTH, CHUNK = 24, 7


class OverTokens(nn.Module):
    """A module that reads (B, E, L), as convolutions do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h.mT).mT[:, : h.shape[1]]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        state, outputs = None, []
        for token in h.unbind(dim=1):
            state = self.cell(token, state)
            outputs.append(state[0])
        return torch.stack(outputs, dim=1)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.attention(h, h, h)[0]


class Gated(nn.Module):
    """An adapter that starts as nothing: its last weight is zero, and what is before it mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, h: Tensor) -> Tensor:
        return self.up(h.cumsum(dim=1))


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.on, self.share = False, 0.0
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        return h.roll(1, dims=1) if self.on else h + (self.share + self.kept) * h.mean(dim=1, keepdim=True)


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


def _normalised_in_backward(h: Tensor) -> Tensor:
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / gradient.norm())
    return h


def _half_of_the_tokens(h: Tensor) -> Tensor:
    """As a mixture of depths: which tokens are taken depends on all of them, and has no derivative."""
    score = h.sum(dim=-1)
    chosen = score.topk(max(1, h.shape[1] // 2), dim=1).indices
    return torch.zeros_like(score).scatter(1, chosen, 1.0).unsqueeze(-1) * h


def _rounded_by_row(h: Tensor) -> Tensor:
    scale = h.detach().abs().amax(dim=(1, 2), keepdim=True) / 127
    return h + ((h / scale).round() * scale - h).detach()


class Shifted(nn.Module):
    """A filter over tokens that starts as the identity: its second tap is zero, but has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return self.taps[0] * h + self.taps[1] * torch.nn.functional.pad(h, (0, 0, 1, 0))[:, :-1]


class AddedLoss(torch.autograd.Function):
    """Gives a loss of its own the gradient 1, whatever follows."""

    @staticmethod
    def forward(ctx, h, loss):
        return h.clone()

    @staticmethod
    def backward(ctx, dh):
        return dh, torch.ones((), dtype=dh.dtype)


class OwnLoss(nn.Module):
    """Its parameters' gradient is no sum over chunks, although tokens do not meet."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return AddedLoss.apply(h, self.gate(h.detach()).softmax(dim=-1).mean(dim=(0, 1)).square().sum())


class Clipped(nn.Module):
    """Clips the gradient of its parameter, which would be done once a chunk."""

    def __init__(self, limit: float = 1e-3) -> None:
        super().__init__()
        self.scale, self.limit = nn.Parameter(torch.ones(WIDTH)), limit

    def forward(self, h: Tensor) -> Tensor:
        scale = self.scale * 1.0
        if scale.requires_grad:
            scale.register_hook(lambda gradient: gradient.clamp(-self.limit, self.limit))
        return h * scale


class Limited(nn.Module):
    """Limits the norm of the gradient of all tokens, if that is large, as it is before a loss scaler has found its scale."""

    def forward(self, h: Tensor) -> Tensor:
        h = 1.0 * h
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * (1e3 / gradient.norm().clamp(min=1e3)))
        return h


class Keeping(nn.Module):
    """Keeps a loss for the program to add."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        self.loss = self.gate(h).square().mean()
        return h


MODULES = {
    "a filter that is the identity": Shifted,
    "a loss of its own": OwnLoss,
    "a clipped gradient": Clipped,
    "a clipped large gradient": lambda: Clipped(1e3),
    "a limited large gradient": Limited,
    "a loss that is kept": Keeping,
    "MultiheadAttention": SelfAttention,
    "LSTMCell": Cell,
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    "ConvTranspose1d": lambda: OverTokens(nn.ConvTranspose1d(WIDTH, WIDTH, 3)),
    "AvgPool1d": lambda: OverTokens(nn.AvgPool1d(3, stride=1, padding=1)),
    "MaxPool1d": lambda: OverTokens(nn.MaxPool1d(3, stride=1, padding=1)),
    "InstanceNorm1d": lambda: OverTokens(nn.InstanceNorm1d(WIDTH)),
    "GroupNorm": lambda: OverTokens(nn.GroupNorm(2, WIDTH)),
    "Softmax": lambda: nn.Softmax(dim=1),
    "ConstantPad1d": lambda: OverTokens(nn.ConstantPad1d((1, 0), 0.0)),
    "zero at first": Gated,
}
FUNCTIONS = {
    "mean": lambda h: h.mean(dim=1, keepdim=True).expand_as(h),
    "cumulative sum": lambda h: h.cumsum(dim=1),
    "roll": lambda h: h.roll(1, dims=1),
    "roll by two": lambda h: h.roll(2, dims=1),
    "flip": lambda h: h.flip(1),
    "shift": lambda h: torch.nn.functional.pad(h, (0, 0, 1, 0))[:, :-1],
    "first token": lambda h: h[:, :1].expand_as(h),
    "a hundredth of the last": lambda h: h + 0.01 * h[:, -1:],
    "sorted": lambda h: h.sort(dim=1).values,
    "a scale without a derivative": lambda h: h / h.detach().abs().amax(),
    "a place in the chunk": lambda h: h * torch.arange(h.shape[1], dtype=h.dtype)[:, None],
    "length": lambda h: h / h.shape[1],
    "not finite in a short chunk": lambda h: h * (1.0 if h.shape[1] > 20 else float("nan")),
    "half of the tokens": _half_of_the_tokens,
    "rounded by row": _rounded_by_row,
    "eight tokens before": lambda h: h + torch.nn.functional.pad(h, (0, 0, 8, 0))[:, :-8],
    "no value, but a derivative": lambda h: h + (h.mean(dim=1, keepdim=True) - h.mean(dim=1, keepdim=True).detach()),
    "gradients of all": _normalised_in_backward,
}
MIXERS = MODULES | {name: lambda function=function: Function(function) for name, function in FUNCTIONS.items()}


def mixed_model(mixer: nn.Module, dtype: torch.dtype = torch.float64, family: str = "llama"):
    """A model whose second layer passes the MLP's output through `mixer`."""
    model = tiny_model(family, dtype=dtype)
    mlp, mixer = model.model.layers[1].mlp, mixer.to(dtype)
    mlp.mixer = mixer
    mlp.register_forward_hook(lambda module, args, out: out + module.mixer(out))
    return model


def assert_refused(model, match: str = "LlamaDecoderLayer 1") -> None:
    assert_refused_step(model, batches.plain(model), match)


def assert_refused_step(model, batch: dict, match: str) -> None:
    model.zero_grad()
    with pytest.raises(ValueError, match=match):
        model(**batch)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_is_refused_in_chunks_and_exact_in_one(name):
    torch.manual_seed(4)
    model = mixed_model(MIXERS[name]())
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=CHUNK)
        assert_refused(model)
        streamgrad.disable(model)
        # The loss might have been added to the model's.
        keep = "all" if name == "a loss that is kept" else "input"
        streamgrad.enable(model, chunk_size=batches.LENGTH, keep=keep)
        assert_same_step(run_step(model, batch), expected, 1e-10)


def test_a_scale_that_only_values_of_the_sequence_reach():
    """Random tokens are small."""
    model = tiny_model("llama")
    limit = 2.0

    def limited(norm, args):
        largest = args[0].detach().abs().amax()
        return (args[0] * (limit / largest.clamp(min=limit)) ** 2 + 1e-3 * largest.clamp(min=limit),)

    model.model.layers[1].input_layernorm.register_forward_pre_hook(limited)
    assert_refused(streamgrad.enable(model, chunk_size=CHUNK))


class OfOneToken(LlamaMLP):
    """Does something else for one token, as code does that takes it for a step of decoding."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] == 1 else 2 * super().forward(x)


@pytest.mark.parametrize(("length", "chunk_size", "has_single"), [(9, 1, True), (9, 4, True), (33, 16, True), (32, 16, False)])
def test_a_layer_that_is_another_for_one_token_is_refused_where_a_chunk_has_one(length, chunk_size, has_single):
    model, batch = tiny_model("llama"), {"input_ids": tokens(1, length), "labels": tokens(1, length)}
    for layer in model.model.layers:
        layer.mlp.__class__ = OfOneToken
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=chunk_size)
        if has_single:
            assert_refused_step(model, batch, "in chunks than for all at once")
        else:
            assert_same_step(run_step(model, batch), expected, 1e-10)


class OfManyWeights(LlamaMLP):
    """Reads the weight of a linear map by itself, and scales its gradient by that of all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.wide.weight * 1
        if weight.requires_grad:
            weight.register_hook(lambda gradient: gradient / gradient.norm())
        return super().forward(x) + nn.functional.linear(x, weight)[..., :WIDTH]


@pytest.mark.parametrize("outputs", [100, 4000])
def test_a_weight_that_is_read_elsewhere_is_compared_whatever_its_size(outputs):
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.__class__, layer.mlp.wide = OfManyWeights, nn.Linear(WIDTH, outputs, bias=False, dtype=torch.float64)
    assert_refused(streamgrad.enable(model, chunk_size=CHUNK), "LlamaDecoderLayer 0 gives other outputs or gradients")


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.complex64, torch.int8])
def test_small_parameters_of_any_dtype_are_looked_at(dtype):
    class Scaled(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale.to(torch.float64 if not dtype.is_complex else dtype).real.to(x.dtype)

    def made():
        model = tiny_model("llama")
        for layer in model.model.layers:
            layer.mlp.__class__ = Scaled
            layer.mlp.scale = nn.Parameter(torch.full((WIDTH,), 2.0).to(dtype), requires_grad=False)
        return model

    batch = batches.plain(None)
    with no_float32():
        expected = run_step(made(), batch)
        assert_same_step(run_step(streamgrad.enable(made(), chunk_size=CHUNK), batch), expected, 1e-10)


class _Product(torch.autograd.Function):
    """`F.linear` as ZeRO-3 replaces it: a function that reads the weight itself."""

    @staticmethod
    def forward(ctx, input, weight):
        ctx.save_for_backward(input, weight)
        return input @ weight.t()

    @staticmethod
    def backward(ctx, dout):
        input, weight = ctx.saved_tensors
        return dout @ weight, dout.flatten(0, -2).t() @ input.flatten(0, -2)


def test_weights_of_linear_maps_are_not_compared_where_an_engine_replaces_the_product(monkeypatch):
    """Their gradients are sums over tokens all the same, and may have gigabytes."""
    monkeypatch.setattr(trial, "_LARGEST_OF_A_SUM", 0)
    out, mlp = torch.ones(1, 3, WIDTH), LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=7, num_attention_heads=1))
    modules = list(mlp.modules())
    assert trial._worth_comparing(modules, mlp(out)) == []
    monkeypatch.setattr(nn.functional, "linear", lambda input, weight, bias=None: _Product.apply(input, weight))
    assert trial._worth_comparing(modules, mlp(out)) == []
    assert trial._worth_comparing(modules, mlp(out) + mlp.down_proj.weight.sum()) == [mlp.down_proj.weight]


def test_rows_do_not_hide_each_other():
    """A scale of each row: with many rows, some token of each is the same in chunks."""
    model = streamgrad.enable(mixed_model(Function(_rounded_by_row)), chunk_size=CHUNK)
    with pytest.raises(ValueError, match="LlamaDecoderLayer 1 "):
        model(input_ids=tokens(8, 23), labels=tokens(8, 23))


def test_a_short_batch_does_not_settle_it():
    far = Function(lambda h: h + torch.nn.functional.pad(h, (0, 0, 4, 0))[:, : h.shape[1]])
    model = streamgrad.enable(mixed_model(far), chunk_size=2)
    model(input_ids=tokens(1, 3), labels=tokens(1, 3))
    with pytest.raises(ValueError, match="LlamaDecoderLayer 1 "):
        model(input_ids=tokens(1, 23), labels=tokens(1, 23))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["GroupNorm", "ConstantPad1d", "mean", "shift", "a place in the chunk"])
def test_a_mixer_is_refused_in_every_precision(name, dtype):
    assert_refused(streamgrad.enable(mixed_model(MIXERS[name](), dtype), chunk_size=CHUNK))


@pytest.mark.parametrize("keep", ["input", "attention"])
def test_a_mixer_that_comes_later_is_refused(keep):
    """As a hook, as another module, or as another forward, after steps that were right."""
    for attach in (
        lambda mlp: mlp.register_forward_hook(lambda module, args, out: out.cumsum(dim=1)),
        lambda mlp: mlp.register_full_backward_hook(lambda module, din, dout: (din[0] / din[0].norm(),)),
        lambda mlp: mlp.register_full_backward_pre_hook(lambda module, dout: (dout[0] / dout[0].norm(),)),
        lambda mlp: setattr(mlp.switched, "on", True),
        lambda mlp: setattr(mlp.switched, "share", 0.5),
        lambda mlp: mlp.switched.kept.fill_(0.5),
        lambda mlp: setattr(mlp, "act_fn", Function(FUNCTIONS["mean"])),
        lambda mlp: setattr(mlp, "forward", lambda h, plain=mlp.forward: plain(h).roll(1, dims=1)),
    ):
        model = streamgrad.enable(mixed_model(Switched()), chunk_size=CHUNK, keep=keep)
        model.model.layers[1].mlp.switched = model.model.layers[1].mlp.mixer
        run_step(model, batches.plain(model))
        attach(model.model.layers[1].mlp)
        assert_refused(model)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_first_step_may_be_one_in_inference_mode(family):
    """It compares outputs, and says nothing of gradients."""
    model = tiny_model(family)
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        with torch.inference_mode():
            logits = model(**batch, use_cache=False).logits
        streamgrad.enable(model, chunk_size=CHUNK)
        with torch.inference_mode():
            torch.testing.assert_close(model(**batch, use_cache=False).logits, logits)
        assert_same_step(run_step(model, batch), expected, 1e-10)


def test_what_mixes_tokens_in_backward_alone_is_refused_after_a_step_in_inference_mode():
    model = streamgrad.enable(mixed_model(Function(_normalised_in_backward)), chunk_size=CHUNK)
    with torch.inference_mode():
        model(input_ids=batches.plain(model)["input_ids"], use_cache=False)
    assert_refused(model)
    outputs = streamgrad.enable(mixed_model(Function(FUNCTIONS["sorted"])), chunk_size=CHUNK)
    with torch.inference_mode(), pytest.raises(ValueError, match="LlamaDecoderLayer 1"):
        outputs(input_ids=batches.plain(outputs)["input_ids"], use_cache=False)


def test_a_mixer_in_place_of_a_forward_that_passed_is_refused():
    """Python gives the memory of a method that is gone, and with it its id, to the next one."""
    model = streamgrad.enable(tiny_model("llama"), chunk_size=CHUNK)
    mlp = model.model.layers[1].mlp
    stock = type(mlp).forward
    scaled, mixed = (lambda self, h: 1.1 * stock(self, h)), (lambda self, h: stock(self, h).cumsum(dim=1))
    mlp.forward = MethodType(scaled, mlp)
    run_step(model, batches.plain(model))
    place = id(mlp.__dict__.pop("forward"))
    others = [MethodType(mixed, mlp) for _ in range(1000)]
    mlp.forward = next((other for other in others if id(other) == place), others[0])
    assert_refused(model)


def test_keys_and_queries_that_mix_tokens_are_refused():
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        model = streamgrad.enable(tiny_model("llama"), chunk_size=CHUNK)
        getattr(model.model.layers[1].self_attn, name).register_forward_hook(lambda module, args, out: out.roll(1, dims=1))
        assert_refused(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_refused_in_16_bits(family):
    """Where rounding decides, a router sends a token to other experts: that is no mixing."""
    for seed in range(3):
        model = streamgrad.enable(tiny_model(family, dtype=torch.bfloat16, seed=seed), chunk_size=CHUNK)
        with torch.no_grad():
            model(input_ids=batches.plain(model)["input_ids"], use_cache=False)


def test_a_trial_leaves_nothing_behind():
    model, seen = streamgrad.enable(mixed_model(nn.Dropout(0.2)), chunk_size=CHUNK), []
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: seen.append(module.training))
    values = [parameter.clone() for parameter in model.parameters()]
    first, second = (_loss_from_seed(model) for _ in range(2))
    assert first == second  # the generator stands where it stood
    assert all(map(torch.equal, model.parameters(), values))
    assert all(seen) and all(module.training for module in model.modules())


def _loss_from_seed(model) -> float:
    torch.manual_seed(3)
    return run_step(model, batches.plain(model)).loss.item()


# --- what is drawn once a call ----------------------------------------------------------------------------------------------


def _dropped_as_a_whole(h: Tensor) -> Tensor:
    return h if torch.rand(1) < 0.5 else 0.0 * h


def _same_for_all_tokens(h: Tensor) -> Tensor:
    return h * torch.nn.functional.dropout(torch.ones_like(h[:, :1]), 0.3)


@pytest.mark.parametrize("function", [_dropped_as_a_whole, _same_for_all_tokens])
def test_one_draw_for_the_whole_call_is_refused(function):
    assert_refused(streamgrad.enable(mixed_model(Function(function)), chunk_size=CHUNK), "1 draws random numbers for the whole")


_DRAWS = {
    "dropout": lambda h, training: torch.nn.functional.dropout(h, 0.3),
    "bernoulli": lambda h, training: h * torch.bernoulli(torch.full_like(h, 0.7)),
    "rand": lambda h, training: h * (torch.rand(h.shape, dtype=h.dtype) > 0.3),
    "jitter": lambda h, training: h * torch.empty_like(h).uniform_(0.9, 1.1),
    "noise": lambda h, training: h + 0.1 * torch.randn_like(h),
    "gumbel": lambda h, training: h - 0.1 * torch.empty_like(h).exponential_().log(),
    "unknown": lambda h, training: torch.nn.functional.rrelu(h, training=training),
}


@pytest.mark.parametrize("name", _DRAWS)
def test_draws_do_not_hide_what_mixes_tokens_in_training_alone(name):
    class Centred(nn.Module):
        mixes = True

        def forward(self, h: Tensor) -> Tensor:
            mean = h.mean(1, keepdim=True) if self.training and self.mixes else 0.0
            return _DRAWS[name](h, self.training) - mean

    if name != "unknown":  # which is tried in eval mode
        assert_refused(streamgrad.enable(mixed_model(Centred()), chunk_size=CHUNK), "1 mixes tokens outside of attention")
    Centred.mixes = False
    model = streamgrad.enable(mixed_model(Centred()), chunk_size=CHUNK)
    assert torch.isfinite(run_step(model, batches.plain(model)).loss)


def test_loha_that_is_dropped_as_a_whole_is_refused():
    from peft import LoHaConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), LoHaConfig(r=2, target_modules=["q_proj"], module_dropout=0.5))
    assert_refused(streamgrad.enable(model, chunk_size=CHUNK), "LlamaDecoderLayer 0 draws random numbers for the whole")


def test_draws_of_python_are_refused():
    function = lambda h: h * random.random()  # noqa: E731
    assert_refused(streamgrad.enable(mixed_model(Function(function)), chunk_size=CHUNK), "Python's random")


def test_dropout_of_tokens_is_streamed():
    for make in (lambda: nn.Dropout(0.3), lambda: nn.Dropout1d(0.3), lambda: nn.AlphaDropout(0.3)):
        model = streamgrad.enable(mixed_model(make()), chunk_size=CHUNK)
        assert torch.isfinite(run_step(model, batches.plain(model)).loss)
    model = with_lora(tiny_model("qwen3_moe"), dropout=0.3)
    assert torch.isfinite(run_step(streamgrad.enable(model, chunk_size=CHUNK), batches.plain(model)).loss)
