# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How bucket size, number of processes and link trade: the table and the picture of docs/distributed.md.

    python benchmarks/scaling.py

Nothing is measured here: ring.py has the formula, which it draws, and the simulation, whose results are the dots.
"""

from __future__ import annotations

from pathlib import Path

from ring import Link, best_bucket_nbytes, exposed_seconds, simulate

MIB = 2**20
# Gradients of 110 million parameters in float32, and a backward that takes as long as a small batch's.
NBYTES, BACKWARD = 420 * MIB, 0.150
LINKS = {"10 Gbit/s": Link(30e-6, 1.25e9), "100 Gbit/s": Link(5e-6, 12.5e9), "400 Gbit/s": Link(3e-6, 50e9)}
PROCESSES = (8, 64, 512, 4096)
BUCKETS_MIB = (1, 8, 32, 128, 420)
# A simulation takes 2 (P − 1) · P events for each bucket.
SIMULATED = 16
PICTURE = Path(__file__).parents[1] / "docs" / "bucket_size.png"


def exposed_ms(bucket_mib: float, processes: int, link: Link) -> float:
    return 1e3 * exposed_seconds(BACKWARD, NBYTES, max(1, round(NBYTES / MIB / bucket_mib)), processes, link)


def table() -> str:
    """Markdown."""
    lines = ["| link | processes | " + " | ".join(f"{size} MiB" for size in BUCKETS_MIB) + " | best size |"]
    lines.append("|---" * (len(BUCKETS_MIB) + 3) + "|")
    for name, link in LINKS.items():
        for processes in PROCESSES:
            cells = [f"{exposed_ms(size, processes, link):,.1f}" for size in BUCKETS_MIB]
            best = best_bucket_nbytes(BACKWARD, NBYTES, processes, link) / MIB
            lines.append(f"| {name} | {processes:,} | {' | '.join(cells)} | {best:,.1f} MiB |")
    return "\n".join(lines)


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    link = LINKS["100 Gbit/s"]
    sizes = [NBYTES / MIB / count for count in sorted({round(1.08**power) for power in range(90)})]
    figure, axes = plt.subplots(figsize=(7.0, 4.0), dpi=80)
    for processes in (SIMULATED, *PROCESSES[1:]):
        (line,) = axes.loglog(sizes, [exposed_ms(size, processes, link) for size in sizes], label=f"{processes:,}")
        best = best_bucket_nbytes(BACKWARD, NBYTES, processes, link) / MIB
        axes.plot([best], [exposed_ms(best, processes, link)], "v", color=line.get_color())
        if processes == SIMULATED:
            counts = (1, 4, 13, 52, 210)
            found = [simulate([BACKWARD] * processes, NBYTES, count, link) - BACKWARD for count in counts]
            axes.plot([NBYTES / MIB / count for count in counts], [1e3 * x for x in found], "o", color=line.get_color())
    axes.set_xlabel("bucket, MiB")
    axes.set_ylabel("wait after backward, ms")
    axes.set_title("420 MiB of gradients, backward 150 ms, 100 Gbit/s; dots: simulated, triangles: best", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(title="processes")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    print(table())
    draw(PICTURE)
    print(f"written: {PICTURE}")


if __name__ == "__main__":
    main()
