# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What keeps a step from being captured in a CUDA graph: what a replay, in which the host has no part, would miss."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def check_capture(owner: str, param_groups: list[dict[str, Any]], *, capturable: bool, supported: bool) -> None:
    """Require what the optimizer named ``owner`` has been given.

    Args:
        owner: For the text.
        param_groups: Its parameters, and their learning rates.
        capturable: The option.
        supported: Whether there is one.

    Raises:
        RuntimeError: A replay would step with numbers of the capture, or not at all.
    """
    if not capturable:
        raise refusal(owner, "it counts steps on the host", supported=supported)
    for index, group in enumerate(param_groups):
        devices = {p.device for p in group["params"]}
        if any(device.type == "cpu" for device in devices):
            raise refusal(owner, f"group {index} has parameters on the CPU, which captures nothing")
        lr = group["lr"]
        if isinstance(lr, Tensor) and devices != {lr.device}:
            raise refusal(owner, f"the learning rate of group {index} is a tensor on {lr.device}; move it to {devices}")


def refusal(owner: str, because: str, *, supported: bool = True) -> RuntimeError:
    """An error that says what is wrong ``because`` of which a step cannot be captured, and what to do."""
    ways = ["Pass capturable=True, and take some steps just like it before the capture; or capture"] * supported
    return RuntimeError(
        f"{owner}.step() cannot be captured in a CUDA graph, since no replay would do the same: {because}. "
        f"{' '.join(ways) or 'Capture'} forward and backward alone (torch.cuda.make_graphed_callables), and call "
        "step() behind each replay. Nothing has been updated"
    )
