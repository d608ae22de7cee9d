# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
# ruff: noqa: RUF001  (the punctuation of Chinese)
"""Writes the tables of the first pages and of the READMEs here from results/*.csv, between markers, and the plots.

    python benchmarks/report.py [--check]

--check writes nothing, and ends with exit code 1 where a page does not show what the csv says.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import plots
import torch
from rounds import RESULTS, read_csv

from apex_npu.optimizers import NpuFusedAdamW
from apex_npu.optimizers.memory_choices import memory_choices

README = Path(__file__).with_name("README.md")
ROOT = README.parents[1]
PAGES = (README, README.parent / "studies/README.md", ROOT / "README.md", ROOT / "README.zh.md")
Table = list[dict[str, str]]


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _origin(table: Table) -> str:
    first = table[0]
    where = f"{first['processor']}. " if first.get("processor") else ""
    return f"{where}Commit {first['commit']}, torch {first['torch']}, {first['device']}.\n\n"


def _ms(row: dict[str, str]) -> str:
    """A GPU's times are fractions of a millisecond."""
    return f"{float(row['median_ms']):.{3 if row['device'] == 'cuda' else 1}f}"


def goals(table: Table) -> str:
    """Every goal, and whether it is met."""
    lines = []
    for row in table:
        low, middle, high = (f"{float(row[k]):.2f}" if row[k] else "" for k in ("low", "median", "high"))
        against = f"{row['variant']} / {row['baseline']}" if row["baseline"] else row["variant"]
        verdict = {"PASS": "yes", "FALLS SHORT": "**no**"}.get(row["verdict"], "not measured")
        lines.append(
            (f"{row['comparison']}, {row['workload']}", against, row["goal"], middle, f"{low} .. {high}", verdict)
        )
    met = sum(row["verdict"] == "PASS" for row in table)
    head = ("", "", "goal", "median", "95 % of the rounds", "met")
    return f"{_origin(table)}{met} of {len(table)} goals are met.\n\n{_markdown(head, lines)}"


def steps(table: Table) -> str:
    """Bare steps: ours in ms and as a share of the ceiling, and how many times as long others take."""
    others = ("torch fused", "torch foreach", "torch for-loop", "torch compiled", "torch compiled, one tensor", "timm")
    others += ("pytorch_optimizer", "DeepSpeed", "bitsandbytes", "old patch")
    found: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in table:
        if row["comparison"].startswith("step of") and row["workload"] in ("small2000", "resnet50", "bert"):
            found.setdefault((row["comparison"], row["workload"]), {})[row["variant"]] = row
    there = [name for name in others if any(name in variants for variants in found.values())]
    lines = []
    for (comparison, workload), variants in found.items():
        own = variants["apex_npu"]
        share = f"{float(own['share_of_ceiling']):.0%}" if own["share_of_ceiling"] else ""
        ratios = [f"{float(variants[name]['ratio']):.2f}" if name in variants else "" for name in there]
        lines.append((comparison.removeprefix("step of "), workload, _ms(own), share, *ratios))
    return _origin(table) + _markdown(("rule", "workload", "ms", "of the ceiling", *there), lines)


def vendor_counts(table: Table) -> str:
    """Return the counts of host_cann for 2,000 tensors, with a column for each variant."""
    names = list(dict.fromkeys(row["variant"] for row in table))
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in table:
        if row["workload"] == "small2000":
            cell = f"{int(row['launches']):,} / {int(row['syncs']):,} / {int(row['bytes']) / 1e6:,.1f}"
            found.setdefault((row["rule"], row["comparison"]), {})[row["variant"]] = cell
    lines = [(*key, *(cells.get(name, "") for name in names)) for key, cells in found.items()]
    return _origin(table) + _markdown(("rule", "launches / waits / MB of", *names), lines)


