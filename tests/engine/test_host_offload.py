"""Host memory for what layers keep: its buffers, and on a GPU the streams that copy to it and back."""

from __future__ import annotations

import pytest
import torch

import streamgrad
from gradients import assert_same_step, run_step
from streamgrad.engine import host_offload
from streamgrad.engine.host_offload import HostStore, PinnedPool
from streamgrad.engine.kv_chunk import Attended
from streamgrad.engine.saved import SavedOnHost
from tiny import tiny_model, tokens


class Plain(PinnedPool):
    """A pool that pins nothing."""

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


def test_buffers_are_used_again_for_what_is_about_as_large():
    pool = Plain(torch.device("cuda"))
    large = pool.take(1000)
    pool.give_back(large)
    small = pool.take(10)
    assert small is not large and pool.total_bytes == 1010
    assert pool.take(900) is large and pool.total_bytes == 1010


def test_buffers_that_have_become_too_small_are_given_up():
    pool = Plain(torch.device("cuda"))
    pool.give_back(pool.take(1000))
    pool.take(1500)
    assert pool.total_bytes == 1500


class Noting:
    """Stands in for an item on the host, which is there as soon as it is copied back; `started` has the copies so far."""

    started: list[str]

    def __init__(self, store: HostStore, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def copied_back(self) -> Noting:
        self.started.append(NAMES[int(self.tensors[0].flatten()[0])])
        return self

    def taken(self) -> list[torch.Tensor]:
        return self.tensors


# By the first value of an item: those of two layers with two chunks each.
NAMES = ["keys below", "chunk 0 below", "chunk 1 below", "keys above", "chunk 0 above", "chunk 1 above"]
# The copies that have started since the last computation, before each computation of a chunk.
EXPECTED = {
    "attention": [["keys above", "chunk 1 above", "chunk 0 above"], ["keys below", "chunk 1 below"], ["chunk 0 below"], []],
    # Chunk 0 comes first too, for its keys are made again.
    "input": [["chunk 0 above", "chunk 1 above"], ["chunk 0 above"], ["chunk 0 below"], ["chunk 1 below"], ["chunk 0 below"], []],
}


@pytest.mark.parametrize("keep", EXPECTED)
def test_what_a_layer_needs_at_once_arrives_while_the_layer_above_computes(keep, monkeypatch):
    """Nothing is computed between a layer's keys and its last chunk, so both are copied during the layer above."""
    monkeypatch.setattr(host_offload, "_Item", Noting)
    store, layers, before, keeps_attention = HostStore(), [], [], keep == "attention"

    def compute() -> None:
        before.append(Noting.started)
        Noting.started = []

    for keys in (0, 3):
        saved = SavedOnHost(torch.tensor([[[keys + 1], [keys + 2]]]), [(0, 1), (1, 2)], [0], store)
        for chunk in range(2):
            saved.note(chunk, Attended(torch.zeros(1), torch.zeros(1)) if keeps_attention else None)
        saved.finish(None, (torch.tensor([keys]),) * 2 if keeps_attention else ())
        layers.append(saved)
    Noting.started = []
    for saved in reversed(layers):
        reader = saved.reader(None)
        if keeps_attention:
            reader.keys_and_values()
        else:
            reader.inputs(0, 1)
            compute()
        for chunk in (1, 0):
            reader.chunk(chunk)
            compute()
    assert before == EXPECTED[keep]


def test_what_the_last_layer_needs_arrives_while_a_layer_above_runs_backward_that_has_kept_its_graph(monkeypatch):
    monkeypatch.setattr(host_offload, "_Item", Noting)
    store = HostStore()
    saved = SavedOnHost(torch.tensor([[[1], [2]]]), [(0, 1), (1, 2)], [0], store)
    for chunk in range(2):
        saved.note(chunk, Attended(torch.zeros(1), torch.zeros(1)))
    saved.finish(None, (torch.tensor([0]),) * 2)
    Noting.started = []
    outputs = [torch.ones((), requires_grad=True) * 1.0 for _ in range(2)]
    for out in outputs:
        store.bring_back_before(out.grad_fn)
    outputs[1].backward()
    assert Noting.started == [], "that is the layer above the next one"
    outputs[0].backward()
    assert Noting.started == ["keys below", "chunk 1 below"]
    saved.reader(None).keys_and_values()
    assert Noting.started == ["keys below", "chunk 1 below"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestStreams:
    """Copies are held up by a sleep on their stream, so that whatever does not wait for them is seen."""

    LONG = 200_000_000  # cycles, about a tenth of a second

    @pytest.fixture
    def store(self) -> HostStore:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return HostStore()

    def shelf(self, store: HostStore, count: int = 2):
        """Return a shelf with `count` items; all values of item `n` are `n + 1`."""
        shelf = store.shelf()
        for name in range(count):
            shelf.put(name, [torch.full((1 << 20,), name + 1.0, device="cuda")])
        shelf.will_be_got(range(count))
        torch.cuda.synchronize()
        return shelf

    def hold_up_copies_back(self, store: HostStore) -> None:
        with torch.cuda.stream(store.streams(torch.device("cuda", 0))[1]):
            torch.cuda._sleep(self.LONG)

    def test_what_is_got_has_arrived(self, store):
        shelf = self.shelf(store)
        self.hold_up_copies_back(store)
        sums = [shelf.get(name)[0].sum() for name in range(2)]
        assert [value.item() for value in sums] == [1.0 * 2**20, 2.0 * 2**20]

    def test_it_may_be_got_on_another_stream(self, store):
        shelf, other = self.shelf(store), torch.cuda.Stream()
        shelf.get(0)  # and item 1 is on its way, for the stream that is current here
        with torch.cuda.stream(other):
            (tensor,) = shelf.get(1)
            torch.cuda._sleep(self.LONG)
            total = tensor.sum()
            del tensor
        torch.full((1 << 20,), 7.0, device="cuda")  # would take the memory if the other stream were not waited for
        other.synchronize()
        assert total.item() == 2.0 * 2**20

    def test_memory_of_what_nobody_takes_is_not_written_again(self, store):
        shelf = self.shelf(store)
        self.hold_up_copies_back(store)
        shelf.get(0)  # item 1 is on its way
        del shelf
        new = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        assert all((tensor == 7.0).all() for tensor in new)

    def test_memory_that_is_still_in_use_is_not_overwritten_by_what_arrives(self, store):
        shelf = self.shelf(store)
        old = torch.full((1 << 20,), 7.0, device="cuda")
        torch.cuda._sleep(self.LONG)
        total = old.sum()
        del old
        shelf.get(0)
        assert total.item() == 7.0 * 2**20

    @pytest.mark.parametrize("keep", ["input", "attention"])
    def test_a_retained_graph_and_a_backward_that_fails(self, keep):
        model = tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=4).cuda()
        ids = tokens(2, 40).cuda()
        batch = {"input_ids": ids, "labels": ids}

        def twice(model, batch):
            loss = model(**batch).loss
            loss.backward(retain_graph=True)
            return loss

        options = {"attention": "eager", "chunk_size": 16, "keep": keep}  # which adds in the same order each time
        streamgrad.enable(model, offload="none", **options)
        expected = run_step(model, batch, forward=twice)
        streamgrad.disable(model)
        streamgrad.enable(model, offload="host", **options)
        assert_same_step(run_step(model, batch, forward=twice), expected, 0.0)

        def fail(gradient):
            raise ArithmeticError("half way")

        handle = model.model.layers[2].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        with pytest.raises(ArithmeticError, match="half way"):
            model(**batch).loss.backward()
        handle.remove()
        assert_same_step(run_step(model, batch, forward=twice), expected, 0.0)
