# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Times of steps of the fused optimizers and of torch's on this CPU, with the published figures."""

from __future__ import annotations

import csv
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apex_npu import optimizers
from apex_npu.doctor.rounds import SHORTEST_MS, Spread, Times, in_turns

PUBLISHED = Path(__file__).with_name("published.csv")
OURS = "apex_npu"

Shapes = list[tuple[int, ...]]


def small2000() -> Shapes:
    """Return the shapes of many small tensors: 2,000 of 256 to 4,096 elements."""
    chosen = random.Random(0)
    return [(chosen.randint(256, 4096),) for _ in range(2000)]


def resnet50() -> Shapes:
    """Return the shapes of a ResNet-50's parameters: 161 tensors, 25.6 million elements."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions: Shapes = [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, inputs, 1, 1))
            for shape in convolutions:
                shapes += [shape, shape[:1], shape[:1]]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


WORKLOADS = {function.__name__: function for function in (small2000, resnet50)}


@dataclass(frozen=True)
class Rule:
    """An update rule, and torch's variants of it."""

    ours: type[torch.optim.Optimizer]
    theirs: Callable[..., torch.optim.Optimizer] | None = None  # torch's class, if torch has the rule
    fused: bool = False  # whether torch has a fused kernel for the rule
    options: dict[str, Any] = field(default_factory=dict)  # the hyper-parameters of both classes

    def variants(self) -> dict[str, Callable[..., torch.optim.Optimizer]]:
        """Return the constructors of the optimizer, by variant: ours, and torch's two or three."""
        found: dict[str, Callable[..., torch.optim.Optimizer]] = {OURS: partial(self.ours, **self.options)}
        if self.theirs is not None:
            found["torch for-loop"] = partial(self.theirs, foreach=False, **self.options)
            found["torch foreach"] = partial(self.theirs, foreach=True, **self.options)
        if self.theirs is not None and self.fused:
            found["torch fused"] = partial(self.theirs, fused=True, **self.options)
        return found


RULES = {
    "SGD": Rule(optimizers.NpuFusedSGD, torch.optim.SGD, True, {"lr": 1e-3, "momentum": 0.9}),
    "Adam": Rule(optimizers.NpuFusedAdam, torch.optim.Adam, True),
    "AdamW": Rule(optimizers.NpuFusedAdamW, torch.optim.AdamW, True),
    "RMSprop": Rule(optimizers.NpuFusedRMSprop, torch.optim.RMSprop),
    "Adadelta": Rule(optimizers.NpuFusedAdadelta, torch.optim.Adadelta),
}


@dataclass(frozen=True)
class Comparison:
    """One row of published.csv."""

    rule: str  # a key of RULES
    workload: str  # a key of WORKLOADS
    baseline: str  # a pattern of the variants to compare with, of which the fastest counts in each round
    published: Spread  # the ratio of the baseline's time to ours
    where: str  # the machine, the commit and the torch of the published figure

    @property
    def name(self) -> str:
        """A short name, as it is printed."""
        return f"step of {self.rule}, {self.workload}: {OURS} / {self.baseline}"


def comparisons() -> list[Comparison]:
    """Return all rows of published.csv, in its order."""
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        return [
            Comparison(
                row["rule"],
                row["workload"],
                row["baseline"],
                Spread(float(row["median"]), float(row["low"]), float(row["high"])),
                f"{row['processor']}, one thread, commit {row['commit']}, torch {row['torch']}",
            )
            for row in csv.DictReader(file)
        ]


def measure(chosen: list[Comparison], seconds: float) -> Iterator[tuple[Comparison, Spread]]:
    """Measure each of ``chosen`` on this machine, in about ``seconds`` of rounds.

    One thread computes, and its CPU time counts, as in the published figures. With more threads, small tensors would
    measure how threads wait for each other.
    """
    needed: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in chosen:
        needed.setdefault((comparison.rule, comparison.workload), []).append(comparison)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for (rule, workload), members in needed.items():
            patterns = [OURS, *(comparison.baseline for comparison in members)]
            times = _times(RULES[rule], WORKLOADS[workload](), patterns, seconds / len(needed))
            for comparison in members:
                yield comparison, Spread.of(ratios(times, comparison.baseline))
    finally:
        torch.set_num_threads(threads)


def ratios(times: Times, baseline: str, ours: str = OURS) -> list[float]:
    """Return, for each round, the time of the fastest variant that matches the pattern ``baseline``, over ours."""
    others = [values for name, values in times.items() if name != ours and fnmatchcase(name, baseline)]
    return [min(row) / own for *row, own in zip(*others, times[ours], strict=True)]


def _times(rule: Rule, shapes: Shapes, patterns: list[str], budget_s: float) -> Times:
    made = {n: make for n, make in rule.variants().items() if any(fnmatchcase(n, pattern) for pattern in patterns)}
    steps = {name: make(_params(shapes)).step for name, make in made.items()}
    repeats = {}
    for name, step in steps.items():  # this warms up, too
        _milliseconds(step, 1)
        repeats[name] = max(1, int(SHORTEST_MS / max(_milliseconds(step, 1), 1e-3)))
    return in_turns(
        list(steps), 30, lambda name: _milliseconds(steps[name], repeats[name]), warm_up=0, budget_s=budget_s
    )


def _milliseconds(step: Callable[[], object], repeats: int) -> float:
    start = time.thread_time()
    for _ in range(repeats):
        step()
    return (time.thread_time() - start) * 1e3 / repeats


def _params(shapes: Shapes) -> list[nn.Parameter]:
    """Return parameters with gradients; the values are the same for every variant."""
    noise = torch.randn(sum(map(math.prod, shapes)), generator=torch.Generator().manual_seed(0))
    pieces = noise.mul_(1e-3).split([math.prod(shape) for shape in shapes])
    params = [nn.Parameter(piece.view(shape) * 25.6) for piece, shape in zip(pieces, shapes, strict=True)]
    for param, piece in zip(params, pieces, strict=True):
        param.grad = piece.view(param.shape).clone()
    return params
