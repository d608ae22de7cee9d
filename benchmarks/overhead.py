# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What Python costs where there is next to nothing to compute: step, scale_loss, a wrapped forward, the import."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from bare_steps import stepping
from torch import Tensor, nn
from torch.optim import Optimizer
from whole_steps import Params, initialized, torch_adam
from workloads import Bench

from apex_npu import amp, optimizers

Step = Callable[[], object]


class Identity(nn.Module):
    """Computes nothing, but has a parameter."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x


def variants(what: str, bench: Bench) -> dict[str, Callable[[], Step]]:
    """The bench's workload is to be tiny. What is done "by hand" has to be taken off a wrapped forward's time."""
    if what == "O1":
        return {"O1 forward": lambda: _forward(bench, "O1"), "by hand": lambda: _forward(bench, None)}
    if what == "O2":
        return {"O2 forward": lambda: _forward(bench, "O2"), "by hand": lambda: _casts_by_hand(bench)}
    return {
        "step": lambda: stepping(optimizers.NpuFusedAdam, bench),
        "torch's fused step": lambda: stepping(torch_adam, bench),
        "step under amp": lambda: _amp_step(bench),
        "scale_loss": lambda: _amp_block(bench),
    }


def _adopted(bench: Bench) -> tuple[Optimizer, Step]:
    """An optimizer under amp, and a block of it, into which gradients come off the clock."""
    model, optimizer = initialized(Params(bench.params()), "O0", fold=False)
    gradients = bench.gradients(list(model.parameters()))
    loss = torch.ones((), device=bench.device, requires_grad=True)

    def block() -> None:
        with amp.scale_loss(loss, optimizer):
            gradients.hand_over()

    return optimizer, block


def _amp_step(bench: Bench) -> Step:
    optimizer, block = _adopted(bench)
    bench.watch.time(block, 1)
    return optimizer.step


def _amp_block(bench: Bench) -> Step:
    """A block of an ordinary iteration.

    One before the first step looks at the graph of the loss, and one that finds gradients multiplies them by the scale.
    """
    optimizer, block = _adopted(bench)

    def iteration() -> None:
        block()
        bench.watch.stop()
        optimizer.step()
        optimizer.zero_grad()
        bench.watch.start()

    bench.watch.time(iteration, 1)
    return iteration


def _forward(bench: Bench, level: str | None) -> Step:
    model, x = Identity(bench.device), torch.ones(4, device=bench.device)
    if level is not None:
        model = amp.initialize(model, opt_level=level, verbosity=0)
    return lambda: model(x)


def _casts_by_hand(bench: Bench) -> Step:
    model, x = Identity(bench.device), torch.ones(4, device=bench.device)
    return lambda: model(x.half()).float()


_IMPORT = """
import time, torch
start = time.process_time()
from apex_npu import amp, optimizers
print((time.process_time() - start) * 1e3)
"""


def import_ms(times: int) -> list[float]:
    """CPU time of importing the package in a new process that has torch, some times.

    Modules are compiled to bytecode before, as those of an installed package are, whatever this process is told.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        return [_import_ms(variables) for _ in range(times + 1)][1:]


def _import_ms(variables: dict[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env=variables,
    )
    return float(done.stdout)
