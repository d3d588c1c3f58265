"""Fused experts: their parts, which experts are recognised, and whole models with them against transformers' own."""

from __future__ import annotations

import functools
import importlib

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.integrations import moe

import batches
import families
import streamgrad
from families import small_model
from gradients import assert_same_step, no_float32, run_step, total_gradient_error
from streamgrad.hf import fused_experts
from streamgrad.hf.fusion import Fusion
from streamgrad.ops import fused
from streamgrad.ops.experts import Routes, collected, spread, weighted_gate
from tiny import tiny_model

WIDE = {"hidden_size": 128, "moe_intermediate_size": 96, "head_dim": 32}
CHOSEN = torch.tensor([[2, 0], [0, 3], [2, 3], [0, 2], [3, 0]])  # nobody chose expert 1


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def any_dtype(monkeypatch):
    """Grouped products in torch code of transformers, which takes fp64 too."""
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *operands: False)


def of_experts(**options):
    model = tiny_model("qwen3_moe", **options)
    model.config._experts_implementation = "grouped_mm"
    return model


def is_fused(module: nn.Module, mode: str = "on") -> bool:
    with Fusion([module], mode=mode).installed():
        return "forward" in module.__dict__


def test_routes():
    routes = Routes.of(CHOSEN, 5)
    assert torch.equal(CHOSEN.reshape(-1)[routes.pair_S], CHOSEN.reshape(-1).sort().values)
    assert torch.equal(routes.token_S[routes.place_TK], torch.arange(5)[:, None].expand(-1, 2))
    assert torch.equal(routes.pair_S[routes.place_TK.reshape(-1)], torch.arange(10))
    assert routes.stop_X.tolist() == [4, 4, 7, 10, 10] and routes.stop_X.dtype == torch.int32


def test_spreading_and_collecting_are_each_others_backward():
    routes, x, rows = Routes.of(CHOSEN, 4), leaf(5, 7), leaf(10, 7)
    assert torch.equal(spread(x, routes), x[routes.token_S])
    torch.testing.assert_close(collected(rows, routes), rows[routes.place_TK].sum(dim=1), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: spread(x, routes), (x,))
    assert torch.autograd.gradcheck(lambda rows: collected(rows, routes), (rows,))


@pytest.mark.parametrize("activation", fused.ACTIVATIONS)
def test_weighted_gate(activation):
    stock = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[activation]
    routes, source, weights = Routes.of(CHOSEN, 4), leaf(10, 14), leaf(5, 2)
    gate, up = source.chunk(2, dim=-1)
    expected = stock(gate) * up * weights.reshape(-1)[routes.pair_S, None]
    torch.testing.assert_close(weighted_gate(source, weights, routes, activation), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda s, w: weighted_gate(s, w, routes, activation), (source, weights))
    assert torch.autograd.gradcheck(lambda s, w: weighted_gate(s * 1.0, w, routes, activation, consumed=True), (source, weights))


def test_a_graph_that_runs_again_keeps_what_it_was_given_and_one_that_shares_it_is_refused():
    routes, source, weights = Routes.of(CHOSEN, 4), leaf(10, 14), leaf(5, 2)
    joint = source * 1.0
    before = joint.detach().clone()
    out = weighted_gate(joint, weights, routes, "silu", consumed=True).sum()
    first = torch.autograd.grad(out, (source, weights), retain_graph=True)
    assert torch.equal(joint, before)
    assert all(map(torch.equal, first, torch.autograd.grad(out, (source, weights))))
    assert not torch.equal(joint, before)
    joint = source * 1.0
    other = joint.square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation|has been modified inplace"):
        (other + weighted_gate(joint, weights, routes, "silu", consumed=True).sum()).backward()


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
@pytest.mark.parametrize("frozen", [(), ("experts",), ("gate_up_proj",), ("down_proj",), ("mlp.gate.",)])
def test_gradients_are_those_of_stock_experts(frozen, keep, any_dtype):
    """The gradients of experts, of the router that weighs them, and of all that comes before, with some of these frozen."""
    model = of_experts()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    batch = batches.right_padded(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=7, keep=keep, fused_kernels="on")
        assert_same_step(run_step(model, batch), expected, 1e-10)


