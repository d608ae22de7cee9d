# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Kernels for operators that Apex casts and a device's autocast does not, under autocast's own dispatch key.

They act only if autocast is enabled for the device, so switching autocast off switches them off. Names that are not
operators are in ``monkey_patches.py``.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch

from apex_npu._extension import extension
from apex_npu.autocast import cast_lists
from apex_npu.autocast.autocast_kernels import make_kernel
from apex_npu.backends._torch_private import (
    destroy_library,
    operators_implemented_in_python,
    operators_with_kernel,
    privateuse1_device_type,
)

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


def _has_op(name: str) -> bool:
    packet_name, _, overload = name.partition(".")
    return hasattr(getattr(torch.ops.aten, packet_name, None), overload or "default")


def install_dispatch_overlay(undo: ExitStack, device_type: str) -> None:
    """Register a kernel for each operator that Apex casts and autocast for ``device_type`` does not.

    Args:
        undo: Receives the callback that removes the kernels again.
        device_type: ``"cpu"``, ``"cuda"`` or the name of the PrivateUse1 backend.
    """
    already_cast = _already_cast(device_type, autocast_key(device_type))
    policies = cast_lists.policies(device_type)
    table = [(name, policy) for name, policy in policies.items() if name not in already_cast and _has_op(name)]
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
            packet_name, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet_name), overload or "default")
            library.impl(name, make_kernel(policy, op, device_type))
