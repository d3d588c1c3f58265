"""`streamgrad profile`: a byte is in one category at every moment, known tensors are in theirs, the page works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import torch
from typer.testing import CliRunner

import streamgrad
from lora import with_lora
from streamgrad.cli.app import app
from streamgrad.cli.profile_run import CHECKPOINTING, STREAMED, record, record_both
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.profile import record as recording
from streamgrad.profile.advice import advice, as_bytes
from streamgrad.profile.labels import Sizes, category_of
from streamgrad.profile.record import Recorder
from streamgrad.profile.snapshot import recorder_for, timeline_of_trace
from streamgrad.profile.timeline import CATEGORIES, Ledger, Timeline
from streamgrad.profile.timeline_picture import write_page
from tiny import tiny_model

CPU = torch.device("cpu")
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
    """The category's bytes at each moment of "forward" or "backward"."""
    values = timeline.parts[category]
    return [values[index] for index in range(len(values)) if timeline.phase(index) == name]


# --- Every byte once ----------------------------------------------------------------------------------------------------------


class _Loud(Recorder):
    """Also notes its total after each birth and death, and each as an entry of a GPU's trace."""

    def __init__(self, model, sizes):
        self.log, self.trace = {}, []
        super().__init__(model, sizes)

    def _born(self, key, size):
        super()._born(key, size)
        if size:
            self._note("alloc", key, size, [{"filename": file, "name": name, "line": 1} for file, name in self.frames])

    def _die(self, key, size):
        super()._die(key, size)
        if size:
            self._note("free_requested", key, size, [])
            self._note("free_completed", key, size, [])

    def backward_begins(self):
        super().backward_begins()
        mark = [{"filename": "/x/streamgrad/profile/snapshot.py", "name": "backward_begins", "line": 1}]
        self._note("alloc", 1, 0, mark)
        self._note("free_completed", 1, 0, [])

    def _note(self, action, key, size, frames):
        self.log[self._operation] = max(self.log.get(self._operation, 0), self.live_bytes)
        entry = {"action": action, "addr": key, "size": size, "stream": 0, "time_us": 1000 * self._operation, "frames": frames}
        self.trace.append(entry)


def as_in_gpu_threads(frames):
    """Backward on a GPU runs in a thread of autograd: what called `loss.backward()` is not in its stack."""
    entered = [index for index, (_, function) in enumerate(frames) if function == "_engine_run_backward"]
    return frames[: entered[-1]] if entered else frames


def recorded_loudly(how: str, monkeypatch):
    def listening(frames, size, sizes):
        recorder.frames = as_in_gpu_threads(frames)
        return category_of(frames, size, sizes)

    monkeypatch.setattr(recording, "category_of", listening)
    model = model_of()
    ids = torch.randint(V, (1, T))
    if how == STREAMED:
        streamgrad.enable(model, **OPTIONS)
    else:
        model.gradient_checkpointing_enable()
    sizes = Sizes.of(torch.float32, tokens=T, vocabulary=V, width=E, key_width=KEYS)
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
    """Exactly its input; streamed also, of each chunk, at most one token of its output, by which re-runs are checked."""
    deeper = timelines_of(LAYERS + 2)
    for name, timeline in both.items():
        kept, kept_deeper = (max(in_pass(each, "backward", "kept inputs")) for each in (timeline, deeper[name]))
        checks = (kept_deeper - kept) / 2 - T * E * 4
        assert checks == 0 if name == CHECKPOINTING else 0 <= checks <= T // CHUNK * E * 4


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


