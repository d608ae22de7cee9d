# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameters of which each process holds a part (DTensor, as fully_shard makes them): the part is what is stepped.

Users keep what they gave: parameter, gradient and state stay DTensors for them, so that torch.distributed.checkpoint
finds what it expects. The plain tensors inside are fused like any others.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: object) -> bool:
    """True for a DTensor."""
    # Where the module was never imported there is none; importing it would cost each process a second.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Tensor:
    """The part that this process holds, the very tensor inside; of any other tensor itself."""
    # to_local() would give a new view each time, which cannot be recognised in the next step.
    part: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
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


def sharded_like(part: Tensor, like: Any) -> Tensor:
    """``part`` as users get it: a DTensor cut as ``like`` is, over the same memory; or itself, where that is plain."""
    if not is_sharded(like):
        return part
    cls: Any = sys.modules["torch.distributed.tensor"].DTensor
    made: Tensor = cls.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def is_partial(tensor: Any) -> bool:
    """True for a DTensor of which processes hold addends rather than parts."""
    return is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements)
