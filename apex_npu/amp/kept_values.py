# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The float32 values of what a model has in low precision without masters: weights that are frozen, and buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apex_npu.amp.float32_copies import ModuleCopies, copies_of, own_tensors
from apex_npu.backends import for_device
from apex_npu.ops import LOW_PRECISION, unscale_grads

# More than that is announced.
_ANNOUNCED = 2**30


class _Cast(NamedTuple):
    """A parameter or buffer that has been cast, with the module that it is of, and what it was."""

    module: nn.Module
    copies: ModuleCopies
    name: str
    full_name: str
    tensor: Tensor
    value: Tensor


def keep_values(
    models: Sequence[nn.Module], before: Mapping[int, Tensor], with_master: Collection[int], *, keep: bool
) -> list[str]:
    """Keep the float32 values of what has been cast and has no master, for state dicts and for masters to come.

    They are in host memory. Values that low precision holds exactly are not kept. A buffer of which it would lose a
    value altogether, as inf or as 0, becomes float32 again.

    Args:
        models: They have been cast, and ``show_float32`` has been called.
        before: ``id(tensor)`` → its value before.
        with_master: The identities of the parameters that have masters.
        keep: False: nothing is kept.

    Returns:
        What is to be printed.

    Raises:
        RuntimeError: A parameter has a value that becomes inf.
    """
    for module in (module for model in models for module in model.modules()):
        copies = copies_of(module)
        if copies is not None:
            copies.keeps = keep
    cast = list(_cast(models, before))
    answers = _answers(cast, with_master)
    said, lost = [], []
    nbytes = 0
    for (module, copies, name, full_name, tensor, value), (overflows, vanishes, differs) in zip(
        cast, answers, strict=True
    ):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if name in module._buffers and (overflows or vanishes):
            tensor.data = value
            lost.append(full_name)
        elif overflows:
            raise RuntimeError(
                f"parameter {full_name} has finite values of up to {value.abs().max():.4g}, which are inf in {dtype} "
                f"(at most {torch.finfo(tensor.dtype).max:.4g}): rescale it, or use O1, or O4 or O5, whose bfloat16 "
                "has the range of float32. Nothing has been changed"
            )
        elif keep and differs and id(tensor) not in with_master:
            copies.kept[name] = value.detach().to("cpu", torch.float32)
            nbytes += value.numel() * 4
    if lost:
        said.append(f"Buffers that stay float32, since their values would be inf or 0 otherwise: {', '.join(lost)}")
    if nbytes > _ANNOUNCED:
        said.append(
            f"Weights without masters, and buffers, keep {nbytes / 2**30:.1f} GiB of float32 values in host memory, "
            "for state_dict() and for unfreezing; keep_frozen_float32=False does without"
        )
    return said


def _cast(models: Sequence[nn.Module], before: Mapping[int, Tensor]) -> Iterator[_Cast]:
    for model in models:
        for prefix, module in model.named_modules():
            copies = copies_of(module)
            if copies is None:
                continue
            for name, tensor in own_tensors(module):
                value = before.get(id(tensor))
                if value is None or tensor.dtype not in LOW_PRECISION or value.dtype == tensor.dtype:
                    continue
                yield _Cast(module, copies, name, f"{prefix}.{name}" if prefix else name, tensor, value)


def _answers(cast: Sequence[_Cast], with_master: Collection[int]) -> list[list[bool]]:
    """As ``_ask``; what has a master is only looked at where something has become inf, one check for all of it."""
    alone = [entry for entry in cast if id(entry.tensor) not in with_master]
    others = [entry for entry in cast if id(entry.tensor) in with_master]
    asked = [*alone, *(others if _any_inf([entry.tensor for entry in others]) else [])]
    answers = {id(entry.tensor): answer for entry, answer in zip(asked, _ask(asked), strict=True)}
    return [answers.get(id(entry.tensor), [False, False, False]) for entry in cast]


def _any_inf(tensors: Sequence[Tensor]) -> bool:
    """Whether a value of ``tensors``, of masters all, is not finite."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dtype == torch.float16:  # bfloat16 has the range of float32
            by_device.setdefault(tensor.device, []).append(tensor.data)
    found = []
    for device, some in by_device.items():
        found.append(torch.zeros(1, device=device))
        unscale_grads(some, 1.0, found[-1])
    return any(map(bool, found))


@torch.no_grad()
def _ask(cast: Sequence[_Cast]) -> list[list[bool]]:
    """For each whether a finite value has become inf, one that is not 0 has become 0, and any other than it was."""
    asked: dict[torch.device, list[Tensor]] = {}
    for *_, tensor, value in cast:
        # Operators on weights in tiles are others, and some of these have none.
        now, value = map(for_device(tensor.device).in_base_format, (tensor.detach(), value))
        questions = (now.isinf() & value.isfinite(), (now == 0) & (value != 0), now.to(value.dtype) != value)
        asked.setdefault(now.device, []).append(torch.stack([question.any() for question in questions]))
    answers = {device: iter(torch.stack(found).tolist()) for device, found in asked.items()}
    return [next(answers[entry.tensor.device]) for entry in cast]
