# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the benchmarks share: a device, a clock, variants in turns, and rows with ratios taken within a turn."""

from __future__ import annotations

import csv
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles

import torch

RESULTS = Path(__file__).parent / "results"
WARM_UP_ROUNDS = 2


def open_device(name: str) -> torch.device:
    """The device, simulated where it is an npu, with one thread on the host."""
    torch.set_num_threads(1)
    if name == "npu":
        import npu_simulator

        npu_simulator.install()
    return torch.device(name)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def clock(device: torch.device) -> float:
    """Seconds. On the host CPU time of the process: others do not count, the engine's threads do."""
    return time.perf_counter() if device.type == "cuda" else time.process_time()


def time_calls(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Milliseconds of one call, after one that warms up."""
    call()
    synchronize(device)
    start = clock(device)
    for _ in range(repeats):
        call()
    synchronize(device)
    return (clock(device) - start) * 1e3 / repeats


def in_turns(variants: Sequence[str], rounds: int, time_one: Callable[[str], float]) -> dict[str, list[float]]:
    """The milliseconds of ``time_one(variant)`` in each round, per variant; the first rounds warm up."""
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(rounds + WARM_UP_ROUNDS):
        # Rotated, so that no variant always follows the same one.
        for i in range(len(variants)):
            variant = variants[(turn + i) % len(variants)]
            elapsed = time_one(variant)
            if turn >= WARM_UP_ROUNDS:
                times[variant].append(elapsed)
    return times


def rows(
    device: torch.device, dtype: torch.dtype, workload: str, times: dict[str, list[float]], reference: str
) -> list[dict[str, str]]:
    """One row per variant; README.md explains the columns."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    same = {"commit": commit.stdout.strip(), "device": device.type, "torch": torch.__version__, "dtype": str(dtype)}
    table = []
    for variant, values in times.items():
        ratios = [a / b for a, b in zip(values, times[reference], strict=True)]
        fortieths = quantiles(ratios, n=40)
        numbers = {
            "median_ms": median(values),
            "p90_ms": quantiles(values, n=10)[-1],
            f"ratio_to_{reference}": median(ratios),
            "ratio_low": fortieths[0],
            "ratio_high": fortieths[-1],
        }
        table.append(
            {**same, "workload": workload, "variant": variant, **{name: f"{x:.4f}" for name, x in numbers.items()}}
        )
    return table


def show(table: list[dict[str, str]]) -> None:
    """Print what one wants to see of ``rows``."""
    for row in table:
        ratio = next(value for name, value in row.items() if name.startswith("ratio_to"))
        spread = f"({float(row['ratio_low']):.2f} .. {float(row['ratio_high']):.2f})"
        print(
            f"{row['workload']:24} {row['variant']:34} {float(row['median_ms']):9.3f} ms {float(ratio):7.2f} {spread}"
        )


def write(name: str, device: torch.device, table: list[dict[str, str]]) -> None:
    """Write ``results/<name>_<device>.csv``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}_{device.type}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    print(f"written: {path}")
