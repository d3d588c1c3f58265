"""DDP training in which the second rank's second batch has a label that the model does not know."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import streamgrad
from tiny import tiny_model, tokens

dist.init_process_group("gloo")
model = DistributedDataParallel(streamgrad.enable(tiny_model("qwen3"), chunk_size=8))
for step in range(2):
    ids = tokens(2, 32)
    labels = ids.clone()
    if dist.get_rank() == 1 and step == 1:
        labels[0, 5] = 1000
    model(input_ids=ids, labels=labels).loss.backward()
