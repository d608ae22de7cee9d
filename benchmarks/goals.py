# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is to be reached, and whether it is: one row per goal.

    python benchmarks/goals.py [--device cpu|cuda] [--seconds 60] [--only PATTERN] [--write]

Exit code 1 where the median of the rounds misses a goal, or a comparison fails.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from iterations import MODELS, TORCH_BF16, TORCH_FP32
from measure import measure, variant_names
from overhead import import_ms
from rounds import RESULTS, Spread, Times, commit, open_device, processor, write_csv
from whole_steps import CAPTURABLE, IN_PLACE, REFERENCE

from apex_npu.doctor import bench

LARGE, SMALL, TINY = "resnet50", "small2000", "tiny"
ANY, CPU, CUDA = ("cpu", "cuda"), ("cpu",), ("cuda",)
IMPORT = "import"


@dataclass(frozen=True)
class Goal:
    """One row.

    Attributes:
        comparison: One of ``measure.COMPARISONS``, or IMPORT.
        workload: Of the comparison.
        ours: The variant that has to be fast.
        baseline: Pattern of the variants it is compared with: the fastest of each round. "": none.
        at_least: The baseline's time over ours.
        at_most_us: Instead: our time less the baseline's, in microseconds.
        devices: Where the goal counts.
    """

    comparison: str
    workload: str
    ours: str
    baseline: str
    at_least: float | None = None
    at_most_us: float | None = None
    devices: tuple[str, ...] = CPU

    @property
    def name(self) -> str:
        """What is printed; short."""
        return f"{self.comparison}, {self.workload}: {self.ours} / {self.baseline or 'nothing'}"

    def has_baseline(self, variants: Iterable[str]) -> bool:
        """Whether what it is compared with is among ``variants``, or it is compared with nothing."""
        return not self.baseline or any(fnmatchcase(v, self.baseline) for v in variants if v != self.ours)

    def values(self, times: Times) -> list[float]:
        """What is held against the goal, of each round."""
        if self.at_most_us is None:
            return bench.ratios(times, self.baseline, self.ours)
        base = times[self.baseline] if self.baseline else [0.0] * len(times[self.ours])
        return [(a - b) * 1e3 for a, b in zip(times[self.ours], base, strict=True)]

    def is_met(self, spread: Spread) -> bool:
        """Whether the median meets the goal."""
        if self.at_most_us is not None:
            return spread.middle <= self.at_most_us
        assert self.at_least is not None
        return spread.middle >= self.at_least


def _goals() -> Iterator[Goal]:
    step, ours = "step of {}".format, "apex_npu"
    for rule in ("SGD", "Adam", "AdamW", "RMSprop", "Adadelta"):
        yield Goal(step(rule), LARGE, ours, "ceiling", 0.85, devices=ANY)
    yield Goal(step("LAMB"), LARGE, ours, "ceiling", 0.80)
    for rule, small in (("SGD", 3.0), ("Adam", 4.0), ("AdamW", 4.0)):
        yield Goal(step(rule), LARGE, ours, "torch fused", 0.95)
        yield Goal(step(rule), SMALL, ours, "torch fused", small)
    for rule, large, small in (("RMSprop", 2.5, 12.0), ("Adadelta", 4.0, 15.0)):
        yield Goal(step(rule), LARGE, ours, "torch *", large)
        yield Goal(step(rule), SMALL, ours, "torch *", small)
    yield Goal(step("LAMB"), LARGE, ours, "timm", 3.5)
    yield Goal(step("LAMB"), SMALL, ours, "timm", 25.0)
    yield Goal(step("AdamP"), LARGE, ours, "timm", 1.0)
    yield Goal(step("Adam"), SMALL, ours, "apex_npu, one tensor", 1 / 1.3, devices=ANY)

    written, folded = "apex_npu, as written", "apex_npu, folded"
    for precision, workload, variant, least in (
        ("fp32", LARGE, written, 1.15),
        ("fp32", LARGE, folded, 1.7),
        ("fp32", LARGE, folded + IN_PLACE, 1.3),
        ("fp32", SMALL, written, 5.0),
        ("fp32", SMALL, folded, 6.0),
        ("fp32", SMALL, folded + IN_PLACE, 5.0),
        ("O2", LARGE, written, 1.3),
        ("O2", LARGE, folded, 1.9),
        ("O2", LARGE, folded + IN_PLACE, 1.7),
        ("O2", SMALL, written, 5.0),
        ("O2", SMALL, folded, 6.0),
        ("O2", SMALL, folded + IN_PLACE, 5.0),
    ):
        how = IN_PLACE if variant.endswith(IN_PLACE) else ""
        yield Goal(f"whole {precision} step", workload, variant, f"{REFERENCE[precision]}{how}", least)
    for model in MODELS:
        for level, recipe, least in (("O0", TORCH_FP32, 1.10), ("O5", TORCH_BF16, 1.15)):
            yield Goal(f"iteration of {model}", TINY, f"apex_npu {level}, as written", recipe, least)
    for precision, workload, least in (("fp32", "bert", 1.3), ("fp32", SMALL, 3.0), ("O2", "bert", 1.6)):
        variant = f"{folded}{CAPTURABLE}"
        yield Goal(f"whole {precision} step", workload, variant, REFERENCE[precision], least, devices=CUDA)

    yield Goal("overhead of step", TINY, "step", "", at_most_us=40.0, devices=ANY)
    yield Goal("overhead of step", TINY, "scale_loss", "", at_most_us=50.0, devices=ANY)
    yield Goal("overhead of O1", TINY, "O1 forward", "by hand", at_most_us=10.0, devices=ANY)
    yield Goal("overhead of O2", TINY, "O2 forward", "by hand", at_most_us=10.0, devices=ANY)
    yield Goal(IMPORT, "over torch", ours, "", at_most_us=0.3e6, devices=CPU)


