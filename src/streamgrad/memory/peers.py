"""Bytes of a step with gradient checkpointing and Liger's kernels, whose loss never has full logits: a peer of streaming.

The layer inputs, one layer's whole graph with fused norms and activations, and a head that works in pieces. The pieces are
Liger's: as many as the vocabulary is wider than the model, rounded to a power of two. tests/memory/test_peers.py tests these
bytes against measured steps.
"""

from __future__ import annotations

from streamgrad.memory.costs import Parts, sum_of
from streamgrad.memory.fit import Card, longest_with
from streamgrad.memory.phases import Phase, Workload, largest


def liger_phases(load: Workload) -> list[Phase]:
    """Return the phases: the head, the backward passes of the last layer and of the first, and the embeddings."""
    shape, tokens, costs = load.shape, load.tokens, load.shape.profile.costs
    hidden = tokens * costs.input
    through: Parts = {"hidden states": 2 * hidden}
    pieces = -(-shape.vocabulary // shape.width)
    rows = min(tokens, 1 << (-(-tokens // pieces) - 1).bit_length())
    head = {
        "hidden states": hidden,
        "logits": 2.0 * rows * shape.vocabulary * shape.itemsize,
        "gradients": 2.0 * shape.itemsize * shape.head_trainable,
    }
    work = {
        "chunk activations": tokens * costs.widest,
        "gradients": float(shape.itemsize * shape.layer_trainable),
        "workspace": tokens * costs.workspace + costs.weights,
    }

    def before(layers: int) -> Parts:
        return sum_of(load.with_positions, through, {"kept inputs": layers * hidden})

    def layer(index: int) -> Phase:
        finished = {"gradients": load.gradients(shape.layers - 1 - index)}
        return Phase(f"backward of layer {index}", sum_of(before(index + 1), work, finished))

    gradients = {"gradients": load.gradients(shape.layers)}
    return [
        Phase("the head", sum_of(before(shape.layers), head)),
        layer(shape.layers - 1),
        layer(0),
        Phase("the embeddings", sum_of(load.always, gradients, load.at_embeddings(load.embedding_gradient_bytes))),
    ]


def longest_with_liger(card: Card, load: Workload) -> int:
    """Return the tokens of the longest sequence that fits, or 0."""
    return longest_with(load, lambda longer: card.holds(None, largest(liger_phases(longer))))
