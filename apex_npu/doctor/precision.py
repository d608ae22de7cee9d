# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which low-precision dtypes a device computes natively.

They are found by timing: the flags of a CPU do not say what its torch makes of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

# What the layers of networks are made of. A CPU, or its torch, may compute one of them natively and not the other.
LAYERS = ("linear layers", "convolutions")
_DTYPES = (torch.bfloat16, torch.float16)
# A dtype that is emulated is slower than float32 by far more than timings scatter; one that is not is faster.
_NATIVE = 1.15
_ROUNDS = 5
# One round tells a dtype that is slower than this apart: emulated arithmetic may be 50 times slower than float32.
_HOPELESS = 0.5


def speed_of_low_precision(layers: str, device: torch.device | str = "cpu") -> dict[torch.dtype, float]:
    """Time in float32 over time in bfloat16 and float16, of a layer's forward and backward.

    All dtypes are timed in turns; the shortest time of each counts. On a CPU it is the CPU time of one thread, so that
    other programs do not matter much, and takes about a second.

    Args:
        layers: One of ``LAYERS``.
        device: Where to compute.

    Returns:
        The ratio for each dtype: above 1 where it is faster than float32. 0.0 for one that the device refuses.

    Example::

        >>> apex_npu.doctor.precision.speed_of_low_precision("convolutions", "cpu")
        {torch.bfloat16: 1.7, torch.float16: 0.03}
    """
    device = torch.device(device)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        return _measure(layers, device)
    finally:
        torch.set_num_threads(threads)


def native_dtypes(speeds: dict[torch.dtype, float]) -> list[torch.dtype]:
    """Those dtypes of ``speed_of_low_precision`` that the device computes natively, the fastest first.

    Example::

        >>> apex_npu.doctor.precision.native_dtypes({torch.bfloat16: 1.7, torch.float16: 0.03})
        [torch.bfloat16]
    """
    return sorted((dtype for dtype, speed in speeds.items() if speed >= _NATIVE), key=lambda dtype: -speeds[dtype])


def _measure(layers: str, device: torch.device) -> dict[torch.dtype, float]:
    works = {torch.float32: _work(layers, torch.float32, device)}
    speeds = dict.fromkeys(_DTYPES, 0.0)
    for dtype in _DTYPES:
        try:
            works[dtype] = _work(layers, dtype, device)
            works[dtype]()  # the first run compiles and allocates
        except (RuntimeError, TypeError):
            works.pop(dtype, None)
    works[torch.float32]()
    best = {dtype: float("inf") for dtype in works}
    for _ in range(_ROUNDS):
        for dtype, work in works.items():
            if dtype == torch.float32 or speeds[dtype] == 0.0 or speeds[dtype] > _HOPELESS:
                best[dtype] = min(best[dtype], _seconds(work, device))
        for dtype in works.keys() - {torch.float32}:
            speeds[dtype] = best[torch.float32] / best[dtype]
    return speeds


def _work(layers: str, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Forward and backward of one layer whose weights and input are ``dtype``."""
    layer: nn.Module
    if layers == "linear layers":
        layer = nn.Linear(512, 512, device=device, dtype=dtype)
        values = torch.ones(256, 512, device=device, dtype=dtype)
    else:
        layer = nn.Conv2d(64, 64, 3, padding=1, device=device, dtype=dtype)
        values = torch.ones(8, 64, 16, 16, device=device, dtype=dtype)

    def run() -> None:
        layer(values).sum().backward()

    return run


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cpu":
        started = time.thread_time()
        work()
        return time.thread_time() - started
    module = torch.get_device_module(device)
    module.synchronize()
    started = time.perf_counter()
    work()
    module.synchronize()
    return time.perf_counter() - started
