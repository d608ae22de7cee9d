# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``step(grad_scaler=...)``: a GradScaler that passes itself, as in old torch and in torch_npu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


def grad_scaler_of(optimizer: Optimizer, arguments: dict[str, Any]) -> Any:
    """Return the one in ``arguments``, all the keyword arguments of a step but the closure.

    Raises:
        TypeError: There is another argument.
    """
    for name in arguments.keys() - {"grad_scaler"}:
        raise TypeError(f"{type(optimizer).__name__}.step() got an unexpected keyword argument {name!r}")
    return arguments["grad_scaler"]


@contextmanager
def handing_over(optimizer: Any, grad_scaler: Any) -> Iterator[None]:
    """Set the attributes of ``optimizer`` that the current GradScaler sets, ``grad_scale`` and ``found_inf``.

    They exist inside the context. If ``grad_scaler`` has not checked for overflow yet, it does so first.
    """
    state = grad_scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY:
        grad_scaler._check_inf_per_device(optimizer)
    scale = grad_scaler._get_scale_async()
    flags = [flag.to(scale.device, non_blocking=True) for flag in state["found_inf_per_device"].values()]
    optimizer.found_inf = sum(flags[1:], start=flags[0]) if flags else None
    optimizer.grad_scale = None if state["stage"] is OptState.UNSCALED else scale
    try:
        yield
    finally:
        del optimizer.found_inf, optimizer.grad_scale
