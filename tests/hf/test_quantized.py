"""LoRA on quantised weights: as exact as plain backpropagation on the same weights, and counted right by the plan."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import streamgrad
from gradients import assert_as_exact_as_plain, assert_same_step, assert_step_as_exact_as_plain, more, run_step
from lora import with_lora
from quantized import KINDS, bitsandbytes, dequantized_model, quantized_model
from streamgrad.engine import layer as engine_layer
from streamgrad.engine import unread
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.step_facts import held_bytes
from streamgrad.memory.live_bytes import LiveBytes
from tiny import tiny_model, tokens

EVERYWHERE = r".*_proj"


def batch(length: int = 23) -> dict:
    ids = tokens(2, length)
    return {"input_ids": ids, "labels": ids}


def steps(kind: str, dtype: torch.dtype, *options: dict, head: bool = False, prepare=lambda model: None):
    """Streamed steps with each of the options, a plain step of the same model, and the truth of its dequantised weights."""
    model = with_lora(quantized_model(kind, dtype=dtype, head=head), targets=EVERYWHERE)
    prepare(model)
    plain = run_step(model, batch())
    streamed = []
    for each in options:
        streamgrad.enable(model, **each)
        streamed.append(run_step(model, batch()))
        streamgrad.disable(model)
    truth = with_lora(dequantized_model(kind, dtype=torch.float64, head=head), targets=EVERYWHERE)
    return streamed, plain, run_step(truth, batch())


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=more if kind in ("fp4", "nf4 doubly") else ()) for kind in KINDS])
def test_gradients_are_as_exact_as_plain(kind):
    """Frozen weights have no gradient on either side, or the comparison fails."""
    options = [{"chunk_size": 1}, {"chunk_size": 7}, {"chunk_size": 7, "keep": "attention"}, {"chunk_size": 99, "keep": "all"}]
    streamed, plain, truth = steps(kind, torch.float32, *options)
    for step in streamed:
        assert_step_as_exact_as_plain(step, plain, truth)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=more if kind in ("fp4", "nf4 doubly") else ()) for kind in KINDS])
def test_bf16_gradients_are_as_exact_as_plain(kind):
    (streamed,), plain, truth = steps(kind, torch.bfloat16, {"chunk_size": 7})
    assert_step_as_exact_as_plain(streamed, plain, truth, rounding=torch.bfloat16)


def test_int8_with_outliers_is_as_exact_as_plain():
    """As on a GPU: columns with large inputs are computed in 16 bits. They are found in each call, so in each chunk."""

    def as_on_a_gpu(model):
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.data[3] *= 8
        for module in model.modules():
            if isinstance(module, bitsandbytes().nn.Linear8bitLt):
                module.training = False

    (streamed,), plain, _ = steps("int8", torch.bfloat16, {"chunk_size": 7}, prepare=as_on_a_gpu)
    truth = with_lora(dequantized_model("int8", dtype=torch.float64), targets=EVERYWHERE)
    for name, parameter in truth.named_parameters():
        if "layernorm" in name:
            parameter.data[3] *= 8
    assert_as_exact_as_plain(streamed.gradients, plain.gradients, run_step(truth, batch()).gradients, rounding=torch.bfloat16)


def test_quantised_head():
    (streamed,), plain, truth = steps("nf4", torch.float32, {"chunk_size": 7, "head_chunk_size": 5}, head=True)
    assert_step_as_exact_as_plain(streamed, plain, truth)


def test_quantised_weights_have_no_accumulator(monkeypatch):
    model = with_lora(quantized_model("nf4", dtype=torch.float32), targets=EVERYWHERE)
    summed = []

    class Watched(engine_layer.GradAccumulators):
        def __init__(self, parameters, **options):
            super().__init__(parameters, **options)
            summed.extend(parameters)

    monkeypatch.setattr(engine_layer, "GradAccumulators", Watched)
    streamgrad.enable(model, chunk_size=7)
    run_step(model, batch())
    trained = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    assert {id(parameter) for parameter in summed} == {id(parameter) for parameter in trained}


def dequantisations(model) -> Counter:
    """How often the weights of all layers are dequantised in one step, for forward and for backward."""
    library, calls = bitsandbytes(), Counter()

    def counted(function, name):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    run_step(model, batch())  # in which layers are tried on a few tokens
    with (
        mock.patch.object(library, "matmul_4bit", counted(library.matmul_4bit, "forward")),
        mock.patch.object(library.functional, "dequantize_4bit", counted(library.functional.dequantize_4bit, "backward")),
    ):
        run_step(model, batch())
    return calls


def test_dequantisations():
    """A weight is dequantised for each product. One chunk has as many as checkpointing; that is why chunks are chosen large."""
    layers, weights = 2, 7
    model = with_lora(quantized_model("nf4", dtype=torch.float32), targets=EVERYWHERE)
    checkpointed = copy.deepcopy(model)
    checkpointed.enable_input_require_grads()
    model.enable_input_require_grads()
    checkpointed.base_model.model.gradient_checkpointing_enable()
    expected = dequantisations(checkpointed)
    assert expected == {"forward": 2 * layers * weights, "backward": layers * weights}
    streamgrad.enable(model, keep="input")
    assert dequantisations(model) == expected
    streamgrad.disable(model)
    for keep, projections in (("input", 3), ("attention", 0)):
        streamgrad.enable(model, keep=keep, chunk_size=6)
        chunks = 4
        again = layers * (chunks - 1) * projections  # to have the keys of all chunks but the last
        forward, backward = chunks * expected["forward"] + again, chunks * expected["backward"]
        assert dequantisations(model) == {"forward": forward, "backward": backward}
        streamgrad.disable(model)


def seeded_step(model, inputs: dict):
    torch.manual_seed(0)
    return run_step(model, inputs)


FOUR_BITS = [kind for kind in KINDS if kind != "int8"]
ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("kind", FOUR_BITS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.filterwarnings("ignore:inner dimension")  # of bitsandbytes', about its fast kernels for single tokens
def test_gradients_of_later_steps_are_those_of_the_first(kind, keep, device, monkeypatch):
    """From the second on, layers do not run their last product again. Dropout is drawn as in forward."""
    monkeypatch.setitem(unread._FEWEST_TOKENS, device, 0)
    model = with_lora(quantized_model(kind, dtype=torch.bfloat16), targets=EVERYWHERE, dropout=0.3).to(device)
    inputs = {name: tensor.to(device) for name, tensor in batch().items()}
    streamgrad.enable(model, chunk_size=7, keep=keep)
    first, *later = (seeded_step(model, inputs) for _ in range(4))
    for step in later:
        assert_same_step(step, first, 2**-8)


class LastProducts(TorchDispatchMode):
    """Counts the products of more tokens than a guard's two with `down_proj`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.count = width, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.bitsandbytes.gemm_4bit.default:
            self.count += args[0].shape[-1] == self.width and args[0].shape[-2] > 2
        return function(*args, **(kwargs or {}))


