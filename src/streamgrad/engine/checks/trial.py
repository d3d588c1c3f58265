"""Tries a layer on a few tokens before its first step in chunks, and refuses one whose chunks would differ.

    out[:, t] = f(h[:, t])          for every token t, where attention lets each token see itself only

A layer may mix tokens through attention, which the stream knows, and in no other way. No list of modules can tell: a mean over
the sequence may be in a hook. So the layer is run, with attention reduced to the token itself:

- Its output at some tokens must have no derivative by other tokens. Exactly none: zeros stay zeros in every precision.
- Its output must be the same in one chunk as in several. This finds what has no derivative, as a maximum that sets a scale, and
  what counts positions inside the chunk. So must the gradients of its parameters, summed over chunks.
- It may read no trainable tensor but its own parameters, keep none with its graph, and make no gradients where none come in.
- What it draws at random must be drawn for tokens (`engine.checks.trial_draws`).

Zeros in trainable parameters, as in the last one of a new adapter, would hide what is behind them. They are replaced for the
trial.

Shapes: B batch, H query heads, G key/value heads, T sequence, N tokens of the trial, D head size, E model width.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from streamgrad.engine.checks.contents import contents_of
from streamgrad.engine.checks.guards import AdapterFacts, check_leaves
from streamgrad.engine.checks.kept_graphs import keeping, keeps_a_graph, nodes_from, note_watched
from streamgrad.engine.checks.module_state import ModuleState, left_as_they_were, set_by_first_call
from streamgrad.engine.checks.trial_draws import without_draws
from streamgrad.engine.grad_accumulator import stand_in, swapped_parameters
from streamgrad.engine.kv_chunk import Chunk, SeamError, Span
from streamgrad.engine.linear_maps import nobody_watches
from streamgrad.engine.module_walk import buffers_in, modules_of, parameters_in
from streamgrad.engine.replay import DRAWING, Autocast
from streamgrad.ops.autograd import own_graph

# Runs the layer chunk by chunk over the spans and returns its output for all tokens.
RunChunks = Callable[[Tensor, Sequence[Span]], Tensor]

_MOST_TOKENS = 32
# Elements of a parameter: of a linear map's weight, and of others.
_LARGEST_OF_A_SUM, _LARGEST_COMPARED = 1 << 16, 1 << 24
_DRAWS = {"16 bits": 16, "32 bits": 3, "64 bits": 1}
# What each layer consisted of when a trial passed; a reference without adapters and a policy with them take turns in one layer.
_PASSED: weakref.WeakKeyDictionary[nn.Module, list[Hashable]] = weakref.WeakKeyDictionary()


def attend_alone(chunk: Chunk, query_BHND: Tensor, key_BGND: Tensor, value_BGND: Tensor, scale: float) -> Tensor:
    """Return the attention output, (B, H, N, D), of tokens that see themselves only, beside a key of score 0 and value 0.

    out_t = sigmoid((q_t k_t + q_t a + a k_t) scale) v_t

    `a` is a fixed vector: by q_t k_t alone, a rotation of both by the same angle would not show.
    """
    chunk.check_tokens(key_BGND)
    chunk.attention_calls += 1
    groups = query_BHND.shape[1] // key_BGND.shape[1]
    key_BHND, value_BHND = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_BGND, value_BGND))
    fixed_D = torch.arange(1, query_BHND.shape[-1] + 1, device=query_BHND.device).to(query_BHND.dtype).cos()
    scores_BHN1 = (query_BHND * key_BHND + (query_BHND + key_BHND) * fixed_D).sum(dim=-1, keepdim=True) * scale
    return scores_BHN1.sigmoid() * value_BHND


@dataclass
class Trial:
    """The trial of one layer, made before its surroundings replace parts of it, and called within them.

    Args:
        modules: of the layer, which is the first.
        name: of the layer, for messages.
        run: runs the layer, each time from an empty cache.
        called_as: tells the layer's own forward, which is replaced while the layer is streamed, and switches that it is called
            with, from others.
        least: the fewest tokens that a chunk may have.
        mixes_by_states: the layer hands states from token to token, so tokens do depend on earlier ones.
        is_scaled_later: gradients are computed before the loss's own is known, so they must be linear in it.
        has_single: a chunk of the sequence has one token, as code may take for a step of decoding.
    """

    modules: Sequence[nn.Module]
    name: str
    run: RunChunks
    adapters: AdapterFacts
    called_as: Hashable = None
    least: int = 1
    mixes_by_states: bool = False
    is_scaled_later: bool = False
    has_single: bool = False

    def __post_init__(self) -> None:
        self.contents: Hashable = (self.called_as, contents_of(self.modules, self.adapters))

    def is_due(self, h_BTE: Tensor, *, before_backward: bool) -> bool:
        """Return whether none has passed for such a step of the layer, which is called with `h_BTE`."""
        tokens = min(_MOST_TOKENS, h_BTE.shape[1])
        if h_BTE.is_meta or tokens < 2 * self.least:
            return False
        passed = _PASSED.get(self.modules[0], ())
        of_single = [True] if self.has_single else [True, False]
        return not any((tokens, before_backward, has_single, self.contents) in passed for has_single in of_single)

    def __call__(self, h_BTE: Tensor, *, before_backward: bool, before: ModuleState | None = None) -> None:
        """Raise `SeamError` where the layer, called with `h_BTE`, would give something else in chunks; once for each layer.

        `before` is its state before its first chunk ran, which has been.
        """
        if not self.is_due(h_BTE, before_backward=before_backward):
            return
        layer, tokens = self.modules[0], min(_MOST_TOKENS, h_BTE.shape[1])
        modules = self.modules = modules_of(layer)  # the first chunk has run, and may have made some of them
        devices = [device for device in {h_BTE.device, *(p.device for p in parameters_in(modules))} if device.type == "cuda"]
        autocast, generator = Autocast(h_BTE.device.type), torch.Generator(device="cpu").manual_seed(0)

        def draw(*, of_sequence: bool = False) -> Tensor:
            """Return random tokens and, as every second one or as each, one of the sequence, changed by a hundredth.

            Random ones are small, so that what the layer adds to them is not lost beside them. Values of the sequence may reach
            what small ones do not, as a limit on the largest of all tokens.
            """
            noise_BNE = torch.randn(h_BTE.shape[0], tokens, *h_BTE.shape[2:], generator=generator, device="cpu").to(h_BTE)
            places = torch.linspace(0, h_BTE.shape[1] - 1, tokens, dtype=torch.long, device=h_BTE.device)
            drawn_BNE = h_BTE.detach()[:, places] * (1 + 0.01 * noise_BNE)
            if not of_sequence:
                drawn_BNE[:, ::2] = 0.1 * noise_BNE[:, ::2]
            return drawn_BNE

        with (
            DRAWING,  # as other threads may not draw while the generators are set back
            torch.random.fork_rng(devices=devices),
            own_graph(),
            torch.autograd.set_detect_anomaly(False),  # what is not finite here says nothing of the step
            torch.enable_grad(),
            left_as_they_were(modules) as after,
            swapped_parameters(modules, _stand_ins(modules)),
            _unchanged_buffers(modules),
        ):
            try:
                if before is not None and (which := set_by_first_call(before, after, self._run_whole, draw)) is not None:
                    raise SeamError(
                        f"{self.name} sets {which} in its first call, by the tokens that it is given, which would be those of a "
                        "chunk; call the model once under torch.no_grad() before streamgrad.enable(model)"
                    )
                # In inference mode, outputs alone are compared.
                if not torch.is_inference_mode_enabled() and keeps_a_graph(self._run_whole, draw().requires_grad_(), modules):
                    raise SeamError(keeping(self.name))
                with without_draws(modules, self.name, self._run_whole, draw, devices):
                    parts = _cut(tokens, self.least, has_single=self.has_single)
                    # What is not finite for random tokens may be for those of the sequence.
                    passed = self._check_chunks(draw, parts) or self._check_chunks(partial(draw, of_sequence=True), parts)
            finally:
                autocast.forget_casts()
        if passed:
            _PASSED[layer] = [*_PASSED.get(layer, ())[-7:], (tokens, before_backward, self.has_single, self.contents)]
            if before_backward:
                note_watched(modules)

    def _run_whole(self, h_BNE: Tensor) -> Tensor:
        return self.run(h_BNE, [(0, h_BNE.shape[1])])

    def _check_chunks(self, draw: Callable[[], Tensor], parts: Sequence[Span]) -> bool:
        """Raise where one chunk and several differ, in outputs or gradients; return whether there was something to compare.

        Where rounding decides, a router may send a token to another expert, in 16 bits one in a few. So there must be
        differences in every draw; in 16 bits at the same token, at all tokens of a chunk, or in most of the gradient.
        """
        suspects_BN: Tensor | None = None
        for _ in range(_DRAWS[_precision(h_BNE := draw())]):
            found = self._compared(h_BNE.requires_grad_(), parts)
            if found is None:
                return False
            differs_BN, gradients_differ = found
            suspects_BN = differs_BN if suspects_BN is None else suspects_BN & differs_BN
            if _precision(h_BNE) == "16 bits":
                several = [slice(start, stop) for start, stop in parts if stop - start > 1]
                differ = suspects_BN.any() or any(differs_BN[:, span].all(dim=1).any() for span in several)
            else:
                differ = differs_BN.any()
            if not differ and not gradients_differ:
                return True
            h_BNE = draw()
        if self.mixes_by_states:
            raise SeamError(
                f"{self.name} gives other outputs or gradients for tokens in chunks than for all at once, so it does not take up "
                "the state before a chunk (layers of transformers before 5.21 do not), or something else depends on a chunk"
            )
        raise SeamError(
            f"{self.name} gives other outputs or gradients for tokens in chunks than for all at once, so something beside "
            "attention depends on the other tokens of a chunk or on the place in it"
        )

    def _compared(self, h_BNE: Tensor, parts: Sequence[Span]) -> tuple[Tensor, bool] | None:
        """Return which tokens differ, (B, N), and whether gradients do; None where the layer's outputs are not finite."""
        modules = self.modules
        restored = set(map(id, self.adapters.versionless(modules)))
        read = [*buffers_in(modules), *(p for p in parameters_in(modules) if id(p) not in restored)]
        versions = [tensor._version for tensor in read]
        whole = _Output(self._run_whole, h_BNE)
        check_leaves(whole.values_BNE, [h_BNE, *parameters_in(modules)], self.name)
        if [tensor._version for tensor in read] != versions:
            raise SeamError(f"a buffer or parameter of {self.name} is modified in place whenever it is called")
        if not whole.values_BNE.isfinite().all():
            return None
        inputs = [h_BNE, *_worth_comparing(modules, whole.values_BNE)] if whole.values_BNE.requires_grad else []
        self._check_injected(whole, inputs)
        # A large one too: a limit on the gradient of all tokens may act on that alone.
        dout_BNE, scale = _dout_of(whole.values_BNE), _large_scale(whole.values_BNE)
        douts_BNE = dout_BNE, scale * dout_BNE
        expected = [whole.gradients(inputs, each_BNE) for each_BNE in douts_BNE]
        if inputs and expected[0][0] is not None and not self.mixes_by_states:
            for each_BNE, (of_all_BNE, *_) in zip(douts_BNE, expected, strict=True):
                self._check_jacobian(whole, each_BNE, of_all_BNE)
            if self.is_scaled_later:
                self._check_proportional(expected[0][0], expected[1][0], scale)
        whole_BNE = whole.values_BNE.detach()
        del whole  # whose graph is no longer needed
        cut = _Output(lambda h_BNE: self.run(h_BNE, parts), h_BNE)
        before = h_BNE if whole_BNE.shape == h_BNE.shape else 0.0  # a head makes logits of hidden states
        # So that NaN differs: every comparison with it is false.
        differs_BN = ~(_token_difference(cut.values_BNE, whole_BNE, before) <= self._largest_rounding(whole_BNE))
        in_parts = [cut.gradients(inputs, each_BNE) for each_BNE in douts_BNE]
        return differs_BN, any(self._differ(*pair, _precision(h_BNE)) for pair in zip(in_parts, expected, strict=True))

    def _check_injected(self, out: _Output, inputs: Sequence[Tensor]) -> None:
        """Raise where gradients come out although none goes in, as of a penalty that is added in backward: once a chunk."""
        made = out.gradients(inputs, torch.zeros_like(out.values_BNE))
        if any(gradient is not None and gradient.nan_to_num(0.0, 0.0, 0.0).any() for gradient in made):
            raise SeamError(
                f"{self.name} makes gradients of its own in backward, whatever the loss's are, as of an auxiliary loss that is "
                "added there, and would make them again for every chunk"
            )

    def _differ(self, actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], precision: str) -> bool:
        """Return whether one of the gradients differs by more than rounding, or is there on one side only."""
        if [each is None for each in actual] != [each is None for each in expected]:
            return True
        both = zip(actual, expected, strict=True)
        # Without what is not finite for the whole sequence either, as in the stock model.
        pairs = [(ours, theirs) for ours, theirs in both if ours is not None and theirs is not None and theirs.isfinite().all()]
        largest = max((theirs.float().norm().item() for _, theirs in pairs), default=0.0)
        # In 16 bits the tokens that a router sends elsewhere take their share with them; what is no sum is off by more than all.
        allowed = 0.7 if precision == "16 bits" else 10 * self._rounding(precision)
        # Also relative to the largest: what is zero but for rounding differs from itself.
        return not all(
            (ours - theirs).float().norm().item() <= allowed * (theirs.float().norm().item() + 1e-3 * largest)
            for ours, theirs in pairs
        )

    def _check_jacobian(self, out: _Output, dout_BNE: Tensor, of_all_BNE: Tensor | None) -> None:
        """Raise where a token's output has a derivative by another token; `of_all_BNE` is the input's gradient."""
        if of_all_BNE is None or not of_all_BNE.isfinite().all():
            return

        chosen_N = torch.rand(dout_BNE.shape[1], generator=torch.Generator(device="cpu").manual_seed(2), device="cpu") < 0.5
        chosen_N[0], chosen_N[-1] = True, False
        some_BNE = dout_BNE.clone()
        some_BNE[:, ~chosen_N] = 0
        (of_some_BNE,) = out.gradients([out.h_BNE], some_BNE)
        assert of_some_BNE is not None, "it was there for all tokens"
        if of_some_BNE[:, ~chosen_N].any():
            raise SeamError(
                f"{self.name} mixes tokens outside of attention: its outputs have derivatives by the inputs of other tokens"
            )
        allowed = self._largest_rounding(of_all_BNE)
        if (_token_difference(of_some_BNE[:, chosen_N], of_all_BNE[:, chosen_N], 0.0) > allowed).any():
            raise SeamError(f"{self.name} mixes tokens in backward: a token's gradient depends on the gradients of others")

    def _check_proportional(self, small_BNE: Tensor, large_BNE: Tensor | None, scale: float) -> None:
        """Raise where the input's gradient for `scale` times the output's is not as many times larger."""
        if large_BNE is None or (_token_difference(large_BNE / scale, small_BNE, 0.0) > self._largest_rounding(small_BNE)).any():
            raise SeamError(f"{self.name} has a gradient that is not proportional to the loss's own (a hook, or code that clips)")

    def _largest_rounding(self, tensor: Tensor) -> float:
        return self._rounding(_precision(tensor))

    def _rounding(self, precision: str) -> float:
        """Return the largest relative difference that counts as rounding; scans over states sum in another order in chunks."""
        return {"16 bits": 0.02, "32 bits": 2e-3, "64 bits": 1e-4 if self.mixes_by_states else 1e-6}[precision]


