# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws results/cpu.csv, and cuda.csv where there is one: share of the ceiling, baselines, and how cost grows.

    python benchmarks/plots.py

``results/speed.png``, the picture of the first page, is drawn from cpu.csv alone, ``results/iterations.png`` from
iterations_cpu.csv, docs/sharded_steps.png from sharded_whole_steps_cpu.csv, and docs/memory.png from what ``apex_npu``
says of itself.
"""

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


def over_the_same_tensors(variants: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Implementations of others that a user can have: neither the ceiling, nor a step over one flat tensor."""
    return {
        name: row
        for name, row in variants.items()
        if name != "ceiling" and not name.startswith("apex_npu") and not name.endswith(", one tensor")
    }


def where(table: Table) -> str:
    """The machine, the commit and the torch of ``table``."""
    first = table[0]
    threads = max(int(row.get("threads", "1")) for row in table)
    how = first["device"] if first["device"] != "cpu" else f"{threads} thread{'s' * (threads > 1)}"
    return f"{first['processor']}, {how}, torch {first['torch']}, commit {first['commit']}"


def _share(axes: Any, table: Table) -> None:
    steps = {rule: v["apex_npu"] for rule, v in _steps(table, "resnet50").items() if v["apex_npu"]["share_of_ceiling"]}
    axes.bar(list(steps), [float(row["share_of_ceiling"]) * 100 for row in steps.values()])
    axes.axhline(100, color="gray", linewidth=1)
    axes.set(title="A step of resnet50's parameters", ylabel="% of the ceiling")
    axes.tick_params(axis="x", rotation=45)


def _baselines(axes: Any, table: Table, workload: str) -> None:
    steps = _steps(table, workload)
    baselines = list(dict.fromkeys(name for variants in steps.values() for name in over_the_same_tensors(variants)))
    width = 0.8 / max(1, len(baselines))
    places: dict[str, list[tuple[float, float]]] = {name: [] for name in baselines}
    for x, variants in enumerate(steps.values()):
        there = [name for name in baselines if name in variants]
        for i, name in enumerate(there):  # around the rule's tick, however many have the rule
            places[name].append((x + (i - (len(there) - 1) / 2) * width, float(variants[name]["ratio"])))
    for name, bars in places.items():
        axes.bar(*zip(*bars, strict=True), width, label=name)
    axes.axhline(1, color="gray", linewidth=1)
    axes.set(title=f"A step of {workload}'s parameters", ylabel="time over apex_npu's", yscale="log")
    axes.set_xticks(range(len(steps)), list(steps), rotation=45)
    axes.legend(fontsize="small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)


def _growth(axes: Any, table: Table, sweep: dict[str, int], label: str) -> None:
    rows = [row for row in table if row["comparison"] == "step of Adam" and row["workload"] in sweep]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        points = [(sweep[row["workload"]], float(row["median_ms"])) for row in rows if row["variant"] == variant]
        axes.plot(*zip(*points, strict=True), marker="o", label=variant)
    axes.set(xlabel=label, ylabel="ms", xscale="log", yscale="log", title="A step of Adam")
    axes.legend(fontsize="small")


# What the bars of the first page stand for, with Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS = {
    "torch": "#999999",
    "fastest other": "#999999",
    "patch of 2020": "#E69F00",
    "apex_npu": "#0072B2",
    "with fuse_unscale": "#56B4E9",
}
_WHOLE_STEP = {
    "torch": "foreach copies, GradScaler, clip, fused",
    "apex_npu": "apex_npu, as written",
    "with fuse_unscale": "apex_npu, folded",
}
_WORKLOADS = {"resnet50": "ResNet-50", "bert": "BERT", "small2000": "2,000 small tensors"}
_SHARDED = {
    "torch": "GradScaler, clip, fused",
    "apex_npu": "apex_npu",
    "with fuse_unscale": "apex_npu, folded",
}
_LEVELS = {"O0": "#999999", "O1": "#E69F00", "O2": "#D55E00", "O4": "#56B4E9", "O5": "#0072B2"}
_MARKERS = {"O0": "o", "O1": "s", "O2": "D", "O4": "^", "O5": "v"}
_PRECISIONS = {"O0": "float32", "O1": "float16", "O2": "float16", "O4": "bfloat16", "O5": "bfloat16"}
_DOCS = RESULTS.parents[1] / "docs"
# A median, and the ends of the interval around it.
Speed = tuple[float, float, float]


