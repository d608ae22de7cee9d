# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Controls for tests that no real device offers: counters, the behaviour of other chips, faults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

_SATURATE: dict[Literal[False, "fp16", "all"], int] = {False: 0, "fp16": 1, "all": 2}


def _extension() -> Any:
    from npu_simulator.installation import installed

    if not installed():
        raise RuntimeError("npu_simulator is not installed in this process; call npu_simulator.install() first")
    from npu_simulator import _C  # type: ignore[attr-defined]

    return _C


@dataclass(frozen=True)
class Settings:
    """How the device behaves; see ``configure``."""

    saturate: Literal[False, "fp16", "all"] = False
    fused_foreach: bool = False
    padded_format: bool = False
    memory_limit: int | None = None


def configure(
    *,
    saturate: Literal[False, "fp16", "all"] = False,
    fused_foreach: bool = False,
    padded_format: bool = False,
    memory_limit: int | None = None,
) -> Settings:
    """Make all devices behave like another chip. What is not passed returns to its default.

    Args:
        saturate: ``"fp16"``: float16 results have no inf (it becomes ±65504) and no NaN (0), and a sticky flag per
            device tells that there was one, as on chips before the 910B. ``"all"``: bfloat16 and float32 too.
        fused_foreach: ``torch._foreach_*`` is one launch, as on a 910B, not one per tensor.
        padded_format: ``torch_npu.npu_format_cast`` to a private format gives a storage larger than the tensor.
        memory_limit: Bytes per device, beyond which allocating raises ``torch.OutOfMemoryError``.

    Returns:
        The settings before, so that ``configure(**vars(before))`` restores them.
    """
    # `False` only: 0 is equal to it, and would pass for a setting.
    if not (saturate is False or saturate in ("fp16", "all")):
        raise ValueError(f"saturate must be False, 'fp16' or 'all', got {saturate!r}")
    for name, flag in (("fused_foreach", fused_foreach), ("padded_format", padded_format)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    if memory_limit is not None and (isinstance(memory_limit, bool) or not isinstance(memory_limit, int)):
        raise TypeError(f"memory_limit must be a number of bytes or None, got {memory_limit!r}")
    if memory_limit is not None and memory_limit < 0:
        raise ValueError(f"memory_limit must be >= 0 bytes, got {memory_limit}")
    extension = _extension()
    before = current_settings()
    limit = -1 if memory_limit is None else memory_limit
    extension.configure(_SATURATE[saturate], fused_foreach, padded_format, limit)
    return before


def current_settings() -> Settings:
    """The settings of the last ``configure``."""
    saturate, fused_foreach, padded_format, limit = _extension().settings()
    names = {number: name for name, number in _SATURATE.items()}
    return Settings(names[saturate], fused_foreach, padded_format, None if limit < 0 else limit)


def fail_after(n_launches: int | None) -> None:
    """Let ``n_launches`` more launches pass and make the next one raise RuntimeError, once; None calls it off.

    The launch that fails has changed nothing. Launches are counted as ``count`` does, on all devices together.
    """
    if n_launches is not None and (isinstance(n_launches, bool) or not isinstance(n_launches, int)):
        raise TypeError(f"n_launches must be an int or None, got {n_launches!r}")
    if n_launches is not None and n_launches < 0:
        raise ValueError(f"n_launches must be >= 0, got {n_launches}")
    _extension().fail_after(-1 if n_launches is None else n_launches)


def live_storages() -> int:
    """How many storages on the devices are alive."""
    return int(_extension().live_storages())


class Count:
    """What the devices did since ``count`` was entered, until it was left.

    Attributes:
        launches: Kernels started. Views and allocations are none.
        bytes: Bytes that kernels and copies were given or made.
        h2d: Copies from the host.
        d2h: Copies to the host, ``item`` and ``bool`` among them.
        syncs: Times that the host waited for a device.
        by_op: Launches by operator: ``{"mm": 2, "add.out": 1}``. Many operators that look different in Python arrive as
            their ``out`` form.
    """

    def __init__(self) -> None:
        self._before = self._read()
        self._after: tuple[Any, ...] | None = None

    @staticmethod
    def _read() -> tuple[Any, ...]:
        return tuple(_extension().totals())

    def _stop(self) -> None:
        self._after = self._read()

    def _since(self, index: int) -> int:
        return int((self._after or self._read())[index] - self._before[index])

    @property
    def launches(self) -> int:
        return self._since(0)

    @property
    def bytes(self) -> int:
        return self._since(1)

    @property
    def h2d(self) -> int:
        return self._since(2)

    @property
    def d2h(self) -> int:
        return self._since(3)

    @property
    def syncs(self) -> int:
        return self._since(4)

    @property
    def by_op(self) -> dict[str, int]:
        now, before = (self._after or self._read())[5], self._before[5]
        return {name: n - before.get(name, 0) for name, n in sorted(now.items()) if n > before.get(name, 0)}

    def __repr__(self) -> str:
        names = ("launches", "bytes", "h2d", "d2h", "syncs", "by_op")
        return f"Count({', '.join(f'{name}={getattr(self, name)}' for name in names)})"


@contextmanager
def count() -> Iterator[Count]:
    """Count what the devices do inside the block.

    with npu_simulator.count() as n:
        loss.backward()
    assert n.syncs == 0
    """
    counted = Count()
    try:
        yield counted
    finally:
        counted._stop()


def padded_numel(size: tuple[int, ...]) -> int:
    """Elements of a tensor of ``size`` laid out in tiles of 16 × 16: its last two dimensions are rounded up."""
    if not size:
        return 16 * 16
    rows, columns = (1, *size)[-2:]
    return math.prod(size[:-2]) * (-(-rows // 16) * 16) * (-(-columns // 16) * 16)
