# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Instances of DistributedDataParallel around a script's models, and the gradients that they average."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from apex_npu.backends.live_objects import instances_of
from apex_npu.backends.script_warnings import warn
from apex_npu.fusion import grads_of

# The instances that are alive; a dead one removes itself.
KnownDDPs = list["weakref.ref[DistributedDataParallel]"]


def find_ddps(known: KnownDDPs) -> None:
    """Add the instances that exist already to ``known``."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    for found in instances_of(DistributedDataParallel):
        _add(known, found)


def watch_ddps(known: KnownDDPs, check: Callable[[nn.Module], None]) -> RemovableHandle:
    """Add instances to ``known`` when they register the module inside of them, until the result is removed.

    Args:
        known: The instances that exist.
        check: Called with the module first. It may raise an error, which ends the constructor before communication.
    """

    def note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            if submodule is not None:
                check(submodule)
            _add(known, module)

    return register_module_module_registration_hook(note)


def adding_to(known: KnownDDPs) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of DistributedDataParallel's ``__setstate__`` that adds copied instances to ``known``.

    Copied and unpickled instances do not register the module inside of them.
    """

    def decorator(set_state: Callable[..., None]) -> Callable[..., None]:
        def set_state_and_add(self: DistributedDataParallel, state: Any) -> None:
            set_state(self, state)
            _add(known, self)

        return set_state_and_add

    return decorator


# Called with a module, its tensors whose values have been broadcast, the process group, and the rank that sent them.
FollowBroadcast = Callable[[nn.Module, Sequence[Tensor], Any, int], object]


