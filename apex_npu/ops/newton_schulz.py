# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Newton-Schulz iterations on the matrices of a flat buffer, with batched products for matrices of equal shape.

Almost all of the work is in torch's products, so a separate kernel would not help. The number of launches depends on
the number of different shapes, not on the number of matrices.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from apex_npu.ops.gather import cat_into, cats_lists
from apex_npu.ops.reference import chunk_numel, wide_dtype

logger = logging.getLogger("apex_npu")

# On a CPU, a batch should stay in the cache of a core; products of larger matrices are as fast one by one.
_BATCH_NUMEL = 1 << 19
_ALONE_NUMEL = 1 << 16


class Stack(NamedTuple):
    """Matrices of equal shape in a flat buffer.

    Attributes:
        rows: The rows of each, as in memory.
        columns: The columns of each.
        factor: The factor of their results.
        members: The indices of the matrices.
    """

    rows: int
    columns: int
    factor: float
    members: list[int]


class Matrices(NamedTuple):
    """Memory for a step of the matrices of a flat buffer, in the same layout.

    Attributes:
        flat: 1-D, as long as the buffer; zeros between matrices.
        pieces: The matrices in ``flat``, each 1-D.
        gaps: The number of elements between each matrix and the next.
        stacks: The matrices that are stepped together; empty matrices are in no stack.
        zeros: 1-D, of the dtype of the products; at least as many as the largest gap.
    """

    flat: Tensor
    pieces: list[Tensor]
    gaps: list[int]
    stacks: list[Stack]
    zeros: Tensor

    @staticmethod
    def of(
        shapes: Sequence[tuple[int, int]], offsets: Sequence[int], factors: Sequence[float], param: Tensor
    ) -> Matrices:
        """Allocate for matrices of ``shapes`` at ``offsets``, which begin with 0, in buffers like ``param``."""
        ends = [*offsets[1:], param.numel()]
        sizes: list[int] = []
        stacks: dict[tuple[int, int, float], Stack] = {}
        for i, ((rows, columns), factor, begin, end) in enumerate(zip(shapes, factors, offsets, ends, strict=True)):
            sizes += [rows * columns, end - begin - rows * columns]
            if rows * columns:
                stacks.setdefault((rows, columns, factor), Stack(rows, columns, factor, [])).members.append(i)
        flat = new_directions(param)
        zeros = param.new_zeros(max(sizes[1::2], default=0), dtype=product_dtype(param.device))
        return Matrices(flat, list(flat.split_with_sizes(sizes)[::2]), sizes[1::2], list(stacks.values()), zeros)


def new_directions(param: Tensor) -> Tensor:
    """Return zeros for the directions of a step of ``param``, a flat buffer."""
    dtype = wide_dtype(param.dtype)
    # Kernels of the CPU write the dtype of the products, unless they compute in float64.
    narrow = param.device.type == "cpu" and dtype == torch.float32
    return param.new_zeros(param.numel(), dtype=product_dtype(param.device) if narrow else dtype)


