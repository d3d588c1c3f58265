"""Streamed models on several GPUs: launches, failures, shared sequences, ZeRO-3's leaf modules. Other engines need nothing."""

from streamgrad.parallel.failures import failures_told
from streamgrad.parallel.launch import check_launch
from streamgrad.parallel.sequence import sequence_loss, sequence_parallel, whole_sequence
from streamgrad.parallel.shared_slices import shared_slice
from streamgrad.parallel.zero3 import make_zero3_leaves

__all__ = [
    "check_launch",
    "failures_told",
    "make_zero3_leaves",
    "sequence_loss",
    "sequence_parallel",
    "shared_slice",
    "whole_sequence",
]
