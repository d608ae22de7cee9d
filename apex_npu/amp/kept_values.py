# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The float32 values of low-precision tensors without masters: frozen weights, and buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apex_npu._extension import REBUILD, extension
from apex_npu.amp.float32_copies import ModuleCopies, copies_of, own_tensors
from apex_npu.amp.masters import fp32_value
from apex_npu.amp.session import Session
from apex_npu.backends import for_device
from apex_npu.distributed.consistency import broadcast_values
from apex_npu.ops import LOW_PRECISION, unscale_grads

# The number of bytes above which kept values are announced.
_ANNOUNCED = 2**30


class _Cast(NamedTuple):
    """A parameter or buffer that has been cast, with its module and its former value."""

    module: nn.Module
    copies: ModuleCopies
    name: str
    full_name: str
    tensor: Tensor
    value: Tensor


def keep_values(
    models: Sequence[nn.Module], before: Mapping[int, Tensor], with_master: Collection[int], *, keep: bool
) -> list[str]:
    """Keep the float32 values of cast tensors without a master, for state dicts and for later masters.

    The values are kept in host memory, unless low precision holds them exactly. A buffer becomes float32 again if low
    precision turns a value into inf or 0. A 0-dim buffer also does so if low precision does not hold it exactly, since
    type promotion ignores it. A larger float32 buffer would make all results float32, which the next layer does not
    accept.

    Args:
        models: Models that have been cast, and passed to ``show_float32``.
        before: ``id(tensor)`` → its value before the cast.
        with_master: The identities of the parameters that have masters.
        keep: False: nothing is kept.

    Returns:
        The texts to print.

    Raises:
        RuntimeError: A parameter has a value that becomes inf.
    """
    for module in (module for model in models for module in model.modules()):
        copies = copies_of(module)
        if copies is not None:
            copies.keeps = keep
    cast = list(_cast(models, before))
    answers = _answers(cast, with_master)
    said, stay, inexact = [], [], []
    nbytes = 0
    for (module, copies, name, full_name, tensor, value), (overflows, vanishes, differs) in zip(
        cast, answers, strict=True
    ):
        dtype = str(tensor.dtype).removeprefix("torch.")
        is_buffer = name in module._buffers
        if is_buffer and (overflows or vanishes or (differs and value.dim() == 0)):
            tensor.data = value
            stay.append(full_name)
        elif overflows:
            raise RuntimeError(
                f"parameter {full_name} has finite values of up to {value.abs().max():.4g}, which are inf in {dtype} "
                f"(at most {torch.finfo(tensor.dtype).max:.4g}): rescale it, or use O1, or O4 or O5, whose bfloat16 "
                "has the range of float32. Nothing has been changed"
            )
        elif keep and differs and id(tensor) not in with_master:
            copies.kept[name] = value.detach().to("cpu", torch.float32)
            nbytes += value.numel() * 4
            inexact += [full_name] * is_buffer
    if stay:
        said.append(f"Buffers that stay float32, since {dtype} does not hold their values: {_listed(stay)}")
    if inexact:
        said.append(
            f"Buffers that are rounded in forward, since {dtype} does not hold their values (state_dict() has them): "
            f"{_listed(inexact)}"
        )
    if nbytes > _ANNOUNCED:
        said.append(
            f"Weights without masters, and buffers, keep {nbytes / 2**30:.1f} GiB of float32 values in host memory, "
            "for state_dict() and for unfreezing; keep_frozen_float32=False does not keep them"
        )
    return said


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


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
    """Return the result of ``_ask``. Tensors with masters are examined only if one check finds an inf in them."""
    alone = [entry for entry in cast if id(entry.tensor) not in with_master]
    others = [entry for entry in cast if id(entry.tensor) in with_master]
    asked = [*alone, *(others if _any_inf([entry.tensor for entry in others]) else [])]
    answers = {id(entry.tensor): answer for entry, answer in zip(asked, _ask(asked), strict=True)}
    return [answers.get(id(entry.tensor), [False, False, False]) for entry in cast]


def _any_inf(tensors: Sequence[Tensor]) -> bool:
    """Return True if a value of ``tensors``, which all have masters, is not finite."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dtype == torch.float16:  # bfloat16 has the range of float32
            by_device.setdefault(tensor.device, []).append(tensor.data)
    found = []
    for device, some in by_device.items():
        found.append(torch.zeros(1, dtype=torch.float32, device=device))
        unscale_grads(some, 1.0, found[-1])
    return any(map(bool, found))


@torch.no_grad()
def _ask(cast: Sequence[_Cast]) -> list[list[bool]]:
    """Return for each tensor whether a finite value became inf, a nonzero value became 0, and any value changed."""
    asked: dict[torch.device, list[Tensor]] = {}
    for *_, tensor, value in cast:
        # Weights in tiled formats use other operators, and some operators do not exist for them.
        now, value = map(for_device(tensor.device).in_base_format, (tensor.detach(), value))
        questions = (now.isinf() & value.isfinite(), (now == 0) & (value != 0), now.to(value.dtype) != value)
        asked.setdefault(now.device, []).append(torch.stack([question.any() for question in questions]))
    answers = {device: iter(torch.stack(found).tolist()) for device, found in asked.items()}
    return [next(answers[entry.tensor.device]) for entry in cast]


@torch.no_grad()
def check_averages() -> None:
    """Require the C++ extension, which keeps DistributedDataParallel's hooks while parameters have float32 data.

    Raises:
        RuntimeError: The extension is missing. An assignment to ``Tensor.data`` would replace the accumulator.
    """
    if extension is None:
        raise RuntimeError(
            "DistributedDataParallel would not average the gradients of 16-bit parameters whose float32 values amp "
            f"keeps: that needs apex_npu's C++ extension. Build it ({REBUILD}), or use opt_level O1 or O4"
        )


def follow_broadcast(session: Session, module: nn.Module, sent: Sequence[Tensor], group: Any, rank: int) -> None:
    """Set masters and kept values to those of the process whose rounded values DistributedDataParallel has broadcast.

    Args:
        session: The session whose optimizers have the masters.
        module: The module inside DistributedDataParallel.
        sent: The parameters and buffers of the module that were broadcast.
        group: The process group.
        rank: The rank of the sending process in ``group``.

    Raises:
        RuntimeError: ``check_averages`` raises it.
    """
    rounded = {id(tensor): tensor for tensor in sent if tensor.dtype in LOW_PRECISION}
    owners = {
        key: [o._amp_state.masters for o in session.adopted if o._amp_state.masters.has(t)]
        for key, t in rounded.items()
    }
    if any(masters.swaps for found in owners.values() for masters in found):
        check_averages()
    named = [(copies_of(m), name, t) for m in module.modules() for name, t in own_tensors(m) if id(t) in rounded]
    kept = {id(t): copies.kept[name] for copies, name, t in named if copies is not None and name in copies.kept}
    # One value for each tensor, known here or not: all processes must broadcast the same list.
    values = {key: fp32_value(t, kept.get(key)) for key, t in rounded.items()}
    for key, masters in owners.items():
        known = masters[0].sent(rounded[key]) if masters else None
        values[key] = values[key] if known is None else known
    broadcast_values(values.values(), group, rank)
    for key, masters in owners.items():
        for one in masters:
            one.load(rounded[key], values[key])
    for copies, name, tensor in named:
        if copies is not None and copies.keeps and not owners[id(tensor)]:
            copies.keep(name, tensor, values[id(tensor)])
    for optimizer in session.adopted:
        optimizer._amp_state.masters.end_loading(list(rounded.values()))
