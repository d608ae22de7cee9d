# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The layout of an optimizer's gradients: the groups that are unscaled together, and amp's own gradient buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu._extension import extension
from apex_npu.amp.grad_groups import FlatGradGroup, GradGroup
from apex_npu.amp.widened_grads import LooseGrads, WidenedGrads
from apex_npu.fusion import FlatGrads
from apex_npu.ops import LOW_PRECISION


def make_grad_groups(
    params: Sequence[Tensor],
    flats: Sequence[FlatGrads],
    widened: Collection[int] = (),
) -> list[GradGroup]:
    """Make the groups of an optimizer.

    Args:
        params: All parameters that it steps.
        flats: The buffers with some of their gradients.
        widened: The identities of 16-bit parameters that get float32 gradients.
    """
    groups: list[GradGroup] = []
    for flat in flats:
        if flat.is_widened or any(id(p) in widened for p in flat.full_params):
            groups.append(WidenedGrads(flat))
        else:
            groups.append(FlatGradGroup(flat))
    held = {id(p) for flat in flats for p in flat.full_params}
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        if id(p) not in held:
            alike.setdefault((p.device, p.dtype), []).append(p)
    for members in alike.values():
        widens = any(id(p) in widened for p in members)
        groups.append(WidenedGrads(LooseGrads(members)) if widens else GradGroup(members))
    return groups


def trainable(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that require a gradient, or have one."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad or p.grad is not None]


def combine_grads(params: Sequence[Tensor], former: list[FlatGrads], *, widens: bool) -> list[FlatGrads]:
    """Return one gradient buffer per device and dtype of ``params``, for an optimizer without buffers of its own.

    Without the C++ extension the list is empty. Buffers of ``former`` that still fit are kept. New parameters get a
    separate buffer, since a script may replace them in every step. With ``widens`` the gradients of 16-bit parameters
    are float32.
    """
    if extension is None:
        return []
    there = set(map(id, params))
    flats = [flat for flat in former if all(id(p) in there for p in flat.params) and not flat.broken()]
    held = {id(p) for flat in flats for p in flat.params}
    known = {id(p) for flat in former for p in flat.params}
    members: dict[tuple[bool, torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        if id(p) not in held:
            members.setdefault((id(p) in known, p.device, p.dtype), []).append(p)
    made = list(map(FlatGrads.apart, members.values()))
    for flat in made:
        if widens and flat.params[0].dtype in LOW_PRECISION:
            flat.widen()
    return [*flats, *made]
