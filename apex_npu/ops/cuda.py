# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The kernels on cuda: Triton's, and plain torch where Triton's cannot run.

Triton is imported when the first parameters on a GPU are fused or stepped. Where it is missing, too old, switched off
with ``APEX_NPU_NO_TRITON=1``, or fails to compile a kernel, torch's own kernels do the work, with more launches and the
same results. That is said once, in the log; an error is only raised for operands that no kernel could take.
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

# It came with torch 2.10. Up to 3.3 kernels cannot ask for float64 numbers; up to 3.5 roots take denormal ones for 0.
_OLDEST_TRITON = (3, 6)
# Ops whose kernels Triton could not compile here: not tried again.
_given_up: set[object] = set()
_TAKE, _SCALE = "take_addressed", "scale_listed"
_ids: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def takes_ranges() -> bool:
    """True where the kernels find segments by their ranges, and need no map from elements to segments."""
    return _plans() is not None


def masks_writes(device: torch.device) -> bool:
    """True where rules on ``device`` write nothing if a flag there is set, and that costs no pass of its own."""
    return device.type == "cuda" and _plans() is not None


def takes_addresses(slot: Tensor) -> bool:
    """True where ``take_addressed`` may write into tensors like ``slot``."""
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
    """Take gradients into slots, as in ``gather_cuda``; False, with nothing written, if Triton cannot compile this.

    Args:
        flat: The buffer with the slots.
        chunks: int64, a row for each program: its first element in ``flat``, one past its last, and the slot.
        addresses: int64, one for each slot: where ``flat`` would begin around the slot's gradient; 0: there is none.
        dtype: Of the gradients.
        inv_scale: What to multiply them with.
        found_inf: float32, one element; set to 1 where a gradient is not finite. None: do not look.
        size: How many elements a chunk has at most.
        aligned: See ``Chunks``.
        kept: What was planned for the same ``flat``, ``size`` and ``aligned``, for the next time.
    """
    args = (flat, chunks, addresses, dtype, inv_scale, found_inf, size, aligned, kept)
    return _run_plan(_TAKE, args, {})[0]


def scale_listed(grads: Tensor, factor: float | Tensor, found_inf: Tensor | None) -> bool:
    """Multiply gradients that are listed where they are; False, with nothing written, where Triton cannot.

    Args:
        grads: The operand; with a factor of 1.0 nothing is written, and some may be narrower than it.
        factor: A number, or one on their device.
        found_inf: As of ``take_addressed``; with a factor of 1.0 not None.
    """
    return _run_plan(_SCALE, (grads, factor, found_inf), {})[0]


@functools.cache
def _plans() -> ModuleType | None:
    """The module that plans the launches; None where plain torch is used."""
    # The same words as for APEX_NPU_NO_EXT.
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
    """A kernel of ``op`` in Triton where that can be, else ``fallback``."""

    def kernel(*args: Any, **options: Any) -> Any:
        is_done, result = _run_plan(op.__name__, args, options, name=op.name, key=op)
        if is_done:
            return result
        return fallback(*_with_ids(op, tuple(map(with_memory, args))), **options)

    return kernel


def plan_encoded(rule: Rule[...], operands: tuple[Any, ...], options: dict[str, Any], encoded: Any) -> Call | None:
    """A step of operands that are kept in fewer bytes, by the kernels of the rule itself; None where these cannot.

    Args:
        rule: The rule.
        operands: Its own, as they are stored.
        options: Its own.
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
    """Calls of a rule on cuda that have the operands of the one before, most often: those of a run of slots.

    The launch of an elementwise rule is planned once for its operands, and torch's dispatcher, whose way to a kernel in
    Python takes longer than a launch, is left out unless something listens there.
    """

    def __init__(self, rule: Rule[...]) -> None:
        self._rule = rule
        self._numbers = list(rule.scalars.items())
        self._operands: tuple[Any, ...] = ()
        self._kept: dict[Any, Any] = {}
        self._are_plain = False

    def __call__(self, *operands: Any, **options: Any) -> None:
        """The rule."""
        call, args, kwargs = self.prepare(operands, options)
        call(*args, **kwargs)

    def prepare(self, operands: tuple[Any, ...], options: dict[str, Any]) -> Call:
        """The rule, to be called later; see ``prepared``."""
        rule, known, grad = self._rule, operands, operands[1]
        if is_grad_list(grad):  # which is another in each step, and not kept: it would keep their memory
            addresses = addresses_of(grad)
            if addresses is None:  # they are copied in each step
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
    """``call`` with all that it needs allocated and compiled: of several, none is made where memory lacks for another.

    Args:
        call: Of the rule of a run.
        remember: The run's, for the operands of the next step.
        elsewhere: Its gradients are not in their slots: unless they are listed, a call that is kept would keep them.
    """
    rule, operands, options = call
    if not isinstance(rule, Rule):
        return call
    make = functools.partial(Repeated, rule)
    keeps = not elsewhere or is_grad_list(operands[1])
    repeated: Repeated = remember("repeated call", rule, make) if keeps else make()
    return repeated.prepare(operands, options)


def _with_ids(op: Op[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with the map from elements to segments that plain torch needs, made once for the same segments."""
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