GOALS = list(_goals())


class Row(NamedTuple):
    """A goal, and what was measured; None where the baseline is not here, or a variant fails."""

    goal: Goal
    spread: Spread | None
    error: str = ""

    @property
    def verdict(self) -> str:
        """In words."""
        if self.spread is None:
            return "FAILED" if self.error else "SKIPPED"
        return "PASS" if self.goal.is_met(self.spread) else "FALLS SHORT"

    def line(self) -> str:
        """To print."""
        if self.error:
            return f"{'FAILED':12}{self.goal.name}: {self.error}"
        if self.spread is None:
            return f"{'SKIPPED':12}{self.goal.name}: no {self.goal.baseline} here (make bench-deps, or a C++ compiler)"
        if self.goal.at_most_us is not None:
            wanted, unit, digits = f"<= {self.goal.at_most_us:g} µs", " µs", 1
        else:
            wanted, unit, digits = f">= {self.goal.at_least:.2f}", "x", 2
        low, middle, high = (f"{x:.{digits}f}" for x in (self.spread.low, self.spread.middle, self.spread.high))
        return f"{self.verdict:12}{middle + unit:>12} ({low} .. {high}), goal {wanted:12} {self.goal.name}"

    def cells(self) -> dict[str, str]:
        """For a csv."""
        numbers = ["", "", ""] if self.spread is None else [f"{x:.4f}" for x in self.spread]
        goal = self.goal
        return {
            "comparison": goal.comparison,
            "workload": goal.workload,
            "variant": goal.ours,
            "baseline": goal.baseline,
            "goal": f">= {goal.at_least:.2f}" if goal.at_least is not None else f"<= {goal.at_most_us:g} µs",
            **dict(zip(("median", "low", "high"), numbers, strict=True)),
            "verdict": self.verdict,
        }


def _times(comparison: str, workload: str, goals: list[Goal], device: torch.device, budget_s: float) -> Times:
    if comparison == IMPORT:
        return {"apex_npu": import_ms(5)}
    there = variant_names(comparison, workload, device)
    patterns = {pattern for goal in goals for pattern in (goal.ours, goal.baseline) if pattern}
    wanted = [name for name in there if any(fnmatchcase(name, p) for p in patterns)]
    return measure(comparison, workload, device, patterns=wanted, budget_s=budget_s)


def check(goals: list[Goal], device: torch.device, seconds: float) -> Iterator[Row]:
    """Measure what ``goals`` need, one comparison after the other, in about so many seconds of rounds."""
    needed: dict[tuple[str, str], list[Goal]] = {}
    for goal in goals:
        needed.setdefault((goal.comparison, goal.workload), []).append(goal)
    for (comparison, workload), members in needed.items():
        try:
            times = _times(comparison, workload, members, device, seconds / len(needed))
        except Exception as error:  # the other comparisons still count
            traceback.print_exc()
            yield from (Row(goal, None, f"{type(error).__name__}: {error}".splitlines()[0]) for goal in members)
            continue
        for goal in members:
            if goal.has_baseline(times):
                yield Row(goal, Spread.of(goal.values(times)))
            else:
                failed = goal.has_baseline(variant_names(comparison, workload, device))
                yield Row(goal, None, f"{goal.baseline} fails" if failed else "")


def published(table: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of goals_cpu.csv that ``python -m apex_npu bench`` measures again: medians and intervals, no goals."""
    found = []
    for goal in GOALS:
        rule = goal.comparison.removeprefix("step of ")
        if rule in bench.RULES and goal.workload in bench.WORKLOADS and goal.baseline.startswith("torch"):
            same = (goal.comparison, goal.workload, goal.ours, goal.baseline)
            (row,) = [r for r in table if (r["comparison"], r["workload"], r["variant"], r["baseline"]) == same]
            names = ("workload", "baseline", "commit", "processor", "torch", "median", "low", "high")
            found.append({"rule": rule, **{name: row[name] for name in names}})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the rounds of all goals together")
    parser.add_argument("--only", default="*", help="pattern of the comparisons, as in a shell")
    parser.add_argument("--write", action="store_true", help="write results/goals_<device>.csv")
    options = parser.parse_args()
    device = open_device(options.device)
    started = time.perf_counter()
    rows = []
    goals = [g for g in GOALS if device.type in g.devices and fnmatchcase(g.comparison, options.only)]
    for row in check(goals, device, options.seconds):
        rows.append(row)
        print(row.line(), flush=True)
    verdicts = Counter(row.verdict for row in rows)
    print(
        f"{verdicts['PASS']} goals met, {verdicts['FALLS SHORT']} not, {verdicts['SKIPPED']} skipped, "
        f"{verdicts['FAILED']} failed, in {time.perf_counter() - started:.0f} s on {processor(device)}, "
        f"torch {torch.__version__}"
    )
    if options.write:
        same = {"commit": commit(), "device": device.type, "processor": processor(device), "torch": torch.__version__}
        table = [{**same, **row.cells()} for row in rows]
        write_csv(RESULTS / f"goals_{device.type}.csv", table)
        if device.type == "cpu" and options.only == "*":
            write_csv(bench.PUBLISHED, published(table))
    sys.exit(1 if verdicts["FALLS SHORT"] or verdicts["FAILED"] else 0)


if __name__ == "__main__":
    main()
