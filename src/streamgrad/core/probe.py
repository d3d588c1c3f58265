"""What one layer costs, measured by running it on its first few tokens with an ordinary graph.

Nothing of the run remains: the graph is dropped, and the generators stand where they stood.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from streamgrad.core.chunk import Chunk, KeyValueStream
from streamgrad.core.policy import LayerCosts
from streamgrad.core.shadows import trainable_parameters
from streamgrad.core.sums import accumulator_dtype

PROBED_TOKENS = 256


def measured_costs(layer: nn.Module, run, mask: object, backends: list, h_BTE: Tensor) -> LayerCosts:
    """Of the layer whose chunks `run` computes (see `StreamedCall`), on the first tokens of `h_BTE`."""
    h_BLE = h_BTE[:, :PROBED_TOKENS].detach().clone().requires_grad_()
    count = h_BLE.shape[0] * h_BLE.shape[1]
    chunk = Chunk(0, h_BLE.shape[1], KeyValueStream(h_BLE.shape[1]), mask, backends, keep_attention=True)
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
    with (
        torch.random.fork_rng(devices=devices),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        out_BLE = run(h_BLE, chunk)
    chunk.check_finished()
    assert chunk.own_key is not None and chunk.own_value is not None
    saved.pop(h_BLE.untyped_storage().data_ptr(), None)
    attention = 0 if chunk.kept is None else chunk.kept.out_BHLD.nbytes + chunk.kept.lse_BHL.nbytes
    input_bytes = max(h_BLE.nbytes, out_BLE.nbytes) / count
    keys_and_values = (chunk.own_key.nbytes + chunk.own_value.nbytes) / count
    trainable = [parameter for parameter in trainable_parameters(layer) if parameter.grad is None]
    return LayerCosts(
        input=input_bytes,
        keys_and_values=keys_and_values,
        attention=attention / count,
        graph=input_bytes + keys_and_values + sum(saved.values()) / count,  # the stream holds keys and values, not the graph
        gradients=sum(parameter.nbytes for parameter in trainable),
        gradient_sums=sum(p.numel() * accumulator_dtype(p.dtype).itemsize for p in trainable_parameters(layer)),
    )