def test_grouped_products_of_torch():
    """As they run on a GPU too."""
    model = of_experts(dtype=torch.float32)
    batch = batches.plain(model)
    expected = run_step(model, batch)
    streamgrad.enable(model, chunk_size=7, fused_kernels="on")
    assert_same_step(run_step(model, batch), expected, 2e-5)


@pytest.mark.parametrize(
    ("device", "mode"),
    [
        ("cpu", "on"),
        pytest.param(
            "cuda",
            "auto",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_bf16_error_is_no_larger_than_that_of_stock_experts(device, mode):
    """Weights are rounded before the last product, not after it. Over 512 tokens, the error against fp32 is 0.82 of stock's.

    Of experts alone: in a model, the few tokens that rounding sends to another expert are most of the error, on either side.
    """

    def gradients(experts, chosen, dout, *inputs):
        x, weights = (tensor.to(dout.dtype, copy=True).requires_grad_() for tensor in inputs)
        experts.zero_grad(set_to_none=True)
        experts(x, chosen, weights).backward(dout)
        return {"x": x.grad, "weights": weights.grad} | {name: weight.grad for name, weight in experts.named_parameters()}

    for seed in range(3):
        experts, exact = (
            of_experts(dtype=dtype, seed=seed, **WIDE).to(device).model.layers[0].mlp.experts
            for dtype in (torch.bfloat16, torch.float32)
        )
        exact.load_state_dict(experts.state_dict())
        exact.config._experts_implementation = "eager"
        x, dout = torch.randn(2, 512, WIDE["hidden_size"], device=device).bfloat16()
        scores = torch.rand(2, 512, 4, device=device)
        chosen, weights = scores[0].topk(2).indices, scores[1, :, :2].softmax(dim=-1).bfloat16()
        truth = gradients(exact, chosen, dout.float(), x, weights)
        stock = total_gradient_error(gradients(experts, chosen, dout, x, weights), truth)
        assert is_fused(experts, mode)
        with Fusion([experts], mode=mode).installed():
            fused_error = total_gradient_error(gradients(experts, chosen, dout, x, weights), truth)
        assert 0 < fused_error <= 0.95 * stock, (fused_error, stock)


@pytest.mark.parametrize(
    ("family", "fuses"),
    [
        ("mixtral", True), ("deepseek_v3", True), ("aria_text", True), ("qwen3_next", True), ("phimoe", True),
        ("gpt_oss", False), ("nemotron_h", False),
    ],
)  # fmt: skip
def test_families_with_experts(family, fuses, any_dtype):
    """Weights that lie transposed and experts beside a shared one run fused; biases, a gate of one's own or none as they are."""
    model = small_model(family)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "grouped_mm"
    experts = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    assert experts and all(is_fused(module) == fuses for module in experts)
    with no_float32():
        for batch in families.batches():
            expected = run_step(model, batch)
            streamgrad.enable(model, chunk_size=5, fused_kernels="on")
            assert_same_step(run_step(model, batch), expected, 1e-9)
            streamgrad.disable(model)


@pytest.mark.parametrize("keep", ["input", "all"])
def test_adapters_on_the_weights_of_experts(keep, any_dtype):
    """PEFT puts `W + B A` in the place of a weight for each call."""
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = of_experts()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False))
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=7, keep=keep, fused_kernels="on")
        assert_same_step(run_step(model, batch), expected, 1e-10)


def test_only_experts_that_are_known_run_fused(monkeypatch):
    experts = of_experts().model.layers[0].mlp.experts
    assert is_fused(experts) and not is_fused(experts, mode="off")
    for name in ("has_bias", "has_post_expert_norm", "_is_expert_parallel"):
        monkeypatch.setattr(experts, name, True, raising=False)
        assert not is_fused(experts)
        monkeypatch.undo()
    monkeypatch.setattr(experts, "has_gate", False)
    assert not is_fused(experts)
    monkeypatch.undo()
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, joint: joint[..., ::2])
    assert not is_fused(experts)
    monkeypatch.undo()
    monkeypatch.setattr(experts, "act_fn", nn.ReLU())
    assert not is_fused(experts)
    monkeypatch.undo()
    monkeypatch.setattr(fused_experts, "_KNOWN_NAMES", fused_experts._KNOWN_NAMES - {"has_bias"})
    fused_experts._is_known_code.cache_clear()
    assert not is_fused(experts), "transformers' function reads what is not known here"
    fused_experts._is_known_code.cache_clear()


