"""Layers that choose by values are known, and run forward chunk by chunk, as they are run again."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

import streamgrad
from gradients import assert_same_step, run_step
from streamgrad.attention import backends
from streamgrad.engine.checks.value_choices import ValueChoices
from streamgrad.hf.discover import decoder_layers
from stretches import CHUNK, calls_in_step
from tiny import tiny_model
from two_kernels import two_kernels


@pytest.mark.parametrize(
    ("function", "chooses"),
    [
        (lambda x: x.topk(2), True), (lambda x: x[x > 0], True), (lambda x: x.argmax(), True), (lambda x: x.argsort(), True),
        (lambda x: x / x.abs().amax(), True), (lambda x: torch.where(x > 0.5, x, -x), True), (lambda x: x * x.sign(), True),
        (lambda x: x if x.mean() else -x, True), (lambda x: x.mean().item(), True), (lambda x: x >= 0.5, True),
        (lambda x: (4 * x).long(), True), (lambda x: x.bool(), True), (lambda x: x.unique(), True),
        (lambda x: torch._int_mm(x.to(torch.int8), x.to(torch.int8)), True),
        (lambda x: x.softmax(-1) @ x, False), (lambda x: x[:, [0, 1]].relu(), False), (lambda x: x.clamp(min=0.0), False),
        (lambda x: x.clone().gt_(0.5), True), (lambda x: torch.tensor(1) < x, True), (lambda x: x.view(torch.int32), True),
        (lambda x: torch.zeros(32, dtype=torch.long).copy_(x[0]), True), (lambda x: x.div(0.1, rounding_mode="floor"), True),
        (lambda x: x.round(), True), (lambda x: x == 0, True), (lambda x: torch.ops.test_value_choices.routed(x), True),
        (lambda x: x.masked_fill(torch.arange(32) > 3, 0.0), False), (lambda x: x.double().bfloat16(), False),
        (lambda x: x.clone().mul_(2).copy_(x), False), (lambda x: x[torch.arange(32) > 3], False),
        (lambda x: torch.arange(32)[torch.ones(32, dtype=torch.bool)].max().item(), False),
    ],
)  # fmt: skip
def test_what_chooses_by_values(function, chooses):
    with ValueChoices() as choices:
        function(torch.randn(32, 32))
    assert choices.made == chooses


@torch.library.custom_op("test_value_choices::routed", mutates_args=())
def routed(x: torch.Tensor) -> torch.Tensor:
    """What another library's kernel may do, which nobody looks into."""
    return x * x.topk(1).values


@pytest.mark.parametrize(("family", "chooses"), [("qwen3", False), ("qwen3_moe", True), ("gpt_oss", True), ("deepseek_v3", True)])
def test_layers_that_choose_run_chunk_by_chunk(family, chooses):
    """A router's product rounds in another way over several chunks: the re-run could send a token to another expert."""
    model = tiny_model(family, dtype=torch.float32)
    calls, _ = calls_in_step(model, 6 * CHUNK, 3, layer=-1)
    assert (max(calls) == CHUNK) == chooses


def test_a_choice_of_a_hook_is_seen_when_it_comes():
    """In one layer of many that are alike otherwise, and after a step without."""
    model = tiny_model("qwen3", dtype=torch.float32)
    assert max(calls_in_step(model, 6 * CHUNK, 3, layer=1)[0]) == 3 * CHUNK
    mlp = decoder_layers(model.get_decoder())[1].mlp
    handle = mlp.register_forward_hook(lambda module, args, output: torch.where(output > 0.1, output, 0.0))
    assert max(calls_in_step(model, 6 * CHUNK, 3, layer=1)[0]) == CHUNK
    assert max(calls_in_step(model, 6 * CHUNK, 3, layer=0)[0]) == 3 * CHUNK
    handle.remove()
    assert max(calls_in_step(model, 6 * CHUNK, 3, layer=1)[0]) == 3 * CHUNK