def sharded(table: Table) -> str:
    """Steps over DTensors: of each workload ms, and times relative to the first variant's and to one flat tensor's."""
    workloads = list(dict.fromkeys(row["workload"] for row in table))
    ratio = next(name for name in table[0] if name.startswith("ratio_to_"))
    ratios = {"relative": (ratio, "ratio_low", "ratio_high")}
    if "ratio_to_one_flat_tensor" in table[0]:
        ratios["to one flat tensor"] = ("ratio_to_one_flat_tensor", "flat_low", "flat_high")
    found: dict[str, list[str]] = {}
    for row in table:
        cells = found.setdefault(row["variant"], [])
        cells.append(f"{float(row['median_ms']):.3g}")
        for names in ratios.values():
            middle, low, high = (float(row[name]) for name in names)
            cells.append(f"{middle:.2f} ({low:.2f} .. {high:.2f})")
    head = [cell for workload in workloads for cell in (f"ms, {workload}", *ratios)]
    return _origin(table) + _markdown(("", *head), [(variant, *cells) for variant, cells in found.items()])


def sharded_memory(table: Table) -> str:
    """MB of trainings of a sharded model."""
    lines = [
        tuple(row[name] for name in ("level", "variant", "peak_mb", "stepped_mb", "cleared_mb", "before_mb"))
        for row in table
    ]
    head = ("level", "", "MB at most", "after the step", "gradients cleared", "before the training")
    return f"{_origin(table)}{table[0]['workload']}.\n\n{_markdown(head, lines)}"


# What the first pages say of a row, with the section of the benchmarks' pages that has more; in both languages.
_SUMMARY = {
    "head": ("on one {}", "torch", "apex_npu", "speed (95 % interval)"),
    "iteration": "[training iteration](benchmarks/README.md#on-a-gpu) of {}, bfloat16 (O5)",
    "step": "[AdamW step](benchmarks/README.md#on-a-gpu) over {}",
    "of": {"bert": "the 110 million parameters of BERT-base", "small2000": "2,000 small tensors"},
    "sharded": "[AdamW step](benchmarks/studies/README.md#sharded-parameters) over 1,000 DTensors of FSDP2",
    "measured": "[memory of a parameter](benchmarks/studies/README.md#sharded-parameters), FSDP2 at O5, after a step",
    "counted": "the same with exact masters and [int8 states](docs/memory.md), counted and not measured",
    "bytes": "{} bytes",
    "to": "to",
    "origin": "{}. Times are medians. torch: autocast, `clip_grad_norm_`, fused Adam; `AdamW(fused=True)` for a step.",
}
_IN_CHINESE = {
    "head": ("一块 {}", "torch", "apex_npu", "速度比（95 % 区间）"),
    "iteration": "{} 的一次[训练迭代](benchmarks/README.md#on-a-gpu)，bfloat16（O5）",
    "step": "{}上的 [AdamW 一步](benchmarks/README.md#on-a-gpu)",
    "of": {"bert": "BERT-base 的 1.1 亿个参数", "small2000": "2,000 个小张量"},
    "sharded": "FSDP2 的 1,000 个 DTensor 上的 [AdamW 一步](benchmarks/studies/README.md#sharded-parameters)",
    "measured": "[每个参数占用的内存](benchmarks/studies/README.md#sharded-parameters)：FSDP2，O5，更新之后",
    "counted": "同上，主参数精确、[状态为 int8](docs/memory.md)（计算所得，未经测量）",
    "bytes": "{} 字节",
    "to": "至",
    "origin": "{}。时间为中位数。torch 一列：autocast、`clip_grad_norm_` 与融合 Adam；单步为 `AdamW(fused=True)`。",
}