class _Output:
    """The layer's output for `h_BNE`, and gradients through it, as often as is asked for.

    A graph of torch.compile runs backward once, so the layer runs again for each further time.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], h_BNE: Tensor) -> None:
        self.values_BNE, self.h_BNE, self._run, self._is_spent = run(h_BNE), h_BNE, run, False
        self._runs_once = any("CompiledFunction" in type(node).__name__ for node in nodes_from(self.values_BNE.grad_fn))

    def gradients(self, inputs: Sequence[Tensor], dout_BNE: Tensor) -> list[Tensor | None]:
        """Return the gradients of the inputs for this one of the output; None for those that it does not depend on."""
        if not inputs:
            return []
        out_BNE = self._run(self.h_BNE) if self._runs_once and self._is_spent else self.values_BNE
        self._is_spent = True
        # Not by `dout_BNE` itself: where this is the first backward of a process and begins with a product, cuBLAS warns.
        product = (out_BNE * dout_BNE).sum()
        return list(torch.autograd.grad(product, inputs, retain_graph=not self._runs_once, allow_unused=True))


def _dout_of(out_BNE: Tensor) -> Tensor:
    return torch.randn(out_BNE.shape, generator=torch.Generator(device="cpu").manual_seed(1), device="cpu").to(out_BNE)


def _large_scale(tensor: Tensor) -> float:
    """Return by how much a gradient is made large: by less in float16, whose largest number is 65,504."""
    kind = tensor.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
    return 2.0**10 if dtype == torch.float16 else 2.0**20


def _precision(tensor: Tensor) -> str:
    """Return in how many bits a layer computes; bf16 has 8, and products of fp32 may have 10."""
    in_16_bits = tensor.dtype.itemsize == 2 or torch.is_autocast_enabled(tensor.device.type)
    return "16 bits" if in_16_bits else "64 bits" if tensor.dtype == torch.float64 else "32 bits"


def _token_difference(actual_BNE: Tensor, expected_BNE: Tensor, h_BNE: Tensor | float) -> Tensor:
    """Return how far tokens differ, relative to what the layer has added to its input, (B, N).

    That difference of output and input carries the output's rounding, so a part of the output is added to the scale.
    """
    error, change, whole = (
        tensor.detach().flatten(2).float().norm(dim=2)
        for tensor in (actual_BNE - expected_BNE, expected_BNE - h_BNE, expected_BNE)
    )
    return error / (change + 0.4 * whole).clamp(min=1e-30)


def _worth_comparing(modules: Sequence[nn.Module], out_BNE: Tensor) -> list[Tensor]:
    """Return the trainable parameters but for weights of torch's own linear maps, whose gradients are sums over tokens.

    Those of few elements are compared too, and those that the graph of the output does something else with than multiply. The
    largest of other modules are not: a layer's experts may have gigabytes.
    """
    linear = {id(module.weight): module.weight for module in modules if nobody_watches(module)}
    others = _read_otherwise(out_BNE) & set(linear)
    sums = set(linear) - others
    trained = [p for p in parameters_in(modules) if p.requires_grad]
    return [p for p in trained if id(p) in others or p.numel() <= (_LARGEST_OF_A_SUM if id(p) in sums else _LARGEST_COMPARED)]


def _read_otherwise(out_BNE: Tensor) -> set[int]:
    """Return the ids of leaves that a graph reads by other functions than products with a transposed weight, or their casts."""
    casts = {"ToCopyBackward0"} if torch.is_autocast_enabled(out_BNE.device.type) else set()
    multiplied = {"TBackward0", "LinearBackward0"} | casts | _readers_of_weights(out_BNE)
    return {
        id(leaf.variable)
        for node in nodes_from(out_BNE.grad_fn)
        for leaf, _ in node.next_functions
        if hasattr(leaf, "variable") and node.name() not in multiplied and "CompiledFunction" not in node.name()
    }


def _readers_of_weights(like: Tensor) -> set[str]:
    """Return the functions by which `F.linear` reads its weight: an engine may have put another in its place, as ZeRO-3 does."""
    weight = like.new_ones(1, 1).requires_grad_()
    out = nn.functional.linear(like.new_ones(2, 1), weight)
    nodes = nodes_from(out.grad_fn)
    return {node.name() for node in nodes for leaf, _ in node.next_functions if getattr(leaf, "variable", None) is weight}


def _cut(tokens: int, least: int, *, has_single: bool) -> list[Span]:
    """Return two or three spans whose lengths have no common divisor, as far as so few tokens allow it, and perhaps one token."""
    first = max(least, tokens // 6)
    second = max(first + least, 5 * tokens // 9)
    borders = {0, first, *([second] if tokens - second >= least else []), tokens}
    return list(itertools.pairwise(sorted(borders | ({tokens - 1} if has_single else set()))))


def _stand_ins(modules: Sequence[nn.Module]) -> dict[int, Tensor]:
    """Return leaves in place of trainable parameters, by their ids: hooks on the parameters must not see the trial.

    Where a parameter has zeros (more than stray ones), random values are in their place.
    """
    generator, found = torch.Generator(device="cpu").manual_seed(3), {}
    for parameter in parameters_in(modules):
        if parameter.requires_grad:
            found[id(parameter)] = stand_in(parameter, summed=False)
            if type(parameter) is not nn.Parameter:
                continue
            is_zero = parameter.detach() == 0
            if is_zero.sum() * 1000 > is_zero.numel():
                values = 0.1 * torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter)
                found[id(parameter)] = torch.where(is_zero, values, parameter.detach()).requires_grad_()
    return found


@contextlib.contextmanager
def _unchanged_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the modules' buffers after the block: a layer that changes them is refused elsewhere."""
    held = [(buffer, buffer._version, buffer.clone()) for buffer in buffers_in(modules)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, values in held:
                if buffer._version != version:
                    buffer.copy_(values)
