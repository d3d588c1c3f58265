"""The work of `streamgrad env`: what this machine has, which attention kernels work on it, and which one runs for which batch.

Each kernel computes a small chunk of each kind of batch, forward and backward, and is compared with attention in float64.
"""

from __future__ import annotations

import contextlib
import importlib.util
import platform
from dataclasses import dataclass
from importlib import metadata

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import streamgrad
from streamgrad.attention.backends import Backend, Block, backends_named, flash_implementation, preferred
from streamgrad.attention.masks import CausalMask, DenseMask
from streamgrad.engine.kv_chunk import Attended
from streamgrad.memory.device import available_host_bytes
from streamgrad.ops.triton_support import kernels_for

PACKAGES = ("torch", "transformers", "triton", "peft", "trl", "accelerate", "deepspeed", "liger-kernel")

# The chunk on which kernels are tried: two rows, the last 64 of 96 tokens.
BATCH, START, STOP, HEADS, KEY_HEADS, HEAD_SIZE = 2, 32, 96, 4, 2, 64
# Relative error that a 16-bit kernel may have; a wrong one is off by about 1.
TOLERANCE = 0.03

_Operands = tuple[Tensor, Tensor, Tensor]  # queries, keys, values


@dataclass(frozen=True)
class Environment:
    """The report of `streamgrad env --json`.

    `attention` says for each kind of batch which kernel `attention="auto"` takes, and for each kernel "works" or why it does not.
    """

    versions: dict[str, str]
    devices: list[dict[str, str | int]]
    host_available_bytes: int | None
    dtype: str
    flash: str
    triton: str
    attention: dict[str, dict[str, str]]


def environment() -> Environment:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    available = available_host_bytes()
    return Environment(
        versions=_versions(),
        devices=_devices(),
        host_available_bytes=None if available == float("inf") else int(available),
        dtype=str(dtype).removeprefix("torch."),
        flash=flash_implementation() or _torchs_flash(),
        triton=_triton(device),
        attention={kind: _kernels_for(mask, softcap, device, dtype) for kind, (mask, softcap) in _kinds().items()},
    )


