# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that ``fuse_unscale`` leaves multiplied by the loss scale, told from those that are left there later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex_npu.amp.grad_groups import GradGroup
from apex_npu.fusion import grads_of, increment_versions, versions_of, wraps_tensors
from apex_npu.fusion.grad_slots import IN_BUFFER
from apex_npu.fusion.shards import local_part

# What a block or a step says, once for each optimizer.
NOT_SCALED = (
    "gradients have been added to, written or replaced after amp.scale_loss, which with fuse_unscale=True leaves them "
    "multiplied by the loss scale until step: a backward outside of amp.scale_loss adds some that are not, and that "
    "count by that much less. Give it a block of its own, or call optimizer.zero_grad() before it, or leave "
    "fuse_unscale out. What multiplies gradients needs none of this"
)


class ScaledGrads:
    """The gradients of parameters without a master, as they were when a block ended."""

    def __init__(self, groups: Sequence[GradGroup]) -> None:
        """Of ``groups``, now. Their versions become others than those of new tensors, which may get the same memory."""
        self._groups = groups
        self._own = [
            [k for k, (p, source) in enumerate(zip(group.params, group.sources, strict=True)) if p is source]
            for group in groups
        ]
        increment_versions([grad for grads in self._grads() for grad in grads if grad is not None])
        self._entries = list(map(_entries_of, self._grads()))

    def _grads(self) -> list[list[Tensor | None]]:
        return [grads_of([group.params[k] for k in own]) for group, own in zip(self._groups, self._own, strict=True)]

    def are_written(self) -> bool:
        """True where others are there, or the same have been written, but those that have been gathered or cleared."""
        nonzero: dict[torch.device, list[Tensor]] = {}
        for group, own, known, grads in zip(self._groups, self._own, self._entries, self._grads(), strict=True):
            entries = _entries_of(grads)
            if entries == known:
                continue
            states = b"" if group.flat is None else group.flat.states()
            for k, before, now, grad in zip(
                own, zip(*known, strict=True), zip(*entries, strict=True), grads, strict=True
            ):
                if grad is None or now == before or _is_gathered(states[k : k + 1], before[1], grad):
                    continue
                if grad.layout != torch.strided:
                    return True
                nonzero.setdefault(grad.device, []).append(local_part(grad).any())
        # One answer for all of a device: reading each alone would wait for it each time.
        return any(bool(torch.stack(answers).any()) for answers in nonzero.values())


def _entries_of(grads: Sequence[Tensor | None]) -> tuple[list[int], list[int]]:
    """Versions and addresses: 0 for one without memory of its own, and -1 where there is none.

    Two lists of numbers, since Python's garbage collector looks at a tuple for each.
    """
    wraps = {cls: wraps_tensors(grad) for cls, grad in {type(grad): grad for grad in grads}.items()}
    addresses = [
        -1 if grad is None else 0 if wraps[type(grad)] or grad.layout != torch.strided else grad.data_ptr()
        for grad in grads
    ]
    return versions_of(list(grads)), addresses


def _is_gathered(state: bytes, before: int, grad: Tensor) -> bool:
    return state == bytes([IN_BUFFER]) and before not in (-1, grad.data_ptr())
