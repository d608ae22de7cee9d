# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Counters of the device for tests, and failures that tests can inject."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from host_cann.installation import operators, runtime

_OUT_OF_MEMORY = 207001  # ACL_ERROR_RT_MEMORY_ALLOCATION
_KERNEL_ERROR = 507015  # ACL_ERROR_RT_AICORE_EXCEPTION
_KERNEL_TIMEOUT = 507014  # ACL_ERROR_RT_AICORE_TIMEOUT

_PHASES = {"call": 0, "launch": 1, "run": 2}
_HANG = 3
_ALWAYS = 2**62


class Count:
    """What has been called.

    Attributes:
        launches: how many operators were given to a stream, collectives among them.
        bytes: what they and the copies read and wrote, by shape.
        syncs: how often the host waited.
        by_op: launches by name, "aclnnAdd" or "aclop ApplyAdamW".
        rows: launches by name and dtypes, "aclnnAdd f32 f32 f32".
        copies: copies by direction: "h2d", "d2h", "d2d".
        waits: waits by what was waited for: "stream", "event", "device".
    """

    def __init__(self) -> None:
        self.launches = self.bytes = self.syncs = 0
        self.by_op: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    @property
    def h2d(self) -> int:
        return self.copies["h2d"]

    @property
    def d2h(self) -> int:
        return self.copies["d2h"]

    def _add(self, line: str) -> None:
        calls, size, kind, *words = line.split(" ")
        if calls == "0":
            return
        if kind == "launch":
            self.launches += int(calls)
            self.bytes += int(size)
            self.by_op[" ".join(words[:2]) if words[0] == "aclop" else words[0]] += int(calls)
            self.rows[" ".join(words)] += int(calls)
        elif kind == "copy":
            self.bytes += int(size)
            self.copies[words[0]] += int(calls)
        else:
            self.syncs += int(calls)
            self.waits[words[0]] += int(calls)


@contextmanager
def count() -> Iterator[Count]:
    """Count what is called inside: ``with count() as n: ...; n.launches``.

    All devices are waited for before and after, which is not counted: what torch_npu's own queue still holds is counted
    where it was asked for, and once. The numbers are there when the block has been left.
    """
    _synchronize()
    runtime().host_cann_reset_counts()
    counted = Count()
    try:
        yield counted
    finally:
        waits = _synchronize()
        for _ in range(waits):
            runtime().host_cann_uncount_wait(b"device")
        for line in _lines("host_cann_counts"):
            counted._add(line)


def _synchronize() -> int:
    """Wait for all devices that are in use; returns how many waits that were."""
    import torch

    used = [device for device in range(torch.npu.device_count()) if runtime().host_cann_is_used(device)]
    for device in used:
        torch.npu.synchronize(device)
    return len(used)


def fail_after(n: int, prefix: str = "aclnn", code: int = _KERNEL_ERROR, when: str = "call") -> None:
    """Let a call fail, once: the one whose name begins with ``prefix``, after ``n`` that succeed.

    Args:
        n: how many calls succeed first.
        prefix: how the name begins: ``"aclnnAdd"`` (and ``aclnnAddmm``), ``"aclop ApplyAdamW"``, ``"HcclAllReduce"``,
            ``"aclrtMalloc"``, ``"aclrtMemcpyAsync"``.
        code: the error that CANN's interface returns.
        when: ``"call"``: at once, before anything is done; an operator when it is planned. ``"launch"``: an operator
            when it is given to its stream. ``"run"``: when the stream comes to it; the call has succeeded then, what
            follows on the stream is not done, and the host is told where it next waits.

    ``n < 0`` takes back what was asked for.
    """
    if when not in _PHASES:
        raise ValueError(f"host_cann.fail_after: when={when!r} is none of {', '.join(map(repr, _PHASES))}")
    if when != "call" and not prefix.startswith(("acln", "aclop", "Hccl")):
        raise ValueError(
            f"host_cann.fail_after: {prefix!r} is no operator or collective, which alone have when={when!r}"
        )
    _ask(prefix, n, code, _PHASES[when])


