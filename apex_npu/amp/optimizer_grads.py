# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``OptimizerGrads``: the gradients of one optimizer, in groups, and amp's own buffers.

The functions at the end divide the gradients of several groups, and check them for overflow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu._extension import extension, require_extension
from apex_npu.amp.grad_groups import GradGroup, writable_grads
from apex_npu.amp.masters import Masters
from apex_npu.amp.policy import Policy
from apex_npu.amp.widened_grads import LooseGrads, WidenedGrads
from apex_npu.backends import Backend, for_device
from apex_npu.backends._torch_private import labelled
from apex_npu.fusion import FlatGrads, HasFusedGroups, are_same, by_kind, combined
from apex_npu.fusion.grad_memory import GradMemory
from apex_npu.fusion.shards import meshes_of
from apex_npu.ops import LOW_PRECISION

_PARAMS, _DEVICE = itemgetter("params"), attrgetter("device")


class OptimizerGrads:
    """The gradient groups of one optimizer, and the state of its gradients.

    Attributes:
        groups: The gradient groups; made again when the parameters or their buffers change.
        saturates: The gradients are on a device that saturates instead of giving inf.
        meshes: The device meshes over which parameters are sharded.
        lending: The gradient memory that is freed or reused between steps.
        saturated: On a device that saturates: gradients have overflowed and have not been cleared.
        unchecked: Gradients have been brought to the optimizer's parameters without a check for inf or NaN.
        scaled_by: Names of other optimizers whose block has given gradients to parameters of this optimizer. They are
            multiplied by the loss scale. Empty: there are no such gradients.
        dropped: A block has dropped such gradients, and no warning has said so yet.
    """

    def __init__(self) -> None:
        self.groups: list[GradGroup] = []
        self.saturates = self.saturated = self.dropped = False
        self.meshes: list[Any] = []
        self.lending: list[GradMemory] = []
        self.unchecked = False
        self.scaled_by = ""
        self._loose: list[Tensor] = []  # without a gradient buffer: scripts may move them one by one
        self._devices: list[torch.device] = []
        self._fitted_to: list[list[Any]] = []
        self._own_flats: list[FlatGrads] = []

    def groups_of(self, optimizer: Any) -> list[GradGroup]:
        """Return the groups for the current parameters and buffers of ``optimizer``, whose state has this object."""
        flats = optimizer.flat_grads() if isinstance(optimizer, HasFusedGroups) else self._combined(optimizer)
        fitted_to: list[list[Any]] = [flats, *map(_PARAMS, optimizer.param_groups)]
        fits = len(fitted_to) == len(self._fitted_to) and all(map(are_same, fitted_to, self._fitted_to))
        if not fits or list(map(_DEVICE, self._loose)) != self._devices:
            self._make(optimizer, optimizer._amp_state.masters, flats)
            self._fitted_to = [list(part) for part in fitted_to]
        return self.groups

    def _make(self, optimizer: Optimizer, masters: Masters, flats: list[FlatGrads]) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        fused = masters.swaps and bool(flats) and isinstance(optimizer, HasFusedGroups)
        widened = set(map(id, params if fused else masters.params()))
        groups = make_grad_groups(params, flats, widened)
        for group in groups:
            if isinstance(group, WidenedGrads):
                group.adopt_from(self.groups)
        self.saturates, self.meshes = bool(_saturating(groups)), meshes_of(params)
        memories = [group.flat.memory for group in groups if group.flat is not None]
        self.lending = [memory for memory in memories if memory.lends]
        self.groups = groups  # last, after they have adopted all gradients set aside
        self._loose = [p for group in groups if group.flat is None for p in group.params]
        self._devices = list(map(_DEVICE, self._loose))

    def _combined(self, optimizer: Any) -> list[FlatGrads]:
        """Return the buffers of an optimizer without buffers of its own; none without ``combine_grad``."""
        policy: Policy = optimizer._amp_state.policy
        if not policy.combine_grad:
            return []
        params = trainable(optimizer)
        held = {id(p) for flat in self._own_flats for p in flat.params}
        if held != {id(p) for p in params} or any(flat.broken() for flat in self._own_flats):
            self._own_flats = combine_grads(params, self._own_flats, widens=bool(policy.master_weights))
        return self._own_flats

    def combined(self, optimizer: Any) -> list[FlatGrads]:
        """Return the gradients of each combined buffer. Make the buffers if they do not exist yet."""
        fused = isinstance(optimizer, HasFusedGroups)
        flats: list[FlatGrads] = optimizer.combined_grads() if fused else self._combined_own(optimizer)
        self.groups_of(optimizer)  # replaces groups of former buffers
        return flats

    def _combined_own(self, optimizer: Any) -> list[FlatGrads]:
        require_extension("a combined buffer")
        flats = self._combined(optimizer)
        leading = {id(p) for p in optimizer.leading_params()}
        found = combined(flats, leading)
        if found is None:
            optimizer.check_combining()
            found = self._own_flats = [
                flat
                for kind in by_kind(trainable(optimizer), leading)
                for flat in combine_grads(kind, [], widens=optimizer._amp_state.widens)
            ]
        return found


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
            groups.append(GradGroup(flat.full_params, flat))
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


