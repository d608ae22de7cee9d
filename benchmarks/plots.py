# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws results/cpu.csv, and cuda.csv where there is one: share of the ceiling, baselines, and how cost grows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rounds import RESULTS, read_csv
from workloads import COUNTS, SIZES

Table = list[dict[str, str]]


def _steps(table: Table, workload: str) -> dict[str, dict[str, dict[str, str]]]:
    """Rule → variant → row."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in table:
        if row["comparison"].startswith("step of ") and row["workload"] == workload:
            found.setdefault(row["comparison"].removeprefix("step of "), {})[row["variant"]] = row
    return found


def _share(axes: Any, table: Table) -> None:
    steps = {rule: v["apex_npu"] for rule, v in _steps(table, "resnet50").items() if v["apex_npu"]["share_of_ceiling"]}
    axes.bar(list(steps), [float(row["share_of_ceiling"]) * 100 for row in steps.values()])
    axes.axhline(100, color="gray", linewidth=1)
    axes.set(title="A step of resnet50's parameters", ylabel="% of the ceiling")
    axes.tick_params(axis="x", rotation=45)


def _baselines(axes: Any, table: Table, workload: str) -> None:
    steps = _steps(table, workload)
    names = dict.fromkeys(name for variants in steps.values() for name in variants)
    baselines = [name for name in names if not name.startswith("apex_npu") and name != "ceiling"]
    width = 0.8 / max(1, len(baselines))
    for i, baseline in enumerate(baselines):
        bars = [(x, float(v[baseline]["ratio"])) for x, v in enumerate(steps.values()) if baseline in v]
        axes.bar([x + (i - len(baselines) / 2) * width for x, _ in bars], [y for _, y in bars], width, label=baseline)
    axes.axhline(1, color="gray", linewidth=1)
    axes.set(title=f"A step of {workload}'s parameters", ylabel="time over apex_npu's", yscale="log")
    axes.set_xticks(range(len(steps)), list(steps), rotation=45)
    axes.legend(fontsize="small")


def _growth(axes: Any, table: Table, sweep: dict[str, int], label: str) -> None:
    rows = [row for row in table if row["comparison"] == "step of Adam" and row["workload"] in sweep]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        points = [(sweep[row["workload"]], float(row["median_ms"])) for row in rows if row["variant"] == variant]
        axes.plot(*zip(*points, strict=True), marker="o", label=variant)
    axes.set(xlabel=label, ylabel="ms", xscale="log", yscale="log", title="A step of Adam")
    axes.legend(fontsize="small")


def write(results: Path = RESULTS) -> None:
    """One PNG for each device that has been timed; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed")
        return
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    for device in ("cpu", "cuda"):
        path = results / f"{device}.csv"
        if not path.exists():
            continue
        table = read_csv(path)
        figure, ((a, b, c), (d, e, f)) = plt.subplots(2, 3, figsize=(18, 10))
        _share(a, table)
        _baselines(b, table, "resnet50")
        _baselines(c, table, "small2000")
        _growth(d, table, COUNTS, "tensors, of 4 million elements together")
        _growth(e, table, SIZES, "elements, in 100 tensors")
        f.axis("off")
        figure.tight_layout()
        figure.savefig(results / f"{device}.png", dpi=80, metadata={"Software": None})
        plt.close(figure)
        print(f"written: {results / f'{device}.png'}")
