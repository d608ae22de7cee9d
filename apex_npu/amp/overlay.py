# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What Apex casts and a device's autocast does not: operators through the dispatcher, a few names as attributes.

Both kinds act only where autocast is enabled for the tensor's device, so switching autocast off switches them off.
Each ``install_*`` function registers how to undo itself on the ``ExitStack`` it is given.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cast_lists

Kernel = Callable[..., Any]
KernelFactory = Callable[[Kernel, str], Kernel]

_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU"}
_ABSENT = object()


def autocast_key(device_type: str) -> str:
    """The name of the dispatch key under which autocast for ``device_type`` is registered."""
    if device_type == torch._C._get_privateuse1_backend_name():
        return "AutocastPrivateUse1"
    try:
        return _AUTOCAST_KEYS[device_type]
    except KeyError:
        known = ", ".join(sorted(_AUTOCAST_KEYS))
        raise ValueError(
            f"no autocast for device type {device_type!r}: this torch knows {known}, and the out-of-tree backend that "
            "is loaded, if any (for npu, import torch_npu first)"
        ) from None


# ---------------------------------------------------------------------------------------------------- argument casts


def _to_float(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in cast_lists.LOW_PRECISION else value
    if isinstance(value, (list, tuple)):
        return [_to_float(item) for item in value]
    return value


def _to_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in cast_lists.AUTOCAST_FLOATS else value
    if isinstance(value, (list, tuple)):
        return [_to_dtype(item, dtype) for item in value]
    return value


# ------------------------------------------------------------------------------------------------- dispatcher kernels
# A kernel is reached only while autocast is enabled for its device type, hence the plain True in each finally.
# Switching the flag is the cheapest way to leave autocast (an _ExcludeDispatchKeyGuard costs 0.6 us more, a redispatch
# 0.3 us), and keeps an operator made of others, such as layer_norm or lstm, in one precision down to the bottom.


def _float_kernel(op: Kernel, device_type: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if kwargs.get("dtype") is not None:
                return without_casts(*args, **kwargs)  # what was asked for by name wins
            kwargs = {name: _to_float(value) for name, value in kwargs.items()}
        torch.set_autocast_enabled(device_type, False)
        try:
            return op(*[_to_float(value) for value in args], **kwargs)
        finally:
            torch.set_autocast_enabled(device_type, True)

    without_casts = _uncast_kernel(op, device_type)
    return kernel


def _uncast_kernel(op: Kernel, device_type: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        torch.set_autocast_enabled(device_type, False)
        try:
            return op(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device_type, True)

    return kernel


def _cast_all_kernel(op: Kernel, device_type: str, choose: Callable[[tuple[Any, ...]], torch.dtype]) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose(args)
        torch.set_autocast_enabled(device_type, False)
        try:
            return op(
                *[_to_dtype(value, dtype) for value in args],
                **{name: _to_dtype(value, dtype) for name, value in kwargs.items()},
            )
        finally:
            torch.set_autocast_enabled(device_type, True)

    return kernel


def _half_kernel(op: Kernel, device_type: str) -> Kernel:
    # The dtype of the moment, not the policy's: a user's own bfloat16 block inside O1 gets what it asks for.
    return _cast_all_kernel(op, device_type, lambda args: torch.get_autocast_dtype(device_type))


def _promote_kernel(op: Kernel, device_type: str) -> Kernel:
    def widest(args: tuple[Any, ...]) -> torch.dtype:
        dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor) and arg.dtype in cast_lists.AUTOCAST_FLOATS}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    return _cast_all_kernel(op, device_type, widest)


def _match_self_kernel(op: Kernel, device_type: str) -> Kernel:
    casting = _cast_all_kernel(op, device_type, lambda args: args[0].dtype)
    plain = _uncast_kernel(op, device_type)

    def kernel(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Into an integer tensor torch refuses floats, and rightly.
        return (casting if self.dtype in cast_lists.AUTOCAST_FLOATS else plain)(self, *args, **kwargs)

    return kernel


def _table(device_type: str) -> dict[str, KernelFactory]:
    table: dict[str, KernelFactory] = {}
    table.update(dict.fromkeys(cast_lists.HALF_OPS, _half_kernel))
    table.update(dict.fromkeys(cast_lists.FLOAT_OPS, _float_kernel))
    table.update(dict.fromkeys(cast_lists.UNCAST_OPS, _uncast_kernel))
    table.update(dict.fromkeys(cast_lists.PROMOTE_OPS, _promote_kernel))
    table.update(dict.fromkeys(cast_lists.MATCH_SELF_OPS, _match_self_kernel))
    if device_type == "cpu":
        table.update(dict.fromkeys(cast_lists.CPU_HALF_OPS, _half_kernel))
    return table


def _already_cast(device_type: str, key: str) -> set[str]:
    """The operators, without ``aten::``, that the device's own autocast (or an outer overlay) takes care of."""
    registered = {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
    if device_type == "cpu":
        return registered
    # An override registered from Python is an outer overlay's, and older torch refuses a second one.
    from_python: set[str] = getattr(torch.library, "_impls", set())
    return registered - {op for op in cast_lists.ACCELERATOR_FORCED_OPS if f"aten/{op}/{key}" not in from_python}


def _find_op(name: str) -> Kernel | None:
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    op: Kernel | None = getattr(packet, overload or "default", None)
    return op


def install_dispatch_overlay(undo: ExitStack, device_type: str) -> None:
    """Register a kernel for each operator that Apex casts and autocast for ``device_type`` does not.

    Args:
        undo: Takes the callback that removes the kernels again.
        device_type: ``"cpu"``, ``"cuda"`` or the name of the PrivateUse1 backend.
    """
    key = autocast_key(device_type)
    already_cast = _already_cast(device_type, key)
    make_library: Callable[..., Any] = torch.library.Library
    library = make_library("aten", "IMPL", key)
    undo.callback(library._destroy)
    with warnings.catch_warnings():
        # Said for the forced operators, where it is the intention.
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        for name, make_kernel in _table(device_type).items():
            op = _find_op(name)
            if op is not None and name not in already_cast:
                library.impl(name, make_kernel(op, device_type))


# --------------------------------------------------------------------------------------------------------- attributes


def patch_attribute(undo: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` by ``make(owner.name)`` until ``undo`` is closed.

    Args:
        undo: Takes the callback that puts the attribute back, or deletes it where ``owner`` only inherited it.
        owner: A module or a class.
        name: The attribute, which must exist.
        make: Gets the attribute's value and returns the replacement.
    """
    own = vars(owner).get(name, _ABSENT)
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))
    if own is _ABSENT:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, own)


def install_attribute_overlay(undo: ExitStack, device_types: tuple[str, ...]) -> None:
    """Patch the names whose promise no single operator can keep.

    Args:
        undo: Takes the callbacks that restore each attribute.
        device_types: Where tensors live that the patches care about; others pass straight through.
    """

    def casting(value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        device_type = value.device.type
        return device_type in device_types and torch.is_autocast_enabled(device_type)

    def low_precision(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in cast_lists.LOW_PRECISION and casting(value)

    for name in cast_lists.FLOAT_FUNCTIONS:
        patch_attribute(undo, F, name, functools.partial(_float_function, low_precision))
    patch_attribute(undo, F, "binary_cross_entropy", functools.partial(_banned_bce, casting, low_precision))
    for name in cast_lists.INPLACE_ERROR_FUNCTIONS:
        patch_attribute(undo, torch, name, functools.partial(_refusing_function, low_precision))
    for name in cast_lists.INPLACE_ERROR_METHODS:
        patch_attribute(undo, Tensor, name, functools.partial(_refusing_method, low_precision))
    patch_attribute(undo, Tensor, "__ipow__", functools.partial(_widening_ipow, low_precision))
    patch_attribute(undo, Tensor, "cpu", functools.partial(_widening_cpu, low_precision))


Test = Callable[[Any], bool]


def _float_function(low_precision: Test, original: Kernel) -> Kernel:
    def function(*args: Any, **kwargs: Any) -> Any:
        return original(
            *[value.float() if low_precision(value) else value for value in args],
            **{name: value.float() if low_precision(value) else value for name, value in kwargs.items()},
        )

    return function


def _banned_bce(casting: Test, low_precision: Test, original: Kernel) -> Kernel:
    def binary_cross_entropy(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if casting(value)]
        if not tensors:
            return original(*args, **kwargs)
        if any(low_precision(value) for value in tensors):
            raise NotImplementedError(
                "binary_cross_entropy (also behind torch.nn.BCELoss) is not safe with fp16 arguments: probabilities "
                "near 0 and 1 round to them, and their logarithm is infinite. Leave out the sigmoid and use "
                "binary_cross_entropy_with_logits (torch.nn.BCEWithLogitsLoss), or cast the arguments with .float() "
                "and compute the loss under amp.disable_casts()."
            )
        # Autocast on accelerators refuses this function whatever the dtype; in float there is no reason to.
        with torch.autocast(tensors[0].device.type, enabled=False):
            return original(*args, **kwargs)

    return binary_cross_entropy


def _name_of(dtype: torch.dtype) -> str:
    return "fp16" if dtype == torch.float16 else "bf16"


def _refusing_function(low_precision: Test, original: Kernel) -> Kernel:
    def function(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if low_precision(value):
                raise NotImplementedError(
                    f"Cannot call in-place function {original.__name__} with {_name_of(value.dtype)} arguments."
                )
        return original(*args, **kwargs)

    return function


def _refusing_method(low_precision: Test, original: Kernel) -> Kernel:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if low_precision(self):
            raise NotImplementedError(
                f"Cannot call in-place method {original.__name__} on {_name_of(self.dtype)} Tensors."
            )
        return original(self, *args, **kwargs)

    return method


def _widening_ipow(low_precision: Test, original: Kernel) -> Kernel:
    def __ipow__(self: Tensor, other: Any) -> Any:
        return torch.pow(self, other) if low_precision(self) else original(self, other)

    return __ipow__


def _widening_cpu(low_precision: Test, original: Kernel) -> Kernel:
    def cpu(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy: Tensor = original(self, *args, **kwargs)
        return copy.float() if low_precision(self) else copy

    return cpu
