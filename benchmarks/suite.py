# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Everything, on one device: writes results/<device>.csv, the plots, and the tables of the READMEs.

    python benchmarks/suite.py [--device cpu|cuda|npu] [--minutes 20] [--only PATTERN] [--skip PATTERN]

Without --device: on each that is here. On a simulated npu launches, bytes and waits are counted, and nothing is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from fnmatch import fnmatchcase
from statistics import median, quantiles
from typing import NamedTuple

import bare_steps
import iterations
import report
import torch
import whole_steps
from measure import count, measure, variant_names
from rounds import RESULTS, Spread, Times, commit, is_simulated, open_device, processor, write_csv
from workloads import COUNTS, SIZES, WORKLOADS, numel

# Of the names of what the sweeps compare; the rest is left to real shapes.
SWEPT = ("apex_npu", "torch f*")
# Of a model of 109 million parameters, as many as 12 GiB hold: each has buffers of its own.
LARGE_ON_CPU = {
    "step": ("apex_npu", "torch foreach", "torch fused", "ceiling"),
    "whole": ("*GradScaler, clip, fused", "apex_npu, as written", "apex_npu, folded"),
}
# Largest part of the memory that a comparison may need.
SHARE_OF_MEMORY = 0.8
COLUMNS = ("median_ms", "p90_ms", "ratio", "low", "high", "share_of_ceiling", "launches", "bytes", "syncs")
# What is printed while it runs.
WIDTHS = {
    "comparison": 30,
    "workload": 12,
    "variant": 40,
    "median_ms": 11,
    "ratio": 9,
    "share_of_ceiling": 7,
    "launches": 7,
}


class Item(NamedTuple):
    """A comparison on a workload, and which of its variants."""

    comparison: str
    workload: str
    patterns: tuple[str, ...] = ("*",)


def items(device: torch.device) -> Iterator[Item]:
    """All there is to measure on ``device``."""
    simulated = is_simulated(device)
    large = ("resnet50",) if simulated else ("resnet50", "bert")

    def of(workload: str, kind: str) -> tuple[str, ...]:
        return LARGE_ON_CPU[kind] if (workload, device.type) == ("bert", "cpu") else ("*",)

    for rule in bare_steps.RULES:
        # What others have without fused kernels takes seconds for a step of bert, and tells nothing more there.
        for workload in ("small2000", *(large if rule in ("SGD", "Adam", "AdamW") else large[:1])):
            yield Item(f"step of {rule}", workload, of(workload, "step"))
    for precision in whole_steps.REFERENCE:
        for workload in ("small2000", *large):
            yield Item(f"whole {precision} step", workload, of(workload, "whole"))
    for what in ("step", "O1", "O2"):
        yield Item(f"overhead of {what}", "tiny")
    for model in iterations.MODELS:
        yield Item(f"iteration of {model}", "tiny")
    for workload in (*COUNTS, *(() if simulated else SIZES)):
        yield Item("step of Adam", workload, SWEPT)


def available_bytes(device: torch.device) -> int:
    """Memory that is free on the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what earlier comparisons have left is free as well
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def needed_bytes(item: Item, variants: int) -> int:
    """Roughly: each variant has parameters, gradients twice and two states of its own; and there is a master copy."""
    return numel(WORKLOADS[item.workload]()) * 4 * (5 * variants + 2)


def chosen_variants(item: Item, device: torch.device) -> list[str]:
    """The names of those that are there and that the item asks for."""
    names = variant_names(item.comparison, item.workload, device)
    return [name for name in names if any(fnmatchcase(name, p) for p in item.patterns)]


def run(item: Item, device: torch.device, budget_s: float, skip: str = "") -> list[dict[str, str]]:
    """The rows of one item; none where memory does not suffice."""
    chosen = [name for name in chosen_variants(item, device) if not fnmatchcase(name, skip)]
    needed, available = needed_bytes(item, len(chosen)), SHARE_OF_MEMORY * available_bytes(device)
    if needed > available:
        print(f"{item.comparison}, {item.workload}: skipped, needs {needed / 1e9:.0f} of {available / 1e9:.0f} GB")
        return []
    if is_simulated(device):
        numbers = counted(count(item.comparison, item.workload, device, patterns=chosen))
    else:
        numbers = timed(measure(item.comparison, item.workload, device, patterns=chosen, budget_s=budget_s))
    same = {
        "commit": commit(),
        "device": device.type,
        "processor": processor(device),
        "torch": torch.__version__,
        "dtype": "float16" if "O2" in item.comparison else "float32",
        "comparison": item.comparison,
        "workload": item.workload,
    }
    table = [{**same, "variant": name, **dict.fromkeys(COLUMNS, ""), **row} for name, row in numbers.items()]
    for row in table:
        print(*(f"{row[name]:>{width}}" for name, width in WIDTHS.items()), flush=True)
    return table


def timed(times: Times) -> dict[str, dict[str, str]]:
    """Cells of each variant; ratios are taken within a round, to the first one."""
    reference, ceiling = next(iter(times.values())), times.get("ceiling")
    found = {}
    for name, values in times.items():
        ratio = Spread.of([a / b for a, b in zip(values, reference, strict=True)])
        ms, p90 = median(values), quantiles(values, n=10, method="inclusive")[-1]
        numbers = {"median_ms": ms, "p90_ms": p90, "ratio": ratio.middle, "low": ratio.low, "high": ratio.high}
        if ceiling is not None:
            numbers["share_of_ceiling"] = median(a / b for a, b in zip(ceiling, values, strict=True))
        found[name] = {key: f"{number:.4f}" for key, number in numbers.items()}
    return found


def counted(counts: dict[str, dict[str, int]]) -> dict[str, dict[str, str]]:
    """Likewise, of counts."""
    return {name: {key: str(number) for key, number in numbers.items()} for name, numbers in counts.items()}


def devices() -> list[str]:
    """Those that are here; a simulated npu counts."""
    found = ["cpu"]
    if torch.cuda.is_available():
        found.append("cuda")
    if any(map(importlib.util.find_spec, ("torch_npu", "npu_simulator"))):
        found.append("npu")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"))
    parser.add_argument("--minutes", type=float, default=15.0, help="of each device, for the rounds; about")
    parser.add_argument("--only", default="*", help="pattern of the comparisons, as in a shell")
    parser.add_argument(
        "--skip", default="", help="pattern of variants, as 'torch compiled*', which take minutes to compile"
    )
    options = parser.parse_args()
    if options.device is None:
        for name in devices():
            # A process for each: a simulated npu cannot be added once autograd's engine runs.
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--device", name], check=True)
        return
    device = open_device(options.device)
    chosen = [item for item in items(device) if fnmatchcase(item.comparison, options.only)]
    table, failed = [], []
    for item in chosen:
        try:
            table += run(item, device, options.minutes * 60 / len(chosen), options.skip)
        except Exception:  # the other comparisons still count
            traceback.print_exc()
            failed.append(f"{item.comparison}, {item.workload}")
    if options.only == "*" and table:
        write_csv(RESULTS / f"{options.device}.csv", table)
        report.write()
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
