"""The work of `streamgrad demo`: one small model trained twice from the same weights, by ordinary backpropagation and streamed.

It shows the two halves of the promise on the user's own machine: the gradients and so the losses are the same, and the memory
of a step grows several times more slowly with the length of the sequence.
"""

from __future__ import annotations

import copy
import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import streamgrad
from streamgrad.cli import CheckFailed
from streamgrad.memory.live_bytes import peak_bytes_of

# Rounding alone gives errors of 1e-6 to 1e-5 in fp32, depending on the CPU; a wrong gradient is off by 1e-3 or more.
LARGEST_ERROR = 1e-4

ORDINARY, CHECKPOINTING, STREAMED = "ordinary backprop", "gradient checkpointing", "streamgrad"

# The opening of Alice's Adventures in Wonderland (Lewis Carroll, 1865; public domain).
TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she had \
peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use of a book," \
thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the \
pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit \
with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say to \
itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she ought to have \
wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually took a watch out of its \
waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it flashed across her mind that she had \
never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran \
across the field after it, and fortunately was just in time to see it pop down a large rabbit-hole under the hedge.
"""


@dataclass(frozen=True)
class Settings:
    """The size of the demo. Lengths are in tokens, which are bytes of `TEXT`."""

    steps: int
    batch_size: int
    train_length: int
    train_chunk: int
    memory_lengths: tuple[int, ...]
    memory_chunk: int


FULL = Settings(
    steps=60, batch_size=4, train_length=256, train_chunk=64, memory_lengths=(1024, 2048, 3072, 4096), memory_chunk=512
)
QUICK = Settings(steps=3, batch_size=2, train_length=48, train_chunk=16, memory_lengths=(128, 256, 512), memory_chunk=64)


@dataclass(frozen=True)
class Training:
    """Losses by method, and the worst relative error of a streamed gradient in the first step."""

    losses: dict[str, list[float]]
    worst_error: float
    worst_parameter: str


def run(settings: Settings, *, out: Path, memory_image: Path | None, console: Console) -> None:
    """Run the whole demo. Raise `CheckFailed` if a gradient is missing, not finite or off by more than `LARGEST_ERROR`."""
    # Imported here, so that a missing matplotlib is found before the training and not after it.
    importlib.import_module("matplotlib.figure")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Matrices this small gain little from more threads, and threads that wait for a busy core make a step several times slower.
    torch.set_num_threads(1)
    model = demo_model().to(device)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    about = f"{model.config.num_hidden_layers}-layer Qwen3-shaped model, {size:.1f} M parameters, fp32, {device.type}"
    console.print(f"{about}; random weights, byte tokens", soft_wrap=True)
    with console.status("Training twice from the same weights ..."):
        training = train(model, settings, device)
    console.print(_loss_table(training))
    console.print("Differences begin as fp32 rounding, which training amplifies.")
    console.print(
        f"Gradients of the first step: worst relative error {training.worst_error:.1e} over all parameters "
        f"({training.worst_parameter}); at most {LARGEST_ERROR:.0e} is accepted",
        soft_wrap=True,
    )
    with console.status("Counting the bytes of one step at several lengths ..."):
        peaks = peak_bytes(model, settings, device)
    console.print(_memory_table(peaks, settings))
    slopes = {name: bytes_per_token(values, settings.memory_lengths) for name, values in peaks.items()}
    console.print(
        f"The same gradients, and each further token costs {slopes[ORDINARY] / slopes[STREAMED]:.0f} times less memory than with "
        f"{ORDINARY}, {slopes[CHECKPOINTING] / slopes[STREAMED]:.0f} times less than with {CHECKPOINTING}.",
        style="bold",
        soft_wrap=True,
    )
    how = "by torch's allocator" if device.type == "cuda" else "as live tensors"
    footer = f"{about}; bytes counted {how}"
    plot(training, peaks, settings, footer, out)
    console.print(f"Plot: {out}", soft_wrap=True)
    if memory_image is not None:
        plot(None, peaks, settings, footer, memory_image)
        console.print(f"Memory plot: {memory_image}", soft_wrap=True)


def demo_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).train()


def tokens() -> Tensor:
    return torch.tensor(list(TEXT.encode()), dtype=torch.long)


def train(model: PreTrainedModel, settings: Settings, device: torch.device) -> Training:
    """Train with both methods on the same batches by AdamW, and compare the gradients of the first step."""
    models = {ORDINARY: copy.deepcopy(model), STREAMED: copy.deepcopy(model)}
    streamgrad.enable(models[STREAMED], chunk_size=settings.train_chunk, head_chunk_size=settings.train_chunk)
    optimizers = {name: torch.optim.AdamW(each.parameters(), lr=1e-3) for name, each in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    worst_error, worst_parameter = math.nan, ""
    text = tokens()
    generator = torch.Generator().manual_seed(0)
    for step in range(settings.steps):
        starts = torch.randint(len(text) - settings.train_length, (settings.batch_size, 1), generator=generator)
        ids = text[starts + torch.arange(settings.train_length)].to(device)
        for name, each in models.items():
            loss = each(input_ids=ids, labels=ids).loss
            loss.backward()
            losses[name].append(loss.item())
        if step == 0:
            worst_error, worst_parameter = worst_gradient_error(models[STREAMED], models[ORDINARY])
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    return Training(losses, worst_error, worst_parameter)


def worst_gradient_error(model: torch.nn.Module, reference: torch.nn.Module) -> tuple[float, str]:
    """Return the largest ||g - g_ref|| / ||g_ref|| of all parameters, and its parameter; raise `CheckFailed` if one is bad."""
    worst, worst_name = 0.0, "none"
    for (name, parameter), (_, expected) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if parameter.grad is None or expected.grad is None:
            raise CheckFailed(f"the gradient check failed: {name} has no gradient.")
        error = ((parameter.grad - expected.grad).norm() / expected.grad.norm()).item()
        # Written so that NaN fails: every comparison with it is false.
        if not error <= LARGEST_ERROR:
            raise CheckFailed(f"the gradient check failed: relative error {error:.1e} > {LARGEST_ERROR:.0e} at {name}.")
        if error > worst:
            worst, worst_name = error, name
    return worst, worst_name


def peak_bytes(model: PreTrainedModel, settings: Settings, device: torch.device) -> dict[str, list[int]]:
    """Return the peak bytes of one forward and backward, above weights and gradients, by method and length."""
    text = tokens()

    def step(length: int) -> None:
        ids = text.repeat(math.ceil(length / len(text)))[:length].unsqueeze(0).to(device)
        model(input_ids=ids, labels=ids).loss.backward()

    def measure() -> list[int]:
        step(settings.memory_lengths[0])  # makes the gradients, and whatever the device sets up at its first use
        return [peak_bytes_of(lambda length=length: step(length), device)[1] for length in settings.memory_lengths]

    peaks = {ORDINARY: measure()}
    model.gradient_checkpointing_enable()
    peaks[CHECKPOINTING] = measure()
    model.gradient_checkpointing_disable()
    streamgrad.enable(model, chunk_size=settings.memory_chunk, head_chunk_size=settings.memory_chunk)
    peaks[STREAMED] = measure()
    streamgrad.disable(model)
    return peaks


def bytes_per_token(peaks: list[int], lengths: tuple[int, ...]) -> float:
    """Return the slope of peak bytes between the shortest and the longest sequence."""
    return (peaks[-1] - peaks[0]) / (lengths[-1] - lengths[0])


def _loss_table(training: Training) -> Table:
    ordinary, streamed = training.losses[ORDINARY], training.losses[STREAMED]
    table = Table(title="Loss, same weights and batches", title_justify="left")
    for name in ("step", ORDINARY, STREAMED, "difference"):
        table.add_column(name, justify="right")
    last = len(ordinary) - 1
    for step in sorted({0, last // 6, last // 3, last // 2, 2 * last // 3, last}):
        difference = f"{abs(streamed[step] - ordinary[step]):.0e}"
        table.add_row(str(step + 1), f"{ordinary[step]:.6f}", f"{streamed[step]:.6f}", difference)
    return table


def _memory_table(peaks: dict[str, list[int]], settings: Settings) -> Table:
    lengths = settings.memory_lengths
    table = Table(title="Peak memory of one step, above weights and gradients", title_justify="left")
    for name in ("method", f"at {lengths[-1]:,} tokens", "for each further token"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name, values in peaks.items():
        table.add_row(name, f"{values[-1] / 1e6:.1f} MB", f"{bytes_per_token(values, lengths) / 1e3:.1f} KB")
    return table


def plot(training: Training | None, peaks: dict[str, list[int]], settings: Settings, footer: str, path: Path) -> None:
    """Plot loss curves (if there is a training) and memory against length, side by side."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(6, 4) if training is None else (11, 4.2), layout=ConstrainedLayoutEngine(wspace=0.05))
    axes = figure.subplots(1, 1 if training is None else 2, squeeze=False)[0]
    if training is not None:
        _draw_losses(axes[0], training)
    _draw_memory(axes[-1], peaks, settings.memory_lengths)
    figure.supxlabel(footer, fontsize=8, color="dimgray")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format=path.suffix.removeprefix(".") or "png")