def summary(models: Table, table: Table, sharded: Table, memory: Table, words: dict[str, Any]) -> str:
    """Of the first pages: what there is to gain on one machine."""

    def line(name: str, torchs: str, ours: str, speed: plots.Speed) -> tuple[str, ...]:
        middle, low, high = (f"{value:.{2 if speed[0] < 10 else 0}f}" for value in speed)
        return name, f"{float(torchs):#.3g} ms", f"{float(ours):#.3g} ms", f"**{middle}** ({low} {words['to']} {high})"

    lines = []
    times = {(row["model"], row["precision"], row["variant"]): row["median_ms"] for row in models}
    for model in ("nanoGPT", "BERT, 6 layers"):
        ours, torchs = times[model, "bfloat16", "O5, as written"], times[model, "bfloat16", "torch"]
        speed = plots.iterations(models, "as written")["O5"][model]
        lines.append(line(words["iteration"].format(model.partition(",")[0]), torchs, ours, speed))
    for workload, shown in words["of"].items():
        variants = plots.steps(table, workload)["AdamW"]
        own, fused = variants["apex_npu"]["median_ms"], variants["torch fused"]
        speed = float(fused["ratio"]), float(fused["low"]), float(fused["high"])
        lines.append(line(words["step"].format(shown), fused["median_ms"], own, speed))
    rows = {row["variant"]: row for row in sharded if row["workload"].startswith("1000 DTensors")}
    speed = plots.speed(rows["apex_npu"], "ratio_to_torch fused", "ratio_low", "ratio_high")
    lines.append(line(words["sharded"], rows["torch fused"]["median_ms"], rows["apex_npu"]["median_ms"], speed))
    count, width = map(int, re.findall(r"(\d+) units of width (\d+)", memory[0]["workload"])[0])
    numel = count * width * (width + 1)  # of Linear(width, width)
    held = {row["variant"]: float(row["stepped_mb"]) * 1e6 / numel for row in memory if row["level"] == "O5"}
    both = (words["bytes"].format(f"{held[variant]:.1f}") for variant in ("torch", "apex_npu"))
    lines.append((words["measured"], *both, ""))
    choices = memory_choices(NpuFusedAdamW([torch.nn.Parameter(torch.zeros(1))]))
    (int8,) = (choice for choice in choices if choice.name.endswith('state_dtype="int8"'))
    both = (words["bytes"].format(f"{choice.total:.3g}") for choice in (choices[0], int8))
    lines.append((words["counted"], *both, ""))
    machine = plots.where(models, table, sharded, memory)
    head = [cell.format(machine.partition(",")[0]) for cell in words["head"]]
    return f"{_markdown(head, lines)}\n\n{words['origin'].format(machine)}"


_ON_GPU = ("iterations_cuda.csv", "cuda.csv", "sharded_steps_cuda.csv", "sharded_memory_cuda.csv")
# Marker in a page → csv, and how it is shown.
TABLES: dict[str, tuple[str | tuple[str, ...], Callable[..., str]]] = {
    "summary on cuda": (_ON_GPU, partial(summary, words=_SUMMARY)),
    "summary on cuda, in Chinese": (_ON_GPU, partial(summary, words=_IN_CHINESE)),
    "goals on cpu": ("goals_cpu.csv", goals),
    "steps on cpu": ("cpu.csv", steps),
    "counts on the vendor's torch_npu": ("npu_counts.csv", vendor_counts),
    "goals on cuda": ("goals_cuda.csv", goals),
    "steps on cuda": ("cuda.csv", steps),
    "sharded steps on cpu": ("sharded_steps_cpu.csv", sharded),
    "sharded steps after a backward on cpu": ("sharded_backward_steps_cpu.csv", sharded),
    "sharded steps on cuda": ("sharded_steps_cuda.csv", sharded),
    "sharded memory on cuda": ("sharded_memory_cuda.csv", sharded_memory),
}
MISSING = "There are no figures yet."


def filled(text: str, results: Path = RESULTS) -> str:
    """``text`` with what is between its markers regenerated."""

    def table(match: re.Match[str]) -> str:
        names, render = TABLES[match["name"]]
        paths = [results / name for name in ((names,) if isinstance(names, str) else names)]
        shown = render(*map(read_csv, paths)) if all(path.exists() for path in paths) else MISSING
        return f"{match['open']}\n{shown}\n{match['close']}"

    return re.sub(r"(?P<open><!-- table: (?P<name>.+?) -->)\n.*?(?P<close><!-- end -->)", table, text, flags=re.DOTALL)


def write() -> None:
    """Tables and plots."""
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    plots.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        write()
        return
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            sys.exit(f"{page} does not show what results/*.csv say: run python benchmarks/report.py")


if __name__ == "__main__":
    main()