def test_a_choice_that_long_calls_alone_make_is_seen():
    model = tiny_model("qwen3", dtype=torch.float32)
    mlp = decoder_layers(model.get_decoder())[1].mlp
    mlp.register_forward_hook(lambda module, args, output: output if output.shape[1] < 12 else output * output.sign().abs())
    assert max(calls_in_step(model, 7 * CHUNK, 3, layer=1)[0]) == CHUNK
    assert max(calls_in_step(model, 7 * CHUNK, 3, layer=0)[0]) == 3 * CHUNK


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_parts_are_looked_at_as_they_are_written():
    """torch.compile does not compile while operations are looked at, and would give a whole graph up for good."""
    model = tiny_model("qwen3", dtype=torch.float32)
    layers = decoder_layers(model.get_decoder())
    layers[0].mlp.act_fn = torch.compile(torch.nn.SiLU(), fullgraph=True, backend="eager")
    calls, step = calls_in_step(model, 6 * CHUNK, 3)
    assert max(calls) == 3 * CHUNK
    assert_same_step(step, calls_in_step(model, 6 * CHUNK, 1)[1], tolerance=1e-5)
    chooses = torch.compile(lambda module, args, output: output * output.sign().abs(), backend="eager")
    handle = layers[0].mlp.register_forward_hook(chooses)
    assert max(calls_in_step(model, 6 * CHUNK, 3)[0]) == CHUNK
    handle.remove()


def test_code_that_cannot_be_looked_at_runs_chunk_by_chunk():
    """As operators of higher order, which know nothing of it."""

    def refuses(module, args, output):
        if torch._C._len_torch_dispatch_stack():
            raise NotImplementedError("There was no rule registered")

    model = tiny_model("qwen3", dtype=torch.float32)
    decoder_layers(model.get_decoder())[0].mlp.register_forward_hook(refuses)
    calls, step = calls_in_step(model, 6 * CHUNK, 3)
    assert max(calls) == CHUNK
    assert_same_step(step, calls_in_step(model, 6 * CHUNK, 1)[1], tolerance=1e-5)


@pytest.mark.parametrize("options", [{"keep": "input"}, {"keep": "input", "recompute_layers": 2}])
@pytest.mark.parametrize("first_plans", [0, 3, 7])
def test_chunks_run_again_on_the_kernels_that_ran_them(options, first_plans, monkeypatch):
    """A plan that is worth it from some call on would give the re-run another rounding, and a router's token another expert."""
    calls = itertools.count()
    log = two_kernels(monkeypatch, lambda backward: not backward and next(calls) >= first_plans)
    model = tiny_model("qwen3_moe", num_hidden_layers=4)
    batch = {"input_ids": torch.arange(12)[None], "labels": torch.arange(12)[None]}
    expected = run_step(model, batch)
    streamgrad.enable(model, chunk_size=5, **options)
    assert_same_step(run_step(model, batch), expected, 1e-6)  # in which layers are tried
    log.clear()
    calls = itertools.count()
    assert_same_step(run_step(model, batch), expected, 1e-6)
    names = [(name, shape) for name, backward, shape in log if not backward]
    forward, again = names[:12], names[12:]
    assert [name for name, _ in forward] == ["flash"] * first_plans + ["cudnn"] * (12 - first_plans)
    assert Counter(again) == Counter(forward) if "recompute_layers" not in options else set(again) <= set(forward)
    assert again[-3:] == forward[:3][::-1]


@pytest.mark.parametrize("ran_forward", [False, True])
def test_a_kernel_that_fails_in_backward_is_replaced_there(ran_forward, monkeypatch):
    """It may not have run in forward. Where it has, chunks are run again on it: they would else choose otherwise."""
    log = two_kernels(monkeypatch, lambda backward: backward or ran_forward)

    def fails(self, *args):
        raise RuntimeError("no plan for backward")

    monkeypatch.setattr(type(backends._ALL[0]), "backward", fails)
    model = tiny_model("qwen3_moe")
    batch = {"input_ids": torch.arange(12)[None], "labels": torch.arange(12)[None]}
    expected = run_step(model, batch)
    streamgrad.enable(model, chunk_size=5, keep="input")
    with pytest.warns(RuntimeWarning, match="'cudnn' failed and is replaced by flash or eager: no plan for backward"):
        assert_same_step(run_step(model, batch), expected, 1e-6)
    first = "cudnn" if ran_forward else "flash"
    assert [name for name, backward, _ in log if not backward] == [first] * 12
    assert {name for name, backward, _ in log if backward} == {"flash"}
    log.clear()
    assert_same_step(run_step(model, batch), expected, 1e-6)
    assert {name for name, *_ in log} == {"flash"}