_COLORS = {ORDINARY: "#c2410c", CHECKPOINTING: "#64748b", STREAMED: "#0f766e"}


def _draw_losses(axes: Any, training: Training) -> None:
    steps = range(1, len(training.losses[ORDINARY]) + 1)
    # The curves lie on each other: a broad light one below a narrow dashed one shows both.
    axes.plot(steps, training.losses[ORDINARY], color=_COLORS[ORDINARY], alpha=0.4, linewidth=6, label=ORDINARY)
    axes.plot(steps, training.losses[STREAMED], color=_COLORS[STREAMED], linewidth=1.6, linestyle="--", label=STREAMED)
    axes.set(title="Loss: the same curve", xlabel="step", ylabel="loss (nats per byte)")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, loc="upper right")
    _tidy(axes)


def _draw_memory(axes: Any, peaks: dict[str, list[int]], lengths: tuple[int, ...]) -> None:
    for name, values in peaks.items():
        label = f"{name}: {bytes_per_token(values, lengths) / 1e3:.1f} KB per token"
        axes.plot(lengths, [value / 1e6 for value in values], color=_COLORS[name], marker="o", label=label)
    axes.set(title="Memory of one step", xlabel="sequence length (tokens)", ylabel="peak above weights and gradients (MB)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xticks([0, *lengths])
    axes.legend(frameon=False, loc="upper left")
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
