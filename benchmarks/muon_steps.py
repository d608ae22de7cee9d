# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``step`` of Muon on matrices that have gradients: ours beside torch.optim's, as it is and compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from bare_steps import Step, stepping
from ceiling import compiler
from workloads import Bench

from apex_npu import optimizers


def variants(bench: Bench) -> dict[str, Callable[[], Step]]:
    """All of them, on the matrices of the workload; each makes its own parameters when it is called."""
    bench = Bench(bench.device, [shape for shape in bench.shapes if len(shape) == 2])
    found: dict[str, Callable[[], Step]] = {
        "apex_npu": lambda: stepping(optimizers.NpuFusedMuon, bench, None),
        "torch": lambda: stepping(torch.optim.Muon, bench, None),
    }
    if bench.device.type == "cuda" or (bench.device.type == "cpu" and compiler() is not None):
        found["torch compiled"] = lambda: torch.compile(stepping(torch.optim.Muon, bench, None))
    return found
