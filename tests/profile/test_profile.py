"""`streamgrad profile` puts a byte into one category at every moment, and known tensors into theirs."""

from __future__ import annotations

import pytest
import torch

import streamgrad
from lora import with_lora
from streamgrad.cli.profile_run import CHECKPOINTING, STREAMED, record, record_both
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.ops.memory_label import current_label
from streamgrad.profile import record as recording
from streamgrad.profile.advice import advice, as_bytes
from streamgrad.profile.labels import Sizes, category_of
from streamgrad.profile.record import Recorder
from streamgrad.profile.snapshot import BACKWARD_BEGINS, SnapshotRecorder, recorder_for, relabelling, timeline_of_trace
from streamgrad.profile.timeline import CATEGORIES, Ledger, Timeline
from tiny import tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# No two of these products are equal: sizes tell some tensors apart.
T, CHUNK, E, V, KEYS, LAYERS = 96, 16, 24, 61, 2 * 8, 2
OPTIONS = {"chunk_size": CHUNK, "head_chunk_size": CHUNK, "keep": "input", "offload": "none"}


def model_of(layers: int = LAYERS, dtype: torch.dtype = torch.float32):
    return tiny_model("qwen3", dtype=dtype, num_hidden_layers=layers, use_cache=False)


def timelines_of(layers: int = LAYERS, dtype: torch.dtype = torch.float32, **options) -> dict[str, Timeline]:
    return record_both(model_of(layers, dtype), T, CPU, **(OPTIONS | options))


@pytest.fixture(scope="module")
def both() -> dict[str, Timeline]:
    return timelines_of()


def in_pass(timeline: Timeline, name: str, category: str) -> list[int]:
    """Return the category's bytes at each moment of "forward" or "backward"."""
    values = timeline.parts[category]
    return [values[index] for index in range(len(values)) if timeline.phase(index) == name]


# --- Every byte once ----------------------------------------------------------------------------------------------------------


class _Loud(Recorder):
    """Notes its total after each birth and death, and each as an entry of a GPU's trace."""

    def __init__(self, model, sizes):
        self.log, self.trace = {}, []
        super().__init__(model, sizes)

    def _born(self, key, size):
        super()._born(key, size)
        if size:
            frames = [{"filename": file, "name": name, "line": 1} for file, name in self.frames]
            self._note("alloc", key, size, frames, current_label() or "")

    def _die(self, key, size):
        super()._die(key, size)
        if size:
            self._note("free_requested", key, size)
            self._note("free_completed", key, size)

    def backward_begins(self):
        super().backward_begins()
        self._note("alloc", 1, 0, label=BACKWARD_BEGINS)
        self._note("free_completed", 1, 0)

    def relabelled(self, tensor, label):
        super().relabelled(tensor, label)
        self._note("alloc", 1, 0, label=relabelling(label, tensor.untyped_storage()._cdata))
        self.trace[-1]["time_us"] = self.trace[-2]["time_us"]  # no moment of its own

    def _note(self, action, key, size, frames=(), label=""):
        self.log[self._operation] = max(self.log.get(self._operation, 0), self.live_bytes)
        entry = {"action": action, "addr": key, "size": size, "stream": 0, "time_us": 1000 * self._operation}
        self.trace.append(entry | {"frames": frames, "user_metadata": label})


def as_in_gpu_threads(frames):
    """Return the frames that a thread of autograd has, in which backward runs on a GPU: without the caller of `backward`."""
    entered = [index for index, (_, function) in enumerate(frames) if function == "_engine_run_backward"]
    return frames[: entered[-1]] if entered else frames


def recorded_loudly(how: str, monkeypatch):
    def listening(label, frames, size, sizes):
        recorder.frames = as_in_gpu_threads(frames)
        return category_of(label, frames, size, sizes)

    monkeypatch.setattr(recording, "category_of", listening)
    model = model_of()
    ids = torch.randint(V, (1, T))
    if how == STREAMED:
        streamgrad.enable(model, **OPTIONS)
    else:
        model.gradient_checkpointing_enable()
    sizes = Sizes.of(torch.float32, tokens=T, vocabulary=V, width=E)
    with _Loud(model, sizes) as recorder:
        loss = model(input_ids=ids, labels=ids).loss
        recorder.backward_begins()
        loss.backward()
    return model, recorder, sizes


