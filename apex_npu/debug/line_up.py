# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which row of one record is which of another, and how far two of them are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch

from apex_npu.debug.recorded import Row


def line_up(reference: Sequence[Row], candidate: Sequence[Row]) -> dict[int, int]:
    """The indices of rows of ``candidate``, each with that of the same row of ``reference``.

    Operators of a phase are lined up in their order, by module, operator, result and shape; one that only one of the
    two has is passed over. Others are known by their names and calls: autograd calls hooks of one tensor in another
    order than those of a tensor and of its cast.
    """
    found: dict[int, int] = {}
    for group in dict.fromkeys((row.kind, row.phase) for row in reference):
        theirs = [i for i, row in enumerate(reference) if (row.kind, row.phase) == group]
        ours = [i for i, row in enumerate(candidate) if (row.kind, row.phase) == group]
        if group[0] in ("module", "gradient", "buffer"):
            named = {(_key(reference[i]), reference[i].call): i for i in theirs}
            pairs = {i: named.get((_key(candidate[i]), candidate[i].call)) for i in ours}
            found.update((i, other) for i, other in pairs.items() if other is not None)
            continue
        matcher = SequenceMatcher(None, [_key(reference[i]) for i in theirs], [_key(candidate[i]) for i in ours], False)
        for begin, other, count in matcher.get_matching_blocks():
            found.update((ours[other + k], theirs[begin + k]) for k in range(count))
    return dict(sorted(found.items()))


def _key(row: Row) -> tuple[str | None, str, int, tuple[int, ...]]:
    return row.module, row.operator, row.result, row.shape


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from that of the reference, on the elements that are kept.

    Attributes:
        max_abs: The largest difference.
        relative: The norm of the difference over the norm of the reference; inf where only one of the two is finite.
        max_relative: The largest difference of an element over its magnitude in the reference.
        cosine: Of the angle between the two.
        saturated: The share of elements that are the largest number of the dtype, or its negative.
        nonfinite: The share of elements that are inf or nan, where those of the reference are not.
        new_zeros: The share of elements that are 0, where those of the reference are not.
        distance: The norm of the difference.
        norm: That of the reference.
        spacing: The norm of a difference by the least subnormal number of the dtype in each element.
    """

    max_abs: float
    relative: float
    max_relative: float
    cosine: float
    saturated: float
    nonfinite: float
    new_zeros: float
    distance: float
    norm: float
    spacing: float


def difference(reference: Row, candidate: Row) -> Difference:
    """How far ``candidate`` is from ``reference``, in float64."""
    true, got = reference.exact.reshape(-1), candidate.exact.reshape(-1)
    count = max(true.numel(), 1)
    dtype = getattr(torch, candidate.dtype)
    largest, spacing = math.inf, 0.0
    if dtype.is_floating_point or dtype.is_complex:
        info = torch.finfo(dtype)
        largest, spacing = info.max / candidate.scale, info.smallest_normal * info.eps / candidate.scale
    same = (true == got) | (true.isnan() & got.isnan())  # inf, as in masks, is no difference where both have it
    nonfinite = int((~got.isfinite() & true.isfinite()).sum())
    held = true.isfinite() & got.isfinite()
    zero = torch.zeros((), dtype=torch.float64)
    both_true, both_got = torch.where(held, true, zero), torch.where(held, got, zero)
    apart = (both_got - both_true).abs()
    norm = float(both_true.norm())
    distance = math.inf if bool((~held & ~same).any()) else float(apart.norm())
    nonzero = both_true != 0
    product = norm * float(both_got.norm())
    return Difference(
        max_abs=math.inf if math.isinf(distance) else float(apart.max()) if apart.numel() else 0.0,
        relative=distance / norm if norm else (math.inf if distance else 0.0),
        max_relative=float((apart[nonzero] / both_true[nonzero].abs()).max()) if bool(nonzero.any()) else 0.0,
        cosine=float(both_true @ both_got) / product if product else 1.0 if not distance else 0.0,
        saturated=int((got.abs() == largest).sum()) / count,
        nonfinite=nonfinite / count,
        new_zeros=int(((got == 0) & (true != 0)).sum()) / count,
        distance=distance,
        norm=norm,
        spacing=spacing * math.sqrt(count),
    )
