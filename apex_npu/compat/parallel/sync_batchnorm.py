# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Batch norm over the batches of all processes: torch's class with Apex's additions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from apex_npu.ops import LOW_PRECISION

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm``, whose state dict it shares, with two more ways to use it.

    With ``channel_last``, the channels are the last dimension of the input rather than the second. With ``fuse_relu``,
    ReLU is applied to the output.

    Example::

        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), parallel.SyncBatchNorm(8, fuse_relu=True))
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize ``input``; ``z``, of the same shape, is added before the ReLU."""
        moved = self.channel_last and input.dim() > 2
        channels_second = input.movedim(-1, 1) if moved else input
        if input.device.type != "cpu":
            output = super().forward(channels_second)
        elif self.training and _has_peers(self.process_group):
            output = self._forward_from_operators(channels_second)
        else:
            output = super(nn.SyncBatchNorm, self).forward(channels_second)  # batch norm of this process only
        output = output.movedim(1, -1) if moved else output
        if z is not None:
            output = output + z
        return output.relu() if self.fuse_relu else output

    def _forward_from_operators(self, input: Tensor) -> Tensor:
        """Compute with operators what torch has only as kernels for accelerators."""
        over = [d for d in range(input.dim()) if d != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        wide = input.float() if input.dtype in LOW_PRECISION else input
        count = _sum(wide.new_tensor(float(wide.numel() // wide.size(1))), self.process_group)
        mean = _sum(wide.sum(over), self.process_group) / count
        centred = wide - mean.view(shape)
        variance = _sum(centred.square().sum(over), self.process_group) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        output = (centred * torch.rsqrt(variance + self.eps).view(shape)).to(input.dtype)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        result: Tensor = output.to(input.dtype)
        return result

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


class _SumOverProcesses(torch.autograd.Function):
    """The sum of a tensor over a group's processes. The gradient is summed too, since every process uses the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _sum(grads[0], ctx.group), None


def _sum(tensor: Tensor, group: Any) -> Tensor:
    total: Tensor = _SumOverProcesses.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def _has_peers(group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace every batch norm in ``module`` by a ``SyncBatchNorm`` with its parameters, buffers and mode.

    The parameters stay the same objects, so an optimizer that has been made already steps them. ``module`` is changed
    in place and returned, unless it is a batch norm itself.

    Example::

        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> type(parallel.convert_syncbn_model(network)[1]).__name__
        'SyncBatchNorm'
    """
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return _converted(module, process_group, channel_last)
    for name, child in module.named_children():
        converted = convert_syncbn_model(child, process_group, channel_last)
        if converted is not child:
            setattr(module, name, converted)
    return module


def _converted(norm: _BatchNorm, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    if isinstance(norm, LazyModuleMixin) and norm.has_uninitialized_params():
        raise RuntimeError(
            "a lazy batch norm has no number of channels yet; run the model once on a batch before converting it"
        )
    # Made on no device, since its own parameters are discarded.
    with torch.device("meta"):
        same = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        converted = SyncBatchNorm(*same, process_group, channel_last=channel_last)
    converted._parameters.update(norm._parameters)
    converted._buffers.update(norm._buffers)
    converted.train(norm.training)
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Divide the processes into groups of ``group_size`` neighbours, and return the group of this process.

    Every process must call this function. For a ``group_size`` of 0 the result is None: one group of all.

    Raises:
        ValueError: ``group_size`` does not divide the number of processes.

    Example::

        >>> # with a process group
        >>> group = parallel.create_syncbn_process_group(group_size=1)
        >>> norm = parallel.SyncBatchNorm(8, process_group=group)
    """
    if group_size == 0:
        return None
    world_size = dist.get_world_size()
    if not 0 < group_size <= world_size or world_size % group_size:
        raise ValueError(f"group_size must divide the number of processes, {world_size}, got {group_size}")
    own = None
    # Making a group is collective: every process takes part in making all of them.
    for first in range(0, world_size, group_size):
        group = dist.new_group(list(range(first, first + group_size)))
        if first <= dist.get_rank() < first + group_size:
            own = group
    return own
