# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apex's DistributedDataParallel, Reducer and flat_dist_call over torch.distributed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from apex_npu.compat.flattening import flatten, unflatten

__all__ = ["DistributedDataParallel", "Reducer", "flat_dist_call", "flatten", "unflatten"]

_MIB = 2**20


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with Apex's arguments. Wrap the model after ``amp.initialize``.

    As in Apex, parameters without a gradient are tolerated, and buffers are not broadcast at each forward. torch's own
    arguments change both; ``find_unused_parameters=False`` saves a walk over the graph per iteration. The arguments
    ``allreduce_trigger_params``, ``num_allreduce_streams``, ``gradient_average_split_factor`` and ``prof`` have no
    effect.

    Args:
        module: The model, which must be the same in every process.
        message_size: The number of elements per bucket of gradients that is reduced in one call.
        delay_allreduce: Reduce all gradients in one bucket.
        allreduce_always_fp32: Reduce low-precision gradients in float32.
        gradient_average: Divide gradients by the number of processes.
        gradient_predivide_factor: Divide gradients by this factor before reducing, and by the rest afterwards.
        **options: Arguments of ``torch.nn.parallel.DistributedDataParallel``.

    Raises:
        ValueError: Arguments contradict each other or are no longer supported.

    Example::

        >>> # with a process group
        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> model = parallel.DistributedDataParallel(model)
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        **options: Any,
    ) -> None:
        for name, given, way_out in (
            ("shared_param", shared_param is not None, "use delay_allreduce=True to reduce at the end of backward"),
            ("retain_allreduce_buffers", retain_allreduce_buffers, "use gradient_as_bucket_view=True"),
            ("allreduce_communicators", allreduce_communicators is not None, "pass process_group"),
        ):
            if given:
                raise ValueError(f"{name} is not supported; {way_out}")
        if delay_allreduce and (allreduce_trigger_params is not None or num_allreduce_streams > 1):
            raise ValueError(
                "allreduce_trigger_params and num_allreduce_streams say how to reduce during backward, "
                "delay_allreduce=True that it is done after it; leave one of them out"
            )
        numel = sum(p.numel() for p in module.parameters()) if delay_allreduce else message_size
        options.setdefault("bucket_cap_mb", max(1, -(-4 * numel // _MIB)))
        # Newer torch has another name for this argument, and warns of the old one.
        names = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        options |= {} if "broadcast_buffers" in options else {name: options.get(name, False)}
        options.setdefault("find_unused_parameters", True)
        super().__init__(module, **options)
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            reduction = _reduction(
                self.process_group, allreduce_always_fp32, gradient_average, gradient_predivide_factor
            )
            self.register_comm_hook(None, reduction)

    def disable_allreduce(self) -> None:
        """Stop reducing gradients; they stay in this process from now on."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce gradients over processes again."""
        self.require_backward_grad_sync = True

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        # torch refuses its SyncBatchNorm on the CPU, where ours works.
        if self.device_type != "cpu" or any(type(m) is nn.SyncBatchNorm for m in module.modules()):
            super()._passing_sync_batchnorm_handle(module)  # type: ignore[no-untyped-call]


def _reduction(group: Any, in_fp32: bool, average: bool, predivide_factor: float) -> Callable[[Any, Any], Any]:
    """Return a communication hook that reduces one bucket of gradients."""
    postdivide_factor = dist.get_world_size(group) / predivide_factor if average else 1.0

    def apex_reduction(state: Any, bucket: Any) -> Future[Tensor]:
        buffer: Tensor = bucket.buffer()
        reduced = buffer.float() if in_fp32 else buffer
        if predivide_factor != 1.0:
            reduced.div_(predivide_factor)
        work = dist.all_reduce(reduced, group=group, async_op=True)
        # Written into the bucket, since gradients may be views of it.
        later: Future[Tensor] = work.get_future().then(lambda _: buffer.copy_(reduced.div_(postdivide_factor)))
        return later

    # torch requires no annotation, or the class GradBucket, which does not exist everywhere.
    apex_reduction.__annotations__.clear()
    return apex_reduction


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run a collective, ``call(tensor, *extra_args)``, on many tensors, in one call per dtype and device.

    With ``all_reduce`` the sums are divided by the number of processes.

    Example::

        >>> # with a process group
        >>> parallel.flat_dist_call([p.detach() for p in model.parameters()], torch.distributed.broadcast, (0,))
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    for members in alike.values():
        flat = flatten(members)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()
        torch._foreach_copy_(members, unflatten(flat, members))


class Reducer:
    """Averages gradients over processes when ``reduce`` is called.

    Args:
        module_or_grads_list: A module, whose parameters are immediately broadcast from rank 0, or gradients.

    Example::

        >>> # with a process group
        >>> reducer = parallel.Reducer(model)
        >>> loss_fn(model(input), target).backward()
        >>> reducer.reduce()
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Any]) -> None:
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads: list[Tensor] = []
        if self.module is not None:
            flat_dist_call(self.module.parameters(), dist.broadcast, (0,))
        else:
            self.grads = list(_tensors(module_or_grads_list))

    def reduce(self) -> None:
        """Average the gradients over processes."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat_dist_call(grads, dist.all_reduce)


def _tensors(nested: Any) -> Iterable[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Iterable):
        for item in nested:
            yield from _tensors(item)
