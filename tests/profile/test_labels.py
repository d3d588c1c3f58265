"""What an allocation is: by its label, and for stock code by its frames and its size. The engine labels what it allocates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import streamgrad
from streamgrad.engine.grad_accumulator import GradAccumulators
from streamgrad.engine.kv_chunk import KeyValueStream
from streamgrad.head.linear_head import LogitMap
from streamgrad.head.token_scores import token_scores
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.ops.memory_label import Listener, current_label, listen, stop_listening
from streamgrad.profile.labels import CATEGORY_OF_LABEL, Sizes, category_of
from streamgrad.profile.timeline import CATEGORIES

T, V, E = 96, 61, 24
SIZES = Sizes.of(torch.bfloat16, tokens=T, vocabulary=V, width=E)


def category(*frames: str, size: int = 7, label: str | None = None) -> str:
    paths = [("/lib/python3/site-packages/" + frame).rsplit(":", 1) for frame in frames]
    return category_of(label, [(file, function) for file, function in paths], size, SIZES)


def test_rules_for_stock_code():
    assert category() == category("torch/autograd/graph.py:_engine_run_backward") == "activations"
    assert category(size=2 * T * V) == category(size=4 * T * V) == "logits" and category(size=8 * T * V) == "activations"
    assert category(size=2 * V * E) == "gradients"
    assert category("transformers/models/x.py:forward", size=2 * V * E) == "activations"
    assert category("user.py:main", "user.py:<module>") == "other"
    # A node of autograd in Python, and a hook: on a GPU in a thread of autograd, on a CPU below `backward`.
    below = ("torch/autograd/graph.py:_engine_run_backward", "user.py:main")
    node, hook = ("user.py:backward", "torch/autograd/function.py:apply"), ("user.py:hook",)
    assert category(*node) == category(*node, *below) == "activations"
    assert category(*hook) == category(*hook, *below) == "other"


def test_a_label_wins_over_frames_and_size():
    for label, expected in CATEGORY_OF_LABEL.items():
        assert expected in CATEGORIES
        assert category("transformers/models/x.py:forward", size=2 * T * V, label=label) == expected
    assert category("transformers/models/x.py:forward", label="a user's own metadata") == "activations"
    assert category("user.py:main", label="") == "other"


def test_a_file_of_this_library_says_nothing():
    """Only labels do, so that code may be renamed and moved."""
    for path in (Path(streamgrad.__file__).parent / "profile").glob("*.py"):
        assert not re.search(r"\b(engine|ops|attention|head)/", path.read_text()), path


def test_every_label_of_the_engine_has_a_category():
    root = Path(streamgrad.__file__).parent
    source = "\n".join(path.read_text() for room in ("engine", "attention", "head") for path in (root / room).rglob("*.py"))
    used = set(re.findall(r'\b(?:memory_label|labelled|relabel)\("([^"]*)"', source))
    assert used >= {"gradients", "kept inputs", "keys and values", "activations", "logits", "hidden states"}
    assert used <= CATEGORY_OF_LABEL.keys()


# --- Single allocations of the engine -------------------------------------------------------------------------------------


class _Labels(LiveBytes, Listener):
    """Notes the label and the bytes of each storage, as last said."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[tuple[str | None, int]] = []
        self._latest: dict[int, int] = {}  # a storage may have the address of one that is gone

    def __enter__(self):
        listen(self)
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        stop_listening(self)

    def _born(self, key, size):
        super()._born(key, size)
        if size:
            self._latest[key] = len(self.labels)
            self.labels.append((current_label(), size))

    def relabelled(self, tensor, label):
        storage = tensor.untyped_storage()
        index = self._latest.setdefault(storage._cdata, len(self.labels))
        self.labels[index : index + 1] = [(label, storage.nbytes())]

    def bytes_of(self, label: str | None) -> list[int]:
        return sorted(size for found, size in self.labels if found == label)


def test_keys_values_and_their_sums():
    """Where the first gradient is not of all keys, the sums start as zeros."""
    keys = torch.randn(2, 1, 2, 4, 8).bfloat16()
    whole = 2 * 12 * 8
    with _Labels() as found:
        stream = KeyValueStream(12)
        stream.write(0, 4, *keys)
        assert found.bytes_of("keys and values") == 2 * [2 * whole]
        stream.deposit(4, 8, *keys)
        assert found.bytes_of("keys and values") == 2 * [2 * whole] + 2 * [4 * whole]
        parts = stream.collect(4, 8)
    assert found.bytes_of("keys and values")[:2] == [part.nbytes for part in parts] and not found.bytes_of(None)


def test_the_first_gradient_of_all_keys_becomes_their_sum():
    stream = KeyValueStream(4, (torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8)))
    with _Labels() as found:
        terms = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8)
        assert found.bytes_of(None) == 2 * [terms[0].nbytes]
        stream.deposit(0, 4, *terms)
    assert found.bytes_of("keys and values") == 2 * [terms[0].nbytes] and not found.bytes_of(None)


def test_sums_of_parameters_are_gradients():
    linear = torch.nn.Linear(8, 3, bias=False).bfloat16()
    accumulators = GradAccumulators(list(linear.parameters()), summed=True)
    hidden = torch.randn(5, 8).bfloat16()
    with _Labels() as found:
        with accumulators.installed_in([linear]):
            linear(hidden).sum().backward()
        assert found.bytes_of("gradients") == [8 * 3 * 4]
        (gradient,) = accumulators.take_gradients()
    assert found.bytes_of("gradients") == [gradient.nbytes, 8 * 3 * 4]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_trainers_logits_are_labelled(smoothing):
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    with _Labels() as found:
        scores = token_scores(
            hidden, weight, torch.randint(50, (12,)), fields=("log_probs", "entropy", "log_sum_sq_probs"), chunk_size=4,
            logit_map=LogitMap.build(softcap=5.0), label_smoothing=smoothing,
        )  # fmt: skip
        (scores["log_probs"].sum() + scores["entropy"].sum()).backward()
    chunk = 4 * 50 * 4
    assert found.bytes_of("logits").count(chunk) >= 6
    assert not any(chunk in found.bytes_of(label) for label in (None, "token scores", "hidden states", "gradients"))
    assert weight.grad.nbytes in found.bytes_of("gradients") and hidden.grad.nbytes in found.bytes_of("hidden states")
