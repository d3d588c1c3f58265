"""Where the peak of a step is and what to change about it, in words."""

from __future__ import annotations

from streamgrad.profile.timeline import Timeline

_WORTH_NAMING = 0.01

# What lowers each category: in a step that is not streamed, and in one that is.
_REMEDIES = {
    "parameters": (_SHARD := "shard them over GPUs (ZeRO-3, FSDP2), or load them in fewer bits and train adapters", _SHARD),
    "gradients": (_FEWER := "train adapters (LoRA), or shard them over GPUs (ZeRO-2, ZeRO-3, FSDP2)", _FEWER),
    "kept inputs": (
        "streamgrad.enable(model, offload='host') keeps layers' inputs in host memory",
        "offload='host' moves them to host memory (on a GPU), and keep='input' keeps the least",
    ),
    "keys and values": (
        "streamgrad.enable(model) holds those of one layer at a time",
        "they grow with the sequence and are there for one layer only: a shorter sequence, or fewer sequences in a batch",
    ),
    "activations": (
        "streamgrad.enable(model) makes them for one chunk of a layer instead of all its tokens",
        "a smaller chunk_size: half as many tokens in a chunk, half as many bytes here",
    ),
    "logits": (
        "streamgrad.enable(model) makes logits for one chunk of tokens at a time",
        "a smaller head_chunk_size: half as many tokens at a time, half as many bytes here",
    ),
    "other": (
        _SHORTER := "hidden states between layers and their gradients are as long as the batch: fewer tokens at a time",
        _SHORTER,
    ),
}


def advice(timeline: Timeline, *, streamed: bool) -> list[str]:
    """Sentences: the peak, what it is made of, what would lower its largest part, and then the largest of the next peak."""
    index, peak = timeline.peak_index, timeline.peak_bytes
    parts = sorted(timeline.at(index).items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {as_bytes(size)} ({size / peak:.0%})" for name, size in parts if size >= _WORTH_NAMING * peak)
    if timeline.unit == "ms":
        moment = f"{timeline.times[index]:,.1f} of {timeline.times[-1]:,.1f} ms"
    else:
        moment = f"operation {timeline.times[index]:,.0f} of {timeline.times[-1]:,.0f}"
    lines = [f"Peak: {as_bytes(peak)} in {timeline.phase(index)} ({moment}): {shares}."]
    rest = timeline
    for next_one in ("", "Then "):
        name = rest.largest_part(rest.peak_index)
        rest = rest.without(name)
        lines.append(
            f"{next_one}{name}: {_REMEDIES[name][streamed]}. With none at all, the peak would be {as_bytes(rest.peak_bytes)}."
        )
    return lines


def as_bytes(count: float) -> str:
    """`1.23 GB`: powers of ten, three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"
