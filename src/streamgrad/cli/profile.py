"""`streamgrad profile`: options and words. The steps are in `profile_run`, the recording in `streamgrad.profile`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from streamgrad.cli.outputs import writable_folder

_CHUNKS = 8
_JSON_POINTS = 400


def profile(
    model: Annotated[str, typer.Option(help="A preset (qwen3-0.6b), a directory with a config.json, or tiny.")] = "tiny",
    layers: Annotated[int | None, typer.Option(min=1, help="Run only the model's first layers.", show_default="all")] = None,
    seq_len: Annotated[int, typer.Option(min=2, max=1 << 20, help="Tokens of the one sequence.")] = 2048,
    chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a chunk, for layers and head.", show_default="an eighth of the sequence")
    ] = None,
    keep: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "input",
    offload: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "none",
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="cuda if there is one, else cpu")] = None,
    out: Annotated[Path, typer.Option(help="Where profile.png and profile.html go.", callback=writable_folder)] = Path(
        "out/profile"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print timelines and words as JSON instead of the words.")] = False,
) -> None:
    """Show where the memory of a training step goes, with gradient checkpointing and with streaming.

    Writes a picture of the bytes over the step and a page with hover and zoom, and says where the peak is and how to lower it.
    Bytes come from torch's allocator on a GPU and are counted on a CPU. Exits with 0.

    **Examples**

    `python -m streamgrad profile`

    `python -m streamgrad profile --model qwen3-4b --layers 8 --seq-len 16384 --chunk-size 2048 --out out/qwen3`
    """
    import matplotlib  # noqa: F401  (missing, it is found before the steps and not after them)

    # Here, so that `--help` need not wait for them.
    with Console(stderr=True).status("Loading torch and transformers ..."):
        from streamgrad.cli.chosen_device import chosen_device
        from streamgrad.cli.profile_run import STREAMED, profiled_model, record_both
        from streamgrad.profile.advice import advice
        from streamgrad.profile.timeline_picture import draw, write_page

    target = chosen_device(device)
    subject = profiled_model(model, layers, target)
    chunk = chunk_size or math.ceil(seq_len / _CHUNKS)
    console = Console(stderr=as_json)
    with console.status("Recording two steps ..."):
        timelines = record_both(subject, seq_len, target, chunk_size=chunk, head_chunk_size=chunk, keep=keep, offload=offload)
    words = {name: advice(timeline, streamed=name == STREAMED) for name, timeline in timelines.items()}
    dtype = str(subject.dtype).removeprefix("torch.")
    count = subject.config.get_text_config().num_hidden_layers
    name = "tiny Qwen3-shaped model" if model == "tiny" else f"{model}, {count} layer{'s' if count > 1 else ''}"
    title = f"One training step: {name}, {dtype}, {seq_len:,} tokens, chunks of {min(chunk, seq_len):,}, {target.type}"
    draw(timelines, title, out / "profile.png")
    write_page(timelines, title, words, out / "profile.html")
    if as_json:
        runs = {name: timeline.thinned(_JSON_POINTS).to_dict() | {"words": words[name]} for name, timeline in timelines.items()}
        files = {"png": str(out / "profile.png"), "html": str(out / "profile.html")}
        typer.echo(json.dumps({"title": title, "files": files, "runs": runs}, indent=2))
        return
    console.print(title, soft_wrap=True)
    for name, lines in words.items():
        console.print(f"\n[bold]{name}[/bold]")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)
    console.print(f"\nPicture: {out / 'profile.png'}\nPage: {out / 'profile.html'}", soft_wrap=True)
