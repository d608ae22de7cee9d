# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws the pictures of the pages from results/*.csv, each for light and for dark pages.

    python benchmarks/plots.py

results/speed_*, rules_*, iterations_* and growth_* are drawn for each device that has been timed, and docs/memory_*
from what ``apex_npu`` says of itself. They are as wide as a page on a telephone can show.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rounds import RESULTS, read_csv
from workloads import COUNTS, SIZES

Table = list[dict[str, str]]
# A median, and the ends of the interval around it.
Speed = tuple[float, float, float]

DOCS = RESULTS.parents[1] / "docs"
WIDTH = 4.8  # inches: letters of 10 points are as large as the text where a page has 390 pixels
_COMMON = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "savefig.transparent": True,
    "svg.hashsalt": "apex_npu",  # the same csv makes the same file
}
INK = {"light": "#1f2328", "dark": "#e6edf3"}
_PALE = {"light": "#d1d9e0", "dark": "#3d444d"}
_OWN = {"light": "#0072B2", "dark": "#56B4E9"}
_OTHER = {"light": "#8c959f", "dark": "#9198a1"}
# Okabe and Ito's colours, which colour-blind readers tell apart.
COLOURS = {
    "O0": _OTHER,
    "O1": dict.fromkeys(INK, "#E69F00"),
    "O2": dict.fromkeys(INK, "#D55E00"),
    "O4": dict.fromkeys(INK, "#009E73"),
    "O5": _OWN,
    "torch": _OTHER,
    "apex_npu": _OWN,
    "with fuse_unscale": dict.fromkeys(INK, "#009E73"),
    "model": _OWN,
    "gradient": dict.fromkeys(INK, "#009E73"),
    "float32 value": dict.fromkeys(INK, "#E69F00"),
    "state": _OTHER,
}
_MARKERS = {"O0": "o", "O1": "s", "O2": "D", "O4": "^", "O5": "v"}
_PRECISIONS = {"O0": "float32", "O1": "float16", "O2": "float16", "O4": "bfloat16", "O5": "bfloat16"}
_WORKLOADS = {"bert": "BERT", "resnet50": "ResNet-50", "small2000": "2,000 small tensors"}
_VARIANTS = {"apex_npu": "apex_npu", "torch for-loop": "torch", "torch foreach": "O1", "torch fused": "O4"}


def where(*tables: Table) -> str:
    """The machine and the torch of ``tables``.

    Raises:
        ValueError: They are of several.
    """
    machines = {(row["processor"], row["torch"]) for table in tables for row in table}
    if len(machines) != 1:
        raise ValueError(f"a picture has one machine, and these tables are of {sorted(machines)}")
    ((processor, version),) = machines
    return f"{processor}, torch {version}"


def steps(table: Table, workload: str) -> dict[str, dict[str, dict[str, str]]]:
    """Rule → variant → row."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in table:
        if row["comparison"].startswith("step of ") and row["workload"] == workload:
            found.setdefault(row["comparison"].removeprefix("step of "), {})[row["variant"]] = row
    return found


def fastest_others(table: Table, workload: str = "small2000") -> dict[str, tuple[str, Speed]]:
    """Rule → the fastest implementation that a user can have beside ours, and our speed over it.

    Neither the ceiling nor a step over one flat tensor is one, and no package has the operators of ``old_patch.py``.
    """
    found = {}
    for rule, variants in steps(table, workload).items():
        others = {
            name: row
            for name, row in variants.items()
            if name not in ("ceiling", "old patch")
            and not name.startswith("apex_npu")
            and not name.endswith(", one tensor")
        }
        if others:
            name, fastest = min(others.items(), key=lambda item: float(item[1]["ratio"]))
            found[rule] = name, (float(fastest["ratio"]), float(fastest["low"]), float(fastest["high"]))
    return found


def adamw_steps(table: Table, sharded: Table | None = None) -> dict[str, Speed]:
    """Parameters → speed of a step over ``torch.optim.AdamW(fused=True)``."""
    found = {}
    for workload, shown in _WORKLOADS.items():
        row = steps(table, workload)["AdamW"]["torch fused"]
        found[shown] = float(row["ratio"]), float(row["low"]), float(row["high"])
    for row in sharded or []:
        if row["variant"] == "apex_npu" and row["workload"].startswith("1000 "):
            found["1,000 DTensors (FSDP2)"] = speed(row, "ratio_to_torch fused", "ratio_low", "ratio_high")
    return found


def speed(row: dict[str, str], ratio: str = "ratio", low: str = "low", high: str = "high") -> Speed:
    """Of a row with a time over another's."""
    return 1 / float(row[ratio]), 1 / float(row[high]), 1 / float(row[low])


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


