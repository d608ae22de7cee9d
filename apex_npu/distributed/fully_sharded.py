# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models that ``fully_shard`` has sharded: their units, precision policies, and gradients that units hold back."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex_npu.backends._torch_private import finds_held_gradients, param_groups
from apex_npu.backends.script_warnings import warn
from apex_npu.fusion.shards import local_part


class Unit(NamedTuple):
    """A module that ``fully_shard`` was called on.

    Attributes:
        name: The module's name in the model; "" is the model.
        module: The module.
        is_outermost: The module is in no other unit of the model.
    """

    name: str
    module: nn.Module
    is_outermost: bool

    @property
    def policy(self) -> Any:
        """The ``MixedPrecisionPolicy`` of the unit."""
        module: Any = self.module
        return module._get_fsdp_state()._mp_policy


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of ``model``, outer ones before those inside of them."""
    # If the module was never imported, there are no units.
    cls: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if cls is None:
        return []
    units: list[Unit] = []
    for name, module in model.named_modules():
        if isinstance(module, cls):
            units.append(Unit(name, module, unit_around(units, name) is None))
    return units


def reshard(model: nn.Module) -> None:
    """Make ``model`` show its sharded parameters.

    A forward without a backward, as in evaluation, leaves the gathered parameters of some units in place.
    """
    for unit in units_of(model):
        module: Any = unit.module
        module.reshard()


def unit_around(units: Iterable[Unit], name: str) -> Unit | None:
    """Return the innermost of ``units`` that is or contains the module of this name, or None."""
    found = None
    for unit in units:
        if not unit.name or name == unit.name or name.startswith(f"{unit.name}."):
            found = unit
    return found


def ensure_averages(units: Sequence[Unit], meshes: Iterable[Any]) -> None:
    """Make sure that ``units`` get averages of gradients over ``meshes``. All processes of the meshes must call this.

    In some releases of torch, gloo's reductions return sums instead of averages, without an error. This function then
    makes the units request sums and divide them.

    Raises:
        RuntimeError: The units of this release of torch cannot request sums.
    """
    # Each group once: several meshes may share a dimension.
    groups = {id(group): group for mesh in meshes if mesh.device_type == "cpu" for group in mesh.get_all_groups()}
    if all([_averages(group) for group in groups.values()]):
        return
    for unit in units:
        module: Any = unit.module
        if not hasattr(module, "set_force_sum_reduction_for_comms"):
            raise RuntimeError(
                f"gloo of torch {torch.__version__} returns sums of gradients to fully_shard instead of averages, "
                f"so that they would be {max(map(dist.get_world_size, groups.values()))} times too large: use torch "
                "2.12 or newer on a CPU"
            )
        module.set_force_sum_reduction_for_comms(True)


def _averages(group: Any) -> bool:
    """Return whether the reductions of ``group`` that ``fully_shard`` uses return averages."""
    part, whole = torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")
    # The name in torch 2.13, and the name in earlier releases.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    try:
        reduce_scatter(part, torch.ones(dist.get_world_size(group), device="cpu"), op=dist.ReduceOp.AVG, group=group)
        dist.all_reduce(whole, op=dist.ReduceOp.AVG, group=group)
    except (RuntimeError, ValueError):  # all processes raise it, before anything is sent
        return False
    return bool(part == 1.0) and bool(whole == 1.0)


class HeldGradients:
    """The gradients that units hold back because they are not reduced yet.

    Units hold them back after ``set_requires_gradient_sync(False)``, and after HSDP's
    ``set_requires_all_reduce(False)``. They have the loss scale of their backward, and no ``.grad`` shows them.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        """Observe ``units`` by weak references. If this torch keeps gradients elsewhere, warn and observe nothing."""
        listed = list(units)
        self._modules = [weakref.ref(unit.module) for unit in listed]
        states = [unit.module._get_fsdp_state() for unit in listed]  # type: ignore[operator]
        if not all(map(finds_held_gradients, states)):
            states = []
            warn(
                f"torch {torch.__version__} keeps gradients that fully_shard holds back in a place that this "
                "package does not know, so that it does not see them. If you use set_requires_gradient_sync or "
                "set_requires_all_reduce, pass a static loss_scale to amp.initialize, and load a checkpoint after "
                "an exception in a block"
            )
        self._groups = [weakref.ref(group) for state in states for group in param_groups(state)]

    def add(self, other: HeldGradients) -> None:
        """Also observe the units of ``other``."""
        self._modules += other._modules
        self._groups += other._groups

    def knows(self, unit: Unit) -> bool:
        """Return whether this object observes ``unit``."""
        return any(reference() is unit.module for reference in self._modules)

    def params(self) -> list[Tensor]:
        """Return, after a backward, the parameters of the units that hold gradients back."""
        found: list[Tensor] = []
        for reference in self._groups:
            group: Any = reference()
            if group is not None and not (group.reduce_grads and group._partial_reduce_output is None):
                found += [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
        return found

    @torch.no_grad()
    def multiply(self, factors: Mapping[int, float]) -> None:
        """Multiply the gradients that are held back for a parameter by ``factors[id(parameter)]``.

        This includes units that reduce in the next backward, which hold their gradients back until then.
        """
        for group in (reference() for reference in self._groups):
            fsdp_params: list[Any] = [] if group is None else group.fsdp_params
            found = [(p, factors[id(p.sharded_param)]) for p in fsdp_params if id(p.sharded_param) in factors]
            for fsdp_param, factor in found:
                for grad in _held_by(fsdp_param):
                    grad.mul_(factor)  # correct for addends, too
            reduced: Any = getattr(group, "_partial_reduce_output", None)
            if found and reduced is not None:  # one flat tensor of the whole unit, made by one backward
                reduced.mul_(found[0][1])

    def drop(self, params: set[int]) -> bool:
        """Drop, after an exception, an interrupted forward or backward, and the gradients held back for ``params``.

        ``params`` are ids. Whole models are cleared, because the interrupted unit has half of a backward. torch's
        ``reset_iter_state`` alone does not clear gradients that are not reduced.

        Returns:
            True if anything was dropped.
        """
        found = False
        for reference in self._modules if self._groups else ():
            module: Any = reference()
            state = None if module is None else module._get_fsdp_state()
            if state is None or not state._is_root:
                continue
            context = state._state_ctx
            groups = [group for unit in context.all_states for group in param_groups(unit)]
            if not any(id(p.sharded_param) in params for group in groups for p in group.fsdp_params):
                continue
            interrupted = context.post_backward_final_callback_queued or context.iter_forward_root is not None
            if interrupted and hasattr(module, "reset_iter_state"):  # torch 2.13 has it
                module.reset_iter_state()
            # A list, not a generator, so that all groups are cleared.
            found |= any([_drop(group) for group in groups]) or interrupted
        return found


def _drop(group: Any) -> bool:
    """Drop the gradients that ``group`` holds back, and return whether there were any."""
    found = group._partial_reduce_output is not None
    group._partial_reduce_output = None
    for fsdp_param in group.fsdp_params:
        found |= bool(_held_by(fsdp_param))
        if "unsharded_accumulated_grad" in vars(fsdp_param):  # torch 2.15 has a property, which cannot be set
            fsdp_param.unsharded_accumulated_grad = None
        unsharded = getattr(fsdp_param, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None
    return found


def _held_by(fsdp_param: Any) -> list[Tensor]:
    """Return this process's part of each gradient that is held back for a parameter.

    Until torch 2.14 there may be two: one accumulated in ``reduce_dtype``, and one of the last backward. From 2.15 on
    there is one, under both names.
    """
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    named = (fsdp_param.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad)
    parts = [local_part(grad) for grad in named if grad is not None]
    return list({part.data_ptr(): part for part in parts}.values())