@pytest.mark.parametrize("how", [CHECKPOINTING, STREAMED])
def test_categories_sum_to_what_is_alive_at_every_moment(how, monkeypatch):
    model, recorder, _ = recorded_loudly(how, monkeypatch)
    timeline = recorder.timeline()
    standing = timeline.totals[0]
    assert standing == sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    found = dict(zip(timeline.times[1:-1], timeline.totals[1:-1], strict=True))
    assert found == {operation: standing + live for operation, live in recorder.log.items()} and len(found) > 100
    assert timeline.totals[-1] == standing + recorder.live_bytes
    assert all(value >= 0 for values in timeline.parts.values() for value in values)


def test_the_peak_is_that_of_the_live_bytes_counter(both):
    model, ids = model_of(), torch.randint(V, (1, T))
    streamgrad.enable(model, **OPTIONS)
    model(input_ids=ids, labels=ids).loss.backward()  # in which layers are tried
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        model(input_ids=ids, labels=ids).loss.backward()
    assert both[STREAMED].peak_bytes - both[STREAMED].totals[0] == live.peak_bytes


# --- Known tensors are in their category --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_and_gradients(dtype):
    model = model_of(dtype=dtype)
    weights = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    for timeline in record_both(model, T, CPU, **OPTIONS).values():
        assert set(timeline.parts["parameters"]) == {weights + buffers}
        assert timeline.parts["gradients"][0] == 0 and timeline.parts["gradients"][-1] == weights
    assert all(p.grad is None for p in model.parameters()) and not streamgrad.is_enabled(model)
    assert not model.is_gradient_checkpointing


def test_sums_of_gradients_are_gradients():
    """They are fp32: the head's, which forward makes, and a layer's, beside what becomes of them in 16 bits."""
    model = model_of(dtype=torch.bfloat16)
    timeline = record_both(model, T, CPU, **OPTIONS)[STREAMED]
    assert in_pass(timeline, "forward", "gradients")[-1] == V * E * 4
    layer = list(model.model.layers[0].parameters())
    sums = 4 * sum(p.numel() for p in layer if p.ndim == 2)
    assert max(timeline.parts["gradients"]) >= timeline.parts["gradients"][-1] - sum(p.nbytes for p in layer) + sums


def test_gradients_that_were_there_before_are_counted_once():
    model = model_of()
    ids = torch.randint(V, (1, T))
    streamgrad.enable(model, **OPTIONS)
    model(input_ids=ids, labels=ids).loss.backward()
    with recorder_for(model, tokens=T) as recorder:
        loss = model(input_ids=ids, labels=ids).loss
        recorder.backward_begins()
        loss.backward()
    gradients = recorder.timeline().parts["gradients"]
    assert gradients[0] == gradients[-1] == sum(p.grad.nbytes for p in model.parameters())


def test_adapters_are_what_is_trained():
    """LoRA: gradients of the adapters alone, and none of the head's."""
    model = with_lora(model_of())
    timeline = record(model, torch.randint(V, (1, T)))
    assert timeline.parts["gradients"][-1] == sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert timeline.parts["parameters"][0] == sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


def test_a_layer_more_keeps_one_input_more(both):
    """Exactly its input; streamed also, of each chunk, at most a token of its output and a norm, by which re-runs are checked."""
    deeper = timelines_of(LAYERS + 2)
    for name, timeline in both.items():
        kept, kept_deeper = (max(in_pass(each, "backward", "kept inputs")) for each in (timeline, deeper[name]))
        checks = (kept_deeper - kept) / 2 - T * E * 4
        assert checks == 0 if name == CHECKPOINTING else 0 <= checks <= T // CHUNK * (E + 1) * 4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keys_and_values_are_one_layers(attention):
    """Two tensors of the whole sequence in forward, and their gradients beside them in backward, whatever kernel makes them."""
    timeline = timelines_of(attention=attention)[STREAMED]
    one = T * KEYS * 4
    assert max(in_pass(timeline, "forward", "keys and values")) == 2 * one
    assert max(in_pass(timeline, "backward", "keys and values")) == 4 * one
    assert timeline.parts["keys and values"][-1] == 0


def test_kept_keys_and_values_are_every_layers():
    timeline = timelines_of(keep="attention")[STREAMED]
    assert in_pass(timeline, "forward", "keys and values")[-1] == LAYERS * 2 * T * KEYS * 4


def test_logits_are_all_or_a_chunk(both):
    plain, streamed = (max(both[name].parts["logits"]) for name in (CHECKPOINTING, STREAMED))
    assert plain % (T * V * 4) == 0 and plain >= 2 * T * V * 4
    assert CHUNK * V * 4 <= streamed <= 3 * CHUNK * V * 4 + 1024
    assert set(in_pass(both[STREAMED], "backward", "logits")) == {0}


