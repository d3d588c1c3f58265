"""A rank that fails says why on rank 0 too, whose console may be the only one that anybody reads."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

_POLL_S = 0.2  # between two looks of rank 0
_PATIENCE_S = 5.0  # that a failing rank waits for it
_blocks = itertools.count()  # ranks enter as many, so that each block has keys of its own


@contextmanager
def failures_told() -> Iterator[None]:
    """Let rank 0 print at once why another rank leaves the block with an error. Every rank has to enter it.

    The reason travels through the store by which the processes found each other, not through a collective: rank 0 may be waiting
    in one, for the rank that failed. How long it goes on waiting is up to the launcher, which stops all ranks if one ends, and
    to `init_process_group(timeout=...)`.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    store, rank = PrefixStore(f"streamgrad/failures/{next(_blocks)}", _get_default_store()), dist.get_rank()
    if rank == 0:
        with _listening(store):
            yield
        return
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # a store that is gone must not hide the reason
            _tell(store, f"rank {rank} has failed: {type(error).__name__}: {error}")
        raise


def _tell(store: Store, reason: str) -> None:
    if not store.check(["reason"]):
        store.set("reason", reason)
    until = time.monotonic() + _PATIENCE_S
    while not store.check(["heard"]) and time.monotonic() < until:
        time.sleep(_POLL_S)


@contextmanager
def _listening(store: Store) -> Iterator[None]:
    """Print what another rank tells while the block runs."""
    ended = Event()

    def listen() -> None:
        with suppress(Exception):  # as when the store's process is gone, which the block will notice
            while not ended.wait(_POLL_S):
                if store.check(["reason"]):
                    sys.stderr.write(f"[rank0]: {store.get('reason').decode()}\n")
                    sys.stderr.flush()
                    store.set("heard", "yes")
                    return

    thread = Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(Exception):
            store.set("heard", "yes")  # or no longer listening
