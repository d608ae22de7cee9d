# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks that a step can be captured in a CUDA graph: that a replay needs no work of the host."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from apex_npu.fusion import FusedGroup, is_slot
from apex_npu.fusion.graph_runs import GraphRuns


class Capturable(Protocol):
    """The attributes of an optimizer that the checks read; ``FusedOptimizer`` documents them."""

    param_groups: list[dict[str, Any]]
    capturable: bool
    supports_capture: ClassVar[bool]

    def fused_groups(self) -> list[FusedGroup]:
        """The fused groups of the last step."""
        ...


def check_capture(optimizer: Capturable) -> None:
    """Require what is known before gradients are: options, parameters, learning rates and a GradScaler's flag.

    Raises:
        RuntimeError: A replay would not do what the captured step does; nothing has been updated.
    """
    name = type(optimizer).__name__
    if not optimizer.capturable:
        because = "it counts steps on the host"
        raise refusal(name, because, capturable=False, supported=optimizer.supports_capture)
    check_groups(name, optimizer.param_groups, getattr(optimizer, "found_inf", None))


def check_captured_gradients(optimizer: Capturable) -> None:
    """Require gradients as they were in the step before, and keep what a graph will read; before they are gathered.

    Raises:
        RuntimeError: They are others, or counts have been written; nothing has been updated.
    """
    name, groups = type(optimizer).__name__, optimizer.fused_groups()
    check_gradients(name, (p.grad for fused in groups for p in fused.params if p.grad is not None))
    runs = [(fused, fused.runs) for fused in groups if isinstance(fused.runs, GraphRuns)]
    if not all(found.steps_as_before(fused) for fused, found in runs):
        raise refusal(name, "other parameters have gradients than in the step before, or counts have been written")
    for _, found in runs:
        found.keep()


def check_groups(owner: str, param_groups: list[dict[str, Any]], found_inf: Tensor | None) -> None:
    """Require parameters, learning rates and a GradScaler's flag where a graph can read them.

    Args:
        owner: The optimizer's name, for the text.
        param_groups: Its parameters, and their learning rates.
        found_inf: What a GradScaler has handed over.

    Raises:
        RuntimeError: A replay would step with numbers of the capture, or not at all.
    """
    for index, group in enumerate(param_groups):
        devices = {p.device for p in group["params"]}
        if any(device.type == "cpu" for device in devices):
            raise refusal(owner, f"group {index} has parameters on the CPU, which captures nothing")
        for what, number in (("learning rate", group["lr"]), ("found_inf", found_inf)):
            if isinstance(number, Tensor) and devices - {number.device}:
                where = ", ".join(sorted(map(str, devices)))
                raise refusal(
                    owner,
                    f"its {what} is a tensor on {number.device}, and parameters of group {index} are on {where}",
                )


def check_gradients(owner: str, grads: Iterable[Tensor]) -> None:
    """Require ``grads`` that are in their slots, or are made by the graph itself.

    Each replay would copy any other into its slot again and overwrite what a user has put there since.

    Raises:
        RuntimeError: One has been made since the step before, and not in the capture.
    """
    foreign = [grad for grad in grads if grad.is_cuda and not is_slot(grad)]
    if not foreign:
        return
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # not every allocator keeps an account
        return
    ordinary = outside_of_graphs(segments)
    for grad in foreign:
        if lies_in(ordinary, grad.data_ptr()):
            raise refusal(
                owner,
                f"the gradient of shape {tuple(grad.shape)} was made after the previous step, and outside of the "
                "capture. Make it inside, or write it to the one that the previous step has left",
            )


def outside_of_graphs(segments: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """First and last addresses of the memory that is in no graph's pool, in order, from torch.cuda.memory_snapshot."""
    return sorted(
        (segment["address"], segment["address"] + segment["total_size"] - 1)
        for segment in segments
        if tuple(segment["segment_pool_id"]) == (0, 0)
    )


def lies_in(ranges: Sequence[tuple[int, int]], address: int) -> bool:
    """True where ``address`` is in one of ``ranges``, which are in order."""
    found = bisect_right(ranges, address, key=itemgetter(0)) - 1
    return found >= 0 and address <= ranges[found][1]


def refusal(owner: str, because: str, *, capturable: bool = True, supported: bool = True) -> RuntimeError:
    """The error of a step that cannot be captured ``because`` of something; it also says what to do.

    Args:
        owner: The optimizer's name.
        because: The reason.
        capturable: The option is on.
        supported: There is one.
    """
    first = "Take some steps just like it before the capture" if capturable else "Pass capturable=True"
    ways = f"{first}; or capture" if supported else "Capture"
    return RuntimeError(
        f"{owner}.step() cannot be captured in a CUDA graph, since no replay would do the same: {because}. {ways} "
        "forward and backward alone (torch.cuda.make_graphed_callables), and call step() after each replay. Nothing "
        "has been updated"
    )
