# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What reading gradients where autograd left them is worth: each step as it is, and with all of them gathered first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from whole_steps import ours
from workloads import Bench

from apex_npu import optimizers
from apex_npu.fusion import grad_slots

Step = Callable[[], object]
Make = Callable[[], Step]


@contextmanager
def gathering_first() -> Iterator[None]:
    """Inside, no gradient is left outside of its slot."""
    names = ("EXTERNAL_NUMEL", "WRITTEN_NUMEL")
    before = [getattr(grad_slots, name) for name in names]
    try:
        for name in names:
            setattr(grad_slots, name, 1 << 62)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(grad_slots, name, value)


def gathered(make: Make) -> Make:
    """``make``, whose steps gather everything first."""

    def made() -> Step:
        step = make()

        def gather_and_step() -> None:
            with gathering_first():
                step()

        return gather_and_step

    return made


def bare(bench: Bench) -> Step:
    """``step`` and ``zero_grad`` of NpuFusedAdam, on gradients that are others each time."""
    params = bench.params()
    take = bench.gradients(params).hand_over
    optimizer = optimizers.NpuFusedAdam(params, lr=1e-4)

    def step() -> None:
        take()
        optimizer.step()
        optimizer.zero_grad()

    return step


STEPS: dict[str, Callable[[Bench], Step]] = {
    "bare step": bare,
    "O0 as written": lambda bench: ours(bench, "O0"),
    "O2 as written": lambda bench: ours(bench, "O2"),
    "O0 folded": lambda bench: ours(bench, "O0", fold=True),
    "O2 folded": lambda bench: ours(bench, "O2", fold=True),
}


def variants(name: str, bench: Bench) -> dict[str, Make]:
    """Both of the step ``name``; each makes its own parameters when it is called."""

    def make() -> Step:
        return STEPS[name](bench)

    return {"in place": make, "gathered first": gathered(make)}
