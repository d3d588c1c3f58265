"""One decoder call's plan: what `StreamConfig` leaves open, decided when the first layer has shown what it costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.config import StreamConfig
from streamgrad.engine.host_offload import HostStore
from streamgrad.engine.module_walk import modules_of, parameters_of
from streamgrad.engine.ulysses import SequenceSharing
from streamgrad.hf.discover import decoder_layers
from streamgrad.hf.patching import InstalledForward, temporary_attribute
from streamgrad.memory.costs import LayerCosts, LayerPolicy, Shape, embedding_parts, head_parts
from streamgrad.memory.device import device_memory, host_budget_bytes, segments_grow, usable_share
from streamgrad.memory.head_chunk import SHORTEST_CHUNK
from streamgrad.memory.measure import PROBED_TOKENS, measured_costs
from streamgrad.memory.planner import USUAL_CHUNK, Plan, Step, choose_plan, readable, regular_chunk

logger = logging.getLogger("streamgrad")

# Of a budget, for a caller that does something unknown with the hidden states: its own head, its own loss.
UNKNOWN_HEAD_SHARE = 0.2


@dataclass(frozen=True)
class HeadCosts:
    """What the parts of a model outside of its layers will hold: the head while it works, the gradients it will leave, the
    embeddings when backward reaches them, and weights that are not the decoder's."""

    bytes: float
    gradient_bytes: float
    embedding_bytes: float
    weight_bytes: float = 0.0


@dataclass(frozen=True)
class Sample:
    """One layer of a kind, which can be run, as in `StreamedCall`; without a mask where it has states and no attention."""

    layer: nn.Module
    run: Callable[..., Tensor]
    mask: object


