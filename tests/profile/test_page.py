"""`streamgrad profile` as a command: it writes picture, page and JSON, and the page works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from families import small_model
from streamgrad.cli.app import app
from streamgrad.cli.profile_run import CHECKPOINTING, STREAMED
from streamgrad.profile.advice import as_bytes
from streamgrad.profile.timeline import CATEGORIES, Timeline
from streamgrad.profile.timeline_picture import write_page

# --- The command --------------------------------------------------------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(app, ["profile", "--device", "cpu", *arguments], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Run the command once, on a short sequence."""
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


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_directory_is_profiled(family, tmp_path):
    """A hybrid's, too."""
    small_model(family).config.save_pretrained(tmp_path / "tiny")
    result = run("--model", str(tmp_path / "tiny"), "--seq-len", "64", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0 and result.output.count("Peak: ") == 2, result.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "qwen9"], "model='qwen9' is neither a directory that exists nor a preset"),
        (["--layers", "2"], "--layers is for --model with a preset"),
        (["--device", "tpu"], "--device.*tpu"),
        (["--keep", "some"], "keep.*'some'"),
    ],
)
def test_wrong_options_say_so(arguments, reason, tmp_path):
    result = run("--seq-len", "16", "--out", str(tmp_path), *arguments)
    assert result.exit_code == 1 and isinstance(result.exception, ValueError) and re.search(reason, str(result.exception))


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
    """Return what `VISIT` saw in a browser."""
    path = tmp_path / "visited.html"
    path.write_text(page.replace("<title>", WATCH + "<title>", 1).replace("</body>", VISIT + "</body>", 1))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}",
         "--window-size=1400,900", "--virtual-time-budget=5000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=900, check=True,
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


def test_words_and_titles_are_text_and_not_markup(tmp_path):
    timeline = Timeline("operations", (0, 1), dict.fromkeys(CATEGORIES, (0, 9)), 1)
    words = {name: ["</script><b>bold</b>"] for name in (CHECKPOINTING, STREAMED)}
    write_page(dict.fromkeys(words, timeline), "a <b> title", words, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "</script><b>" not in page and "a &lt;b&gt; title" in page
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    assert json.loads(data[1])["runs"][0]["words"] == words[CHECKPOINTING]