def test_another_implementation_runs_as_it_is(monkeypatch):
    """It is looked up in every call, as transformers does it: a program may change it between two steps."""
    model = of_experts(dtype=torch.float32)
    calls = []
    stock = Routes.of.__func__
    monkeypatch.setattr(Routes, "of", classmethod(lambda cls, *args: calls.append(args) or stock(cls, *args)))
    streamgrad.enable(model, chunk_size=7, fused_kernels="on")
    run_step(model, batches.plain(model))
    assert calls
    calls.clear()
    model.config._experts_implementation = "batched_mm"
    run_step(model, batches.plain(model))
    assert not calls


def test_pairs_of_no_expert_count_for_nothing(any_dtype):
    """transformers 5.17 lets a router drop pairs by a number beyond the experts'. Products leave their rows undefined."""
    chosen = CHOSEN.clone()
    chosen[0, 1] = chosen[3, 0] = 4
    routes, rows = Routes.of(chosen, 4), leaf(10, 7)
    kept = torch.arange(10) < 8
    assert routes.stop_X.tolist() == [2, 2, 5, 8]
    undefined = torch.where(kept[:, None], rows, torch.nan)
    assert torch.equal(collected(undefined, routes), collected(torch.where(kept[:, None], rows, 0.0), routes))
    x = leaf(5, 7)
    (gradient,) = torch.autograd.grad(spread(x, routes), x, torch.where(kept[:, None], torch.ones(10, 7), torch.nan))
    assert torch.equal(gradient[:, 0], torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0]))


def test_what_a_program_has_replaced_runs_as_it_is(monkeypatch):
    """Functions of transformers' in every place where they are looked up: one that wraps them is none of them."""
    model = of_experts(dtype=torch.float32)
    experts, batch = model.model.layers[0].mlp.experts, batches.plain(model)

    def halved(function):
        return lambda *args, **kwargs: function(*args, **kwargs) * 0.5

    for name, places in {
        "grouped_mm_experts_forward": [],
        "_default_apply_gate": [(type(experts), "_apply_gate")],
        "_grouped_linear": [],
        "_grouped_mm": [],
    }.items():
        changed = halved(getattr(moe, name))
        for owner, attribute in [(moe, name), *places]:
            monkeypatch.setattr(owner, attribute, changed)
        if name == "grouped_mm_experts_forward":
            monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", changed)
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=7, fused_kernels="on")
        assert_same_step(run_step(model, batch), expected, 2e-5)
        streamgrad.disable(model)
        monkeypatch.undo()
    monkeypatch.setattr(moe, "grouped_mm_experts_forward", functools.partial(moe.grouped_mm_experts_forward))
    assert is_fused(experts), "the registry has the function itself"


class _Named(nn.Module):
    """Experts of a program: other names in its own forward, and weights that are elsewhere."""

    def __init__(self, config, stock):
        super().__init__()
        self.act_fn, self.num_experts, self.stock = stock.act_fn, stock.num_experts, stock

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        return self.stock(hidden_states, router_indices, routing_weights)


def test_experts_with_arguments_of_their_own():
    """A call is looked at only where transformers' function gets it."""
    model = of_experts(dtype=torch.float32)
    model.config._experts_implementation = "eager"
    stock = model.model.layers[0].mlp.experts
    experts = moe.use_experts_implementation(_Named)(model.config, stock)
    x, weights = torch.randn(5, model.config.hidden_size), torch.rand(5, 2)
    expected = stock(x, CHOSEN, weights)
    with Fusion([experts], mode="on").installed():
        assert torch.equal(experts(x, router_indices=CHOSEN, routing_weights=weights), expected)