def _versions() -> dict[str, str]:
    found = {"streamgrad": streamgrad.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def _torchs_flash() -> str:
    """Return torch's own FlashAttention, and how the user can activate a newer one that is installed."""
    for implementation in ("FA4", "FA3"):
        package = f"flash-attn-{implementation[-1]}"
        with contextlib.suppress(metadata.PackageNotFoundError):
            return (
                f"FA2, torch's own; {package} {metadata.version(package)} is installed, and "
                f'torch.nn.attention.activate_flash_attention_impl("{implementation}") puts it in its place'
            )
    return "FA2, torch's own"


def _devices() -> list[dict[str, str | int]]:
    devices: list[dict[str, str | int]] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        name = torch.cuda.get_device_name(index)
        devices.append({"name": name, "capability": capability, "free_bytes": free, "total_bytes": total})
    return devices


def _triton(device: torch.device) -> str:
    if importlib.util.find_spec("triton") is None:
        return "not installed: norms, rotary embeddings, activations, the head and merged attention run as several kernels each"
    if device.type != "cuda":
        return "installed, but its kernels need a GPU"
    runs = kernels_for(torch.zeros(1, device=device), "streamgrad.ops.fused_kernels") is not None
    return "kernels run" if runs else "installed, but its kernels do not run: it finds no C compiler, or fails"


def _kinds() -> dict[str, tuple[CausalMask | DenseMask, float | None]]:
    """Return a mask and a softcap for each kind of batch that kernels may treat differently."""
    position_T = torch.arange(STOP)
    real_BT = torch.stack([position_T >= 0, position_T >= 41])
    documents_BT = torch.stack([position_T // 40, position_T // 23])
    holes_TT = (torch.rand(STOP, STOP, generator=torch.Generator().manual_seed(0)) < 0.7).fill_diagonal_(True).tril()
    return {
        "plain": (CausalMask(), None),
        "sliding window": (CausalMask(window=16), None),
        "packed": (CausalMask(documents_BT=documents_BT), None),
        "left-padded": (CausalMask(padding_BT=real_BT), None),
        "right-padded": (CausalMask(padding_BT=real_BT.flip(1)), None),
        "4-D mask": (DenseMask(holes_TT[None, None]), None),
        "softcap": (CausalMask(), 2.0),
    }


def _kernels_for(mask: CausalMask | DenseMask, softcap: float | None, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    part = mask.part(START, STOP, BATCH)
    block = Block(
        scale=HEAD_SIZE**-0.5,
        causal=part.causal,
        window=part.window,
        varlen=part.varlen,
        mask=mask.visible(START, STOP, part.first, device) if part.masked else None,
        softcap=softcap,
    )
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, length: int) -> Tensor:
        return torch.randn(BATCH, heads, length, HEAD_SIZE, generator=generator).to(device, dtype)

    keys = part.last - part.first
    operands = random(HEADS, STOP - START), random(KEY_HEADS, keys), random(KEY_HEADS, keys)
    answers = {backend.name: _answer(backend, operands, block) for backend in backends_named("auto")}
    working = [backend for backend in backends_named("auto") if answers[backend.name] == "works"]
    return {"auto": preferred(working)[0].name} | answers


def _answer(backend: Backend, operands: _Operands, block: Block) -> str:
    """Return "works", or why the kernel does not."""
    refusal = backend.refusal(*operands, block)
    if refusal is not None:
        return refusal
    (reference,) = backends_named("eager")
    try:
        ours = _outcome(backend, operands, block)
        query, key, value = (operand.double() for operand in operands)
        truth = _outcome(reference, (query, key, value), block)
    except RuntimeError as error:
        return f"failed: {str(error).splitlines()[0]}"
    worst = max(((one - other).norm() / other.norm()).item() for one, other in zip(ours, truth, strict=True))
    return "works" if worst < TOLERANCE else f"wrong: off by {worst:.1%} from float64"


def _outcome(backend: Backend, operands: _Operands, block: Block) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values; the queries also serve as the upstream gradient."""
    query, key, value = operands
    done = backend.forward(query, key, value, block)
    dquery, pieces = backend.backward(query, query, key, value, Attended(done.out_BHLD, done.lse_BHL), block)
    dkey, dvalue = torch.zeros_like(key, dtype=torch.float64), torch.zeros_like(value, dtype=torch.float64)
    for first, last, dkey_piece, dvalue_piece in pieces:
        dkey[:, :, first:last] += dkey_piece
        dvalue[:, :, first:last] += dvalue_piece
    return [tensor.double() for tensor in (done.out_BHLD, dquery, dkey, dvalue)]


def print_environment(found: Environment, console: Console) -> None:
    console.print(", ".join(f"{package} {version}" for package, version in found.versions.items()), soft_wrap=True)
    for index, device in enumerate(found.devices):
        free, total = (int(device[name]) / 2**30 for name in ("free_bytes", "total_bytes"))
        console.print(
            f"GPU {index}: {device['name']}, {free:.1f} of {total:.1f} GiB free, compute capability {device['capability']}"
        )
    if not found.devices:
        console.print("No GPU that torch can see")
    if found.host_available_bytes is not None:
        console.print(f"Host memory available: {found.host_available_bytes / 2**30:.1f} GiB")
    console.print(f"FlashAttention: {found.flash}\nTriton: {found.triton}", soft_wrap=True)
    names = [name for name in next(iter(found.attention.values())) if name != "auto"]
    table = Table(title=f"Attention kernels in {found.dtype}, forward + backward", title_justify="left")
    for heading in ("batch", 'attention="auto" takes', *names):
        table.add_column(heading)
    notes: list[str] = []
    for kind, answers in found.attention.items():
        row = []
        for name in names:
            note = f"{name}: {answers[name]}"
            if answers[name] != "works" and note not in notes:
                notes.append(note)
            row.append("works" if answers[name] == "works" else f"no ({notes.index(note) + 1})")
        table.add_row(kind, answers["auto"], *row)
    console.print(table)
    for number, note in enumerate(notes, start=1):
        console.print(f"({number}) {note}", soft_wrap=True, markup=False)
