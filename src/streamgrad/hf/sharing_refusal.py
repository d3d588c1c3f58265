"""Says why sequences of a model cannot share their beginnings, and tries it on a few tokens before the first shared call.

    decoder(a row in which three rows share their beginning)  =  decoder(the three rows)          token by token

Inside of layers, tokens meet in attention only (`engine.checks.trial`). What is around the layers is the model's own code, and
hooks: an embedding of pairs of tokens, positions that are counted anew, a mean over the row. No list of names can find these.
So the decoder is run on the shared row, the stock code on the separate rows, and the results are compared.

Shapes: R rows of the trial, T their length, P tokens that they share, N tokens of the shared row, E model width.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from streamgrad.attention.trees import Tree
from streamgrad.engine.checks.contents import identity
from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.module_walk import modules_of
from streamgrad.engine.replay import DRAWING, Autocast, RandomTape
from streamgrad.engine.temporary import temporary_attribute, temporary_attributes
from streamgrad.hf.discover import decoder_layers, follows_length, has_recurrent_layers
from streamgrad.hf.libraries.deepspeed import ulysses_group
from streamgrad.hf.patching import InstalledForward, signature_of
from streamgrad.hf.sequence_slices import WHOLE, sequence_group

_SHARED, _OWN, _ROWS, _PADDING, _MOVED = 8, 8, 3, 3, 5
_TREE = Tree(tuple(_SHARED + branch * _OWN for branch in range(_ROWS + 1)), (-1, *[0] * _ROWS))
# The largest relative difference of hidden states that is rounding, of all layers together, by bytes of a number. In bf16, 1 to 4
# per cent were seen for 24 to 48 layers.
_ROUNDING = {2: 0.1, 4: 1e-2, 8: 1e-5}


class Refusal(NamedTuple):
    """Why sequences cannot share: None if they can. `moved` is of rows that have more or less padding before them."""

    always: str | None = None
    moved: str | None = None


_TRIED: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Refusal]] = weakref.WeakKeyDictionary()


def _stream_of(decoder: Any) -> Any:
    installed = InstalledForward.on(decoder)
    if installed is None:
        raise ValueError("the model is not enabled, and only a streamed one can share. Call streamgrad.enable(model) first.")
    return installed.stream


@contextlib.contextmanager
def row_taken_for(tree: Tree, decoder: Any) -> Iterator[None]:
    """Let calls of an enabled decoder within the block take their row for a tree."""
    with temporary_attribute(_stream_of(decoder), "tree", tree):
        yield


def sharing_refusal(model: Any, device: torch.device) -> Refusal:
    """Return why sequences of this model cannot share their beginnings, as it is now.

    Ranks that train one model call this at the same time: a trial runs the decoder, whose weights an engine may have to gather.
    """
    decoder = model.get_decoder()
    reason = _known_reason(decoder)
    if reason is not None:
        return Refusal(reason)
    contents = tuple(map(_contents, modules_of(decoder)))
    tried = _TRIED.setdefault(decoder, {})
    if contents not in tried:
        tried[contents] = _tried(model, decoder, device)
    return tried[contents]


def _contents(module: nn.Module) -> Hashable:
    """Return what tells whether a module is still the one that was tried: its code, switches and hooks.

    Around every reference pass trainers switch checkpointing, which streamed layers do not read, and register the hook of
    `enable_input_require_grads` once more.
    """
    own = module.__dict__
    hooks = [_code(*entry) for kind in ("_forward_hooks", "_forward_pre_hooks") for entry in own[kind].items()]
    return (
        weakref.ref(module),
        type(module).forward,
        *((name, value) for name, value in own.items() if type(value) in (bool, float, str) and name != "gradient_checkpointing"),
        frozenset(hooks),
        None if InstalledForward.on(module) else identity(own.get("forward")),
    )


def _code(handle: int, hook: Any) -> Hashable:
    """Return the code of a hook that is nothing but its code, and else the number of its registration."""
    has_more = getattr(hook, "__closure__", None) or getattr(hook, "__defaults__", None)
    return handle if has_more else getattr(hook, "__code__", handle)


def _known_reason(decoder: Any) -> str | None:
    """Return what can be said without a run."""
    if "position_ids" not in signature_of(decoder.forward).parameters:
        return "its decoder takes no position_ids"
    group = sequence_group(decoder, _stream_of(decoder).group)
    if group is not None and group.ring is not None:
        return "a ring of ranks shares its sequences"
    if has_recurrent_layers(decoder):
        return "some of its layers hand a state from token to token"
    positions = getattr(decoder.config, "max_position_embeddings", None)
    if positions is not None and positions < _MOVED + _SHARED + _OWN:
        return f"its positions end at {positions}, and it cannot be tried on so few"
    modules = list(decoder.modules())
    if any(follows_length(module) for module in modules):
        return "its rotary embeddings follow the length of a row"
    if any(map(_drops, modules)):
        return "dropout is on, and rows that share a beginning would share what is dropped there; set it to 0"
    outer = [*modules_of(decoder, but_for=decoder_layers(decoder)), *decoder_layers(decoder)]
    hooked = [module for module in outer if module._backward_hooks or module._backward_pre_hooks]
    if hooked:
        return f"a backward hook of {type(hooked[0]).__name__} would be given the sum of the gradients of several rows"
    return None


def _drops(module: nn.Module) -> bool:
    """Return whether it drops something at random now; attention modules have the rate as a number."""
    if isinstance(module, _DropoutNd):
        return module.training and module.p > 0
    return module.training and any(
        isinstance(value, float) and value > 0 for name, value in module.__dict__.items() if "drop" in name
    )


def _tried(model: Any, decoder: Any, device: torch.device) -> Refusal:
    trial = _Trial(model, decoder, device)
    devices = [each for each in {device, *(p.device for p in decoder.parameters())} if each.type == "cuda"]
    tape, autocast = RandomTape(devices), Autocast(device.type)
    alone = temporary_attribute(_stream_of(decoder), "group", WHOLE)
    with DRAWING, torch.random.fork_rng(devices=devices), torch.no_grad(), alone:
        try:
            with tape.recording(0):
                shared_NE = trial.shared(_PADDING)
            if tape.has_draws and trial.differ(trial.shared(_PADDING), shared_NE, repeated=True):  # a rate of 0 draws, too
                return Refusal("it draws random numbers, and rows that share a beginning would share what is drawn there")
            if trial.differ(shared_NE, trial.separate()):
                return Refusal("something around its layers depends on a token's place in the row or on its neighbours there")
            with _other_positions_in(decoder):
                is_read = trial.differ(trial.shared(_PADDING), shared_NE, repeated=True)
            if is_read or trial.differ(trial.shared(_MOVED), shared_NE):
                return Refusal(moved="its positions are not rotary alone, and equal beginnings have unequal padding before them")
        except ValueError as error:
            return Refusal(str(error.__cause__ if isinstance(error.__cause__, SeamError) else error).rstrip("."))
        finally:
            autocast.forget_casts()
    return Refusal()


class _Trial:
    """Random rows with padding before them, and their hidden states when they share their beginning and when they do not."""

    def __init__(self, model: Any, decoder: Any, device: torch.device) -> None:
        self.base, self.decoder, self.device = model.base_model, decoder, device
        words, generator = model.config.get_text_config(decoder=True).vocab_size, torch.Generator("cpu").manual_seed(0)
        self.rows_RT = torch.randint(words, (_ROWS, _SHARED + _OWN), generator=generator, device="cpu")
        self.rows_RT[:, :_SHARED] = self.rows_RT[0, :_SHARED]

    def shared(self, first: int) -> Tensor:
        """Return the hidden states of the shared row, whose positions begin with `first`, (N, E)."""
        ids_1N = torch.cat([self.rows_RT[0, :_SHARED], self.rows_RT[:, _SHARED:].flatten()]).unsqueeze(0).to(self.device)
        positions_1N = (_TREE.positions() + first).unsqueeze(0).to(self.device)
        with row_taken_for(_TREE, self.decoder):
            output = self.base(input_ids=ids_1N, position_ids=positions_1N, use_cache=False)
        return output.last_hidden_state[0]

    def separate(self) -> Tensor:
        """Return the hidden states of separate rows in the same order, (N, E), by the stock code, as which a cache is filled."""
        ids, is_real = (nn.functional.pad(tensor, (_PADDING, 0)) for tensor in (self.rows_RT, torch.ones_like(self.rows_RT)))
        # DeepSpeed's Ulysses, in training mode, takes the rows of this process for slices.
        modules = [] if ulysses_group() is None else self.decoder.modules()
        with temporary_attributes((module, "training", False) for module in modules):
            output = self.base(input_ids=ids.to(self.device), attention_mask=is_real.to(self.device), use_cache=True)
        hidden_RTE = output.last_hidden_state[:, _PADDING:]
        return torch.cat([hidden_RTE[0, :_SHARED], hidden_RTE[:, _SHARED:].flatten(0, 1)])

    def differ(self, actual_NE: Tensor, expected_NE: Tensor, *, repeated: bool = False) -> bool:
        """Return whether more than rounding differs, which is less where the same computation is repeated.

        By rounding, a router may send a token elsewhere; not the tokens of most rows at one place.
        """
        is_autocast = torch.is_autocast_enabled(actual_NE.device.type)
        allowed = _ROUNDING[2 if is_autocast else max(2, expected_NE.dtype.itemsize)]
        actual_NE, expected_NE = actual_NE.float(), expected_NE.float()
        error_N = (actual_NE - expected_NE).norm(dim=1) / expected_NE.norm(dim=1).clamp(min=1e-30)
        of_rows_RT = error_N[_SHARED:].view(_ROWS, _OWN)
        return not bool((of_rows_RT.median(dim=0).values <= allowed / (25 if repeated else 1)).all())  # so that NaN differs


@contextlib.contextmanager
def _other_positions_in(decoder: Any) -> Iterator[None]:
    """Give layers other position_ids, but not other rotary embeddings: those that differ then read positions themselves."""
    last = (getattr(decoder.config, "max_position_embeddings", None) or 1 << 20) - 1

    def moved(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        positions = kwargs.get("position_ids")
        # As far on as a table of positions reaches: beyond its end, a CUDA device would not recover.
        return args, kwargs if positions is None else kwargs | {"position_ids": positions - positions.max() + last}

    hooks = [layer.register_forward_pre_hook(moved, with_kwargs=True) for layer in decoder_layers(decoder)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
