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
from operator import is_
from types import ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from apex_npu.backends._torch_private import is_dispatch_observed
from apex_npu.ops import aten_fused, elementwise, reference_segments, segmented
from apex_npu.ops.dispatch import Call, Op, Rule
from apex_npu.ops.grad_lists import addresses_of, is_grad_list, with_memory
from apex_npu.ops.reference import FLOATS
from apex_npu.ops.triton_kernels.launches import CompilationError

logger = logging.getLogger("apex_npu")

# The release that came with torch 2.10. Up to 3.3 kernels cannot take float64 numbers; up to 3.5 roots treat denormal
# numbers as 0.
_OLDEST_TRITON = (3, 6)
# Ops whose kernels Triton failed to compile, which are not tried again.
_given_up: set[object] = set()
_TAKE, _SCALE = "take_addressed", "scale_listed"
_ids: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def takes_ranges() -> bool:
    """Return True if the kernels find segments by their ranges, without a map from elements to segments."""
    return _plans() is not None


def masks_writes(device: torch.device) -> bool:
    """Return True if rules on ``device`` write nothing if a flag there is set, without a separate pass."""
    return device.type == "cuda" and _plans() is not None


def takes_addresses(slot: Tensor) -> bool:
    """Return True if ``take_addressed`` can write into tensors like ``slot``."""
    return masks_writes(slot.device) and slot.dtype in FLOATS and _TAKE not in _given_up


def take_addressed(
    flat: Tensor,
    chunks: Tensor,
    addresses: Tensor,
    dtype: torch.dtype,
    inv_scale: float,
    found_inf: Tensor | None,
    size: int,
    *,
    aligned: bool,
    kept: dict[Any, Any] | None = None,
) -> bool:
    """Copy gradients into slots, as in ``gather_cuda``; return False, with nothing written, if Triton cannot compile.

    Args:
        flat: The buffer with the slots.
        chunks: int64, a row for each program: its first element in ``flat``, one past its last, and the slot.
        addresses: int64, one for each slot: the address of ``flat`` if the gradient were in its slot; 0: no gradient.
        dtype: The dtype of the gradients.
        inv_scale: The factor of the gradients.
        found_inf: float32, one element; set to 1 if a gradient is not finite. None: do not check.
        size: The maximum number of elements in a chunk.
        aligned: The attribute of ``Chunks``.
        kept: A dict that keeps launches for the same ``flat``, ``size`` and ``aligned``.
    """
    args = (flat, chunks, addresses, dtype, inv_scale, found_inf, size, aligned, kept)
    return _run_plan(_TAKE, args, {})[0]


def scale_listed(grads: Tensor, factor: float | Tensor, found_inf: Tensor | None) -> bool:
    """Multiply listed gradients in place; return False, with nothing written, if Triton cannot.

    Args:
        grads: The operand. With a factor of 1.0 nothing is written, and gradients may have a narrower dtype.
        factor: A number, or a tensor of one number on their device.
        found_inf: The argument of ``take_addressed``; with a factor of 1.0 not None.
    """
    return _run_plan(_SCALE, (grads, factor, found_inf), {})[0]


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