class Planner:
    """Plans for one model; costs are measured once for each way it is run."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.latest: Plan | None = None
        self._shape_with_segments: torch.Size | None = None
        self._costs: dict[tuple, LayerCosts] = {}

    def chunk_size(self, batch: int, sequence: int) -> int:
        """Where no budget decides it."""
        given = self.config.chunk_size
        return given if isinstance(given, int) else regular_chunk(batch, sequence, USUAL_CHUNK)

    def plan(
        self,
        decoder: nn.Module,
        layers: list[nn.Module],
        h_BTE: Tensor,
        first: Sample,
        others: Callable[[list[list[nn.Parameter]]], Iterable[Sample]],
        backends: list,
        head: Callable[[int], HeadCosts] | None,
        store: HostStore,
        sharing: SequenceSharing,
    ) -> Plan:
        """For a decoder whose first layer is about to run on `h_BTE`.

        `others` makes a sample of each further kind of layer, told by the parameters of all.
        """
        config, batch, sequence = self.config, h_BTE.shape[0], h_BTE.shape[1]
        if not self._must_measure(layers, h_BTE):
            keep = "input" if config.keep == "auto" else config.keep
            policies = (LayerPolicy(keep, on_host=config.offload == "host" and keep != "all"),) * len(layers)
            self.latest = Plan(policies, (self.chunk_size(batch, sequence),) * len(layers), 0.0, 0.0)
            return self.latest
        kinds = [self._measured(first, backends, h_BTE, sharing)]
        parameters = [parameters_of(layer) for layer in layers]
        for sample in others(parameters):
            try:
                kinds.append(self._measured(sample, backends, h_BTE, sharing))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # where layers of a kind are called with other arguments than the first
                logger.debug("streamgrad: %s is not measured: %s", type(sample.layer).__name__, error)
        costs = LayerCosts(*map(max, zip(*map(astuple, kinds), strict=True)))  # every layer is taken for the largest
        on_cuda = h_BTE.device.type == "cuda"
        held, limit = device_memory(h_BTE.device) if on_cuda else (_bytes_of(decoder), float("inf"))
        resident = held - h_BTE.nbytes if on_cuda else held  # without the first layer's input, which is among what layers keep
        # In round numbers, so that steps which are alike have the same plan, which then is found once.
        budget = min(_floor(usable_share() * limit, 2**26), config.budget_bytes or float("inf"))
        host = _floor(host_budget_bytes(held_bytes=store.total_bytes), 2**30)
        # Ranks that share a sequence exchange as often as they run attention: all must choose the same plan.
        resident, *missing = sharing.most(resident, -budget, -host)
        budget, host = (-number for number in missing)

        gradients = sum(p.nbytes for own in parameters for p in own if p.requires_grad and p.grad is None)

        def step_of(sequence: int) -> Step:
            hidden = h_BTE.nbytes / h_BTE.shape[1] * sequence
            unknown = HeadCosts(2 * hidden + UNKNOWN_HEAD_SHARE * budget, 0.0, hidden)
            ends = unknown if head is None else head(batch * sequence)
            return Step(
                costs=costs,
                layers=len(layers),
                shape=Shape(batch, sequence),
                resident_bytes=resident if on_cuda else resident + ends.weight_bytes,
                layer_gradient_bytes=gradients / len(layers),
                head_bytes=ends.bytes,
                head_gradient_bytes=ends.gradient_bytes,
                embedding_bytes=ends.embedding_bytes,
                leaf_bytes=hidden if h_BTE.is_leaf and h_BTE.requires_grad else 0.0,
            )

        offload = config.offload if on_cuda else "none"
        plan, fits = self._choice(step_of(sequence), budget, host, offload, sharing.chunk_size)
        if not fits:
            self._refuse(step_of, sequence, plan, budget, host, offload, sharing.chunk_size)
        if self.latest is None or plan.policies != self.latest.policies:
            logger.debug("streamgrad: %d x %d tokens within %.1f GiB: %s", batch, sequence, budget / 2**30, plan)
        if on_cuda and not segments_grow() and self._shape_with_segments != h_BTE.shape:
            _give_segments(h_BTE, sum(not policy.on_host for policy in plan.policies))
            self._shape_with_segments = h_BTE.shape
        self.latest = plan
        return plan

    def _must_measure(self, layers: list[nn.Module], h_BTE: Tensor) -> bool:
        """Where there is something to decide, and memory to decide it by."""
        config = self.config
        if config.budget_bytes is not None:
            return True
        if h_BTE.device.type != "cuda" or len({next(layer.parameters()).device for layer in layers}) > 1:
            return False
        return config.keep == "auto" or config.offload != "none" or config.chunk_size == "auto"

    def _measured(self, sample: Sample, backends: list, h_BTE: Tensor, sharing: SequenceSharing) -> LayerCosts:
        layer, recurrent = sample.layer, sample.mask is None
        trainable = tuple((parameter.requires_grad, parameter.shape) for parameter in parameters_of(layer))
        autocast = torch.is_autocast_enabled(h_BTE.device.type) and torch.get_autocast_dtype(h_BTE.device.type)
        tokens = min(2 * PROBED_TOKENS, h_BTE.shape[1])
        key = (type(layer), h_BTE.dtype, autocast, trainable, layer.training, tokens, sharing.ranks)
        if key not in self._costs:
            measured = measured_costs(layer, sample.run, sample.mask, backends, h_BTE, sharing, recurrent=recurrent)
            self._costs[key] = LayerCosts(*sharing.most(*astuple(measured)))
        return self._costs[key]

    def _refuse(
        self,
        step_of: Callable[[int], Step],
        sequence: int,
        plan: Plan,
        budget: float,
        host: float,
        offload: str,
        dealt: int | None,
    ) -> None:
        """Before the step starts, where the user has named the limit; else the device has the last word."""
        shape = step_of(sequence).shape
        if plan.host_bytes > host:
            raise ValueError(
                f"offload='host' needs {readable(plan.host_bytes)} of host memory for {shape}, and "
                f"{readable(host)} are available to this process. Pass offload='auto', keep='input', or a shorter sequence."
            )
        if self.config.budget_bytes is None or plan.peak_bytes <= budget:
            return
        # By bisection, to a percent or so.
        longest, too_long = 0, sequence
        while too_long - longest > max(1, too_long // 128):
            middle = (longest + too_long) // 2
            _, fits = self._choice(step_of(middle), budget, host, offload, dealt)
            longest, too_long = (middle, too_long) if fits else (longest, middle)
        raise ValueError(
            f"memory_budget={self.config.memory_budget!r} cannot hold {shape}: about "
            f"{readable(plan.peak_bytes)} are needed ({plan}). "
            + (f"About {longest} tokens a sequence would fit." if longest else "Not even a short sequence would fit.")
        )

    def _choice(self, step: Step, budget: float, host: float, offload: str, dealt: int | None) -> tuple[Plan, bool]:
        """`dealt` is the size of chunks where ranks share a sequence: their tokens lie in the order of these."""
        config = self.config
        return choose_plan(
            step,
            keep=config.keep,
            offload=offload,
            chunk_size=config.chunk_size if isinstance(config.chunk_size, int) else dealt,
            budget_bytes=budget,
            host_budget_bytes=host,
        )


def _give_segments(h_BTE: Tensor, count: int) -> None:
    """Let the allocator take a segment from the device for each of `count` hidden states that will be kept.

    It would else carve them, one by one, out of larger blocks that are free for a moment, and what remains of such a block is too
    small for the tensors it was taken for: fragments of a fifth of the memory, where layers keep their inputs alone. It helps
    before a first step, and before a longer one than any so far; else such blocks are there, and nothing is lost by asking.
    """
    with suppress(torch.OutOfMemoryError):  # as much as there is
        held = [torch.empty_like(h_BTE) for _ in range(count)]
        del held


def _floor(count: float, unit: int) -> float:
    return count // unit * unit if count < float("inf") else count


def _bytes_of(module: nn.Module) -> float:
    """On a device whose allocator keeps no count: the module's weights and the gradients they have."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes + (0 if tensor.grad is None else tensor.grad.nbytes) for tensor in tensors)