def _threads(models: Table) -> str:
    """How many work on the CPU's iterations that are drawn."""
    return f", {max(int(row['threads']) for row in models)} threads" if models[0]["device"] == "cpu" else ""


def multiple(value: float) -> str:
    return f"{value:.{2 if value < 3 else 1 if value < 10 else 0}f}×"


def _bars(axes: Any, theme: str, speeds: dict[str, Speed], *, log: bool) -> None:
    """A bar from torch's speed to ours, with its interval."""
    if log:
        axes.set_xscale("log")
    for row, (value, low, high) in enumerate(speeds.values()):
        axes.barh(row, value - 1, 0.5, 1, color=_OWN[theme])
        axes.plot([low, high], [row, row], color=INK[theme], linewidth=1)
        axes.text(max(high, 1), row, f" {multiple(value)}", va="center", fontweight="bold")
    axes.axvline(1, color=_OTHER[theme], linewidth=1.5)
    axes.set_yticks(range(len(speeds)), list(speeds))
    axes.tick_params(axis="y", length=0)
    highest = max(high for _, _, high in speeds.values())
    lowest = min(1.0, *(low for _, low, _ in speeds.values()))
    if log:
        axes.set_xlim(lowest * 0.9, highest ** (1.3))
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if tick <= highest]
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.set_xticks([], minor=True)
    else:
        axes.set_xlim(lowest - 0.05, highest + 0.35 * (highest - lowest))
    axes.invert_yaxis()


def _speed(theme: str, models: Table, table: Table, sharded: Table | None) -> Any:
    """Of the first pages: whole iterations, and steps."""
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(WIDTH, 5.6), height_ratios=(6, 4.4))
    figure.suptitle(where(models, table, *filter(None, [sharded])), fontweight="bold")
    _bars(top, theme, iterations(models, "as written")["O5"], log=False)
    top.set_title(f"A whole training iteration at O5{_threads(models)}")
    top.set_xlabel("speed: torch's autocast (bfloat16), clipping\nand fused Adam = 1")
    _bars(bottom, theme, adamw_steps(table, sharded), log=True)
    bottom.set_title(f"A step of AdamW{', 1 thread' if _threads(models) else ''}")
    bottom.set_xlabel("speed: torch.optim.AdamW(fused=True) = 1")
    return figure


def _rules(theme: str, table: Table) -> Any:
    import matplotlib.pyplot as plt

    others = fastest_others(table)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.8 + 0.5 * len(others)))
    figure.suptitle(where(table), fontweight="bold")
    _bars(axes, theme, {f"{rule}\n/ {name}": ours for rule, (name, ours) in others.items()}, log=True)
    axes.set_title("A step over 2,000 small tensors")
    axes.set_xlabel("speed: the fastest other implementation = 1")
    return figure


def _iterations(theme: str, table: Table) -> Any:
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(2, 1, figsize=(WIDTH, 9.2), sharex=True)
    figure.suptitle(where(table), fontweight="bold")
    titles = {"as written": "Scripts as they are written", "folded": "With fuse_unscale=True and fused clipping"}
    for axes, (how, title) in zip(both, titles.items(), strict=True):
        speeds = iterations(table, how)
        models = list(dict.fromkeys(model for found in speeds.values() for model in found))
        for place, (level, found) in enumerate(speeds.items()):
            colour = COLOURS[level][theme]
            for model, (value, low, high) in found.items():
                height = models.index(model) + 0.16 * (place - (len(speeds) - 1) / 2)
                axes.plot([low, high], [height, height], color=colour, linewidth=1)
                label = f"{level}, {_PRECISIONS[level]}" if model == next(iter(found)) else None
                axes.plot(value, height, _MARKERS[level], color=colour, markersize=6, label=label)
        for between in range(1, len(models)):
            axes.axhline(between - 0.5, color=_PALE[theme], linewidth=0.8)
        axes.axvline(1, color=_OTHER[theme], linewidth=1.5)
        axes.set_yticks(range(len(models)), [name.replace(", ", ",\n").replace("-Lite", "-\nLite") for name in models])
        axes.set_ylim(len(models) - 0.5, -0.5)
        axes.set_title(title)
        axes.set_xlabel("speed: torch's own recipe at the same precision = 1")
        axes.tick_params(axis="x", labelbottom=True)
    figure.legend(*both[0].get_legend_handles_labels(), ncols=3, loc="outside lower center")
    return figure


