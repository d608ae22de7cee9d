# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The float32 values of low-precision tensors without masters: frozen weights, and buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from apex_npu._extension import REBUILD, extension
from apex_npu.amp.float32_copies import ModuleCopies, copies_of, low_tensors
from apex_npu.amp.masters import fp32_value
from apex_npu.amp.scaler import LossScaler
from apex_npu.backends import for_device
from apex_npu.distributed.consistency import broadcast_values
from apex_npu.ops import LOW_PRECISION

# The number of bytes above which kept values are announced.
_ANNOUNCED = 2**30
# The entries of the state dict of a loss scaler.
_OF_SCALER = ("loss_scale", "unskipped", "overflows_in_a_row")


def keep_values(models: Sequence[nn.Module], before: Mapping[int, Tensor], with_master: Collection[int]) -> list[str]:
    """Keep the float32 values of cast tensors without a master, for state dicts and for later masters.

    The values are kept in host memory, unless low precision holds them exactly. A buffer becomes float32 again if low
    precision turns a value into inf or 0. A 0-dim buffer also does so if low precision does not hold it exactly, since
    type promotion ignores it. A larger float32 buffer would make all results float32, which the next layer does not
    accept.

    Args:
        models: Models that have been cast, and passed to ``show_float32``.
        before: ``id(tensor)`` → its value before the cast.
        with_master: The identities of the parameters that have masters.

    Returns:
        The texts to print.

    Raises:
        RuntimeError: A parameter has a value that becomes inf.
    """
    said: list[str] = []
    stay: list[str] = []
    inexact: list[str] = []
    nbytes = 0
    cast = list(_cast_tensors(models))
    # Masters hold the values of most tensors, so that one look is enough. bfloat16 has the range of float32.
    suspects = [t for *_, t in cast if id(t) in with_master and t.dtype == torch.float16]
    suspects = suspects if _any_inf(suspects) else []
    unexamined = set(with_master).difference(map(id, suspects))
    for full_name, copies, name, tensor in cast:
        if id(tensor) in unexamined:
            continue
        value = before[id(tensor)]
        overflows, vanishes, differs = _changes(tensor, value)
        dtype = str(tensor.dtype).removeprefix("torch.")
        is_buffer = name in copies.module._buffers
        if is_buffer and (overflows or vanishes or (differs and value.dim() == 0)):
            tensor.data = value
            stay.append(full_name)
        elif overflows:
            raise RuntimeError(
                f"parameter {full_name} has finite values of up to {value.abs().max():.4g}, which are inf in {dtype} "
                f"(at most {torch.finfo(tensor.dtype).max:.4g}): rescale it, or use O1, or O4 or O5, whose bfloat16 "
                "has the range of float32. Nothing has been changed"
            )
        elif copies.link.keeps and differs and id(tensor) not in with_master:
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


def _cast_tensors(models: Sequence[nn.Module]) -> Iterator[tuple[str, ModuleCopies, str, Tensor]]:
    """Yield the low-precision tensors of cast ``models``: full name, module's copies, name in the module, tensor."""
    for prefix, module in chain.from_iterable(model.named_modules() for model in models):
        copies = copies_of(module)
        if copies is not None:
            for name, tensor in low_tensors(module):
                yield f"{prefix}.{name}".removeprefix("."), copies, name, tensor


@torch.no_grad()
def _any_inf(tensors: Sequence[Tensor]) -> bool:
    """Return whether a value is inf. Waits once for each device."""
    flags: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        values = for_device(tensor.device).in_base_format(tensor.detach())
        flags.setdefault(tensor.device, []).append(values.isinf().any())
    return any(bool(torch.stack(found).any()) for found in flags.values())


@torch.no_grad()
def _changes(tensor: Tensor, value: Tensor) -> list[bool]:
    """Return whether in the cast ``tensor`` finite elements of ``value`` are inf, nonzero ones 0, or any differ."""
    # Weights in tiled formats use other operators, and some operators do not exist for them.
    now, value = map(for_device(tensor.device).in_base_format, (tensor.detach(), value))
    questions = (now.isinf() & value.isfinite(), (now == 0) & (value != 0), now.to(value.dtype) != value)
    changes: list[bool] = torch.stack([question.any() for question in questions]).tolist()
    return changes


def check_averages() -> None:
    """Require the C++ extension: an assignment to ``Tensor.data`` would lose the hooks of DistributedDataParallel."""
    if extension is None:
        raise RuntimeError(
            "DistributedDataParallel would not average the gradients of 16-bit parameters whose float32 values amp "
            f"keeps: that needs apex_npu's C++ extension. Build it ({REBUILD}), or use opt_level O1 or O4"
        )


def follow_broadcast(
    adopted: Collection[Any],
    scalers: Sequence[LossScaler],
    module: nn.Module,
    sent: Sequence[Tensor],
    group: Any,
    rank: int,
) -> None:
    """Set masters, kept values and dynamic loss scales to those of the process whose values were broadcast.

    At the end of DistributedDataParallel's ``join``, processes may have run blocks alone, which have changed the scale.

    Args:
        adopted: The optimizers of the session, which have the masters.
        scalers: The loss scalers of the session.
        module: The module inside DistributedDataParallel.
        sent: The parameters and buffers of the module that were broadcast.
        group: The process group.
        rank: The rank of the sending process in ``group``.
    """
    rounded = {id(tensor): tensor for tensor in sent if tensor.dtype in LOW_PRECISION}
    cast = {id(t): (copies, name) for _, copies, name, t in _cast_tensors([module])}
    owners = {
        key: [masters for masters in (o._amp_state.masters for o in adopted) if masters.has(tensor)]
        for key, tensor in rounded.items()
    }
    if any(masters.swaps for found in owners.values() for masters in found):
        check_averages()
    # One value for each tensor, known here or not: all processes must broadcast the same list.
    values = {}
    for key, tensor in rounded.items():
        copies, name = cast.get(key, (None, ""))
        kept = None if copies is None else copies.kept.get(name)
        known = owners[key][-1].sent(tensor) if owners[key] else None
        values[key] = fp32_value(tensor, kept) if known is None else known
    for optimizer in adopted:
        optimizer._amp_state.resolve()
    states = [scaler.state_dict() for scaler in scalers]
    rows = [[float(state.get(name, 0)) for name in _OF_SCALER] for state in states]
    scales = torch.tensor(rows, dtype=torch.float32, device=sent[0].device if sent else None)
    broadcast_values([*values.values(), scales], group, rank)
    for scaler, numbers in zip(scalers, scales.tolist(), strict=True):
        if scaler.dynamic:
            scaler.load_state_dict(dict(zip(_OF_SCALER, numbers, strict=True)))
    for key, tensor in rounded.items():
        copies, name = cast.get(key, (None, ""))
        for masters in owners[key]:
            masters.load(tensor, values[key])
        if copies is not None and not owners[key]:
            copies.load(name, tensor, values[key])
    for optimizer in adopted:
        optimizer._amp_state.masters.end_loading(list(rounded.values()))