def _or_torch(op: Op[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel of ``op`` that runs in Triton if possible, else calls ``fallback``."""

    def kernel(*args: Any, **options: Any) -> Any:
        is_done, result = _run_plan(op.__name__, args, options, name=op.name, key=op)
        if is_done:
            return result
        return fallback(*_with_ids(op, tuple(map(with_memory, args))), **options)

    return kernel


def plan_encoded(rule: Rule[...], operands: tuple[Any, ...], options: dict[str, Any], encoded: Any) -> Call | None:
    """Return a call of the rule's Triton kernels for operands that are stored in fewer bytes; None if not possible.

    Args:
        rule: The rule.
        operands: The operands of the rule, as they are stored.
        options: The options of the rule.
        encoded: An ``encoded_calls.Encoded``.
    """
    return _planned(rule.__name__, operands, {**options, "encoded": encoded}, name=rule.name, key=(rule, "encoded"))


def _run_plan(
    plan_name: str, args: tuple[Any, ...], options: dict[str, Any], *, name: str = "", key: object = None
) -> tuple[bool, Any]:
    """Return whether Triton's kernels have run, and their result."""
    planned = _planned(plan_name, args, options, name=name, key=key)
    if planned is None:
        return False, None
    run, on, _ = planned
    return True, run(*on)


def _planned(
    plan_name: str, args: tuple[Any, ...], options: dict[str, Any], *, name: str = "", key: object = None
) -> Call | None:
    """Return the call that launches Triton's kernels, compiled and with its memory, or None if they cannot run.

    Args:
        plan_name: The name of a function of ``plans``.
        args: The arguments of that function.
        options: The keyword arguments of that function.
        name: The name of the op, for the log.
        key: Identifies what is not tried again after Triton has failed to compile it.
    """
    name, key = name or plan_name, key or plan_name
    plans = None if key in _given_up else _plans()
    if plans is None:
        return None
    plan = getattr(plans, plan_name)(*args, **options)
    if plan is None:
        return None
    device = args[0].device
    try:
        return plan.run, (device, plan.compile(device)), {}
    except CompilationError as error:
        _given_up.add(key)
        logger.warning("apex_npu: Triton cannot compile %s; torch's own kernels run instead: %s", name, error)
    return None


class Repeated:
    """Calls of a rule on cuda that mostly have the operands of the previous call, as for a run of slots.

    The launch of an elementwise rule is planned once for its operands. The call bypasses torch's dispatcher unless
    something observes it, because the dispatcher takes longer than a launch to reach a kernel in Python.
    """

    def __init__(self, rule: Rule[...]) -> None:
        self._rule = rule
        self._numbers = list(rule.scalars.items())
        self._operands: tuple[Any, ...] = ()
        self._kept: dict[Any, Any] = {}
        self._are_plain = False

    def __call__(self, *operands: Any, **options: Any) -> None:
        """Call the rule."""
        call, args, kwargs = self.prepare(operands, options)
        call(*args, **kwargs)

    def prepare(self, operands: tuple[Any, ...], options: dict[str, Any]) -> Call:
        """Return a call of the rule for later; see ``prepared``."""
        rule, known, grad = self._rule, operands, operands[1]
        if is_grad_list(grad):  # a new one in each step, which is not kept because it would keep the gradients' memory
            addresses = addresses_of(grad)
            if addresses is None:  # the gradients are copied in each step
                return rule, operands, options
            known = (operands[0], addresses.begins, *operands[2:])
        if len(known) != len(self._operands) or not all(map(is_, known, self._operands)):
            self._operands, self._kept = known, {}
            self._are_plain = all(type(operand) in (Tensor, NoneType) for operand in known)
        if self._are_plain and not is_dispatch_observed():
            given = {**options, "kept": self._kept}
            for name, number in self._numbers:  # as the dispatcher does
                if name in given:
                    value = given[name]
                    is_kept = name in rule.numbers and isinstance(value, Tensor)
                    given[name] = value.reshape(()) if is_kept else number(value)
            planned = _planned(rule.__name__, operands, given, name=rule.name, key=rule)
            if planned is not None:
                return planned
        return rule, operands, options


def prepared(call: Call, remember: Callable[..., Any], *, elsewhere: bool) -> Call:
    """Return ``call`` with all memory allocated and all kernels compiled, so that no step fails after it has begun.

    Args:
        call: The call of the rule of a run.
        remember: The method of the run, to keep the call for the next step.
        elsewhere: The gradients are not in their slots. Unless they are listed, a kept call would keep them alive.
    """
    rule, operands, options = call
    if not isinstance(rule, Rule):
        return call
    make = functools.partial(Repeated, rule)
    keeps = not elsewhere or is_grad_list(operands[1])
    repeated: Repeated = remember("repeated call", rule, make) if keeps else make()
    return repeated.prepare(operands, options)


def _with_ids(op: Op[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with the map from elements to segments that plain torch needs. It is made once for segments."""
    at = op.operands.index("starts") if "starts" in op.operands else None
    if at is None or args[at + 2] is not None:
        return args
    starts, lengths = args[at : at + 2]
    ids: Tensor | None = _ids.get(starts)
    if ids is None:
        ids = _ids[starts] = reference_segments.segment_ids(starts, lengths, args[0].numel(), args[0].device)
    return *args[: at + 2], ids, *args[at + 3 :]


_ATEN_FUSED: dict[Op[..., Any], Callable[..., Any]] = {
    elementwise.sgd_: aten_fused.sgd_,
    elementwise.adam_: aten_fused.adam_,
}
KERNELS: dict[Op[..., Any], Callable[..., Any]] = {
    op: _or_torch(op, _ATEN_FUSED.get(op, op.reference))
    for op in (*elementwise.RULES, *segmented.RULES, *segmented.SUMS)
}
