# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Process groups: checks and broadcasts before one trains, so that no process has failed and values are equal."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu.distributed.buckets import MAX_BUCKET_NBYTES, plan_buckets

# One line for each item that must be the same: its name and its value.
Description = list[tuple[str, str]]


class RanksDifferError(RuntimeError):
    """Raised on all processes if the processes of a group are set up differently, or one has failed."""


def check_group(group: Any, argument: str, reason: str) -> Any:
    """Return ``group``, or the default group for None, after a check that this process can use it.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: This process is not in ``group``.
        TypeError: ``group`` is not a process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{reason} needs torch.distributed: call torch.distributed.init_process_group(...) before amp.initialize, "
            "in processes that torchrun has started"
        )
    if group is None:
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0
    ):
        raise ValueError(
            f"{argument} does not contain this process, which has global rank {dist.get_rank()}; pass the group that "
            "it belongs to, or leave amp.initialize to that group's processes"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{argument} must be a torch.distributed process group or None, got {group!r}")
    return group


class GroupReference:
    """A weak reference to a process group: ``reference()`` returns the group.

    ``torch.distributed.destroy_process_group`` ends a group's threads, and frees its communicators, when nothing refers
    to the group any more. A gloo thread that outlives the call ends the process by SIGABRT if it frees a reduction
    while the interpreter exits (https://github.com/pytorch/pytorch/issues/190489).
    """

    def __init__(self, group: Any, argument: str) -> None:
        """Refer to ``group``, which was given to ``amp.initialize`` as ``argument``."""
        self._reference = weakref.ref(group)
        self._argument = argument

    def __call__(self) -> Any:
        """Return the group.

        Raises:
            RuntimeError: The group has been destroyed.
        """
        group = self._reference()
        if group is None:
            raise RuntimeError(
                f"the process group that amp.initialize was given as {self._argument} has been destroyed, and backward "
                "needs it; call torch.distributed.destroy_process_group() after the last step, or amp.initialize again "
                "with the new group"
            )
        return group


@contextmanager
def failing_together(group: Any) -> Iterator[list[Description]]:
    """Make all processes raise at the end of the context if one raises in it.

    Yields:
        A list. The items that the caller appends to it are compared between processes at the end of the context.

    Raises:
        RanksDifferError: Another process has raised, or has other items in its list.
    """
    descriptions: list[Description] = []
    try:
        yield descriptions
    except Exception as error:
        _exchange(group, (f"{type(error).__name__}: {error}", ""))
        raise
    description = [line for part in descriptions for line in part]
    digest = hashlib.sha256(repr(description).encode()).hexdigest()
    heard = _exchange(group, ("", digest))
    for rank, (failure, _) in enumerate(heard):
        if failure:
            raise RanksDifferError(f"rank {rank} of the process group has failed, so this one stops too: {failure}")
    if len({digest for _, digest in heard}) > 1:
        raise RanksDifferError(_first_difference(_exchange(group, description)))


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: Any, *, of: str) -> None:
    """Call ``torch.distributed.all_reduce``, with an error message that says what could not be reduced.

    Raises:
        RuntimeError: A process of ``group`` has ended, or has not joined within the group's timeout.
    """
    with naming_failure(group, f"reduce {of}"):
        dist.all_reduce(tensor, op=op, group=group)


@contextmanager
def naming_failure(group: Any, what: str) -> Iterator[None]:
    """Add to a RuntimeError in the block that this rank of ``group`` could not do ``what``."""
    try:
        yield
    except RuntimeError as error:
        raise type(error)(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} could not {what}: {error}"
        ) from error


def _exchange(group: Any, said: Any) -> list[Any]:
    heard: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, said, group=group)
    return heard


def _first_difference(heard: Sequence[Description]) -> str:
    first = heard[0]
    for rank, other in enumerate(heard):
        for (name, value), (other_name, other_value) in zip(first, other, strict=False):
            if name != other_name:
                return (
                    f"ranks 0 and {rank} of the process group differ: where rank 0 has {name} ({value}), rank {rank} "
                    f"has {other_name} ({other_value}); build the same model, in the same order, on all ranks"
                )
            if value != other_value:
                return (
                    f"ranks 0 and {rank} of the process group differ in {name}: it is {value} on rank 0, {other_value} "
                    f"on rank {rank}; all ranks need the same"
                )
        if len(first) != len(other):
            more, longer = (0, first) if len(first) > len(other) else (rank, other)
            name, value = longer[min(len(first), len(other))]
            return (
                f"ranks 0 and {rank} of the process group differ: only rank {more} has {name} ({value}); build the "
                "same model on all ranks"
            )
    return "ranks of the process group differ, but their descriptions do not show where"


def describe(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], settings: Description) -> Description:
    """Return a description of everything that must be equal on all processes.

    It omits parameters that belong to no model, which may differ between processes, such as the parts of a classifier.
    """
    lines = list(settings)
    names: dict[int, str] = {}
    for m, model in enumerate(models):
        for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                called = f"{kind} {name}" + (f" of model {m}" if len(models) > 1 else "")
                names.setdefault(id(tensor), called)
                trained = ", trainable" if tensor.requires_grad else ""
                lines.append((called, f"{tuple(tensor.shape)}, {tensor.dtype}{trained}"))
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for p, param in enumerate(group["params"]):
                place = f"param_groups[{g}]['params'][{p}] of {type(optimizer).__name__}"
                place += f" {o}" if len(optimizers) > 1 else ""
                if id(param) in names:
                    lines.append((place, names[id(param)]))
    return lines


@torch.no_grad()
def broadcast_values(tensors: Iterable[Tensor], group: Any, rank: int = 0) -> None:
    """Copy the values of ``tensors``, bit for bit, from the process with ``rank`` in ``group`` to all processes."""
    source = dist.get_global_rank(group, rank)
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    for members in by_device.values():
        for numbers in plan_buckets([t.numel() * t.dtype.itemsize for t in members], MAX_BUCKET_NBYTES):
            piece = [members[i] for i in numbers]
            as_bytes = [t.resolve_conj().reshape(-1).view(torch.uint8) for t in piece]
            flat = torch.cat(as_bytes)
            dist.broadcast(flat, source, group=group)
            for tensor, part in zip(piece, flat.split([b.numel() for b in as_bytes]), strict=True):
                # Cloned: a view in another dtype must begin at a multiple of its size.
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