def test_activations_are_of_a_layer_or_of_a_chunk(both):
    """Beside the tensors of the whole sequence around the layers, which do not shrink."""
    plain, streamed = (max(both[name].parts["activations"]) for name in (CHECKPOINTING, STREAMED))
    smaller = max(timelines_of(chunk_size=CHUNK // 2)[STREAMED].parts["activations"])
    assert smaller < streamed < plain / 3


def test_hidden_states_between_layers_are_other(both):
    assert max(in_pass(both[STREAMED], "backward", "other")) >= T * E * 4
    assert both[STREAMED].parts["other"][-1] == 0


# --- A GPU's trace ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [CHECKPOINTING, STREAMED])
def test_a_trace_gives_the_same_timeline(how, monkeypatch):
    """The step as a GPU's allocator would have told it, with the frames that autograd's threads have there."""
    model, recorder, sizes = recorded_loudly(how, monkeypatch)
    expected = recorder.timeline()
    gradients = [p.grad.untyped_storage()._cdata for p in model.parameters()]
    found = timeline_of_trace(recorder.trace, standing={"parameters": expected.totals[0]}, gradients=gradients, sizes=sizes)
    first = recorder.trace[0]["time_us"] / 1000
    assert [time + first for time in found.times[1:]] == list(expected.times[1:])
    assert {name: values[1:] for name, values in found.parts.items()} == {n: v[1:] for n, v in expected.parts.items()}
    assert found.backward_at + first == expected.backward_at and found.unit == "ms"


def test_what_was_there_before_may_be_freed():
    events = [("alloc", 1, 100), ("free_requested", 9, 30), ("free_completed", 9, 30), ("mark", 2, 1), ("free_completed", 2, 1)]
    trace = [
        {"action": "alloc" if action == "mark" else action, "addr": address, "size": size, "time_us": 10 * place,
         "frames": [{"filename": "/a.py", "name": "f"}], "user_metadata": BACKWARD_BEGINS if action == "mark" else ""}
        for place, (action, address, size) in enumerate(events)
    ]  # fmt: skip
    sizes = Sizes.of(torch.float32, tokens=3, vocabulary=5, width=7)
    timeline = timeline_of_trace(trace, standing={"parameters": 50, "other": 40}, gradients=[], sizes=sizes)
    assert timeline.totals[-1] == 50 + 40 + 100 - 30 and timeline.parts["kept inputs"][-1] == 100
    with pytest.raises(ValueError, match=r"recorder.backward_begins\(\)"):
        timeline_of_trace(trace[:3], standing={}, gradients=[], sizes=sizes)


def test_labels_become_the_allocators_metadata(monkeypatch):
    """Replace the functions of torch.cuda that a recorder calls, so that a CPU is enough."""
    told: list[str] = []
    for name in ("synchronize", "memory._record_memory_history"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *args, **kwargs: None)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 0)
    monkeypatch.setattr("torch.cuda.memory._snapshot", lambda device: {"device_traces": [told]})
    monkeypatch.setattr("torch.cuda.memory._set_memory_metadata", told.append)
    model, ids = model_of(), torch.randint(V, (1, T))
    streamgrad.enable(model, **OPTIONS)
    with SnapshotRecorder(model, Sizes.of_model(model, T), torch.device("cpu", 0)) as recorder:
        loss = model(input_ids=ids, labels=ids).loss
        assert told[-1] == ""  # every label has been left
        recorder.backward_begins()
        loss.backward()
    count = len(told)
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(told) == count and told[-1] == "" and recorder._trace is told
    forward, backward = told[: told.index(BACKWARD_BEGINS)], told[told.index(BACKWARD_BEGINS) :]
    assert set(forward) == {"", "activations", "keys and values", "hidden states", "logits", "gradients"}
    assert set(forward) - {"logits"} < set(backward)


@pytest.mark.gpu
@needs_cuda
def test_keys_and_values_on_a_gpu():
    """Forward runs in the caller's thread and backward in one of autograd's; labels reach the allocator from both."""
    timeline = record_both(model_of().to(CUDA), T, CUDA, **(OPTIONS | {"attention": "eager"}))[STREAMED]
    one = T * KEYS * 4
    assert max(in_pass(timeline, "forward", "keys and values")) == 2 * one
    assert max(in_pass(timeline, "backward", "keys and values")) == 4 * one
    assert timeline.parts["keys and values"][-1] == 0


@pytest.mark.gpu
@needs_cuda
def test_what_comes_back_from_the_host_is_a_kept_input():
    """Every chunk of every layer comes back, and all but the last once before, to make keys that later chunks see."""
    model = streamgrad.enable(model_of().to(CUDA), **(OPTIONS | {"offload": "host"}))
    ids = torch.zeros(1, T, dtype=torch.long, device=CUDA)
    loss = model(input_ids=ids, labels=ids).loss
    with recorder_for(model, T) as recorder:
        loss.backward()
    brought = [e["size"] for e in recorder._trace if e["action"] == "alloc" and e.get("user_metadata") == "kept inputs"]
    assert brought == [CHUNK * E * 4] * (LAYERS * (2 * T // CHUNK - 1))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("how", [CHECKPOINTING, STREAMED])
def test_the_allocators_own_peak(how):
    model = tiny_model("qwen3", dtype=torch.bfloat16, hidden_size=256, intermediate_size=1024, vocab_size=5000).to(CUDA)
    ids = torch.randint(5000, (1, 8192), device=CUDA)
    if how == STREAMED:
        streamgrad.enable(model, chunk_size=1024, head_chunk_size=1024, keep="input", offload="none")
    else:
        model.gradient_checkpointing_enable()
    timeline = record(model, ids)
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=ids, labels=ids).loss.backward()
    # The allocator rounds each allocation up to 512 bytes.
    assert timeline.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.01)
    assert timeline.parts["gradients"][-1] == pytest.approx(sum(p.grad.nbytes for p in model.parameters()), rel=0.01)
    logits, all_logits = max(timeline.parts["logits"]), 8192 * 5000 * 2
    assert logits >= 2 * all_logits if how == CHECKPOINTING else 0 < logits < all_logits
    assert (max(timeline.parts["keys and values"]) > 0) == (how == STREAMED)


# --- Timelines and words ------------------------------------------------------------------------------------------------------


def timeline_with(**parts: tuple[int, ...]) -> Timeline:
    parts = {name.replace("_", " "): values for name, values in parts.items()}
    count = len(next(iter(parts.values())))
    full = {name: parts.get(name, (0,) * count) for name in CATEGORIES}
    return Timeline("operations", tuple(range(count)), full, count / 2)


def test_a_thinned_timeline_keeps_the_peak_and_the_end(both):
    for timeline in both.values():
        thin = timeline.thinned(20)
        assert len(thin.times) <= 21 and thin.peak_bytes == timeline.peak_bytes
        assert thin.at(thin.peak_index) == timeline.at(timeline.peak_index)
        assert thin.times[-1] == timeline.times[-1] and thin.at(-1) == timeline.at(-1)


def test_what_dies_in_forward_is_not_kept():
    ledger = Ledger()
    ledger.born(0, 5, "other")
    ledger.step_begins()
    dies, stays, logits = (ledger.born(time, 10**time, category) for time, category in
                           ((1, "activations"), (2, "activations"), (3, "logits")))  # fmt: skip
    ledger.died(4, dies)
    ledger.backward_begins(4)
    for number in (stays, logits):
        ledger.died(5, number)
    timeline = ledger.timeline("operations")
    assert timeline.times == (0, 1, 2, 3, 4, 5, 5) and timeline.parts["activations"] == (0, 10, 10, 10, 0, 0, 0)
    assert max(timeline.parts["kept inputs"]) == 100 and max(timeline.parts["logits"]) == 1000
    assert timeline.parts["other"] == (5,) * len(timeline.times) and timeline.totals[-1] == 5


def test_words_say_where_the_peak_is_and_what_the_next_one_would_be():
    timeline = timeline_with(logits=(0, 7000, 0, 0), activations=(0, 0, 5000, 0), parameters=(1000, 1000, 1000, 1000))
    peak, first, second = advice(timeline, streamed=False)
    assert peak == "Peak: 8 KB in forward (operation 1 of 3): logits 7 KB (88%), parameters 1 KB (12%)."
    assert first.startswith("To lower logits: streamgrad.enable(model)") and "the peak would be 6 KB" in first
    assert second.startswith("Then activations: streamgrad.enable(model)") and "the peak would be 1 KB" in second
    assert "head_chunk_size" in advice(timeline, streamed=True)[1] and "chunk_size" in advice(timeline, streamed=True)[2]


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("streamed", [False, True])
def test_every_category_has_a_remedy(category, streamed):
    assert f"To lower {category}: " in advice(timeline_with(**{category.replace(" ", "_"): (0, 9)}), streamed=streamed)[1]


def test_bytes_in_words():
    assert [as_bytes(n) for n in (0, 999, 1500, 48_700_000, 1.234e9, 12_345e9)] == [
        "0 B", "999 B", "1.5 KB", "48.7 MB", "1.23 GB", "12,345 GB",
    ]  # fmt: skip