def products_of_last_maps(model) -> int:
    """How many there are in the backward pass of a later step."""
    for _ in range(2):
        run_step(model, batch(24))
    loss = model(**batch(24)).loss
    with LastProducts(model.config.intermediate_size) as counted:
        loss.backward()
    return counted.count


@pytest.mark.parametrize("adapted", [EVERYWHERE, r".*q_proj"])
def test_the_last_product_of_a_layer_is_not_run_again(adapted):
    model = with_lora(quantized_model("nf4", dtype=torch.bfloat16), targets=adapted)
    model.enable_input_require_grads()
    streamgrad.enable(model, chunk_size=8)
    assert products_of_last_maps(model) == 0
    watched = model.get_submodule("base_model.model.model.layers.0.mlp.down_proj")
    seen = []
    watched.register_forward_hook(lambda module, args, out: seen.append(out.float().sum().item()))
    assert products_of_last_maps(model) == 3  # of one layer, in three chunks
    assert seen


def inner(mlp, x):
    return mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.tanh(ctx.saved_tensors[0])


def keeps_a_copy(mlp, x):
    out = mlp.down_proj(inner(mlp, x))
    with torch.no_grad():
        mlp.seen = out.clone()
    return out


def saves_and_copies(mlp, x):
    out = mlp.down_proj(inner(mlp, x))
    return out + Saving.apply(out)