@contextmanager
def head_known_to_decoder(model: Any, head: nn.Module, *, tokens: int, config: StreamConfig) -> Iterator[None]:
    """Within the block, the plan of the model's decoder knows what `head`, streamed over `tokens` tokens or fewer, will hold."""
    decoder = model.get_decoder()
    installed = InstalledForward.on(decoder)
    if installed is None:
        yield
        return
    # Not `.weight`: ZeRO-3 gathers what is read outside of its module's call, for the whole step.
    embedding = next(model.get_input_embeddings().parameters())
    tied = any(parameter is embedding for parameter in head.parameters())
    outside = {
        parameter: parameter.nbytes
        for module in modules_of(model, but_for=decoder_layers(decoder))
        for parameter in module._parameters.values()
        if parameter is not None and parameter.requires_grad and parameter is not embedding and parameter.grad is None
    }
    width = getattr(head, "in_features", embedding.shape[-1])
    dense = embedding.nbytes if embedding.requires_grad else 0
    # Where it is also the embeddings', autograd holds the head's gradient until theirs is there, whatever was there before.
    gradient_bytes = sum(outside.values()) + (dense if tied else 0)

    def costs(hidden: int) -> HeadCosts:
        """Of as many hidden states; there are no more targets than those."""
        itemsize = embedding.element_size()
        at = embedding_parts(hidden, width * itemsize, width_sum_bytes=max(4, itemsize) * width, dense_bytes=dense)
        at_work = _head_bytes(head, min(tokens, hidden), config.head_chunk_size)
        return HeadCosts(at_work, gradient_bytes, sum(at.values()), 0.0 if tied else _bytes_of(head))

    with temporary_attribute(installed.stream, "head", costs):
        yield


def _head_bytes(head: nn.Module, tokens: int, chunk_size: int | str) -> float:
    weight = next(head.parameters())
    # By its attributes where it has them: an engine may have taken the weight away and left an empty tensor.
    width, vocabulary = getattr(head, "in_features", weight.shape[-1]), getattr(head, "out_features", weight.shape[0])
    trainable = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    rows = min(tokens, chunk_size if isinstance(chunk_size, int) else SHORTEST_CHUNK)
    itemsize = weight.element_size()
    return sum(head_parts(tokens * width * itemsize, 2 * rows * vocabulary * itemsize, trainable, itemsize).values())
