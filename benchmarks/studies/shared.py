# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the studies share: a timed call, and rows with ratios taken within a turn."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles

import torch
from rounds import RESULTS, Spread, Times, clock, commit, processor, synchronize, write_csv


def time_calls(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Milliseconds of one call, after one that warms up."""
    call()
    synchronize(device)
    start = clock(device)
    for _ in range(repeats):
        call()
    synchronize(device)
    return (clock(device) - start) * 1e3 / repeats


def rows(device: torch.device, dtype: torch.dtype, workload: str, times: Times, reference: str) -> list[dict[str, str]]:
    """One row per variant; results/README.md explains the columns."""
    same = {"commit": commit(), "device": device.type, "processor": processor(device), "torch": torch.__version__}
    same["dtype"] = str(dtype)
    table = []
    for variant, values in times.items():
        ratio = Spread.of([a / b for a, b in zip(values, times[reference], strict=True)])
        numbers = {
            "median_ms": median(values),
            "p90_ms": quantiles(values, n=10, method="inclusive")[-1],
            f"ratio_to_{reference}": ratio.middle,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
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
            f"{row['workload']:28} {row['variant']:34} {float(row['median_ms']):9.3f} ms {float(ratio):7.2f} {spread}",
            flush=True,
        )


def write(name: str, device: torch.device, table: list[dict[str, str]]) -> None:
    """Write ``results/<name>_<device>.csv``."""
    write_csv(RESULTS / f"{name}_{device.type}.csv", table)