def whole_steps(table: Table) -> dict[str, dict[str, Speed]]:
    """Workload → what is drawn → speed over torch's, of a whole O2 step."""
    rows = {(row["workload"], row["variant"]): row for row in table if row["comparison"] == "whole O2 step"}
    return {
        shown: {label: _speed(rows[workload, variant]) for label, variant in _WHOLE_STEP.items()}
        for workload, shown in _WORKLOADS.items()
    }


def sharded_steps(table: Table) -> dict[str, dict[str, Speed]]:
    """How many DTensors → what is drawn → speed over torch's, of all that follows a backward."""
    rows = {(row["workload"], row["variant"]): row for row in table}
    prefix = f"ratio_to_{_SHARDED['torch']}"
    return {
        workload.partition(",")[0]: {
            label: _speed(rows[workload, variant], prefix, "ratio_low", "ratio_high")
            for label, variant in _SHARDED.items()
        }
        for workload in dict.fromkeys(row["workload"] for row in table)
    }


def _speed(row: dict[str, str], ratio: str = "ratio", low: str = "low", high: str = "high") -> Speed:
    return 1 / float(row[ratio]), 1 / float(row[high]), 1 / float(row[low])


def small_steps(table: Table) -> dict[str, dict[str, Speed]]:
    """Rule and the fastest implementation of others → what is drawn → speed over it, for many small tensors.

    The patch of 2020 has bars of its own: ``old_patch.py`` repeats its operators, and no package has them today.
    """
    speeds = {}
    for rule, variants in _steps(table, "small2000").items():
        others = over_the_same_tensors(variants)
        patch = others.pop("old patch")
        if others:
            name, fastest = min(others.items(), key=lambda item: float(item[1]["ratio"]))
            ours = float(fastest["ratio"]), float(fastest["low"]), float(fastest["high"])
            speeds[f"{rule} / {name}"] = {
                "fastest other": (1.0,) * 3,
                "patch of 2020": (ours[0] / float(patch["ratio"]),) * 3,
                "apex_npu": ours,
            }
    return speeds


def iterations(table: Table, how: str) -> dict[str, dict[str, Speed]]:
    """Level → model → speed over torch's own recipe at the same precision, of a whole iteration on all cores."""
    cores = max(table, key=lambda row: int(row["threads"]))["threads"]
    speeds: dict[str, dict[str, Speed]] = {}
    for row in table:
        level, _, variant = row["variant"].partition(", ")
        if row["threads"] == cores and variant == how:
            found = speeds.setdefault(level, {})
            found[row["model"]] = float(row["speed"]), float(row["low"]), float(row["high"])
    return dict(sorted(speeds.items()))


def _points(axes: Any, speeds: dict[str, dict[str, Speed]]) -> None:
    models = list(dict.fromkeys(model for found in speeds.values() for model in found))
    for place, (level, found) in enumerate(speeds.items()):
        for model, (value, low, high) in found.items():
            height = models.index(model) + 0.15 * (place - (len(speeds) - 1) / 2)
            axes.plot([low, high], [height, height], color=_LEVELS[level], linewidth=1)
            label = f"{level}, {_PRECISIONS[level]}" if model == next(iter(found)) else None
            axes.plot(value, height, _MARKERS[level], color=_LEVELS[level], markersize=6, label=label)
    for between in range(1, len(models)):
        axes.axhline(between - 0.5, color="#dddddd", linewidth=0.8)
    axes.axvline(1, color="#999999", linewidth=1.5)
    axes.set_yticks(range(len(models)), models)
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.set_xlabel("speed, torch's own recipe at the same precision = 1", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Any, speeds: dict[str, dict[str, Speed]]) -> None:
    labels = list(next(iter(speeds.values())))
    for place, label in enumerate(labels):
        heights = [row + 0.27 * (place - 1) for row in range(len(speeds))]
        values = [row[label][0] for row in speeds.values()]
        axes.barh(heights, values, 0.25, label=label, color=_COLOURS[label])
        if label in (labels[0], "patch of 2020"):
            continue
        for height, row in zip(heights, speeds.values(), strict=True):
            value, low, high = row[label]
            axes.plot([low, high], [height, height], color="black", linewidth=1)
            axes.text(high, height, f" {value:.1f}x", va="center", fontsize=9)
    axes.set_yticks(range(len(speeds)), list(speeds))
    axes.set_xlabel(f"speed, {labels[0]} = 1", fontsize=10)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, ncols=len(labels), loc="upper center", bbox_to_anchor=(0.45, -0.14), frameon=False)


