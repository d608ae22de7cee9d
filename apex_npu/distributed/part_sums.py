# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Norms of gradients and clipping, in one pass over each flat buffer, and sums over whole sharded tensors.

Parts of sharded tensors take one all-reduce of one vector for each process group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from apex_npu.distributed.consistency import all_reduce
from apex_npu.fusion import FlatGrads
from apex_npu.fusion.grad_slots import IN_BUFFER, InPlace
from apex_npu.fusion.shards import Along, cut_of, is_partial, is_sharded, local_grad, local_part, mesh_groups
from apex_npu.ops import norm, segmented, wide_dtype
from apex_npu.ops.gather import multiply_
from apex_npu.ops.grad_lists import is_grad_list


class PartSums:
    """Adds up numbers of parts of tensors over the processes that share each tensor.

    A number is added up only over the mesh dimensions over which its tensor is cut, so that replicas (HSDP) are not
    added up.
    """

    def __init__(self, params: Sequence[Tensor], along: Along = Along.ALL) -> None:
        """Prepare sums of one number for each of ``params``, in the same order on all processes.

        Args:
            params: DTensors, or plain tensors, whose numbers do not change. A tensor may be repeated.
            along: The argument of ``mesh_groups``.
        """
        columns: dict[int, list[int]] = {}
        groups: dict[int, tuple[object, str]] = {}
        known: dict[int, list[tuple[object, str]]] = {}
        for column, param in enumerate(params):
            if id(param) not in known:
                known[id(param)] = mesh_groups(param, along=along)
            for group, device_type in known[id(param)]:
                groups.setdefault(id(group), (group, device_type))
                columns.setdefault(id(group), []).append(column)
        self._steps = [
            (*groups[key], None if len(found) == len(params) else torch.tensor(found, device="cpu"))
            for key, found in columns.items()
        ]

    @torch.no_grad()
    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Return ``values``, with one entry per tensor in the last dimension, reduced over the tensor's processes."""
        for group, device_type, columns in self._steps:
            if columns is not None:
                columns = columns.to(values.device)
            part = values if columns is None else values.index_select(-1, columns)
            # A group communicates on the device of its mesh, not on a CPU that parameters are offloaded to.
            sent = part.to(device_type).contiguous()
            if sent.data_ptr() == values.data_ptr():
                sent = sent.clone()
            all_reduce(sent, op, group, of="norms of sharded parameters")
            found = sent.to(values.device)
            values = found if columns is None else values.index_copy(-1, columns, found)
        return values


@torch.no_grad()
def total_grad_norm(
    flats: Sequence[FlatGrads], unfused: Sequence[Tensor], norm_type: float = 2.0, found_inf: Tensor | None = None
) -> Tensor:
    """Return the norm that ``clip_grad_norm_`` returns, without clipping.

    Args:
        flats: Buffers of gradients. With ``found_inf``, no gradient may be sharded.
        unfused: Parameters whose gradients are in no buffer.
        norm_type: p of the p-norm.
        found_inf: The argument of ``ops.norm``, for the 2-norm only.
    """
    norm_type = float(norm_type)
    plain, cut = _operands(flats, unfused, norm_type, InPlace.READ)
    return _norm_of_whole(plain, cut, norm_type) if cut else _norm_of(plain, norm_type, found_inf)


@torch.no_grad()
def clip_grad_norm_(
    flats: Sequence[FlatGrads],
    unfused: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their common norm is at most ``max_norm``, without a host sync.

    Sharded parameters count as whole tensors, so all processes of their meshes must call this function.

    Args:
        flats: Buffers of gradients; all sharded parameters of one buffer are cut alike.
        unfused: Parameters whose gradients are in no buffer.
        max_norm: The largest norm, as in ``torch.nn.utils.clip_grad_norm_``.
        norm_type: p of the p-norm; inf, -inf and 0 mean the same as in torch's function.
        error_if_nonfinite: Raise if the norm is inf or nan (this syncs), instead of scaling with it as torch does.

    Returns:
        The norm before clipping, the same on all processes: 0-dim, float32 or wider; 0 without gradients.

    Raises:
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set; or a DTensor has a plain gradient.
            Nothing has been scaled.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    plain, cut = _operands(flats, unfused, norm_type, InPlace.WRITE)
    if not cut and len(plain) == 1 and not error_if_nonfinite and _is_flat(plain[0], norm_type):
        total, coefficient = segmented.norm_to_clip(plain[0], max_norm)
    else:
        total = _norm_of_whole(plain, cut, norm_type) if cut else _norm_of(plain, norm_type)
        coefficient = clip_coefficient(total, max_norm, norm_type, error_if_nonfinite)
    _multiply(flats, plain + [part for _, parts in cut for part in parts], total, coefficient)
    return total


def _operands(
    flats: Sequence[FlatGrads], unfused: Sequence[Tensor], norm_type: float, in_place: InPlace
) -> tuple[list[Tensor], list[tuple[Tensor, list[Tensor]]]]:
    """Return gradients in few pieces: whole ones, and the parts of each sharded parameter, or buffer of such."""
    shards, others = ([flat for flat in flats if flat.is_sharded is held] for held in (True, False))
    if norm_type != 2.0:
        unfused = [*unfused, *chain.from_iterable(flat.full_params for flat in shards)]
        shards = []
    plain = _whole_operands(others, [p for p in unfused if not is_sharded(p)], norm_type, in_place)
    cut = [(flat.full_params[0], flat.operands(in_place)) for flat in shards]
    grads = [_own_grad(p) for p in unfused if is_sharded(p) and p.grad is not None]
    cut += [(grad, [local_part(grad)]) for grad in grads]
    return plain, cut


def _own_grad(param: Tensor) -> Tensor:
    """Return the writable gradient of a DTensor, redistributed if processes hold addends."""
    assert param.grad is not None
    if is_partial(param.grad):
        param.grad = param.grad.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined]
    if not is_sharded(param.grad):
        local_grad(param)  # raises an error
    return param.grad


