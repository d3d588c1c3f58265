"""DDP training in which the second rank's second batch has a label that the model does not know.

With an argument, that rank does not end when it has failed, and the seconds are the timeout of the group.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import streamgrad
from streamgrad.parallel import failures_told
from tiny import tiny_model, tokens

stays = len(sys.argv) > 1
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[1]) if stays else 600))
model = DistributedDataParallel(streamgrad.enable(tiny_model("qwen3"), chunk_size=8))
try:
    with failures_told():
        for step in range(2):
            ids = tokens(2, 32)
            labels = ids.clone()
            if dist.get_rank() == 1 and step == 1:
                labels[0, 5] = 1000
            model(input_ids=ids, labels=labels).loss.backward()
except ValueError:
    if not stays:
        raise
    time.sleep(600)