def test_fp16_runs_as_it_is(monkeypatch):
    """The gradient of a pair's rows is rounded before its weight makes it smaller: it would leave fp16's range sooner."""
    monkeypatch.setattr(Routes, "of", None)
    experts = of_experts(dtype=torch.float16).model.layers[0].mlp.experts
    assert is_fused(experts)
    with Fusion([experts], mode="on").installed():
        experts(torch.randn(5, experts.hidden_dim).half(), CHOSEN, torch.rand(5, 2).half())


def test_a_function_mode_finds_what_it_kept(any_dtype):
    class Keeping(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                self.kept.append((result, result.detach().clone()))
            return result

    experts = of_experts().model.layers[0].mlp.experts
    with Fusion([experts], mode="on").installed(), Keeping() as mode:
        out = experts(leaf(5, experts.hidden_dim), CHOSEN, leaf(5, 2))
    out.sum().backward()
    assert mode.kept and all(torch.equal(result, copy) for result, copy in mode.kept)


def test_weights_that_are_made_for_each_call_are_made_once(any_dtype):
    made = []

    class Counted(nn.Module):
        def forward(self, weight):
            made.append(weight.shape)
            return weight * 1.0

    experts = of_experts().model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        nn.utils.parametrize.register_parametrization(experts, name, Counted())
    made.clear()
    with Fusion([experts], mode="on").installed():
        experts(leaf(5, experts.hidden_dim), CHOSEN, leaf(5, 2))
        assert len(made) == 2
        experts.config._experts_implementation = "batched_mm"
        experts(leaf(5, experts.hidden_dim), CHOSEN, leaf(5, 2))
        assert len(made) == 4


def test_what_backward_needs_has_neither_the_last_product_nor_its_weighted_copy(any_dtype):
    """Saved are pairs of the width E once, not three times."""
    model = of_experts()
    experts, width = model.model.layers[0].mlp.experts, model.config.hidden_size
    x, weights = leaf(6, width), leaf(6, 2)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])

    def saved() -> int:
        wide: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape == (12, width):
                wide[tensor.untyped_storage()._cdata] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = experts(x, chosen, weights)  # keeps them alive while they are counted
        assert out.requires_grad
        return len(wide)

    stock = saved()
    with Fusion([experts], mode="on").installed():
        assert saved() == 1 < stock


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 31, 768, 5000])
def test_kernels(width, dtype):
    """Against the torch code in fp64; rows wider than one program are cut into parts."""
    pytest.importorskip("triton", reason="triton (0.6 GB) comes with torch's CUDA builds and is not installed with the CPU build")
    kernels = importlib.import_module("streamgrad.ops.fused_kernels")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    routes = Routes.of(CHOSEN, 4)
    rows, tolerance = torch.randn(10, width, device=device).to(dtype), {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
    for stop in (routes.stop_X, routes.stop_X - 3):  # of the second, three pairs are of no expert
        where = routes.place_TK.to(device), stop.to(device)
        torch.testing.assert_close(
            kernels.sum_of_rows(rows, *where).double(), fused.sum_of_rows(rows.double(), *where), **tolerance
        )
    joint, dout, weight = (torch.randn(10, size, device=device).to(dtype) for size in (2 * width, width, 1))
    weight_N, exact = weight.view(-1), [tensor.double() for tensor in (dout, *joint.chunk(2, dim=-1))]
    expected = fused.gated_forward(*exact[1:], "silu", weight_N.double())
    torch.testing.assert_close(kernels.gated_forward(*joint.chunk(2, dim=-1), "silu", weight_N).double(), expected, **tolerance)
    expected = fused.gated_backward(*exact, "silu", in_place=False, weight_N=weight_N.double())
    actual = kernels.gated_backward(dout, *joint.chunk(2, dim=-1), "silu", in_place=True, weight_N=weight_N)
    for ours, theirs in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours.double(), theirs, **tolerance)
    assert actual[2].dtype == torch.float32 and actual[0].data_ptr() == joint.data_ptr()
    torch.testing.assert_close(actual[2].double(), expected[2], rtol=1e-4, atol=1e-4)
