# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameters of which each process holds a part (DTensor, as fully_shard makes them): the part is what is stepped.

Users keep what they gave: parameter, gradient and state stay DTensors for them, so that torch.distributed.checkpoint
finds what it expects. The plain tensors inside are fused like any others.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Along(enum.Enum):
    """Which cuts of a parameter: all, those between rows (dimension 0), or those within them."""

    ALL = "all"
    ROWS = "rows"
    COLUMNS = "columns"

    def includes(self, dim: int) -> bool:
        """Whether a cut of dimension ``dim`` is one of these."""
        return self is Along.ALL or (self is Along.ROWS) == (dim == 0)


def is_sharded(tensor: object) -> bool:
    """True for a DTensor."""
    # Where the module was never imported there is none; importing it would cost each process a second.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Tensor:
    """The part that this process holds, the very tensor inside; of any other tensor itself."""
    if not is_sharded(tensor):
        plain: Tensor = tensor
        return plain
    try:
        part: Tensor = tensor._local_tensor
    except AttributeError:
        with torch.no_grad():  # with gradients it gives a new view each time, which no later step recognises
            part = tensor.to_local()
    return part


@torch.no_grad()
def local_part_as(value: Any, like: Any) -> Tensor:
    """This process's part of ``value``, cut as ``like`` is; communicates where it is cut otherwise."""
    if is_sharded(value) and is_sharded(like) and value.placements != like.placements:
        value = value.redistribute(like.device_mesh, like.placements)
    return local_part(value)


@torch.no_grad()
def local_grad(param: Any) -> Tensor | None:
    """The gradient of this process's part.

    Raises:
        RuntimeError: The gradient is no DTensor.
    """
    if param.grad is None:
        return None
    if not is_sharded(param.grad):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} is a DTensor and has a plain gradient of shape "
            f"{tuple(param.grad.shape)}; give it a DTensor, or None"
        )
    return local_part_as(param.grad, param)


def mesh_groups(param: Any, *, along: Along = Along.ALL) -> list[tuple[Any, str]]:
    """The process groups over which parts of ``param`` add up to the whole, each with the device type it talks on.

    One for each mesh dimension over which it is cut; none for a plain tensor, and none for replicas (HSDP).

    Args:
        param: A parameter.
        along: Only those whose processes have other rows, or only those whose processes have other parts of the same.
    """
    if not is_sharded(param):
        return []
    mesh = param.device_mesh
    return [
        (mesh.get_group(dim), mesh.device_type)
        for dim, placement in enumerate(param.placements)
        if not placement.is_replicate() and along.includes(getattr(placement, "dim", 0))
    ]


def part_number(param: Any) -> int:
    """The number of this process's part among all parts of ``param``; replicas have the same. 0 for a plain tensor."""
    number = 0
    for group, _ in mesh_groups(param):
        number = number * dist.get_world_size(group) + dist.get_rank(group)
    return number


def cut_of(tensor: Any) -> tuple[int, ...] | None:
    """Over which processes ``tensor`` is cut: equal where parts add up alike; None for a plain tensor."""
    return tuple(id(group) for group, _ in mesh_groups(tensor)) if is_sharded(tensor) else None


def meshes_of(params: Iterable[Any]) -> list[Any]:
    """The device meshes over which some of ``params`` are cut, each once."""
    return list(
        dict.fromkeys(
            p.device_mesh for p in params if is_sharded(p) and not all(one.is_replicate() for one in p.placements)
        )
    )


def groups_over(meshes: Sequence[Any]) -> list[tuple[Any, str]]:
    """Process groups that together reach all processes of ``meshes``, each with the device type it talks on.

    Of meshes one has to contain the others, as (data, tensor) contains (data). It is one group where its processes are
    all that there are.

    Raises:
        RuntimeError: None contains all.
    """
    if not meshes:
        return []
    largest = max(meshes, key=lambda mesh: mesh.size())
    if len(meshes) > 1:
        ranks = set(largest.mesh.flatten().tolist())
        for mesh in meshes:
            others = sorted(mesh.mesh.flatten().tolist())
            if not ranks.issuperset(others):
                raise RuntimeError(
                    f"parameters are sharded over meshes of different processes, ranks {sorted(ranks)} and {others}, "
                    "which have to decide about overflow together; pass amp.initialize overflow_group=, a group that "
                    "contains all of them"
                )
    if largest.ndim > 1 and largest.size() == dist.get_world_size():
        return [(dist.group.WORLD, largest.device_type)]
    return [(largest.get_group(dim), largest.device_type) for dim in range(largest.ndim) if largest.size(dim) > 1]


def sharded_like(part: Tensor, like: Any) -> Tensor:
    """``part`` as users get it: a DTensor cut as ``like`` is, over the same memory; or itself, where that is plain."""
    if not is_sharded(like):
        return part
    cls: Any = sys.modules["torch.distributed.tensor"].DTensor
    made: Tensor = cls.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def replicated(tensor: Tensor, mesh: Any) -> Tensor:
    """A DTensor over ``mesh``, of which each process has the whole: ``tensor``, the same on all."""
    module: Any = sys.modules["torch.distributed.tensor"]
    whole: Tensor = module.DTensor.from_local(tensor, mesh, [module.Replicate()] * mesh.ndim, run_check=False)
    return whole


def is_partial(tensor: Any) -> bool:
    """True for a DTensor of which processes hold addends rather than parts."""
    return is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements)
