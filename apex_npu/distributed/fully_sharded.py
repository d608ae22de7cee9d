# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models that ``fully_shard`` has cut: their units, what these compute in, and gradients that they hold back."""

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
        name: Its name in the model; "" is the model.
        module: The module.
        is_outermost: It is in no other unit of the model.
    """

    name: str
    module: nn.Module
    is_outermost: bool

    @property
    def policy(self) -> Any:
        """Its ``MixedPrecisionPolicy``."""
        module: Any = self.module
        return module._get_fsdp_state()._mp_policy


def units_of(model: nn.Module) -> list[Unit]:
    """The units of ``model``, outer ones before those inside of them."""
    # Where the module was never imported there is none.
    cls: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if cls is None:
        return []
    units: list[Unit] = []
    for name, module in model.named_modules():
        if isinstance(module, cls):
            inside = any(not unit.name or name.startswith(f"{unit.name}.") for unit in units)
            units.append(Unit(name, module, not inside))
    return units


def reshard(model: nn.Module) -> None:
    """Have ``model`` show its sharded parameters.

    A forward without a backward, as one that evaluates, leaves the gathered ones of some units in their place.
    """
    for unit in units_of(model):
        module: Any = unit.module
        module.reshard()


def unit_around(units: Iterable[Unit], name: str) -> Unit | None:
    """The innermost of ``units`` that contains the module of that name, or is it."""
    found = None
    for unit in units:
        if not unit.name or name == unit.name or name.startswith(f"{unit.name}."):
            found = unit
    return found


def ensure_averages(units: Sequence[Unit], meshes: Iterable[Any]) -> None:
    """Require that ``units`` get averages of gradients over ``meshes``; all processes of these have to call it.

    gloo's reductions in some releases of torch give sums where averages are asked for, without an error. The units ask
    for sums there, and divide by themselves.

    Raises:
        RuntimeError: They cannot, in this release of torch.
    """
    # Each group once: a dimension may be one of several meshes.
    groups = {id(group): group for mesh in meshes if mesh.device_type == "cpu" for group in mesh.get_all_groups()}
    if all([_averages(group) for group in groups.values()]):
        return
    for unit in units:
        module: Any = unit.module
        if not hasattr(module, "set_force_sum_reduction_for_comms"):
            raise RuntimeError(
                f"gloo of torch {torch.__version__} gives fully_shard sums of gradients where it asks for averages, so "
                f"that they would be {max(map(dist.get_world_size, groups.values()))} times too large; use torch 2.12 "
                "or newer on a CPU"
            )
        module.set_force_sum_reduction_for_comms(True)


def _averages(group: Any) -> bool:
    """Whether the reductions of ``group`` that ``fully_shard`` uses can average, and do."""
    part, whole = torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")
    # The name of torch 2.13, and that of those before.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    try:
        reduce_scatter(part, torch.ones(dist.get_world_size(group), device="cpu"), op=dist.ReduceOp.AVG, group=group)
        dist.all_reduce(whole, op=dist.ReduceOp.AVG, group=group)
    except (RuntimeError, ValueError):  # said before anything is sent, by all alike
        return False
    return bool(part == 1.0) and bool(whole == 1.0)


class HeldGradients:
    """The gradients that units hold back, since they are not reduced yet.

    That is what ``set_requires_gradient_sync(False)`` does, and HSDP's ``set_requires_all_reduce(False)``. They have
    the loss scale of their backward, and no ``.grad`` shows them.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        """Of ``units``, which this does not keep alive; with a warning, of none, where torch keeps them elsewhere."""
        listed = list(units)
        self._modules = [weakref.ref(unit.module) for unit in listed]
        states = [unit.module._get_fsdp_state() for unit in listed]  # type: ignore[operator]
        if not all(map(finds_held_gradients, states)):
            states = []
            warn(
                f"torch {torch.__version__} keeps gradients that fully_shard holds back elsewhere than the releases "
                "that this package knows, which does not see them: where set_requires_gradient_sync or "
                "set_requires_all_reduce is used, pass a static loss_scale to amp.initialize, and load a checkpoint "
                "after an exception in a block"
            )
        self._groups = [weakref.ref(group) for state in states for group in param_groups(state)]

    def add(self, other: HeldGradients) -> None:
        """Look at the units of ``other``, too."""
        self._modules += other._modules
        self._groups += other._groups

    def knows(self, unit: Unit) -> bool:
        """True where this looks at ``unit``."""
        return any(reference() is unit.module for reference in self._modules)

    def params(self) -> list[Tensor]:
        """After a backward: the parameters of the units that hold gradients back."""
        found: list[Tensor] = []
        for reference in self._groups:
            group: Any = reference()
            if group is not None and not (group.reduce_grads and group._partial_reduce_output is None):
                found += map(_sharded_param, group.fsdp_params)
        return found

    @torch.no_grad()
    def multiply(self, factors: Mapping[int, float]) -> None:
        """Multiply those that are held back for a parameter by its factor, by ``id(parameter)``.

        Those of units that are to reduce them in the next backward are held back still.
        """
        for group in (reference() for reference in self._groups):
            fsdp_params: list[Any] = [] if group is None else group.fsdp_params
            found = [(p, factors[id(p.sharded_param)]) for p in fsdp_params if id(p.sharded_param) in factors]
            for fsdp_param, factor in found:
                for grad in _held_by(fsdp_param):
                    grad.mul_(factor)  # also of addends
            reduced: Any = getattr(group, "_partial_reduce_output", None)
            if found and reduced is not None:  # flat, of the whole unit: one backward has made it
                reduced.mul_(found[0][1])

    def drop(self, params: set[int]) -> bool:
        """After an exception: forget an interrupted forward or backward, and what is held back, of ``params`` (ids).

        Of whole models: in the unit that was interrupted there is half of a backward. torch has no other way to clear
        what is held back, and its ``reset_iter_state`` leaves gradients that are not reduced at all.

        Returns:
            Whether there was anything.
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
            # Of all groups, whatever the first ones hold.
            found |= any([_drop(group) for group in groups]) or interrupted
        return found


def _drop(group: Any) -> bool:
    """Forget what ``group`` holds back; whether that was anything."""
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
    """This process's part of each gradient that is held back for a parameter.

    Until torch 2.14 there may be two: one accumulated in ``reduce_dtype``, and one of the last backward. From 2.15 on
    there is one, under both names.
    """
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    named = (fsdp_param.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad)
    parts = [local_part(grad) for grad in named if grad is not None]
    return list({part.data_ptr(): part for part in parts}.values())


def _sharded_param(fsdp_param: Any) -> Tensor:
    param: Tensor = fsdp_param.sharded_param
    return param