@functools.cache
def product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16, or float32 if ``device`` has no batched products of bfloat16."""
    try:
        ones = torch.ones(1, 16, 16, dtype=torch.bfloat16, device=device)
        product = torch.bmm(ones, ones)
        found = float(torch.baddbmm(product, product, ones).max())
    except RuntimeError as error:
        because = str(error)
    else:
        if found == 16 + 16**2:
            return torch.bfloat16
        because = f"a product is {found} instead of {16 + 16**2}"
    logger.info("apex_npu: %s has no bfloat16 products; Newton-Schulz iterations run in float32: %s", device, because)
    return torch.float32


def orthogonalize_(matrices: Matrices, *, coefficients: Sequence[float], steps: int, eps: float) -> None:
    """Replace each matrix by ``factor`` times its ``newton_schulz``.

    Args:
        matrices: The matrices.
        coefficients: a, b and c of ``newton_schulz``.
        steps: The number of iterations.
        eps: The smallest divisor.
    """
    flat, pieces, dtype = matrices.flat, matrices.pieces, matrices.zeros.dtype
    joins = cats_lists(flat.device)
    results = [matrices.zeros[:0]] * len(pieces)
    for rows, columns, factor, members in matrices.stacks:
        count = _batch_size(rows * columns, flat.device)
        for batch in (members[i : i + count] for i in range(0, len(members), count)):
            in_place = len(batch) == 1 and flat.dtype == dtype and not joins
            x = pieces[batch[0]] if in_place else _gathered([pieces[i] for i in batch], dtype, joins=joins)
            x = x.view(-1, rows, columns) if len(batch) > 1 else x.view(rows, columns)
            x = newton_schulz(x, coefficients=coefficients, steps=steps, eps=eps, factor=factor)
            if joins:
                for i, row in zip(batch, x.view(len(batch), -1).unbind(), strict=True):
                    results[i] = row
            elif not in_place:
                torch._foreach_copy_([pieces[i] for i in batch], list(x.view(len(batch), -1).unbind()))
    if joins:
        cat_into(flat, results, matrices.gaps, matrices.zeros)


def orthogonalize_stack_(
    stack: Tensor, *, coefficients: Sequence[float], steps: int, eps: float, factor: float
) -> None:
    """Replace each matrix of ``stack`` by its ``newton_schulz``, which has the arguments."""
    for batch in stack.split(_batch_size(stack[0].numel(), stack.device)):
        x = batch if len(batch) > 1 else batch[0]
        newton_schulz(x, coefficients=coefficients, steps=steps, eps=eps, factor=factor)


def _gathered(pieces: list[Tensor], dtype: torch.dtype, *, joins: bool) -> Tensor:
    """Return copies of ``pieces`` in rows, of ``dtype``."""
    if joins:
        return torch.stack(pieces).to(dtype)
    rows = pieces[0].new_empty(len(pieces), pieces[0].numel(), dtype=dtype)
    torch._foreach_copy_(list(rows.unbind()), pieces)
    return rows


def newton_schulz(x: Tensor, *, coefficients: Sequence[float], steps: int, eps: float, factor: float = 1.0) -> Tensor:
    """Move the singular values of matrices close to 1: U diag(s) Vᵀ becomes about U Vᵀ, without a decomposition.

    ::

        x ← x / max(‖x‖, eps)
        A = x xᵀ;  x ← a · x + (b · A + c · A A) x      ``steps`` times
        A = xᵀx;   x ← a · x + x (b · A + c · A A)      where x has more rows than columns: A is the smaller of both

    where ‖x‖ is the Frobenius norm of each matrix. An iteration applies a · s + b · s³ + c · s⁵ to all singular values.

    Args:
        x: One matrix, or a stack of them; the result is written into it.
        coefficients: a, b and c.
        steps: The number of iterations.
        eps: The smallest divisor.
        factor: The factor of the result.

    Returns:
        ``x``.
    """
    if x.dim() == 2 and x.size(0) > x.size(1):  # a single matrix is faster transposed, a stack is not
        newton_schulz(x.T, coefficients=coefficients, steps=steps, eps=eps, factor=factor)
        return x
    multiply, multiply_add = (torch.mm, torch.addmm) if x.dim() == 2 else (torch.bmm, torch.baddbmm)
    tall = x.size(-2) > x.size(-1)
    a, b, c = coefficients
    given = x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=eps))
    size = min(x.shape[-2:])
    gram, polynomial = (x.new_empty(*x.shape[:-2], size, size) for _ in range(2))
    diagonal = polynomial.diagonal(dim1=-2, dim2=-1)
    # torch does not read a tensor that it multiplies by a beta of 0; CANN does not guarantee this.
    results = [(x.new_zeros if x.device.type == "npu" else x.new_empty)(x.shape) for _ in range(min(2, steps))]
    # The term a · x is part of the product, which saves a copy of x: the polynomial is 1 + b/a · A + c/a · A A.
    scale = a or 1.0
    for step in range(1, steps + 1):
        last = step == steps
        multiply(*((x.mT, x) if tall else (x, x.mT)), out=gram)
        multiply_add(gram, gram, gram, beta=b / scale, alpha=c / scale, out=polynomial)
        if a:
            diagonal.add_(1.0)
        out = given if last and x is not given else results[step % 2 - 1]
        left, right = (x, polynomial) if tall else (polynomial, x)
        multiply_add(out, left, right, beta=0.0, alpha=scale * (factor if last else 1.0), out=out)
        x = out
    if not steps:
        x.mul_(factor)
    return x if x is given else given.copy_(x)


def _batch_size(numel: int, device: torch.device) -> int:
    """Return how many matrices of ``numel`` elements to batch; it bounds the memory for intermediate values."""
    if device.type != "cpu":
        return max(1, chunk_numel(device) // numel)
    return max(1, _BATCH_NUMEL // numel) if numel <= _ALONE_NUMEL else 1