def hang_after(n: int, prefix: str = "aclnn", seconds: float = 1.0, code: int = _KERNEL_TIMEOUT) -> None:
    """Let an operator keep its stream for ``seconds`` and fail then, as one that hangs until CANN's timeout ends it.

    Counted like ``fail_after(n, prefix, code, when="run")``.
    """
    _ask(prefix, n, code, _HANG, seconds)


@contextmanager
def out_of_memory_after(n: int) -> Iterator[None]:
    """Inside, allocations of device memory fail after ``n`` that succeed.

    torch_npu allocates large blocks, which it keeps and divides, so most tensors allocate nothing: what it does not use
    it gives back before the block begins.
    """
    import torch

    torch.npu.empty_cache()
    _ask("aclrtMalloc", n, _OUT_OF_MEMORY, _PHASES["call"], times=_ALWAYS)
    try:
        yield
    finally:
        fail_after(-1)


def _ask(prefix: str, n: int, code: int, phase: int, seconds: float = 0.0, times: int = 1) -> None:
    times = times if n >= 0 else 0
    runtime().host_cann_fail(
        prefix.encode(), ctypes.c_long(n), code, phase, ctypes.c_double(seconds), ctypes.c_long(times)
    )


def set_collective_timeout(seconds: int) -> None:
    """Let this process's collectives fail that wait for another rank for more than ``seconds``, from now on.

    At first these are ``$HOST_CANN_HCCL_TIMEOUT``, or 300.
    """
    if seconds <= 0:
        raise ValueError(f"host_cann.set_collective_timeout: seconds={seconds!r} is not positive")
    operators().host_cann_set_collective_timeout(seconds)


class Memory(NamedTuple):
    """Bytes of device memory, as CANN sees it: what torch_npu keeps for later is used."""

    total: int
    free: int

    @property
    def used(self) -> int:
        return self.total - self.free


def memory(device: int = 0) -> Memory:
    """The memory of ``npu:device``; under a limit that is its total."""
    return Memory(_bytes("host_cann_total_bytes", device), _bytes("host_cann_free_bytes", device))


def _bytes(function: str, device: int) -> int:
    call = getattr(runtime(), function)
    call.restype = ctypes.c_size_t
    return int(call(device))


@contextmanager
def memory_limit(size: int, device: int = 0) -> Iterator[None]:
    """Inside, ``npu:device`` has ``size`` bytes more than are in use now; what takes it over that is out of memory.

    torch_npu gives its unused blocks back first: they are in use no longer.
    """
    import torch

    torch.npu.empty_cache()
    used = memory(device).used
    runtime().host_cann_limit_memory(device, ctypes.c_size_t(used + size))
    try:
        yield
    finally:
        runtime().host_cann_limit_memory(device, ctypes.c_size_t(2**63))


def live_storages() -> int:
    """How many blocks of device memory are in use on all devices, by torch_npu's allocator."""
    import torch

    _synchronize()
    devices = range(torch.npu.device_count())
    return sum(int(torch.npu.memory_stats(device)["active.all.current"]) for device in devices)


def saturates() -> bool:
    """Whether the chip (``HOST_CANN_SOC``) has neither inf nor NaN, and raises a flag instead."""
    return bool(runtime().host_cann_saturates())


def missing_operators() -> dict[str, list[str]]:
    """Operators of CANN that this process looked up or called and that are not implemented here.

    Returns:
        ``"called"``: what has failed for it. ``"sought"``: aclnn operators that torch_npu has looked up in vain. For
        some of these it has another way, an older operator or the host; where it has none, it raises an error with the
        name.
    """
    found: dict[str, list[str]] = {"called": [], "sought": []}
    for line in _lines("host_cann_missing"):
        kind, name = line.split(" ", 1)
        found[kind].append(name)
    return found


def _lines(function: str) -> list[str]:
    call = getattr(runtime(), function)
    call.restype = ctypes.c_size_t
    room = call(None, ctypes.c_size_t(0)) + 65536  # other threads may run meanwhile
    text = ctypes.create_string_buffer(room)
    call(text, ctypes.c_size_t(room))
    return text.value.decode().splitlines()