def test_every_rule_by_name():
    sizes = Sizes.of(torch.bfloat16, tokens=T, vocabulary=V, width=E, key_width=KEYS)

    def named(*frames: str, size: int = 7) -> str:
        paths = [("/lib/python3/site-packages/" + frame).rsplit(":", 1) for frame in frames]
        return category_of([(file, function) for file, function in paths], size, sizes)

    layer = "streamgrad/core/layer.py:backward"
    assert named() == named("torch/autograd/graph.py:_engine_run_backward") == "activations"
    assert named(size=2 * T * V) == named(size=4 * T * V) == "logits" and named(size=8 * T * V) == "activations"
    assert named(size=2 * V * E) == "gradients"
    assert named("transformers/models/x.py:forward", size=2 * V * E) == "activations"
    assert named("user.py:main", "user.py:<module>") == "other"
    assert named(layer) == named("streamgrad/core/layer.py:_forward", layer) == "other"
    assert named("torch/autograd/graph.py:_engine_run_backward", layer) == "activations"
    assert named("streamgrad/core/storage.py:copied_back", "streamgrad/core/kept.py:chunk", layer) == "kept inputs"
    assert named("streamgrad/core/sums.py:zeros_for_sum", "streamgrad/core/chunk.py:deposit", layer) == "keys and values"
    assert named("streamgrad/core/sums.py:zeros_for_sum", "streamgrad/core/accumulators.py:backward", layer) == "gradients"
    assert named("streamgrad/core/accumulators.py:backward", layer) == "activations"
    flash = ("streamgrad/attention/backends/flash.py:backward", layer)
    assert named(*flash, size=2 * T * KEYS) == "keys and values" and named(*flash) == "activations"


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
    mark = [{"filename": "/x/profile/snapshot.py", "name": "backward_begins"}]
    trace = [
        {"action": "alloc" if action == "mark" else action, "addr": address, "size": size, "time_us": 10 * place,
         "frames": mark if action == "mark" else [{"filename": "/a.py", "name": "f"}]}
        for place, (action, address, size) in enumerate(events)
    ]  # fmt: skip
    sizes = Sizes.of(torch.float32, tokens=3, vocabulary=5, width=7, key_width=11)
    timeline = timeline_of_trace(trace, standing={"parameters": 50, "other": 40}, gradients=[], sizes=sizes)
    assert timeline.totals[-1] == 50 + 40 + 100 - 30 and timeline.parts["kept inputs"][-1] == 100
    with pytest.raises(ValueError, match=r"recorder.backward_begins\(\)"):
        timeline_of_trace(trace[:3], standing={}, gradients=[], sizes=sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", [CHECKPOINTING, STREAMED])
def test_the_allocators_own_peak(how):
    device = torch.device("cuda")
    model = tiny_model("qwen3", dtype=torch.bfloat16, hidden_size=256, intermediate_size=1024, vocab_size=5000).to(device)
    ids = torch.randint(5000, (1, 8192), device=device)
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


# --- The command --------------------------------------------------------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(app, ["profile", "--device", "cpu", *arguments], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The command once, on a short sequence."""
    out = tmp_path_factory.mktemp("profile") / "new"
    result = run("--seq-len", "256", "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout)


def test_the_command_writes_picture_page_and_json(written):
    out, found = written
    assert (out / "profile.png").read_bytes().startswith(b"\x89PNG") and (out / "profile.png").stat().st_size > 20_000
    checkpointing, streamed = found["runs"][CHECKPOINTING], found["runs"][STREAMED]
    assert streamed["peak"]["bytes"] < checkpointing["peak"]["bytes"]
    for each in (checkpointing, streamed):
        assert sum(each["peak"]["parts"].values()) == each["peak"]["bytes"]
        assert set(each["parts"]) == set(CATEGORIES) and each["words"][0].startswith("Peak: ")
        assert max(map(sum, zip(*each["parts"].values(), strict=True))) == each["peak"]["bytes"]


def test_the_command_in_words(tmp_path):
    result = run("--seq-len", "64", "--chunk-size", "100", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.output.count("Peak: ") == 2 and "chunks of 64" in result.output and "profile.html" in result.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "qwen9"], "--model qwen9 is not a preset"),
        (["--layers", "2"], "--layers is for presets"),
        (["--device", "tpu"], "--device tpu will not do"),
        (["--keep", "some"], "keep='some' is not a choice"),
    ],
)
def test_wrong_options_say_so(arguments, reason, tmp_path):
    result = run("--seq-len", "16", "--out", str(tmp_path), *arguments)
    assert result.exit_code == 1 and isinstance(result.exception, ValueError) and reason in str(result.exception)


# --- The page -----------------------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)")

