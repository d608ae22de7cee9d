# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes to weights that autograd does not count, on accelerators, whose kernels do not look for them as a CPU's do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import compress

import torch
from torch import Tensor

from apex_npu.backends import HostCopy, HostFlag, for_device
from apex_npu.backends._torch_private import no_grad
from apex_npu.fusion import FusedGroup, ModelParamBuffer
from apex_npu.fusion.layout import ALIGN_NUMEL
from apex_npu.fusion.shards import local_part
from apex_npu.ops import masks_writes, note_differences

# What a step says, once for each optimizer.
UNCOUNTED_THERE = (
    "parameters of the model, or their fp32 masters, have been written before an earlier step or block in a way that "
    "autograd's version counter does not count (.data, a combined buffer, a collective). On this device such a write "
    "to the model is lost, as the step overwrites it; one to masters is trained, but the forward before that step has "
    "computed with the values of before. Write under torch.no_grad() instead of through .data"
)

LINE = ALIGN_NUMEL  # elements; each slot of a flat buffer begins at a multiple
WHOLE = 2**18  # elements up to which each look is at all of a buffer
MOST = 2**24  # elements that a look is at


class NewMasters:
    """Values of masters on accelerators before their first block, by which uncounted writes to them are known.

    Of one of more than ``WHOLE`` elements some are kept.
    """

    def __init__(self) -> None:
        self._values: dict[int, Tensor] = {}

    def note(self, masters: Sequence[Tensor], indices: Iterable[int]) -> None:
        """Those at ``indices`` have been given their values by amp."""
        parts = {k: _some(masters[k]) for k in indices if masters[k].device.type != "cpu"}
        if parts:
            copies = [torch.empty_like(part) for part in parts.values()]
            torch._foreach_copy_(copies, list(parts.values()))
            self._values.update(zip(parts, copies, strict=True))

    def written(self, masters: Sequence[Tensor], indices: Iterable[int]) -> set[int]:
        """Which of those at ``indices`` have others, as far as that is known; waits for the device."""
        known = [(k, _some(masters[k]), self._values[k]) for k in indices if k in self._values]
        known = [(k, now, value) for k, now, value in known if now.device == value.device]
        changed = {k for k, now, value in known if now.shape != value.shape}
        alike = [(k, (now != value).any()) for k, now, value in known if k not in changed]
        for device in {answer.device for _, answer in alike}:  # one wait for each
            indices, answers = zip(*[(k, answer) for k, answer in alike if answer.device == device], strict=True)
            changed.update(compress(indices, torch.stack(answers).tolist()))
        return changed


class UncountedWrites:
    """Looks for float16 or bfloat16 copies that are not what their float32 parameters are rounded to.

    One launch for each buffer on a GPU, before a step overwrites it, which writes what it finds into memory of the
    host. Elsewhere three launches, in the steps 1, 2, 3, 4, 6, 9, 13 and so on, whose answer is copied to the host
    asynchronously. A later step has it: none waits. Of a buffer of more than ``WHOLE`` elements one line in four is
    looked at, or in as many as leave ``MOST`` elements, and other lines the next time.

    Attributes:
        is_found: There was one; nothing is looked for any more.
        passes_over: The next look is passed over, as copies are not as they should be for another reason.
    """

    def __init__(self) -> None:
        self.is_found = self.passes_over = False
        self._looks = self._next = self._steps = 0
        self._due = 1
        self._arriving: list[HostCopy] = []
        self._flag: HostFlag | None = None

    def is_due(self, device: torch.device, *, in_step: bool) -> bool:
        """Whether to look now, before the next step or in it: always where that takes one launch."""
        self._steps += in_step
        if masks_writes(device) or self._steps == 0:
            return True
        if self._steps < self._due:
            return False
        # Not twice the number: writes after each second step would always be missed.
        self._due = self._steps + max(1, self._steps // 2)
        return True

    def found(self) -> bool:
        """Whether an earlier look has found one, as far as its answer has come; True once."""
        answers = [(copy, copy.if_come()) for copy in self._arriving]
        self._arriving = [copy for copy, answer in answers if answer is None]
        in_flag = self._flag is not None and not self.is_found and self._flag.is_raised()
        if in_flag or any(answer is not None and answer > 0 for _, answer in answers):
            self.is_found, self._arriving = True, []
            return True
        return False

    @no_grad
    def look_at_buffers(self, buffers: Sequence[tuple[FusedGroup, ModelParamBuffer, Tensor | None]]) -> None:
        """Compare flat buffers; the third of each has 1 for each line that is looked at, and 0; None: all are."""
        for group, buffer, lines in buffers:
            param, copy, numel = group.param_flat, buffer.flat, buffer.flat.numel()
            width = numel // lines.numel() if lines is not None else LINE if numel % LINE == 0 else numel
            every = 1 if numel <= WHOLE else max(4, numel // MOST)
            first = self._looks % every
            if not self._note_differences(param, copy, lines, width, first, every):
                part = slice(first, None, every)
                self._compare(param.view(-1, width)[part], copy.view(-1, width)[part], lines, part)
        self._looks += 1

    def _note_differences(
        self, param: Tensor, copy: Tensor, lines: Tensor | None, width: int, first: int, every: int
    ) -> bool:
        """Have a kernel compare buffers, and write the flag; False where there is none that can."""
        if not masks_writes(param.device):
            return False
        flag = self._flag = self._flag or HostFlag(param.device)
        return note_differences(param, copy, lines, flag.number, width=width, first=first, every=every)

    @torch.no_grad()
    def look_at_each(self, params: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        """Compare pairs one by one: ``MOST`` elements of them, others the next time."""
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        numel, looked_at = 0, 0
        for k in (*range(self._next, len(copies)), *range(min(self._next, len(copies)))):
            numel += copies[k].numel()
            if numel > MOST and looked_at:
                break
            looked_at += 1
            kinds.setdefault((copies[k].device, copies[k].dtype), []).append(k)
        self._next = (self._next + looked_at) % max(1, len(copies))
        for indices in kinds.values():
            joined = [torch.cat([_flat(tensors[k]) for k in indices]) for tensors in (params, copies)]
            self._compare(joined[0], joined[1])

    def _compare(self, param: Tensor, copy: Tensor, lines: Tensor | None = None, part: slice = slice(None)) -> None:
        if param.numel() == 0:  # which has no largest element
            return
        differences = param.to(copy.dtype).sub_(copy)  # of numbers that are not the same never 0
        if lines is not None:
            differences.mul_(lines[part])
        # What is not a number is no write: it is not greater than 0 either.
        self._arriving.append(HostCopy(torch.linalg.vector_norm(differences, math.inf)))


def _some(param: Tensor) -> Tensor:
    return _flat(param)[:: max(1, param.numel() // WHOLE)]


def _flat(tensor: Tensor) -> Tensor:
    part = local_part(tensor.detach())
    return for_device(part.device).in_base_format(part).reshape(-1)
