"""What optimizers, engines and hosts hold beside activations, against bytes that are counted by hand."""

from __future__ import annotations

import pytest

from streamgrad.hf.estimates.shapes import shape_of
from streamgrad.memory.training_state import Setup, training_state

SHAPE = shape_of("qwen3-8b")
PARAMETERS = 8_190_735_360
LAYER = SHAPE.layer_parameters
OUTSIDE = SHAPE.outside_parameters


def state(**options):
    return training_state(SHAPE, Setup(**options))


def test_where_each_optimizer_keeps_what():
    adamw, backward, host = (state(optimizer=name) for name in ("adamw", "in-backward", "host"))
    assert adamw.device["optimizer state"] == backward.device["optimizer state"] == pytest.approx(4 * PARAMETERS, rel=1e-6)
    assert (adamw.gradient_share, backward.gradient_share, host.gradient_share) == (1.0, 0.0, 0.0)
    assert host.device["optimizer state"] == 0 and host.device["other"] == 2 * LAYER
    # The copy that is stepped, the gradients, and two moments.
    assert host.host_bytes == pytest.approx((2 + 2 + 4) * PARAMETERS, rel=1e-6)
    assert not adamw.host and not backward.host


def test_a_shared_weight_waits_for_its_gradient():
    tied = shape_of("qwen3-4b")
    for optimizer in ("in-backward", "host"):
        held = training_state(tied, Setup(optimizer=optimizer)).device
        assert held["gradients"] == 2 * tied.head_parameters
    assert "gradients" not in state(optimizer="in-backward").device


def test_weights_on_the_host_leave_two_layers_and_what_is_outside():
    for optimizer in ("none", "sgd"):
        away = state(weights="host", optimizer=optimizer)
        assert away.device["weights"] == pytest.approx(2 * (OUTSIDE + 2 * LAYER))
        # Gradients follow the weights, whatever steps them.
        assert away.gradient_share == 0 and away.device["other"] == 2 * LAYER
        assert away.host_bytes == pytest.approx((2 + 2) * PARAMETERS, rel=1e-6)
    # With the optimizer there too, the copy that it steps is the weight itself.
    both = state(weights="host", optimizer="host")
    assert both.host_bytes == pytest.approx((2 + 2 + 4) * PARAMETERS, rel=1e-6)


def test_quantised_weights_on_the_host_are_those_of_the_layers():
    shape = shape_of("qwen3-8b", lora_rank=32).quantized("nf4")
    away = training_state(shape, Setup(weights="host", optimizer="none"))
    outside = 2 * shape.outside_parameters
    layers = 2 * 36 * shape.layer_parameters - shape.weights_saved
    assert away.host["weights"] == pytest.approx(layers)
    assert away.device["weights"] == pytest.approx(outside + layers / 18)


def test_fsdp2_is_planned_as_accelerate_runs_it():
    """Masters, gradients and moments in fp32 on N ranks; two units gathered in bf16, and one of gradients.

    tests/parallel/test_documented_launches.py counts them on two ranks. The head is the largest unit here.
    """
    shipped, pure = (state(engine="fsdp2", gpus=8, master_dtype=name) for name in ("auto", "bfloat16"))
    assert shipped.device["weights"] == pytest.approx(4 * PARAMETERS / 8, rel=1e-6)
    assert shipped.device["optimizer state"] == pytest.approx(8 * PARAMETERS / 8, rel=1e-6)
    assert shipped.gradient_share * 2 * PARAMETERS == pytest.approx(4 * PARAMETERS / 8)
    assert shipped.device["other"] == pure.device["other"] == 3 * 2 * SHAPE.head_parameters
    assert pure.device["weights"] == pytest.approx(2 * PARAMETERS / 8, rel=1e-6) and pure.gradient_share == 1 / 8
    more = sum(shipped.device.values()) - sum(pure.device.values())
    assert more == pytest.approx((2 + 4) * PARAMETERS / 8, rel=1e-6)


def test_frozen_weights_are_not_upcast():
    shape = shape_of("qwen3-8b", lora_rank=32)
    trained = 36 * shape.layer_trainable
    total = 36 * shape.layer_parameters + shape.outside_parameters
    held = training_state(shape, Setup(engine="fsdp2", gpus=4))
    assert held.device["weights"] == pytest.approx((2 * total + 2 * trained) / 4)
    packed = training_state(shape.quantized("nf4"), Setup(engine="fsdp2", gpus=4))
    assert packed.device["optimizer state"] == pytest.approx(held.device["optimizer state"] / 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "in-backward", "engine": "ddp", "gpus": 2}, "optimizer='in-backward' with engine='ddp'.*optimizer='host'"),
        ({"optimizer": "host", "engine": "ddp", "gpus": 2}, "optimizer='host' with engine='ddp'.*zero2"),
        ({"weights": "host", "engine": "zero2", "gpus": 2}, "weights='host' with engine='zero2'.*zero3"),
        ({"master_dtype": "float32"}, "master_dtype='float32' is for engine='fsdp2'"),
    ],
)
def test_what_does_not_go_together(options, words):
    with pytest.raises(ValueError, match=words):
        Setup(**options)