def _growth(theme: str, table: Table) -> Any:
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(2, 1, figsize=(WIDTH, 7))
    figure.suptitle(where(table), fontweight="bold")
    titles = {"tensors, of 4 million elements together": COUNTS, "elements, in 100 tensors": SIZES}
    for axes, (label, sweep) in zip(both, titles.items(), strict=True):
        rows = [row for row in table if row["comparison"] == "step of Adam" and row["workload"] in sweep]
        for variant in dict.fromkeys(row["variant"] for row in rows):
            points = [(sweep[row["workload"]], float(row["median_ms"])) for row in rows if row["variant"] == variant]
            colour, width = COLOURS[_VARIANTS[variant]][theme], 2.5 if variant == "apex_npu" else 1.5
            axes.plot(*zip(*points, strict=True), marker=".", label=variant, color=colour, linewidth=width)
        axes.set(xlabel=label, ylabel="ms", xscale="log", yscale="log", title="A step of Adam")
    figure.legend(*both[0].get_legend_handles_labels(), ncols=2, loc="outside lower center")
    return figure


def _memory(theme: str) -> Any:
    import matplotlib.pyplot as plt
    import torch

    from apex_npu.optimizers import NpuFusedAdam
    from apex_npu.optimizers.memory_choices import memory_choices

    choices = memory_choices(NpuFusedAdam([torch.nn.Parameter(torch.zeros(1))]))
    figure, axes = plt.subplots(figsize=(WIDTH, 5.8))
    for row, choice in enumerate(choices):
        end = 0.0
        for part, nbytes in choice.parts().items():
            label = {"state": "Adam's moments"}.get(part, part)
            shown = label if row == 0 else None
            axes.barh(row, nbytes, 0.4, end, label=shown, color=COLOURS[part][theme])
            end += nbytes
        axes.text(end, row, f" {choice.total:.3g}", va="center", fontweight="bold")
        axes.text(0, row - 0.27, choice.name.replace("torch.", "").replace("=True", ""), va="bottom", fontsize=8.5)
    axes.set_title("Bytes of a parameter with Adam")
    axes.set_xlabel("bytes, activations not counted")
    axes.set_yticks([])
    axes.set_xlim(0, 20)
    axes.set_ylim(-0.8, len(choices) - 0.5)
    axes.set_xticks(range(0, 19, 4))
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), ncols=3, loc="outside lower center")
    return figure


def save(path: Path, draw: Callable[..., Any], *tables: Table | None) -> None:
    """``path`` with ``_light.svg`` and ``_dark.svg``."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    for theme, ink in INK.items():
        inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
        with mpl.rc_context({**_COMMON, **dict.fromkeys(inks, ink)}):
            figure = draw(theme, *tables)
            figure.savefig(f"{path}_{theme}.svg", metadata={"Date": None, "Creator": None})
            plt.close(figure)
    print(f"written: {path}_{{light,dark}}.svg")


def write(results: Path = RESULTS) -> None:
    """The pictures of what has been timed; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed")
        return
    for device in ("cpu", "cuda"):
        names = (device, f"iterations_{device}", f"sharded_steps_{device}")
        table, models, sharded = (
            read_csv(path) if path.exists() else None for path in (results / f"{name}.csv" for name in names)
        )
        if table is not None:
            save(results / f"rules_{device}", _rules, table)
            if any(row["workload"] in COUNTS for row in table):
                save(results / f"growth_{device}", _growth, table)
        if models is not None:
            save(results / f"iterations_{device}", _iterations, models)
        if table is not None and models is not None:
            # Those of two processes do not say on which processor.
            named = sharded if sharded is not None and "processor" in sharded[0] else None
            save(results / f"speed_{device}", _speed, models, table, named)
    if results == RESULTS:
        save(DOCS / "memory", _memory)


if __name__ == "__main__":
    write()
