"""Where the peak of a step is and what to change about it, in words."""

from __future__ import annotations

from streamgrad.profile.timeline import Timeline

_WORTH_NAMING = 0.01

# What lowers each category.
_REMEDIES = {
    "parameters": "shard them over GPUs (ZeRO-3, FSDP2), or load them in fewer bits and train adapters",
    "gradients": "train adapters (LoRA), or shard them over GPUs (ZeRO-2, ZeRO-3, FSDP2)",
    "kept inputs": "offload='host' moves them to host memory (on a GPU); they are the least that a layer can keep",
    "keys and values": "they are there for one layer at a time and grow with the sequence; keep='input' keeps none of them",
    "activations": "a smaller chunk_size; they shrink with the chunk",
    "logits": "a smaller head_chunk_size; they shrink with it",
    "other": "hidden states between layers and their gradients are as long as the batch: fewer tokens at a time",
}
# The same for a step that is not streamed, where it differs.
_WITHOUT_STREAMING = {
    "kept inputs": "streamgrad.enable(model, offload='host') keeps them in host memory (on a GPU)",
    "activations": "streamgrad.enable(model) makes them for one chunk of a layer instead of all its tokens",
    "logits": "streamgrad.enable(model) makes them for one chunk of tokens at a time",
}


def advice(timeline: Timeline, *, streamed: bool) -> list[str]:
    """Return sentences about the peak: what it is made of, what would lower its largest part, and what then comes next."""
    index, peak = timeline.peak_index, timeline.peak_bytes
    parts = sorted(timeline.at(index).items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {as_bytes(size)} ({size / peak:.0%})" for name, size in parts if size >= _WORTH_NAMING * peak)
    if timeline.unit == "ms":
        moment = f"{timeline.times[index]:,.1f} of {timeline.times[-1]:,.1f} ms"
    else:
        moment = f"operation {timeline.times[index]:,.0f} of {timeline.times[-1]:,.0f}"
    lines = [f"Peak: {as_bytes(peak)} in {timeline.phase(index)} ({moment}): {shares}."]
    remedies = _REMEDIES if streamed else _REMEDIES | _WITHOUT_STREAMING
    rest = timeline
    for begin, end in (("To lower", "none at all"), ("Then", "neither")):
        name = rest.largest_part(rest.peak_index)
        rest = rest.without(name)
        lines.append(f"{begin} {name}: {remedies[name]}. With {end}, the peak would be {as_bytes(rest.peak_bytes)}.")
    return lines


def as_bytes(count: float) -> str:
    """Return bytes as text like `1.23 GB`, in powers of ten with three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"
