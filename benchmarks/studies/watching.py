# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What an iteration costs that ``amp.debug`` looks at, beside the iteration alone and torch's own means.

    PYTHONPATH=benchmarks python benchmarks/studies/watching.py [--device cpu|cuda|npu] [--opt-level O5] [--rounds 12]

All variants run in one process, in turns; ratios are taken within a turn. results/README.md explains the columns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from iterations import MODELS
from rounds import in_turns, open_device
from shared import rows, show, time_calls, write
from torch import nn
from whole_steps import initialized

from apex_npu import amp

# Times the batch of iterations.py: small ones are bound by the host, as what watches them is.
BATCHES = {"": 1, ", 32 times the batch": 32}
# In place of a scale that overflows: what is found where nothing is wrong.
LOSS_SCALE = 128.0


def torch_debug_mode() -> AbstractContextManager[Any]:
    """torch's log of operators, younger than the oldest torch that is supported."""
    from torch.utils._debug_mode import DebugMode

    mode: AbstractContextManager[Any] = DebugMode()
    return mode


def contexts(model: nn.Module, optimizer: Any, folder: Path) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """What an iteration is run in."""
    return {
        "alone": nullcontext,
        "find_overflow(replay=True)": lambda: amp.debug.find_overflow(model, replay=True),
        "find_overflow": lambda: amp.debug.find_overflow(model),
        "record": lambda: amp.debug.record(folder / "run.pt", model),
        "check_operators": lambda: amp.debug.check_operators(model),
        "gradient_range(probe=256)": lambda: amp.debug.gradient_range(optimizer, probe=256.0),
        "torch.autograd.detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
        "torch's DebugMode": torch_debug_mode,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--opt-level", default="O5")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    device = open_device(options.device)
    table: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            for suffix, times in BATCHES.items():
                model, x = MODELS[name](device)
                model, optimizer = initialized(model, options.opt_level, fold=False)
                batch = x.repeat(times, *[1] * (x.dim() - 1))

                def step(model: nn.Module = model, optimizer: Any = optimizer, batch: torch.Tensor = batch) -> None:
                    optimizer.zero_grad()
                    with amp.scale_loss(model(batch).float().square().mean(), optimizer) as scaled_loss:
                        scaled_loss.backward()
                    optimizer.step()

                around = contexts(model, optimizer, Path(folder))

                def time_one(variant: str, step: Callable[[], None] = step, around: Any = around) -> float:
                    def call() -> None:
                        with around[variant]():
                            step()

                    return time_calls(call, device, 1)

                workload = f"{name}{suffix}"
                new = rows(device, torch.float32, workload, in_turns(list(around), options.rounds, time_one), "alone")
                for row in new:
                    row["dtype"] = options.opt_level
                show(new)
                table += new
                amp.shutdown()
    write("watching", device, table)


if __name__ == "__main__":
    main()
