# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The low-precision dtypes that a device computes natively.

They are found by timing: the flags of a CPU do not tell whether its torch uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn

# The usual layers of networks. A CPU, or its torch, may compute one kind natively and not the other.
LAYERS = ("linear layers", "convolutions")
_DTYPES = (torch.bfloat16, torch.float16)
# A native dtype is faster than float32; an emulated one is much slower, so that the scatter of timings does not matter.
_NATIVE = 1.15
_ROUNDS = 5
# The least time of a float32 run on an accelerator. Shorter runs would show launches, which take as long in any dtype.
_LONG_ENOUGH_S = 4e-3
_LARGEST = 16


def speed_of_low_precision(layers: str, device: torch.device | str = "cpu") -> dict[torch.dtype, float]:
    """Return the time in float32 over the time in bfloat16 and float16, of a layer's forward and backward.

    The shortest time of each dtype counts. On a CPU the CPU time of one thread counts, so that other programs have
    little effect; this takes two seconds. On an accelerator the layer is so large that arithmetic decides the time.
    float32 is computed in torch's default way: on a GPU since Ampere, convolutions use TF32.

    Args:
        layers: One of ``LAYERS``.
        device: The device to measure.

    Returns:
        The ratio for each dtype: above 1 if it is faster than float32, 0.0 if the device refuses it.
    """
    device = torch.device(device)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        scale = _scale(layers, device)
        single = _shortest(_work(layers, torch.float32, device, scale), device)
        return {dtype: _speed(single, layers, dtype, device, scale) for dtype in _DTYPES}
    finally:
        torch.set_num_threads(threads)


def native_dtypes(speeds: dict[torch.dtype, float]) -> list[torch.dtype]:
    """Return the dtypes that the device computes natively, the fastest first.

    ``speeds`` is a result of ``speed_of_low_precision``.
    """
    return sorted((dtype for dtype, speed in speeds.items() if speed >= _NATIVE), key=lambda dtype: -speeds[dtype])


def _scale(layers: str, device: torch.device) -> int:
    """Return the ratio of the size of a layer on ``device`` to that on a CPU."""
    scale = 1
    if device.type == "cpu":
        return scale
    with suppress(torch.OutOfMemoryError):  # then the last size that fits is used
        while scale < _LARGEST:
            work = _work(layers, torch.float32, device, scale)
            work()  # the first run of a size looks for a kernel, and allocates
            if min(_seconds(work, device) for _ in range(2)) >= _LONG_ENOUGH_S:
                break
            scale *= 2
    return scale


def _speed(single: float, layers: str, dtype: torch.dtype, device: torch.device, scale: int) -> float:
    try:
        return single / _shortest(_work(layers, dtype, device, scale), device)
    except (RuntimeError, TypeError):
        return 0.0


def _shortest(work: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of the shortest of several runs."""
    work()  # the first run compiles and allocates
    return min(_seconds(work, device) for _ in range(_ROUNDS))


def _work(layers: str, dtype: torch.dtype, device: torch.device, scale: int) -> Callable[[], None]:
    """Return a function that runs forward and backward of a layer with weights and input of ``dtype``."""
    layer: nn.Module
    if layers == "linear layers":
        layer = nn.Linear(512 * scale, 512 * scale, device=device, dtype=dtype)
        values = torch.ones(256 * scale, 512 * scale, device=device, dtype=dtype)
    else:
        layer = nn.Conv2d(64 * scale, 64 * scale, 3, padding=1, device=device, dtype=dtype)
        values = torch.ones(8 * scale, 64 * scale, 16, 16, device=device, dtype=dtype)

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