def separate(groups: Sequence[GradGroup]) -> None:
    """Replace gradients that share memory with another group by copies. ``writable_grads`` does so within a group."""
    if any(group.flat is None or group.flat.is_sharded for group in groups):
        writable_grads(p for group in groups for p in group.params)


def unscale(
    groups: Sequence[GradGroup],
    scale: float,
    *,
    check: bool,
    share: bool = False,
    spare: dict[torch.device, Tensor] | None = None,
) -> list[Tensor]:
    """Divide all gradients by ``scale``; see ``GradGroup.unscale_``.

    Args:
        groups: The groups of the gradients.
        scale: The loss scale.
        check: Look for overflow.
        share: The argument of ``GradGroup.unscale_``.
        spare: Flags by device that the host has found to be 0, used instead of new ones and removed from the dict.

    Returns:
        The argument of ``any_raised``; empty without ``check``.
    """
    if len(groups) > 1:
        separate(groups)
    flags: dict[torch.device, Tensor] = {}
    for group in groups:
        device = group.device
        if check and device not in flags:
            flag = spare.pop(device, None) if spare else None
            flags[device] = _new_flag(device) if flag is None else flag
        group.unscale_(1.0 / scale, flags.get(device), share=share)
    return list(flags.values())


def look_for_overflow(groups: Sequence[GradGroup]) -> list[Tensor]:
    """Check the gradients of the optimizer's parameters, and return the argument of ``any_raised``."""
    flags = found_inf_flags(groups)
    for group in groups:
        group.check(flags[group.device])
    return list(flags.values())


@labelled("amp.wait")
def any_raised(flags: Iterable[Tensor]) -> bool:
    """Return whether a gradient has overflowed. Waits for the device.

    Args:
        flags: One flag for each device: float32, one element, not 0 if a gradient there is inf or NaN.
    """
    return any(map(bool, flags))


def found_inf_flags(groups: Sequence[GradGroup]) -> dict[torch.device, Tensor]:
    """Make a flag with the value 0, which means no overflow, for each device of ``groups``."""
    return {device: _new_flag(device) for device in {group.device for group in groups}}


def _new_flag(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # so that a kept flag can also be written outside of that mode
        return torch.zeros(1, dtype=torch.float32, device=device)


def clear_saturation(groups: Sequence[GradGroup]) -> None:
    """Clear the overflow flags of devices that saturate, before a backward."""
    for device, backend in _saturating(groups):
        backend.clear_overflow_flag(device)


@labelled("amp.wait")
def read_and_clear_saturation(groups: Sequence[GradGroup]) -> bool:
    """Return whether a device has saturated since, and clear its flag. Waits for the device.

    Call it before gradients are unscaled: torch_npu's kernel multiplies no gradient while the flag is raised.
    """
    found = any([backend.overflow_flag(device) for device, backend in _saturating(groups)])
    if found:
        clear_saturation(groups)
    return found


def _saturating(groups: Sequence[GradGroup]) -> list[tuple[torch.device, Backend]]:
    """Return the devices that, instead of inf, give the largest finite value and raise a flag."""
    devices = [(device, for_device(device)) for device in {group.device for group in groups}]
    return [(device, backend) for device, backend in devices if backend.saturates()]
