# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Ranks``: exchanges the explanations of a skipped step between processes, through their rendezvous store."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from apex_npu.amp import StepReport
from apex_npu.debug.overflow.report import OverflowReport
from apex_npu.distributed.rank_progress import has_peers, store_for

_LENGTH = 4096
_PATIENCE_SECONDS = 10.0
_INTERVAL_SECONDS = 0.05


class Ranks:
    """An exchange of tables: each process sends its own, and a process without a cause of its own reads the others'.

    No collective is involved. If no other process answers within ten seconds, they are not asked again.
    """

    def __init__(self) -> None:
        self._asks = True

    def explain(self, skip: StepReport, reports: Sequence[OverflowReport]) -> tuple[str, bool]:
        """Return the tables of this process, or of the processes with a cause, and whether they say where to look."""
        own = "\n\n".join(str(report) for report in reports if report.overflowed or report.notes)
        causes = [cause for report in reports for cause in report.causes]
        is_cause = any(
            c.operator != "none" for report in reports for c in report.causes if report.reproduced is not False
        )
        store = store_for("explain_overflows") if has_peers() else None
        if store is None:
            return own, is_cause
        # All processes skip the same steps: each has counted the same number, and all that watch have explained the
        # same.
        key = f"{store.add(str(dist.get_rank()), 1)}/{skip.loss_id}/{skip.skipped_steps}"
        if any(cause.kind != "ranks" for cause in causes):
            store.set(f"{key}/{dist.get_rank()}", f"{int(is_cause)}{own}"[:_LENGTH])
            return own, is_cause
        told = self._ask(store, key) if self._asks else {}
        self._asks = bool(told)
        if not told:
            return own, False
        others = [f"rank {rank}\n{textwrap.indent(text[1:], '  ')}" for rank, text in told.items()]
        first = own or "the gradients of this process are finite; the step was skipped because of another process"
        return "\n\n".join([first, *others]), any(text[0] == "1" for text in told.values())

    @staticmethod
    def _ask(store: Any, key: str) -> dict[int, str]:
        ranks = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            there = [rank for rank in ranks if store.check([f"{key}/{rank}"])]
            if there or time.monotonic() > end:
                return {rank: store.get(f"{key}/{rank}").decode(errors="replace") for rank in there}
            time.sleep(_INTERVAL_SECONDS)
