# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks that a step can be captured in a CUDA graph, so that a replay needs no work of the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from apex_npu.fusion import is_slot
from apex_npu.fusion.graph_runs import GraphRuns


def check_capture(optimizer: Any) -> None:
    """Check options, parameters, learning rates and a GradScaler's flag, before gradients are gathered.

    Raises:
        RuntimeError: A replay would not do what the captured step does; nothing has been updated.
    """
    name = type(optimizer).__name__
    if not optimizer.capturable:
        ways = "Pass capturable=True; or capture" if optimizer.supports_capture else "Capture"
        raise refusal(name, "it counts steps on the host", ways)
    check_groups(name, optimizer.param_groups, getattr(optimizer, "found_inf", None))


def check_captured_gradients(optimizer: Any) -> None:
    """Require the gradients of the previous step, and keep the tables that a graph will read.

    Raises:
        RuntimeError: Other parameters have gradients, or counts have been written; nothing has been updated.
    """
    name, groups = type(optimizer).__name__, optimizer.fused_groups()
    check_gradients(name, (p.grad for fused in groups for p in fused.params if p.grad is not None))
    runs = [(fused, fused.runs) for fused in groups if isinstance(fused.runs, GraphRuns)]
    if not all(found.steps_as_before(fused) for fused, found in runs):
        raise refusal(name, "other parameters have gradients than in the previous step, or counts have been written")
    for _, found in runs:
        found.keep()


def check_groups(owner: str, param_groups: list[dict[str, Any]], found_inf: Tensor | None) -> None:
    """Require parameters, learning rates and a GradScaler's flag where a graph can read them.

    Args:
        owner: The optimizer's name, for the text.
        param_groups: Its parameters, and their learning rates.
        found_inf: The overflow flag of a GradScaler.

    Raises:
        RuntimeError: A replay would use numbers of the capture, or would not step.
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

    Each replay would copy any other gradient into its slot again and overwrite later values.

    Raises:
        RuntimeError: A gradient has been made after the previous step, and outside of the capture.
    """
    foreign = [grad for grad in grads if grad.is_cuda and not is_slot(grad)]
    if not foreign:
        return
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # not every allocator supports snapshots
        return
    ordinary = outside_of_graphs(segments)
    for grad in foreign:
        if any(grad.data_ptr() in addresses for addresses in ordinary):
            raise refusal(
                owner,
                f"the gradient of shape {tuple(grad.shape)} was made after the previous step, and outside of the "
                "capture. Make it inside, or write it into the gradient of the previous step",
            )


def outside_of_graphs(segments: Iterable[Mapping[str, Any]]) -> list[range]:
    """Return the addresses of ``segments`` (torch.cuda.memory_snapshot) outside of graph pools."""
    return [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in segments
        if tuple(segment["segment_pool_id"]) == (0, 0)
    ]


def refusal(
    owner: str, because: str, ways: str = "Run some identical steps before the capture; or capture"
) -> RuntimeError:
    """Return the error of a step that cannot be captured: the optimizer's name, the reason, and ways out."""
    return RuntimeError(
        f"{owner}.step() cannot be captured in a CUDA graph, since replays would differ from it: {because}. {ways} "
        "forward and backward alone (torch.cuda.make_graphed_callables), and call step() after each replay. Nothing "
        "has been updated"
    )