# What a visitor does, as events, and what comes of it, as JSON in the page.
VISIT = """
<script>
{
  const seen = {}, svgs = [...document.querySelectorAll("svg")], buttons = [...document.querySelectorAll("#legend button")];
  const areas = () => [...document.querySelectorAll("path[data-category]")];
  const at = (svg, share) => { const box = svg.getBoundingClientRect();
    return { clientX: box.left + share * box.width, clientY: box.top + box.height / 2, bubbles: true, cancelable: true }; };
  const headings = () => [...document.querySelectorAll("h2")].map(node => node.textContent);
  seen.headings = headings();
  seen.areas = areas().map(node => node.dataset.category);
  seen.tallest = svgs.map(svg => Math.max(...[...svg.querySelectorAll("path[data-category]")].map(p => p.getBBox().height)));
  seen.legend = buttons.map(button => button.textContent);
  svgs[0].dispatchEvent(new PointerEvent("pointermove", at(svgs[0], 0.5)));
  seen.tip = document.getElementById("tip").innerText;
  const before = areas()[0].getAttribute("d"), view = () => panels.map(panel => panel.view);
  seen.whole = view();
  svgs[0].dispatchEvent(new WheelEvent("wheel", { ...at(svgs[0], 0.5), deltaY: -100 }));
  seen.zoomed = view();
  svgs[0].dispatchEvent(new PointerEvent("pointerdown", at(svgs[0], 0.5)));
  svgs[0].dispatchEvent(new PointerEvent("pointermove", at(svgs[0], 0.6)));
  dispatchEvent(new PointerEvent("pointerup"));
  seen.dragged = view();
  svgs[0].dispatchEvent(new MouseEvent("dblclick", at(svgs[0], 0.5)));
  seen.restored = areas()[0].getAttribute("d") === before;
  buttons.find(button => button.textContent === "logits").click();
  seen.without = [areas().map(node => node.dataset.category), headings()];
  buttons.find(button => button.textContent === "logits").click();
  seen.again = areas().length;
  setTimeout(() => {
    seen.fetched = performance.getEntriesByType("resource").map(entry => entry.name);
    seen.failures = failures;
    document.body.innerHTML = "<pre id=seen></pre>";
    document.getElementById("seen").textContent = JSON.stringify(seen);
  }, 200);
}
</script>
"""
WATCH = """<script>
const failures = [];
addEventListener("error", event => failures.push(String(event.message)));
document.addEventListener("securitypolicyviolation", event => failures.push(event.blockedURI));
</script>"""


def visit(page: str, tmp_path) -> dict:
    """What `VISIT` saw in a browser."""
    path = tmp_path / "visited.html"
    path.write_text(page.replace("<title>", WATCH + "<title>", 1).replace("</body>", VISIT + "</body>", 1))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}",
         "--window-size=1400,900", "--virtual-time-budget=5000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    match = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert match, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(match[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


def test_the_page_names_nothing_outside_of_itself(written):
    page = (written[0] / "profile.html").read_text()
    assert set(re.findall(r"https?://[^\s\"'<]*", page)) == {"http://www.w3.org/2000/svg"}  # a namespace
    assert not re.search(r"(?i)\b(src|href)\s*=|@import|\bfetch\(|XMLHttpRequest|WebSocket|url\((?!#)", page)
    assert "default-src 'none'" in page


@needs_chromium
def test_the_page_in_a_browser(written, tmp_path):
    out, found = written
    seen = visit((out / "profile.html").read_text(), tmp_path)
    assert seen["failures"] == [] and seen["fetched"] == []
    assert seen["legend"] == list(CATEGORIES) and seen["areas"] == 2 * list(CATEGORIES)
    assert [heading.split(":")[0] for heading in seen["headings"]] == [CHECKPOINTING, STREAMED]
    assert all(f"peak {as_bytes(found['runs'][h.split(':')[0]]['peak']['bytes'])}" in h for h in seen["headings"])
    assert min(seen["tallest"]) > 20  # pixels of the drawing
    assert all(name in seen["tip"] for name in CATEGORIES) and re.search(r"operation [\d,]+: [\d.]+ MB", seen["tip"])
    (start, end), other = seen["whole"]
    zoomed, dragged = seen["zoomed"][0], seen["dragged"][0]
    assert start < zoomed[0] < zoomed[1] < end and seen["zoomed"][1] == other
    assert dragged[0] < zoomed[0] and dragged[1] - dragged[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert seen["restored"]
    areas, headings = seen["without"]
    assert areas == 2 * [name for name in CATEGORIES if name != "logits"] and headings[0] != seen["headings"][0]
    assert seen["again"] == 2 * len(CATEGORIES)


@needs_chromium
def test_the_browser_refuses_to_fetch_for_the_page(written, tmp_path):
    """And the test above would see it."""
    page = (written[0] / "profile.html").read_text()
    seen = visit(page.replace("</body>", '<img src="http://127.0.0.1:9/x.png"></body>'), tmp_path)
    assert seen["failures"] == ["http://127.0.0.1:9/x.png"]


def test_words_and_titles_are_text_and_not_markup(tmp_path, both):
    words = {name: ["</script><b>bold</b>"] for name in both}
    write_page(both, "a <b> title", words, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "</script><b>" not in page and "a &lt;b&gt; title" in page
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    assert json.loads(data[1])["runs"][0]["words"] == words[CHECKPOINTING]
