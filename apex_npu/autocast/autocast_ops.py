# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Kernels for operators that Apex casts and a device's autocast does not, under autocast's own dispatch key.

They act only if autocast is enabled for the device, so switching autocast off switches them off. Names that are not
operators are in ``monkey_patches.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.autocast import cast_lists
from apex_npu.backends._torch_private import (
    destroy_library,
    operators_implemented_in_python,
    operators_with_kernel,
    privateuse1_device_type,
)
from apex_npu.ops import LOW_PRECISION

_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU"}


def autocast_key(device_type: str) -> str:
    """Return the name of the dispatch key under which autocast for ``device_type`` is registered."""
    if device_type == privateuse1_device_type():
        return "AutocastPrivateUse1"
    try:
        return _AUTOCAST_KEYS[device_type]
    except KeyError:
        known = ", ".join(sorted(_AUTOCAST_KEYS))
        raise ValueError(
            f"autocast does not support device type {device_type!r}: this torch supports {known}, and the "
            "out-of-tree backend that is loaded, if any (for npu, import torch_npu first)"
        ) from None


def _already_cast(device_type: str, key: str) -> set[str]:
    """Return the operators, without ``aten::``, that the device's own autocast (or an outer overlay) handles."""
    registered = {name.removeprefix("aten::") for name in operators_with_kernel(key)}
    if device_type == "cpu":
        return registered
    # An override registered from Python belongs to an outer overlay, and older torch refuses a second one.
    from_python = operators_implemented_in_python()
    return registered - {op for op in cast_lists.ACCELERATOR_FORCED_OPS if f"aten/{op}/{key}" not in from_python}


def _find_op(name: str) -> Any:
    """Return the aten operator ``name`` of ``cast_lists``; None if this torch lacks it."""
    packet_name, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet_name, None), overload or "default", None)


def install_dispatch_overlay(undo: ExitStack, device_type: str) -> None:
    """Register a kernel for each operator that Apex casts and autocast for ``device_type`` does not.

    Args:
        undo: Receives the callback that removes the kernels again.
        device_type: ``"cpu"``, ``"cuda"`` or the name of the PrivateUse1 backend.
    """
    already_cast = _already_cast(device_type, autocast_key(device_type))
    policies = cast_lists.policies(device_type)
    table = [(name, policy) for name, policy in policies.items() if name not in already_cast and _find_op(name)]
    if extension is not None:
        undo.callback(extension.Overlay(device_type, table).destroy)
        return
    make_library: Any = torch.library.Library
    library = make_library("aten", "IMPL", autocast_key(device_type))
    undo.callback(destroy_library, library)
    with warnings.catch_warnings():
        # torch warns for the forced operators, where overriding is intended.
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        for name, policy in table:
            library.impl(name, _make_kernel(policy, _find_op(name), device_type))


def _make_kernel(policy: str, op: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Make a kernel for autocast's dispatch key that casts the arguments of ``op`` and calls it with autocast off.

    It does the same as csrc/amp/overlay.cpp, except that it keeps no copies of weights. A call costs 10 to 30 µs.

    A kernel is called only while autocast is enabled for its device type, hence the plain True in ``finally``.
    Switching the flag is the cheapest way to leave autocast (an _ExcludeDispatchKeyGuard costs 0.6 us more, a
    redispatch 0.3 us). It also keeps an operator made of others, such as layer_norm or lstm, in one precision
    throughout.

    Args:
        policy: The name of a policy in ``cast_lists.policies``.
        op: The operator.
        device_type: The device type of the autocast that the kernel is for.
    """
    floats = LOW_PRECISION if policy == "float" else cast_lists.AUTOCAST_FLOATS

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = _dtype_of_call(policy, device_type, args, kwargs)
        torch.set_autocast_enabled(device_type, False)
        try:
            if dtype is None:
                return op(*args, **kwargs)
            return op(
                *[_cast(value, dtype, floats) for value in args],
                **{name: _cast(value, dtype, floats) for name, value in kwargs.items()},
            )
        finally:
            torch.set_autocast_enabled(device_type, True)

    return kernel


def _cast(value: Any, dtype: torch.dtype, floats: Collection[torch.dtype]) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in floats else value
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype, floats) for item in value]
    return value


def _dtype_of_call(policy: str, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype to which a call's arguments are cast; None: nothing is cast."""
    if policy == "half":
        # The current dtype, not that of O1: a user's own bfloat16 block inside O1 casts to bfloat16.
        return torch.get_autocast_dtype(device_type)
    if policy == "float":
        return torch.float32 if kwargs.get("dtype") is None else None  # an explicit dtype takes precedence
    if policy == "match_self":
        # For an integer tensor nothing is cast, so that torch rejects floats.
        dtype: torch.dtype = args[0].dtype
        return dtype if dtype in cast_lists.AUTOCAST_FLOATS else None
    dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor) and arg.dtype in cast_lists.AUTOCAST_FLOATS}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