def around_broadcast(
    before: Callable[[], None], follow: FollowBroadcast
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of the function with which DistributedDataParallel broadcasts a module's values.

    It calls ``before``, broadcasts, and calls ``follow``. DistributedDataParallel broadcasts in its constructor, unless
    ``init_sync=False``, and at the end of ``join``.
    """

    def decorator(broadcast: Callable[..., None]) -> Callable[..., None]:
        def broadcast_and_follow(
            module: nn.Module,
            process_group: Any,
            broadcast_bucket_size: int,
            src: int,
            params_and_buffers_to_ignore: Container[str],
            broadcast_buffers: bool = True,
        ) -> None:
            ignored = params_and_buffers_to_ignore
            before()
            broadcast(module, process_group, broadcast_bucket_size, src, ignored, broadcast_buffers)
            named = chain(module.named_parameters(), module.named_buffers() if broadcast_buffers else ())
            follow(module, [tensor for name, tensor in named if name not in ignored], process_group, src)

        return broadcast_and_follow

    return decorator


def _add(known: KnownDDPs, ddp: DistributedDataParallel) -> None:
    if all(ref() is not ddp for ref in known):
        known.append(weakref.ref(ddp, known.remove))


def _alive(known: KnownDDPs) -> list[DistributedDataParallel]:
    """Return the instances that still exist and whose constructor has ended."""
    return [ddp for ref in known if (ddp := ref()) is not None and hasattr(ddp, "reducer")]


def ddps_of(known: KnownDDPs, params: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """Return the instances in ``known`` around one of ``params``."""
    ids = set(map(id, params))
    return [ddp for ddp in _alive(known) if any(id(p) in ids for p in ddp.module.parameters())]


def may_keep_grads(known: KnownDDPs) -> KnownDDPs:
    """Return the instances in ``known`` that may not average the gradients of the next backward, as in ``no_sync``.

    torch decides this in the forward. A forward under ``no_grad`` cannot be distinguished.
    """

    def averages(ddp: Any) -> bool:
        return bool(ddp.require_backward_grad_sync and ddp.require_forward_param_sync)

    return [ref for ref in known if (ddp := ref()) is not None and hasattr(ddp, "reducer") and not averages(ddp)]


def with_bucket_views(known: KnownDDPs) -> KnownDDPs:
    """Return the instances in ``known`` that leave gradients in their buckets."""
    return [ref for ref in known if (ddp := ref()) is not None and getattr(ddp, "gradient_as_bucket_view", False)]


def looking_at_all(known: KnownDDPs) -> list[DistributedDataParallel]:
    """Return the instances in ``known`` whose reducer looks at the gradients of all parameters in each backward."""
    return [ddp for ddp in _alive(known) if getattr(ddp, "find_unused_parameters", False)]


def rebuild_buckets(ddp: Any) -> None:
    """Make ``ddp`` rebuild its buckets now, instead of in its next forward.

    A rebuild happens once, in the order of the gradients of a backward, and gives parameters new gradients with the
    same values. Between two blocks amp could not distinguish these from the gradients of a backward.
    """
    # In join() a process without data repeats the collectives of the others' forward.
    if not ddp._join_config.enable:
        with suppress(RuntimeError):  # a reduction has not ended: the next forward raises the error
            ddp.reducer._rebuild_buckets()


class LocalBackward:
    """A backward after which some instances may not have averaged gradients."""

    def __init__(self, ddps: Sequence[DistributedDataParallel], *, pending: bool) -> None:
        """Record the gradients before the backward; ``pending``: existing gradients also may not be averaged."""
        self._before = []
        for ddp in ddps:
            params = list(ddp.module.parameters())
            grads: list[Tensor | None] = [None] * len(params) if pending else grads_of(params)
            versions = [0 if grad is None else grad._version for grad in grads]
            self._before.append((ddp.reducer, ddp.reducer.get_backward_stats(), params, grads, versions))

    def kept_grads(self) -> bool:
        """Return whether, after the backward, there are gradients that an instance has not averaged.

        A reducer records when each gradient was ready. If it has recorded nothing, the model inside may have run
        without it, as in a forward under ``no_grad``, and may have no gradients of this backward.
        """
        return any(
            reducer.get_backward_stats() == stats and _has_new(grads_of(params), grads, versions)
            for reducer, stats, params, grads, versions in self._before
        )


def _has_new(now: list[Tensor | None], before: list[Tensor | None], versions: list[int]) -> bool:
    """Return whether a gradient differs from ``before``, or has been written since."""
    return any(
        grad is not None and (grad is not former or grad._version != version)
        for grad, former, version in zip(now, before, versions, strict=True)
    )


def dtypes_of(known: KnownDDPs) -> list[tuple[DistributedDataParallel, list[torch.dtype]]]:
    """Return the instances in ``known`` that are alive, with the dtypes of their parameters."""
    return [(ddp, [p.dtype for p in ddp.module.parameters()]) for ddp in _alive(known)]


def follow_dtypes(ddp: DistributedDataParallel, dtypes: list[torch.dtype]) -> None:
    """Make ``ddp`` average gradients again if the dtypes of its parameters have changed from ``dtypes``."""
    if [p.dtype for p in ddp.module.parameters()] == dtypes:
        return
    obstacle = obstacle_to_rebuilding(ddp)
    if obstacle is None:
        rebuild_reducer(ddp)
    else:
        warn(
            f"a model in a DistributedDataParallel with {obstacle} is float32 again: its gradients are not averaged "
            "from now on. Wrap it in DistributedDataParallel again"
        )


def obstacle_to_rebuilding(ddp: Any) -> str | None:
    """Return a description of the setting that ``rebuild_reducer`` would lose; None if it loses nothing."""
    if ddp.process_group is not dist.group.WORLD:
        return "a process group other than the default one"
    if ddp.mixed_precision is not None:
        return "mixed_precision of its own"
    if ddp._get_ddp_logging_data().get("comm_hook"):
        return "a communication hook"
    return None


def rebuild_reducer(ddp: Any) -> None:
    """Make ``ddp`` average the gradients of parameters whose dtype, and so whose gradient accumulator, has changed.

    torch has no function for this, but unpickling does it.
    """
    ddp.__setstate__(ddp.__getstate__())
