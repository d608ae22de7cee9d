# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The overlay's kernels in Python, used if the extension has not been built: ``make_kernel(policy, ...)``.

They do the same as csrc/amp/overlay.cpp, except that they keep no copies of weights. A call costs 10 to 30 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from apex_npu.autocast import cast_lists
from apex_npu.ops import LOW_PRECISION

Kernel = Callable[..., Any]


def make_kernel(policy: str, op: Kernel, device_type: str) -> Kernel:
    """Make a kernel for autocast's dispatch key that casts the arguments of ``op`` and calls it with autocast off.

    A kernel is called only while autocast is enabled for its device type, hence the plain True in ``finally``.
    Switching the flag is the cheapest way to leave autocast (an _ExcludeDispatchKeyGuard costs 0.6 us more, a
    redispatch 0.3 us). It also keeps an operator made of others, such as layer_norm or lstm, in one precision
    throughout.

    Args:
        policy: The name of a policy in ``cast_lists.policies``.
        op: The operator.
        device_type: The device type of the autocast that the kernel is for.
    """
    choose = _CHOICES[policy]
    floats = LOW_PRECISION if policy == "float" else cast_lists.AUTOCAST_FLOATS

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose(device_type, args, kwargs)
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


def _half(device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    # The current dtype, not the policy's: a user's own bfloat16 block inside O1 casts to bfloat16.
    return torch.get_autocast_dtype(device_type)


def _float(device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    return torch.float32 if kwargs.get("dtype") is None else None  # an explicit dtype takes precedence


def _widest(device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor) and arg.dtype in cast_lists.AUTOCAST_FLOATS}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _of_self(device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    # For an integer tensor nothing is cast, so that torch rejects floats.
    dtype: torch.dtype = args[0].dtype
    return dtype if dtype in cast_lists.AUTOCAST_FLOATS else None


# The functions that choose the dtype of a call; None: nothing is cast.
_CHOICES: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], torch.dtype | None]] = {
    "half": _half,
    "float": _float,
    "promote": _widest,
    "match_self": _of_self,
}
