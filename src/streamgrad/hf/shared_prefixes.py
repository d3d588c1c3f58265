"""Makes one row of a batch whose rows begin alike (completions of a prompt, rollouts of a history); each beginning occurs once.

    shared = share_prefixes(input_ids, attention_mask, completion_mask)
    hidden = shared.hidden_states(model)                                   what predicts each scored token, (1, M, E)
    logprobs = shared.unshared(token_logprobs(hidden, weight, shared.targets))        (B, T - 1), as of separate rows

The layers then run over P + C_1 + ... + C_G tokens in place of G P + C_1 + ... + C_G. The row is a tree (`attention.trees`): a
token sees, at the same distances, exactly the tokens that it would see in a row of its own. The last token of a prompt predicts
the first token of every completion, so hidden states and targets come in pairs, several of which may have one hidden state.

Shapes: B rows of the batch, T their length, N tokens of the shared row, M scored tokens, E model width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from streamgrad.attention.trees import Tree
from streamgrad.hf.discover import unwrap, wrapped_by_engine, wrappers_and_model
from streamgrad.hf.libraries.peft import adds_tokens
from streamgrad.hf.sharing_refusal import row_taken_for, sharing_refusal

# Beyond a prompt, beginnings that share fewer tokens are computed in every row: each branch is one more segment.
SHORTEST = 16

# Seconds in which a layer's kernels are launched, forward and backward, and in which a GPU computes a token there, divided by the
# square of the model's width: steps of Qwen3-4B on an H200, of 500 tokens (81 ms) and of 4,000 (212 ms). A shared row takes a
# fifth more launches, by a profile of its Python code.
_LAUNCH_SECONDS, _TOKEN_SECONDS, _SHARED_LAUNCHES = 2.2e-3, 2.2e-13, 1.2


@dataclass(frozen=True, eq=False)
class SharedBatch:
    """What `share_prefixes` returns: the shared row, and where the tokens of the batch are in it.

    Args:
        input_ids, position_ids: (1, N), the shared row.
        targets: (1, M), the scored tokens, row by row.
        tree: the segments of the shared row.
        mask: (B, T - 1), True where the next token is scored: the mask of what `unshared` returns.
        places: (M,), which token of the shared row predicts each target.
        slots: (2, M), row and column of each target in `mask`.
        tokens: real tokens of the batch, before sharing.
        moved: whether rows share a beginning that has unequal padding before it.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    tree: Tree
    mask: Tensor
    places: Tensor
    slots: Tensor
    tokens: int
    moved: bool

    def hidden_states(self, model: Any, **kwargs: Any) -> Tensor:
        """Run the decoder of an enabled `model` over the shared row; return the hidden state for each of `targets`, (1, M, E).

        `kwargs` are passed to the decoder. Raise `ValueError` if the model's sequences cannot be shared.
        """
        inner = _called_for(model)
        refusal = sharing_refusal(inner, self.input_ids.device)
        if refusal.always is not None or (self.moved and refusal.moved is not None):
            remedy = "Pass separate rows" if refusal.always else "Pass same_padding=True to share_prefixes"
            reason = refusal.always or refusal.moved
            raise ValueError(f"{type(inner).__name__} cannot share the beginnings of its sequences: {reason}. {remedy}.")
        return self.hidden_states_of(inner, **kwargs)

    def hidden_states_of(self, inner: Any, **kwargs: Any) -> Tensor:
        """Return `hidden_states` of a Hugging Face model that is known to be able to share."""
        with self.streamed(inner):
            output = inner.base_model(input_ids=self.input_ids, position_ids=self.position_ids, use_cache=False, **kwargs)
        hidden_1NE: Tensor = output.last_hidden_state
        return hidden_1NE.index_select(1, self.places.to(hidden_1NE.device))

    def unshared(self, scores: Tensor, fill: float = 0.0) -> Tensor:
        """Return (1, M) scores of `targets` as (B, T - 1), where separate rows would have them, and `fill` elsewhere."""
        if scores.shape[:2] != self.targets.shape:
            raise ValueError(f"scores have shape {tuple(scores.shape)}. Pass one for each target: {tuple(self.targets.shape)}.")
        whole = scores.new_full((*self.mask.shape, *scores.shape[2:]), fill)
        # By rows and columns: the device would have to be waited for to know how many entries of a mask are set.
        return whole.index_put(self.slots.to(scores.device).unbind(), scores[0])

    def saves_time(self, width: int, device: torch.device) -> bool:
        """Return whether a model of this width is faster on the shared row than on separate rows: not where launches decide.

        That is so in steps of few tokens on a GPU, which take as long as their kernels are launched, whatever is saved.
        """
        if device.type != "cuda":
            return self.input_ids.numel() < self.tokens
        shared, separate = (_TOKEN_SECONDS * width**2 * tokens for tokens in (self.input_ids.numel(), self.tokens))
        return max(_SHARED_LAUNCHES * _LAUNCH_SECONDS, shared) < max(_LAUNCH_SECONDS, separate)

    @contextmanager
    def streamed(self, model: Any) -> Iterator[None]:
        """Let calls of the model's decoder within the block take its row for the shared one."""
        with row_taken_for(self.tree, unwrap(model).get_decoder()):
            yield


