"""Two forwards before one backward, between which a program changes hooks and switches: each loss has its own gradients."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step
from streamgrad.engine.switches import Switches
from tiny import tiny_model, tokens

OPTIONS = [{}, {"chunk_size": 5}, {"chunk_size": 5, "keep": "attention"}, {"chunk_size": 64, "keep": "input"}, {"keep": "all"}]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


@pytest.fixture(autouse=True)
def _in_float64():
    with no_float32():
        yield


def loss_of(model, length=24):
    ids = tokens(2, length)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def assert_exact(make, step, options):
    stock, streamed = make(), streamgrad.enable(make(), **options)
    assert_same_step(
        run_step(streamed, {}, forward=lambda model, _: step(model)),
        run_step(stock, {}, forward=lambda model, _: step(model)),
        1e-9,
    )


# --- hooks -------------------------------------------------------------------------------------------------------------


def a_tenth(module, gradients_in, gradients_out):
    return tuple(0.1 * gradient for gradient in gradients_in)


def doubled(module, args, out):
    return 2.0 * out


@contextmanager
def scaled_gradients(model):
    def hook(module, args, out):
        if out.requires_grad:
            out.register_hook(lambda gradient: 0.1 * gradient)

    handles = [layer.mlp.register_forward_hook(hook) for layer in model.model.layers]
    yield
    for handle in handles:
        handle.remove()


@every_option
@pytest.mark.parametrize("kind", ["forward", "full_backward"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_hook_that_is_there_in_one_pass_only(when, kind, options):
    """Torch binds backward hooks in forward, too."""

    def step(model):
        register = getattr(model.model.layers[0].mlp, f"register_{kind}_hook")
        hook = doubled if kind == "forward" else a_tenth
        handle = register(hook) if when == "forward" else None
        loss = loss_of(model)
        if handle is None:
            register(hook)
        else:
            handle.remove()
        return loss

    assert_exact(lambda: tiny_model("llama"), step, options)


@every_option
def test_a_hook_that_scales_gradients_in_one_of_two_forwards(options):
    def step(model):
        with scaled_gradients(model):
            first = loss_of(model)
        return first + loss_of(model, 13)

    assert_exact(lambda: tiny_model("llama"), step, options)


# --- attributes --------------------------------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.strength * gradient, None


class Switched(nn.Module):
    """Has adapters that begin as zero, one a task, and switches that outputs do not depend on."""

    strength, stop = 1.0, False

    def __init__(self, map_: nn.Module) -> None:
        super().__init__()
        self.map, self.task, self.calls = map_, 0, 0
        generator, (wide, high) = torch.Generator().manual_seed(0), map_.weight.shape
        self.down = nn.ParameterList(torch.randn(2, high, generator=generator, dtype=torch.float64) for _ in range(2))
        self.up = nn.ParameterList(torch.zeros(wide, 2, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = Reversed.apply(x.detach() if self.stop and self.training else x, self.strength)
        return self.map(x) + F.linear(F.linear(x, self.down[self.task]), self.up[self.task])


def switched():
    model = tiny_model("llama").train()
    for layer in model.model.layers:
        layer.mlp.up_proj = Switched(layer.mlp.up_proj)
    return model


class Reversing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(x, -1.0)


def another_activation(mlp):
    mlp.act_fn[1] = Reversing()


def another_function(mlp):
    mlp.function = lambda x: Reversed.apply(x, -1.0)


def another_forward(mlp):
    plain = mlp.forward
    mlp.forward = lambda x: Reversed.apply(plain(x), -1.0)


@every_option
@pytest.mark.parametrize("change", [another_activation, another_function, another_forward])
def test_a_part_that_is_exchanged_between_two_forwards(change, options):
    """Outputs are the same, and gradients are not; the second forward's part stays after backward."""
    found = []

    def made():
        model = tiny_model("llama")
        for layer in model.model.layers:
            layer.mlp.act_fn, layer.mlp.function = nn.Sequential(nn.SiLU(), nn.Identity()), F.relu
            layer.mlp.register_forward_hook(lambda mlp, args, out: out + mlp.function(args[0]))
        return model

    def step(model):
        found[:] = [layer.mlp for layer in model.model.layers]
        first = loss_of(model)
        for mlp in found:
            mlp.function = F.silu
            change(mlp)
        found.append([(mlp.forward, mlp.function, list(mlp.act_fn)) for mlp in found])
        return first + loss_of(model, 13)

    assert_exact(made, step, options)
    *mlps, noted = found
    assert [(mlp.forward, mlp.function, list(mlp.act_fn)) for mlp in mlps] == noted


@every_option
@pytest.mark.parametrize("switch", [{"task": 1}, {"stop": True}, {"strength": -0.3}], ids=str)
def test_a_switch_that_differs_between_two_forwards(switch, options):
    """The second forward's value stays after backward, and what layers count goes on."""
    found = []

    def step(model):
        maps = [module for module in model.modules() if isinstance(module, Switched)]
        found[:] = maps
        first = loss_of(model)
        for each in maps:
            vars(each).update(switch)
        return first + loss_of(model, 13)

    assert_exact(switched, step, options)
    assert all(getattr(each, name) == value for each in found for name, value in switch.items())


@every_option
def test_eval_mode_after_forward(options):
    def step(model):
        loss = loss_of(model)
        model.eval()
        return loss

    def stopped():
        model = switched()
        for each in model.modules():
            if isinstance(each, Switched):
                each.stop = True
        return model

    assert_exact(stopped, step, options)


def test_a_dropout_that_leaves_training_after_forward():
    def gradients(change):
        model = streamgrad.enable(tiny_model("gpt_neox", hidden_dropout=0.3), chunk_size=7)
        torch.manual_seed(0)
        return run_step(model, batches.plain(None), forward=lambda model, batch: (model(**batch).loss, change(model))[0])

    assert_same_step(gradients(lambda model: model.eval()), gradients(lambda model: None), 1e-12)


# --- what is put back ----------------------------------------------------------------------------------------------------


def test_what_a_block_changes_stays():
    module = nn.Linear(2, 2)
    module.count, module.mode, module.gone, module.text = 3, "a", None, "x"
    noted = Switches([module])
    module.count, module.mode, module.new = 10, "b", 1.5
    del module.gone
    with noted.restored():
        assert (module.count, module.mode, module.gone) == (3, "a", None) and not hasattr(module, "new")
        module.count += 1
        module.text = "y"
    assert (module.count, module.mode, module.new, module.text) == (11, "b", 1.5, "y") and not hasattr(module, "gone")


def test_hooks_are_put_back_after_an_error():
    module = nn.Linear(2, 2)
    noted = Switches([module])
    handle = module.register_forward_hook(doubled)
    hooks = module._forward_hooks
    inside = []
    with pytest.raises(ZeroDivisionError), noted.restored():
        inside.append(1 / len(module._forward_hooks))
    assert module._forward_hooks is hooks and len(hooks) == 1 and not inside
    handle.remove()
    assert not module._forward_hooks
