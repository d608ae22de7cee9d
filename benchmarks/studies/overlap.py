# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws one recorded step of two processes: docs/overlap.png.

    PYTHONPATH=benchmarks torchrun --standalone --nproc-per-node 2 benchmarks/studies/overlap.py

Of several recorded steps that with the median length is drawn, rank 0's.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from data_parallel import CombineDdp, large
from timeline import Timeline

WARM_UP, STEPS = 5, 21
PICTURE = Path(__file__).parents[2] / "docs" / "overlap.png"


def draw(timeline: Timeline, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    def ms(seconds: float) -> float:
        return 1e3 * seconds

    figure, axes = plt.subplots(figsize=(8.0, 3.6), dpi=80)
    axes.barh(0, ms(timeline.backward), color="#b8c9e0", height=0.6)
    for came, nbytes in timeline.gradients:
        axes.plot([ms(came)] * 2, [-0.3, 0.3], color="#33527a", linewidth=0.3 + nbytes / 2e6)
    for row, transfer in enumerate(timeline.transfers, 1):
        axes.barh(row, ms(transfer.averaged - transfer.sent), left=ms(transfer.sent), color="#e0a04c", height=0.6)
        if transfer.full is not None:
            axes.plot([ms(transfer.full)], [row], "v", color="#33527a", markersize=6)
        size = f"{transfer.nbytes / 2**20:.1f} MiB" if transfer.nbytes > 2**16 else f"{transfer.nbytes} bytes"
        axes.text(ms(transfer.averaged) + 0.5, row, size, va="center", fontsize=8)
    axes.axvline(ms(timeline.backward), color="#33527a", linestyle=":", linewidth=1)
    buckets = len(timeline.transfers) - 1
    axes.set_yticks(range(buckets + 2), ["backward", *(f"bucket {i + 1}" for i in range(buckets)), "who has what"])
    axes.set_xlim(0, ms(timeline.end) * 1.08)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds from the start of backward")
    axes.set_title(
        f"combine_ddp, 2 processes over gloo, 7 million parameters: backward hides {timeline.hidden_share:.0%} of the "
        "all-reduces\n(lines: gradients come; triangles: a bucket is full; bars: it is on its way)",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = CombineDdp(*large())
    for _ in range(WARM_UP):
        training.step()
    recorded = []
    for _ in range(STEPS):
        dist.barrier()
        recorded.append(training.recorded())
    if dist.get_rank() == 0:
        draw(sorted(recorded, key=lambda timeline: timeline.end)[STEPS // 2], PICTURE)
        print(f"written: {PICTURE}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
