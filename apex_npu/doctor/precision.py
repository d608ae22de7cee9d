# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The low-precision dtypes that a device computes natively.

They are found by timing: the flags of a CPU do not tell whether its torch uses them.
"""

from __future__ import annotations

import functools
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
# A dtype below this ratio is timed in one round only: emulated arithmetic may be 50 times slower than float32.
_HOPELESS = 0.5
# The least time of a float32 run on an accelerator. Shorter runs would show launches, which take as long in any dtype.
_LONG_ENOUGH_S = 4e-3
_LARGEST = 16


def speed_of_low_precision(layers: str, device: torch.device | str = "cpu") -> dict[torch.dtype, float]:
    """Return the time in float32 over the time in bfloat16 and float16, of a layer's forward and backward.

    All dtypes are timed in turns; the shortest time of each counts. On a CPU the CPU time of one thread counts, so that
    other programs have little effect; this takes about a second. On an accelerator the layer is so large that
    arithmetic decides the time, see ``size_of``. float32 is computed in torch's default way: on a GPU since Ampere,
    convolutions use TF32.

    Args:
        layers: One of ``LAYERS``.
        device: The device to measure.

    Returns:
        The ratio for each dtype: above 1 if it is faster than float32, 0.0 if the device refuses it.

    Example::

        >>> apex_npu.doctor.precision.speed_of_low_precision("convolutions", "cpu")
        {torch.bfloat16: 1.7, torch.float16: 0.03}
    """
    device = torch.device(device)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        return _measure(layers, device, _scale(layers, device))
    finally:
        torch.set_num_threads(threads)


def size_of(layers: str, device: torch.device | str = "cpu") -> str:
    """Return the size of the layers that ``speed_of_low_precision`` measures on ``device``, in words.

    Example::

        >>> apex_npu.doctor.precision.size_of("linear layers", "cpu")
        '256 x 512 by 512 x 512'
    """
    device = torch.device(device)
    scale = _scale(layers, device)
    if layers == "linear layers":
        return f"{256 * scale} x {512 * scale} by {512 * scale} x {512 * scale}"
    single = ", float32 as TF32" if device.type == "cuda" and _convolves_in_tf32() else ""
    return f"3 x 3, {64 * scale} channels, {8 * scale} images of 16 x 16{single}"


def _convolves_in_tf32() -> bool:
    return torch.backends.cudnn.allow_tf32 and torch.cuda.get_device_capability() >= (8, 0)


def native_dtypes(speeds: dict[torch.dtype, float]) -> list[torch.dtype]:
    """Return the dtypes that the device computes natively, the fastest first.

    ``speeds`` is a result of ``speed_of_low_precision``.

    Example::

        >>> apex_npu.doctor.precision.native_dtypes({torch.bfloat16: 1.7, torch.float16: 0.03})
        [torch.bfloat16]
    """
    return sorted((dtype for dtype, speed in speeds.items() if speed >= _NATIVE), key=lambda dtype: -speeds[dtype])


@functools.cache
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


def _measure(layers: str, device: torch.device, scale: int) -> dict[torch.dtype, float]:
    works = {torch.float32: _work(layers, torch.float32, device, scale)}
    speeds = dict.fromkeys(_DTYPES, 0.0)
    for dtype in _DTYPES:
        try:
            works[dtype] = _work(layers, dtype, device, scale)
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
