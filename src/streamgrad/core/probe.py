"""What one layer costs, measured by running it on its first few tokens with an ordinary graph.

Nothing of the run remains: the graph is dropped, and the generators stand where they stood.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from streamgrad.core.chunk import Chunk, KeyValueStream
from streamgrad.core.exchange import Exchange
from streamgrad.core.policy import LayerCosts
from streamgrad.core.replay import Autocast
from streamgrad.core.shadows import trainable_parameters
from streamgrad.core.sums import accumulator_dtype

PROBED_TOKENS = 256


def measured_costs(
    layer: nn.Module, run: Callable[[Tensor, Chunk], Tensor], mask: object, backends: list, h_BTE: Tensor, exchange: Exchange
) -> LayerCosts:
    """Of the layer whose chunks `run` computes (see `StreamedCall`), on the first tokens of `h_BTE`."""
    tokens = min(PROBED_TOKENS, h_BTE.shape[1])
    chunk, out_BLE, saved_bytes = _run(layer, run, mask, backends, h_BTE[:, :tokens], exchange)
    assert chunk.own_key is not None and chunk.own_value is not None
    count = h_BTE.shape[0] * tokens
    if tokens > 1:
        # The difference of two lengths: what does not grow with tokens, as weights that autocast has cast, is no cost of a token.
        half = tokens // 2
        saved_bytes -= _run(layer, run, mask, backends, h_BTE[:, :half], exchange)[2]
        saved_bytes *= tokens / (tokens - half)
    input_bytes = max(h_BTE[:, :tokens].nbytes, out_BLE.nbytes) / count
    attention = 0 if chunk.kept is None else chunk.kept.out_BHLD.nbytes + chunk.kept.lse_BHL.nbytes
    trainable = trainable_parameters(layer)
    return LayerCosts(
        input=input_bytes,
        keys_and_values=(chunk.own_key.nbytes + chunk.own_value.nbytes) / count,
        attention=attention / count,
        graph=input_bytes + saved_bytes / count,
        gradients=sum(parameter.nbytes for parameter in trainable if parameter.grad is None),
        gradient_sums=sum(parameter.numel() * accumulator_dtype(parameter.dtype).itemsize for parameter in trainable),
    )


def _run(
    layer: nn.Module, run: Callable[[Tensor, Chunk], Tensor], mask: object, backends: list, h_BLE: Tensor, exchange: Exchange
) -> tuple[Chunk, Tensor, float]:
    """The chunk, its output, and the bytes that its graph saves beside its input and the layer's weights."""
    h_BLE = h_BLE.detach().clone().requires_grad_()
    stream = KeyValueStream(exchange.ranks * h_BLE.shape[1])
    chunk = Chunk(0, h_BLE.shape[1], stream, mask, backends, keep_attention=True, exchange=exchange)
    saved: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # A slice counts as its own size: rotary angles are slices of the whole sequence's.
            size = min(storage.nbytes(), tensor.nbytes)
            saved[storage.data_ptr()] = max(size, saved.get(storage.data_ptr(), 0))
        return tensor

    devices = [h_BLE.device] if h_BLE.device.type == "cuda" else []
    autocast = Autocast(h_BLE.device.type)
    with (
        torch.random.fork_rng(devices=devices),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        out_BLE = run(h_BLE, chunk)
    autocast.forget_casts()
    chunk.check_finished()
    saved.pop(h_BLE.untyped_storage().data_ptr(), None)
    return chunk, out_BLE, sum(saved.values())