def _called_for(model: Any) -> Any:
    """Return the Hugging Face model; raise for a wrapper that does more than to pass its arguments on."""
    *wrappers, inner = wrappers_and_model(model)
    for wrapper in wrappers:
        if adds_tokens(wrapper):
            raise ValueError("the adapter puts tokens of its own before every row, which a shared row does not have. Use LoRA.")
        if wrapped_by_engine(wrapper) is not None:
            raise ValueError(
                f"the model is inside a {type(wrapper).__name__}, which takes part in backward only if it is called itself. Put "
                "share_prefixes and the loss into the forward of a module, and that module into the wrapper."
            )
    return inner


def share_prefixes(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    completion_mask: Tensor | None = None,
    *,
    same_padding: bool = False,
) -> SharedBatch:
    """Return the batch as one row in which the tokens that several rows begin with occur once.

    Rows with equal prompts share them, however short. Rows share other equal beginnings too, of part of a prompt or of a prompt
    and part of a completion, if at least 16 more tokens are equal.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), nonzero for real tokens, which must be consecutive in a row; padding may be on either side.
        completion_mask: (B, T), nonzero for the tokens that are scored, by default all real ones but a row's first. A row's
            prompt is what comes before them.
        same_padding: whether only rows with equally much padding before them share. Then every token has the position that it
            has in the stock model, which models need whose positions are not rotary.
    """
    ids_BT, is_real_BT = input_ids.cpu(), torch.ones_like(input_ids, dtype=torch.bool, device="cpu")
    for name, given in (("attention_mask", attention_mask), ("completion_mask", completion_mask)):
        if given is not None and given.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(given.shape)} and input_ids {tuple(input_ids.shape)}. Pass one entry for each token."
            )
    if attention_mask is not None:
        is_real_BT = attention_mask.cpu().bool()
    scored_BT = is_real_BT.clone()
    scored_BT &= True if completion_mask is None else completion_mask.cpu().bool()
    if not is_real_BT.any():
        raise ValueError(f"none of the tokens of a batch of shape {tuple(input_ids.shape)} is real. Pass a row with some.")
    rows, firsts = _rows(ids_BT, is_real_BT), _first(is_real_BT)
    scored_BT[torch.arange(len(rows), device="cpu"), firsts] = False  # nothing comes before it
    prompts = torch.where(scored_BT.any(1), _first(scored_BT) - firsts, is_real_BT.sum(1)).tolist()
    layout = _Layout(rows, prompts, firsts.tolist(), same_padding)
    place_BT = torch.zeros_like(ids_BT, dtype=torch.long)
    place_BT[is_real_BT] = torch.cat([torch.arange(*span, device="cpu") for spans in layout.places for span in spans])
    tree = Tree(tuple(layout.ends), tuple(layout.parents))
    tokens_N = ids_BT.new_zeros(tree.length)
    tokens_N[place_BT[is_real_BT]] = ids_BT[is_real_BT]
    scored_BT, device = scored_BT[:, 1:], input_ids.device
    return SharedBatch(
        input_ids=tokens_N.unsqueeze(0).to(device),
        position_ids=(tree.positions() + torch.cat(layout.shifts)).unsqueeze(0).to(device),
        targets=ids_BT[:, 1:][scored_BT].unsqueeze(0).to(device),
        tree=tree,
        mask=scored_BT.to(device),
        places=place_BT[:, :-1][scored_BT].to(device),
        slots=scored_BT.nonzero().mT.to(device),
        tokens=sum(map(len, rows)),
        moved=layout.moved,
    )


