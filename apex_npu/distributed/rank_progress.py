# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The progress of each process of a group, kept in a store, so that other processes can report a missing process."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch.distributed as dist

# The time between two notes, since each is a message to the store.
_INTERVAL_SECONDS = 1.0


def own_rank() -> int:
    """Return the rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_first_rank() -> bool:
    """Return whether this is rank 0; True without torch.distributed."""
    return own_rank() == 0


class LastRank:
    """The rank of this process, also after its process group has been destroyed, as at the end of a script.

    Attributes:
        rank: The rank when ``update`` was last called while there was a process group; 0 before that.
    """

    def __init__(self) -> None:
        """Note the rank in the present process group, if there is one."""
        self.rank = own_rank()

    def update(self) -> None:
        """Note the rank again; without a process group, keep the last one."""
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank()


def has_peers() -> bool:
    """Return whether torch.distributed has other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def store_for(name: str) -> Any:
    """Return the part with prefix ``name`` of the default group's store; None if there is no store."""
    find_store = getattr(dist.distributed_c10d, "_get_default_store", None)
    if find_store is None:
        return None
    # The prefix has the number of restarts, since torchrun may keep the store when it restarts the processes.
    prefix = f"apex_npu/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"
    return dist.PrefixStore(prefix, find_store())  # type: ignore[attr-defined]


class RankProgress:
    """The notes of this process, and of the others in its group.

    Attributes:
        reductions: The number of reductions of gradients that this process has completed.
    """

    def __init__(self, group: Any) -> None:
        """Keep the notes of ``group`` in the store of torch.distributed, if there is one."""
        self.reductions = 0
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._noted = 0.0
        self._store = store_for(group.group_name)

    def note(self, doing: str, *, now: bool = False) -> None:
        """Store ``doing``, the activity of this process, at most once a second unless ``now``."""
        clock = time.monotonic()
        if self._store is None or (not now and clock - self._noted < _INTERVAL_SECONDS):
            return
        self._noted = clock
        try:
            self._store.set(str(self._rank), json.dumps([self.reductions, time.time(), doing]))
        except RuntimeError:
            self._store = None  # the process that keeps it is gone

    def tell(self) -> str:
        """Return one clause for each process, in one text."""
        return "; ".join(f"rank {rank} {self._tell_of(rank)}" for rank in range(self._size))

    def _tell_of(self, rank: int) -> str:
        try:
            if self._store is None or not self._store.check([str(rank)]):
                return "has not reported anything"
            reductions, then, doing = json.loads(self._store.get(str(rank)))
        except RuntimeError:
            return "is not known, because the store is gone"
        ago = max(0.0, time.time() - then)
        return f"had completed {reductions} and {doing}, {ago:.0f} s ago"
