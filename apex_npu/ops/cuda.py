# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The kernels on cuda: Triton kernels, or plain torch if Triton cannot run.

Triton is imported when the first parameters on a GPU are fused or stepped. If it is missing, too old, disabled with
``APEX_NPU_NO_TRITON=1``, or fails to compile a kernel, torch's own kernels run, with more launches and the same
results. The log reports this once. An error is raised only for operands that no kernel supports.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from apex_npu.backends._torch_private import torch_profiler
from apex_npu.ops import reference
from apex_npu.ops.dispatch import Call, Op
from apex_npu.ops.grad_lists import addresses_of, is_grad_list, with_memory
from apex_npu.ops.triton_kernels.launches import CompilationError

logger = logging.getLogger("apex_npu")

# The release that came with torch 2.10. Up to 3.3 kernels cannot take float64 numbers; up to 3.5 roots treat denormal
# numbers as 0.
_OLDEST_TRITON = (3, 6)
# What Triton failed to compile; it is not tried again.
_given_up: set[object] = set()
_ids: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def takes_ranges() -> bool:
    """Return True if the kernels find segments by their ranges, without a map from elements to segments."""
    return _plans() is not None


def masks_writes(device: torch.device) -> bool:
    """Return True if rules on ``device`` write nothing if a flag there is set, without a separate pass."""
    return device.type == "cuda" and _plans() is not None


def can_run(plan_name: str, device: torch.device) -> bool:
    """Return True if ``run`` can run this plan on ``device``."""
    return masks_writes(device) and plan_name not in _given_up


def run(plan_name: str, *args: Any) -> bool:
    """Run Triton's kernels; return False, with nothing written, if that is not possible.

    Args:
        plan_name: The name of a function of ``plans``, which profilers show.
        args: The arguments of that function.
    """
    planned = _planned(plan_name, args, {}, key=plan_name)
    if planned is None:
        return False
    launch, on, _ = planned
    launch(*on)
    return True


@functools.cache
def _plans() -> ModuleType | None:
    """Return the module that plans the launches; None if plain torch is used."""
    # The same values as for APEX_NPU_NO_EXT.
    if os.environ.get("APEX_NPU_NO_TRITON", "").strip().lower() not in {"", "0", "false", "no", "off"}:
        return None
    try:
        triton = importlib.import_module("triton")
        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if version < _OLDEST_TRITON:
            oldest = ".".join(map(str, _OLDEST_TRITON))
            raise ImportError(f"Triton {triton.__version__} is too old: {oldest} or newer is needed")
        return importlib.import_module("apex_npu.ops.triton_kernels.plans")
    except Exception as error:  # a broken installation raises anything
        logger.warning(
            "apex_npu: Triton is not used on cuda; torch's own kernels run instead, with more launches: %s", error
        )
        return None


class Kernel:
    """The kernel of an op on cuda: Triton's kernels if possible, else torch's operators."""

    def __init__(self, op: Op[..., Any], fallback: Callable[..., Any] | None = None) -> None:
        """Create the kernel of ``op``. ``fallback``: another kernel; None: the reference."""
        self._op, self._fallback = op, fallback or op.reference

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Run the kernel."""
        run, args, kwargs = self.prepare(operands, options)
        return run(*args, **kwargs)

    def prepare(self, operands: tuple[Any, ...], options: dict[str, Any], kept: dict[Any, Any] | None = None) -> Call:
        """Return a call for later, with all memory allocated and all kernels compiled, so that it cannot fail.

        Args:
            operands: The operands.
            options: The options.
            kept: For an elementwise rule, a dict that keeps launches for the same operands.
        """
        op = self._op
        more = {} if kept is None else {"kept": kept}
        key = op.name, options.get("encoding") is not None
        planned = _planned(op.name, operands, {**options, **more}, key=key)
        return planned or (self._fallback, _with_ids(op, tuple(map(with_memory, operands))), options)


def _planned(plan_name: str, args: tuple[Any, ...], options: dict[str, Any], *, key: object) -> Call | None:
    """Return the call that launches Triton's kernels, compiled and with its memory, or None if they cannot run.

    Args:
        plan_name: The argument of ``run``.
        args: The arguments of the function.
        options: The keyword arguments of the function.
        key: Identifies what is not tried again after Triton has failed to compile it.
    """
    plans = None if key in _given_up else _plans()
    if plans is None:
        return None
    plan = getattr(plans, plan_name)(*args, **options)
    if plan is None:
        return None
    run, device = plan.run, args[0].device
    if torch_profiler._is_profiler_enabled:
        run = torch_profiler.record_function(f"apex_npu::{plan_name}")(run)
    try:
        return run, (device, plan.compile(device)), {}
    except CompilationError as error:
        _given_up.add(key)
        logger.warning("apex_npu: Triton cannot compile %s; torch's own kernels run instead: %s", plan_name, error)
    return None


def prepared(call: Call, remember: Callable[..., Any], *, elsewhere: bool) -> Call:
    """Return ``call`` with all memory allocated and all kernels compiled, so that no step fails after it has begun.

    The launch of an elementwise rule is planned once for its operands, which are mostly those of the previous step.

    Args:
        call: The call of the rule of a run.
        remember: The method of the run, to keep the launch for the next step.
        elsewhere: The gradients are not in their slots. Unless they are listed, a kept launch would keep them alive.
    """
    kernel, operands, options = call
    if not isinstance(kernel, Kernel):
        return call
    grad = operands[1]
    addresses = addresses_of(grad) if is_grad_list(grad) else None
    if options.get("encoding") is None and (addresses is not None or not elsewhere):
        # A list of gradients is a new one in each step.
        known = operands if addresses is None else (operands[0], addresses.begins, *operands[2:])
        # The operands are kept as well: another tensor would have another identity.
        _, kept = remember("launches", (kernel, *map(id, known)), lambda: (known, {}))
        return kernel.prepare(operands, options, kept)
    return kernel.prepare(operands, options)


def _with_ids(op: Op[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with the map from elements to segments that plain torch needs. It is made once for segments."""
    at = op.operands.index("starts") if "starts" in op.operands else None
    if at is None or args[at + 2] is not None:
        return args
    starts, lengths = args[at : at + 2]
    ids: Tensor | None = _ids.get(starts)
    if ids is None:
        ids = _ids[starts] = reference.segment_ids(starts, lengths, args[0].numel(), args[0].device)
    return *args[: at + 2], ids, *args[at + 3 :]