def _first(is_BT: Tensor) -> Tensor:
    """Return the first true column of each row, or 0."""
    return is_BT.int().argmax(dim=1)


def has_gaps(attention_mask: Tensor) -> bool:
    """Return whether padding lies between real tokens of a row."""
    is_real_BT = torch.nn.functional.pad(attention_mask.bool().int(), (1, 0))
    return bool((is_real_BT.diff(dim=1) == 1).sum(dim=1).max() > 1)


def _rows(ids_BT: Tensor, is_real_BT: Tensor) -> list[list[int]]:
    """Return the real tokens of each row; raise where they are not consecutive."""
    if has_gaps(is_real_BT):
        raise ValueError(
            "attention_mask hides tokens between others of a row, which then are at other distances. Pass rows whose real tokens "
            "are consecutive."
        )
    return [ids_T[is_real_T].tolist() for ids_T, is_real_T in zip(ids_BT, is_real_BT, strict=True)]


class _Layout:
    """The shared row while it is built: where segments end and their parents, and the spans in which each row's tokens are.

    `shifts` are what positions begin with: as in the stock model, they count padding before a row. Of rows that share a beginning
    after different padding, it is the first row's: rotary embeddings depend on differences of positions only.
    """

    def __init__(self, rows: list[list[int]], prompts: list[int], firsts: list[int], same_padding: bool) -> None:
        self.rows, self.prompts = rows, prompts
        self.length = 0
        self.shifts: list[Tensor] = []
        self.ends: list[int] = []
        self.parents: list[int] = []
        self.places: list[list[tuple[int, int]]] = [[] for _ in rows]
        self.moved = False
        kinds = defaultdict(list)
        for row, first in enumerate(firsts):
            kinds[first if same_padding else 0].append(row)
        for group in chain.from_iterable(self._groups(kind, 0) for kind in kinds.values()):
            before = self.length
            self._add(group, 0, -1)
            self.moved |= len({firsts[row] for row in group}) > 1
            self.shifts.append(torch.full((self.length - before,), firsts[group[0]], device="cpu"))

    def _add(self, group: list[int], offset: int, parent: int) -> None:
        """Add what the rows of a group have from `offset` on: the beginning that they share, then their branches."""
        stop = self._end_of_beginning(group, offset)
        span = self.length, self.length + stop - offset
        self.length = span[1]
        self.ends.append(self.length)
        self.parents.append(parent)
        segment = len(self.ends) - 1
        for row in group:
            self.places[row].append(span)
        for branch in self._groups([row for row in group if len(self.rows[row]) > stop], stop):
            self._add(branch, stop, segment)

    def _end_of_beginning(self, group: list[int], offset: int) -> int:
        """Return up to where the rows of a group share their tokens."""
        first = self.rows[group[0]]
        if len(group) == 1:
            return len(first)
        stop = min(len(self.rows[row]) for row in group)
        for row in group[1:]:
            other = self.rows[row]
            if other[offset:stop] != first[offset:stop]:
                stop = next(place for place in range(offset, stop) if other[place] != first[place])
        prompt = min(self.prompts[row] for row in group)
        return prompt if offset < prompt < stop < prompt + SHORTEST else stop

    def _groups(self, rows: list[int], offset: int) -> list[list[int]]:
        """Group rows with the same prompt, or the same next tokens, from `offset` on."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for row in rows:
            tokens, prompt = self.rows[row], self.prompts[row]
            if offset < prompt < offset + SHORTEST:
                groups[prompt, *tokens[offset:prompt]].append(row)
            elif len(tokens) >= offset + SHORTEST:
                groups[None, *tokens[offset : offset + SHORTEST]].append(row)
            elif tokens:
                groups["alone", row].append(row)
        return list(groups.values())