def write_front(results: Path = RESULTS) -> None:
    """The picture of the first page."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    table = read_csv(results / "cpu.csv")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.8), layout="constrained")
    figure.suptitle(where(table), fontsize=9)
    _bars(left, whole_steps(table))
    left.set_title("A whole O2 step with Adam: unscale, clip, step, clear", fontsize=10)
    _bars(right, small_steps(table))
    right.set_title("A step over 2,000 small tensors: rule / fastest other", fontsize=10)
    figure.savefig(results / "speed.png", dpi=125, metadata={"Software": None})
    plt.close(figure)
    print(f"written: {results / 'speed.png'}")


def write_iterations(results: Path = RESULTS) -> None:
    """Whole iterations of well-known models."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    table = read_csv(results / "iterations_cpu.csv")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 5.4), layout="constrained", sharex=True, sharey=True)
    figure.suptitle(where(table), fontsize=9)
    _points(left, iterations(table, "as written"))
    left.set_title("Scripts as they are written", fontsize=10)
    _points(right, iterations(table, "folded"))
    right.set_title("With fuse_unscale=True and fused clipping", fontsize=10)
    figure.legend(*left.get_legend_handles_labels(), fontsize=9, ncols=5, loc="outside lower center", frameon=False)
    figure.savefig(results / "iterations.png", dpi=125, metadata={"Software": None})
    plt.close(figure)
    print(f"written: {results / 'iterations.png'}")


def write_sharded(results: Path = RESULTS, docs: Path = _DOCS) -> None:
    """The picture of docs/distributed.md."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    _bars(axes, sharded_steps(read_csv(results / "sharded_whole_steps_cpu.csv")))
    axes.set_title("A whole O2 step of AdamW over sharded parameters: unscale, clip, step, clear", fontsize=10)
    figure.savefig(docs / "sharded_steps.png", dpi=125, metadata={"Software": None})
    plt.close(figure)
    print(f"written: {docs / 'sharded_steps.png'}")


# What a bar consists of, in order, in Okabe and Ito's colours.
_PARTS = {
    "model": "#0072B2",
    "gradient": "#56B4E9",
    "master": "#E69F00",
    "its gradient": "#F0E442",
    "state": "#999999",
}


def write_memory(docs: Path = _DOCS) -> None:
    """The picture of docs/memory.md."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import torch

    from apex_npu.optimizers import NpuFusedAdam
    from apex_npu.optimizers.memory_choices import memory_choices

    choices = memory_choices(NpuFusedAdam([torch.nn.Parameter(torch.zeros(1))]))
    names = [choice.name.replace(", state_dtype=torch.", ",\nstate_dtype=torch.") for choice in choices]
    names = [name.replace(', state_dtype="', ',\nstate_dtype="') for name in names]
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    ends = [0.0] * len(choices)
    for part, colour in _PARTS.items():
        widths = [choice.parts()[part] for choice in choices]
        label = {"its gradient": "the master's gradient", "state": "Adam's moments"}.get(part, part)
        axes.barh(names, widths, 0.6, ends, label=label, color=colour)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, choice in enumerate(choices):
        axes.text(choice.total, row, f" {choice.total:.3g}", va="center", fontsize=9)
    axes.set_title("Bytes of a parameter with Adam, beside activations", fontsize=10)
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    axes.set_xticks(range(0, 21, 4))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, ncols=len(_PARTS), loc="upper center", bbox_to_anchor=(0.3, -0.08), frameon=False)
    figure.savefig(docs / "memory.png", dpi=125, metadata={"Software": None})
    plt.close(figure)
    print(f"written: {docs / 'memory.png'}")


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
        rows = 2 if any(row["workload"] in COUNTS for row in table) else 1
        figure, axes = plt.subplots(rows, 3, figsize=(18, 5.4 * rows), squeeze=False)
        figure.suptitle(where(table))
        _share(axes[0, 0], table)
        _baselines(axes[0, 1], table, "resnet50")
        _baselines(axes[0, 2], table, "small2000")
        if rows == 2:
            _growth(axes[1, 0], table, COUNTS, "tensors, of 4 million elements together")
            _growth(axes[1, 1], table, SIZES, "elements, in 100 tensors")
            axes[1, 2].axis("off")
        figure.tight_layout()
        figure.savefig(results / f"{device}.png", dpi=80, metadata={"Software": None})
        plt.close(figure)
        print(f"written: {results / f'{device}.png'}")
    if (results / "cpu.csv").exists():
        write_front(results)
    if (results / "iterations_cpu.csv").exists():
        write_iterations(results)
    if results == RESULTS and (results / "sharded_whole_steps_cpu.csv").exists():
        write_sharded()
    if results == RESULTS:
        write_memory()


if __name__ == "__main__":
    write()