@pytest.mark.parametrize("mlp", [keeps_a_copy, saves_and_copies, lambda mlp, x: mlp.down_proj(x=inner(mlp, x))])
def test_layers_that_do_something_else_with_a_product(mlp):
    model = quantized_model("nf4", dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.__class__ = type("Own", (type(layer.mlp),), {"forward": mlp})
    assert_later_steps_are_plain(model)
    for layer in model.model.layers:
        assert torch.isfinite(getattr(layer.mlp, "seen", torch.zeros(()))).all()


def clipped(function):
    """The function, with the gradient of its output clipped."""

    @functools.wraps(function)
    def wrapper(*args, **options):
        out = function(*args, **options)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return out

    return wrapper


def test_functions_of_bitsandbytes_that_a_program_replaces_are_run(monkeypatch):
    library = bitsandbytes()
    function = library.autograd._functions.MatMul4Bit
    backward = function.backward
    for owner, name, replacement in (
        (library.nn.Linear4bit, "forward", clipped(library.nn.Linear4bit.forward)),
        (library, "matmul_4bit", clipped(library.matmul_4bit)),
        (function, "backward", staticmethod(lambda ctx, dout: backward(ctx, dout.clamp(-1e-3, 1e-3)))),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, replacement)
            assert_later_steps_are_plain(quantized_model("nf4", dtype=torch.bfloat16))


def assert_later_steps_are_plain(model) -> None:
    model = with_lora(model, targets=r".*(q_proj|gate_proj)")
    model.enable_input_require_grads()
    plain = run_step(model, batch(24))
    streamgrad.enable(model, chunk_size=99)
    for _ in range(3):
        assert_same_step(run_step(model, batch(24)), plain, 2**-8)


@pytest.mark.parametrize("lies", ["as a row", "as its transpose"])
def test_weights_that_lie_otherwise(lies):
    """A square one, whose transpose has its shape, packed in a row; and one that was quantised as its transpose."""
    library = bitsandbytes()
    model = quantized_model("nf4", dtype=torch.bfloat16, **({"intermediate_size": 24} if lies == "as a row" else {}))
    for layer in model.model.layers:
        weight = layer.mlp.down_proj.weight
        if lies == "as a row":
            changed = library.nn.Params4bit(
                weight.data.t(), requires_grad=False, quant_type="nf4", bnb_quantized=True, quant_state=weight.quant_state
            )
        else:
            values = library.functional.dequantize_4bit(weight.detach(), weight.quant_state).t().contiguous().float()
            changed = library.nn.Params4bit(values, requires_grad=False, quant_type="nf4", compress_statistics=False).to("cpu")
        layer.mlp.down_proj.weight = changed
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # bitsandbytes', of the transpose
        assert_later_steps_are_plain(model)


@pytest.mark.parametrize("change", ["bias", "float32 inputs", "forward of its own", "a program's class"])
def test_a_map_that_does_more_than_multiply_is_run_again(change):
    model = with_lora(quantized_model("nf4", dtype=torch.bfloat16), targets=r".*q_proj")
    model.enable_input_require_grads()
    down = [layer.mlp.down_proj for layer in model.base_model.model.model.layers]
    for module in down:
        if change == "bias":
            module.bias = torch.nn.Parameter(torch.full((module.out_features,), 0.25, dtype=torch.bfloat16))
        elif change == "float32 inputs":
            module.compute_dtype = torch.float32
        elif change == "forward of its own":
            module.forward = lambda x, own=module: 2 * type(own).forward(own, x)
        else:
            module.__class__ = type("Twice", (type(module),), {"forward": lambda self, x: 2 * super(type(self), self).forward(x)})
    plain = run_step(model, batch(24))
    streamgrad.enable(model, chunk_size=24)  # one chunk, which rounds as the plain step does
    assert products_of_last_maps(model) == 2
    assert_same_step(run_step(model, batch(24)), plain, 2**-8)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_plan_counts_a_dequantised_weight(kind):
    """Few tokens and a wide layer: what a product holds of a weight is then most of what a chunk holds."""
    model = quantized_model(kind, dtype=torch.bfloat16, hidden_size=256, intermediate_size=1024)
    streamgrad.enable(with_lora(model, targets=EVERYWHERE), chunk_size=8, keep="input", memory_budget="1GiB", head_chunk_size=4)
    run_step(model, batch(32))
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        run_step(model, batch(32))
    planned = InstalledForward.on(model.model).stream.planner.latest.peak_bytes - held_bytes(model.model)
    assert 0.85 * live.peak_bytes < planned < 1.15 * live.peak_bytes, (planned, live.peak_bytes)


def test_bytes_of_quantised_weights():
    """Half a byte a weight, with a scale of 4 bytes for 64 weights or of 1 byte, itself quantised; or a byte, and 4 for a row."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64, "num_key_value_heads": 4}
    weights = 4 * 256 * 256 + 3 * 256 * 512
    rest = held_bytes(dequantized_model("nf4", dtype=torch.float32, **sizes).model) - 4 * weights
    found = {kind: (held_bytes(quantized_model(kind, dtype=torch.float32, **sizes).model) - rest) / weights for kind in KINDS}
    assert found == pytest.approx({"nf4": 0.5625, "fp4": 0.5625, "nf4 doubly": 0.516, "int8": 1.01}, rel=0.03)


def test_weights_are_not_packed_for_inference_on_the_way():
    """On some processors, in eval mode, a pass without a graph packs them, and their products then have no gradient."""
    model = with_lora(quantized_model("nf4", dtype=torch.float32), targets=EVERYWHERE)
    plain = run_step(model.train(), batch())
    packable = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    assert packable
    for module in packable:
        module.support_avx512bf16_for_cpu = True
    streamgrad.enable(model.eval(), chunk_size=7)
    with mock.patch.object(bitsandbytes().nn.modules, "_convert_weight_packed_for_cpu", side_effect=AssertionError("packed")):
        streamed = run_step(model, batch())
    assert_same_step(streamed, plain, 1e-5)
    assert all(module.support_avx512bf16_for_cpu for module in packable)
    assert "packing_format_for_cpu" in inspect.getsource(bitsandbytes().matmul_4bit), "bitsandbytes has another name for it"
    packable[0].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match="has packed the weight of Qwen3DecoderLayer.*load the model anew"):
        run_step(model, batch())


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
@pytest.mark.filterwarnings("ignore")  # of torchao's, about its own future
def test_torchao_weights_are_exact(kind):
    torchao = pytest.importorskip("torchao", reason="needs torchao: pip install torchao")
    from torchao import quantization

    model = tiny_model("qwen3", dtype=torch.float32)
    whole = held_bytes(model.model.layers)
    torchao.quantize_(model.model.layers, getattr(quantization, kind)())
    assert held_bytes(model.model.layers) < 0.5 * whole, "counted as if they had 32 bits"
    adapted = with_lora(model, targets=EVERYWHERE)
    plain = run_step(adapted, batch())
    for options in ({"chunk_size": 1}, {"chunk_size": 7, "keep": "attention"}, {"chunk_size": 99}):
        streamgrad.enable(adapted, **options)
        assert_same_step(run_step(adapted, batch()), plain, 1e-4)
        streamgrad.disable(adapted)
