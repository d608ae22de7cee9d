# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ceiling: a trivial kernel with an optimizer's memory accesses, timed in turns with what it is a ceiling for.

On cpu ``ceiling.cpp``, compiled once for this machine; on an accelerator the device's own copy of as many bytes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from workloads import Bench, numel

SOURCE = Path(__file__).with_name("ceiling.cpp")
CACHE = Path(__file__).parents[1] / "build" / "benchmarks"
# Bytes per element that a pass over float32 reads and writes.
TRAFFIC = {"read_only": 4, "in_place": 8, "one_pass_1": 12, "one_pass_2": 20, "one_pass_3": 28, "two_passes": 40}


def compiler() -> str | None:
    """Of C++, or None where there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


@functools.cache
def _library() -> ctypes.CDLL:
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("the ceiling needs a C++ compiler: install one, or name it with CXX=...")
    command = [cxx, "-O3", "-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fPIC"]
    identity = hashlib.sha256(SOURCE.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    built = CACHE / f"ceiling-{identity}.so"
    if not built.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-shared", "-o", str(unfinished), str(SOURCE)], check=True)
        unfinished.replace(built)
    return ctypes.CDLL(str(built))


def ceiling(bench: Bench, *kernels: str) -> Callable[[], None]:
    """A step with the memory accesses of ``kernels``, functions of ceiling.cpp: one after the other."""
    n = numel(bench.shapes)
    if bench.device.type != "cpu":
        # A copy reads and writes: half of the traffic each.
        source = torch.ones(n * sum(map(TRAFFIC.__getitem__, kernels)) // 8, device=bench.device)
        target = torch.empty_like(source)

        def copy() -> None:
            target.copy_(source)

        return copy
    streams = {"read_only": 1, "in_place": 1, "one_pass_1": 2, "one_pass_2": 3}
    tensors = [torch.full((n,), 0.01) for _ in range(max(streams.get(kernel, 4) for kernel in kernels))]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    # The gradients are the last of each.
    calls = [(getattr(_library(), kernel), pointers[-streams.get(kernel, 4) :]) for kernel in kernels]

    def step() -> None:
        for function, given in calls:
            function(ctypes.c_long(n), *given)
        assert tensors  # their memory is in use

    return step
