"""Walks over modules without names: what torch's own walks give, in the same order."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from lora import with_lora
from streamgrad.engine.module_walk import modules_of, parameters_by_depth, parameters_of, trainable_parameters
from tiny import FAMILIES, tiny_model


def assert_same_walks(root: nn.Module) -> None:
    assert list(map(id, modules_of(root))) == list(map(id, root.modules()))
    assert list(map(id, parameters_of(root))) == list(map(id, root.parameters()))
    assert set(map(id, parameters_by_depth(root))) == set(map(id, root.parameters()))
    assert list(map(id, trainable_parameters(root))) == [id(p) for p in root.parameters() if p.requires_grad]


@pytest.mark.parametrize("family", FAMILIES)
def test_models(family):
    assert_same_walks(tiny_model(family))


def test_adapters():
    assert_same_walks(with_lora(tiny_model("llama"), modules_to_save=["lm_head"]))


@pytest.mark.parametrize("seed", range(30))
def test_shared_and_missing_children(seed):
    """Modules and parameters that are reached by several ways or in a circle, and names without anything."""
    chance = random.Random(seed)
    shared = [nn.Parameter(torch.zeros(1), requires_grad=chance.random() < 0.5) for _ in range(3)]
    made = [nn.ParameterList(shared[:2]), nn.Linear(1, 1, bias=False)]
    for _ in range(12):
        module = nn.Module()
        for index in range(chance.randrange(4)):
            module.register_module(f"child{index}", chance.choice([*made, None]))
        for index in range(chance.randrange(3)):
            module.register_parameter(f"own{index}", chance.choice([*shared, nn.Parameter(torch.zeros(1)), None]))
        made.append(module)
    made[2].register_module("circle", made[-1])
    assert_same_walks(made[-1])


def test_some_are_left_out():
    model = tiny_model("llama")
    layers = list(model.model.layers)
    rest = modules_of(model, but_for=layers)
    inside = {id(module) for layer in layers for module in layer.modules()}
    assert [id(module) for module in model.modules() if id(module) not in inside] == list(map(id, rest))
