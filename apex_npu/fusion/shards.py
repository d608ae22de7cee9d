# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sharded parameters (DTensor, as fully_shard makes them): each process holds and steps a part of them.

For users, parameters, gradients and states stay DTensors, as torch.distributed.checkpoint expects. The plain tensors
inside are fused like any others.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from apex_npu.fusion.storage import grads_of


class Along(enum.Enum):
    """A choice of cuts of a parameter: all, those between rows (dimension 0), or those within rows."""

    ALL = "all"
    ROWS = "rows"
    COLUMNS = "columns"

    def includes(self, dim: int) -> bool:
        """Return True if this choice includes a cut of dimension ``dim``."""
        return self is Along.ALL or (self is Along.ROWS) == (dim == 0)


def is_sharded(tensor: object) -> bool:
    """Return True for a DTensor."""
    # If the module was never imported, there is no DTensor. Importing it would cost each process a second.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Tensor:
    """Return the tensor inside a DTensor, which is the part of this process; any other tensor unchanged."""
    part: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
    return part


@torch.no_grad()
def local_part_as(value: Any, like: Any) -> Tensor:
    """Return this process's part of ``value``, cut like ``like``; communicate if ``value`` is cut otherwise."""
    if is_sharded(value) and is_sharded(like) and value.placements != like.placements:
        value = value.redistribute(like.device_mesh, like.placements)
    return local_part(value)


@torch.no_grad()
def local_grad(param: Any) -> Tensor | None:
    """Return the gradient of this process's part of ``param``.

    Raises:
        RuntimeError: The gradient is not a DTensor.
    """
    if param.grad is None:
        return None
    if not is_sharded(param.grad):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} is a DTensor and has a plain gradient of shape "
            f"{tuple(param.grad.shape)}; give it a DTensor, or None"
        )
    return local_part_as(param.grad, param)


def local_grads(sharded: list[Any]) -> list[Tensor | None]:
    """Return ``local_grad`` of each DTensor. Gradients that are cut in another way than their parameter are replaced.

    Raises:
        RuntimeError: ``local_grad`` raises it.
    """
    found: list[Any] = grads_of(sharded)
    try:  # attributes without a call: there are thousands of gradients
        return [
            grad if grad is None else grad._local_tensor if grad._spec is param._spec else _grad_cut_like(param)
            for param, grad in zip(sharded, found, strict=True)
        ]
    except AttributeError:  # of a plain gradient, or of this torch
        return list(map(_grad_cut_like, sharded))


def _grad_cut_like(param: Any) -> Tensor | None:
    part = local_grad(param)
    if part is not None and param.grad.placements != param.placements:
        param.grad = sharded_like(part, param)
    return part


def put_parts_inside(sharded: Sequence[Any], parts: Sequence[Tensor | None]) -> None:
    """Replace the tensor inside each DTensor by its part, or leave both as they are where they are None."""
    for tensor, part in zip(sharded, parts, strict=True):
        if part is not None and tensor._local_tensor is not part:
            tensor._local_tensor = part


def mesh_groups(param: Any, *, along: Along = Along.ALL) -> list[tuple[Any, str]]:
    """Return the process groups over which ``param`` is cut, each with the device type of its communication.

    There is one for each mesh dimension over which it is cut. The list is empty for a plain tensor and for replicas.

    Args:
        param: A parameter.
        along: Only groups whose processes have different rows, or only those with different parts of the same rows.
    """
    if not is_sharded(param):
        return []
    mesh = param.device_mesh
    return [
        (mesh.get_group(dim), mesh.device_type)
        for dim, placement in enumerate(param.placements)
        if not placement.is_replicate() and along.includes(getattr(placement, "dim", 0))
    ]


class MatrixCut(NamedTuple):
    """The division of matrices between processes, by rows or by columns.

    Attributes:
        group: The process group.
        device_type: The device type of its communication.
        dim: 0: each process has some rows; 1: some columns.
        sizes: The number of rows or columns of each process, in the order of ranks.
    """

    group: Any
    device_type: str
    dim: int
    sizes: tuple[int, ...]

    def begins(self) -> list[int]:
        """Return the first row or column of each process."""
        return list(accumulate(self.sizes, initial=0))[:-1]

    def of_rows(self, first: int, count: int) -> MatrixCut:
        """Return the division of the matrix that consists of ``count`` rows from ``first`` on."""
        if self.dim:
            return self
        spans = [
            (max(begin, first), min(begin + size, first + count))
            for begin, size in zip(self.begins(), self.sizes, strict=True)
        ]
        return self._replace(sizes=tuple(max(0, end - begin) for begin, end in spans))


def matrix_cuts(param: Any) -> list[MatrixCut]:
    """Return the cuts of the matrices of ``param``, its last two dimensions, one for each mesh dimension.

    The list is empty if each process has whole matrices: for a plain tensor, for replicas, and for a stack of matrices
    that is cut between them.
    """
    if not is_sharded(param):
        return []
    mesh, before = param.device_mesh, param.dim() - 2
    found: list[MatrixCut] = []
    for number, placement in enumerate(param.placements):
        count, dim = mesh.size(number), getattr(placement, "dim", -1) - before
        if not placement.is_replicate() and count > 1 and dim >= 0:
            numel = param.size(before + dim)
            chunk = -(-numel // count)  # as torch.chunk divides
            sizes = tuple(max(0, min(chunk, numel - chunk * rank)) for rank in range(count))
            found.append(MatrixCut(mesh.get_group(number), mesh.device_type, dim, sizes))
    return found


def part_number(param: Any) -> int:
    """Return the number of this process's part of ``param``, equal for replicas; 0 for a plain tensor."""
    number = 0
    for group, _ in mesh_groups(param):
        number = number * dist.get_world_size(group) + dist.get_rank(group)
    return number


def cut_of(tensor: Any) -> tuple[int, ...] | None:
    """Return a key that is equal for tensors cut over the same process groups; None for a plain tensor."""
    return tuple(id(group) for group, _ in mesh_groups(tensor)) if is_sharded(tensor) else None


def meshes_of(params: Iterable[Any]) -> list[Any]:
    """Return the device meshes over which some of ``params`` are cut, each once."""
    return list(
        dict.fromkeys(
            p.device_mesh for p in params if is_sharded(p) and not all(one.is_replicate() for one in p.placements)
        )
    )


def groups_over(meshes: Sequence[Any]) -> list[tuple[Any, str]]:
    """Return process groups that together reach all processes of ``meshes``, each with its device type.

    One mesh must contain the others, as (data, tensor) contains (data). If it contains all processes, the result is one
    group.

    Raises:
        RuntimeError: No mesh contains all others.
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
    """Return ``part`` as a DTensor cut like ``like``, over the same memory; ``part`` itself if ``like`` is plain."""
    if not is_sharded(like):
        return part
    cls: Any = sys.modules["torch.distributed.tensor"].DTensor
    made: Tensor = cls.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def replicated(tensor: Tensor, mesh: Any) -> Tensor:
    """Return ``tensor``, which is the same on all processes, as a replicated DTensor over ``mesh``."""
    module: Any = sys.modules["torch.distributed.tensor"]
    whole: Tensor = module.DTensor.from_local(tensor, mesh, [module.Replicate()] * mesh.ndim, run_check=False)
    return whole


def is_partial(tensor: Any) -> bool:
    """Return True for a DTensor whose processes hold addends rather than parts."""
    return is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements)