def _norm_of_whole(plain: Sequence[Tensor], cut: Sequence[tuple[Tensor, list[Tensor]]], p: float) -> Tensor:
    """Return the p-norm of ``plain`` and ``cut``: pairs of a DTensor and this process's parts, which are cut alike."""
    if p == 0.0:  # the number of tensors that are not all zeros, as in torch
        counts = torch.stack([torch.count_nonzero(part).float() for _, (part,) in cut])
        nonzero = (PartSums([like for like, _ in cut]).reduce(counts) != 0).sum().float()
        return nonzero + _norm_of(plain, p).to(nonzero.device)
    # One number for all tensors that are divided in the same way.
    alike: dict[tuple[int, ...] | None, tuple[Tensor, list[Tensor]]] = {}
    for like, parts in cut:
        alike.setdefault(cut_of(like), (like, []))[1].extend(part for part in parts if part.numel())
    first = cut[0][0]
    wide = torch.float32 if first.device.type == "npu" else torch.float64
    powers = torch.stack([_to_power(parts, p, wide, first.device) for _, parts in alike.values()])
    sums = PartSums([like for like, _ in alike.values()])
    op = dist.ReduceOp.SUM if math.isfinite(p) else dist.ReduceOp.MAX if p > 0 else dist.ReduceOp.MIN
    powers = torch.cat([sums.reduce(powers, op), _to_power(plain, p, wide, first.device).reshape(1)])
    if not math.isfinite(p):
        return (powers.max() if p > 0 else powers.min()).float()
    total = powers.sum()
    return (total.sqrt() if p == 2.0 else total ** (1.0 / p)).to(first.dtype if p == 2.0 else torch.float32)


def _to_power(grads: Sequence[Tensor], p: float, wide: torch.dtype, device: torch.device) -> Tensor:
    """Return the p-norm to the power of p, which can be added up; for infinite p the norm itself."""
    if not grads:
        return torch.full((), math.inf if p == -math.inf else 0.0, dtype=wide, device=device)
    norm = _norm_of(grads, p).to(device, wide)
    return norm if not math.isfinite(p) else norm.square() if p == 2.0 else norm**p


def _multiply(flats: Sequence[FlatGrads], grads: Sequence[Tensor], total: Tensor, coefficient: Tensor) -> None:
    """Multiply ``grads``, whose norm is ``total``, by ``coefficient``. They include the gradients of ``flats``."""
    if total.device.type == "cpu" and coefficient == 1.0:
        return  # multiplying would change nothing
    for grad in grads:
        multiply_(grad, coefficient.to(grad.device))
    if all(map(is_grad_list, grads)):
        return  # no padding is written
    # 0 times a nan coefficient leaves nan in the padding. On a CPU the check is free.
    if total.device.type != "cpu" or coefficient.isnan():
        for flat in flats:
            flat.memory.clear_padding()


def clip_coefficient(norm: Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Return the 0-dim factor that clips gradients of this norm.

    Raises:
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
    """
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients is non-finite ({norm.item()}), so it cannot be "
            "clipped. To scale with it anyway, set error_if_nonfinite=False"
        )
    return segmented.clip_coefficient(norm, max_norm)


def _whole_operands(
    flats: Sequence[FlatGrads], unfused: Sequence[Tensor], norm_type: float, in_place: InPlace
) -> list[Tensor]:
    """Return all gradients in few pieces."""
    found: list[Tensor] = []
    for flat in flats:
        if norm_type == 2.0:
            found += flat.operands(in_place)
        elif norm_type > 0:  # zeros in the padding add nothing; other "norms" count tensors or look for the smallest
            found += flat.operands(InPlace.NO)
        else:
            found += [view for view, state in zip(flat.views, flat.gather(), strict=True) if state == IN_BUFFER]
    return found + [p.grad.detach() for p in unfused if p.grad is not None]


def _norm_of(grads: Sequence[Tensor], norm_type: float, found_inf: Tensor | None = None) -> Tensor:
    """Return the norm of all ``grads`` together, 0-dim; for ``found_inf`` see ``ops.norm``."""
    # A gradient without elements has neither a largest nor a smallest one.
    grads = [grad for grad in grads if grad.numel() or 0 <= norm_type < math.inf]
    if not grads:
        return torch.tensor(0.0)
    norms = [_norm(grad, norm_type, found_inf) for grad in grads]
    if len(norms) == 1 and norm_type != 0.0:  # norm 0 counts tensors
        return norms[0]
    device, dtype = norms[0].device, max((n.dtype for n in norms), key=lambda d: d.itemsize)
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device, dtype) for n in norms]), norm_type)
    return total


def _is_flat(grad: Tensor, norm_type: float) -> bool:
    return norm_type == 2.0 and grad.dim() == 1 and (is_grad_list(grad) or grad.is_contiguous())


def _norm(grad: Tensor, norm_type: float, found_inf: Tensor | None) -> Tensor:
    if found_inf is not None:
        return norm(grad.reshape(-1), found_inf)
    total: Tensor = (
        norm(grad)
        if _is_flat(grad, norm_type)
        else torch.linalg.vector_norm(grad, norm_type, dtype=wide_dtype(grad.dtype))
    )
    return total
