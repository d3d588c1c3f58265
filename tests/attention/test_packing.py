"""Packed documents never see each other: the packed gradient is the sum of the gradients of the separate documents."""

from __future__ import annotations

import pytest
import torch

import streamgrad
from gradients import assert_same_step, no_float32, run_step
from tiny import tiny_model, tokens

LENGTHS = [9, 1, 13, 4]
ITEMS = 20


def separately(model, batch):
    """Each document alone, with the loss of all normalised by one count."""
    losses = [model(input_ids=ids, labels=ids, num_items_in_batch=ITEMS).loss for ids in batch["documents"]]
    return torch.stack(losses).sum()


def packed_batch(how: str) -> dict:
    documents = [tokens(1, length, seed=length) for length in LENGTHS]
    ids = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    batch = {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "num_items_in_batch": ITEMS}
    if how in ("positions", "both"):
        batch["position_ids"] = positions
    if how in ("boundaries", "both"):
        batch |= {"position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        batch |= {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    if how == "boundaries":
        # Stock models find documents by restarting positions only where no mask is given.
        batch["attention_mask"] = torch.ones_like(ids)
    return batch


@pytest.mark.parametrize("chunk_size", [1, 5, 12, 64])
@pytest.mark.parametrize("how", ["positions", "boundaries", "both"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_packing_equals_separate_documents(family, how, chunk_size):
    if (family, how) == ("gpt_oss", "positions"):
        pytest.skip("gpt-oss gives its mask function no positions, so stock packs this way with attention across documents")
    model = tiny_model(family)
    documents = {"documents": [tokens(1, length, seed=length) for length in LENGTHS]}
    with no_float32():
        expected = run_step(model, documents, forward=separately)
        streamgrad.enable(model, chunk_size=chunk_size)
        assert_same_step(run_step(model, packed_batch(how)), expected, 1e-10)


def test_a_chunk_reads_only_keys_of_its_own_documents():
    """The mask names the keys that a chunk can see, so keys of finished documents are not even multiplied."""
    from streamgrad.attention.masks import CausalMask

    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1]])
    mask = CausalMask(lambda b, h, q, k: documents[b, q] == documents[b, k], documents_BT=documents)
    parts = [mask.part(start, start + 1, batch=2) for start in (0, 3, 5, 6, 7)]
    assert [(part.first, part.last) for part in parts] == [(0, 1), (0, 4), (0, 6), (5, 7), (5, 8)]
    part = CausalMask(documents_BT=documents[:1], window=2).part(7, 8, batch=1)
    assert (part.first, part.last) == (6, 8)
