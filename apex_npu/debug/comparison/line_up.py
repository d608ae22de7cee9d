# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Matches the rows of two records, and computes the differences between matching rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from apex_npu.debug.comparison.recorded import Row, TensorRow
from apex_npu.debug.comparison.report import ComparedRow, Distance


def line_up(reference: Sequence[Row], candidate: Sequence[Row]) -> dict[int, int]:
    """Return the indices of rows of ``candidate``, each with the index of the same row of ``reference``.

    Rows of one kind, phase, module, operator, result and shape are matched in order if both have equally many of them.
    """
    theirs, ours = _by_key(reference), _by_key(candidate)
    alike = [(mine, theirs[key]) for key, mine in ours.items() if len(mine) == len(theirs.get(key, ()))]
    return dict(sorted(pair for mine, others in alike for pair in zip(mine, others, strict=True)))


def _by_key(rows: Sequence[Row]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault((row.kind, row.phase, row.module, row.operator, row.result, row.shape), []).append(i)
    return found


def difference(reference: Row, candidate: Row) -> ComparedRow:
    """Return the difference between ``candidate`` and ``reference``, in float64, without a floor."""
    true, got = reference.exact.reshape(-1), candidate.exact.reshape(-1)
    count = max(true.numel(), 1)
    dtype = getattr(torch, candidate.dtype)
    largest, spacing = math.inf, 0.0
    if dtype.is_floating_point or dtype.is_complex:
        info = torch.finfo(dtype)
        largest, spacing = info.max / candidate.scale, info.smallest_normal * info.eps / candidate.scale
    same = (true == got) | (true.isnan() & got.isnan())  # inf in both, as in masks, is no difference
    nonfinite = int((~got.isfinite() & true.isfinite()).sum())
    held = true.isfinite() & got.isfinite()
    zero = torch.zeros_like(true)
    both_true, both_got = torch.where(held, true, zero), torch.where(held, got, zero)
    apart = (both_got - both_true).abs()
    # The norm and the ends of the range change by at most the norm of the difference.
    norms, lows, highs = (
        _moved(getattr(reference, name), getattr(candidate, name)) for name in ("norm", "low", "high")
    )
    moved = max(norms, lows, highs)
    norm = float(both_true.norm())
    distance = math.inf if math.isinf(moved) or bool((~held & ~same).any()) else float(apart.norm())
    whole = reference.norm if math.isfinite(reference.norm) else math.inf
    numel = max(math.prod(reference.shape), 1) * (2 if dtype.is_complex else 1)
    kept = Distance(distance, norm, spacing * math.sqrt(count))
    every = Distance(moved, whole, spacing * math.sqrt(numel))
    nonzero = both_true != 0
    product = norm * float(both_got.norm())
    return ComparedRow(
        **{one.name: getattr(candidate, one.name) for one in fields(TensorRow)},
        reference_dtype=reference.dtype,
        max_abs=math.inf if math.isinf(distance) else max(float(apart.max()) if apart.numel() else 0.0, lows, highs),
        relative=math.inf if math.isinf(distance) else max(kept.relative, every.relative),
        max_relative=float((apart[nonzero] / both_true[nonzero].abs()).max()) if bool(nonzero.any()) else 0.0,
        cosine=float(both_true @ both_got) / product if product else 1.0 if not distance else 0.0,
        saturated=int((got.abs() == largest).sum()) / count,
        nonfinite=nonfinite / count,
        new_zeros=int(((got == 0) & (true != 0)).sum()) / count,
        kept=kept,
        all=every,
    )


def _moved(true: float, got: float) -> float:
    """Return the distance of two numbers; inf if only one is finite, or if both are not finite and differ."""
    if math.isfinite(true) and math.isfinite(got):
        return abs(got - true)
    return 0.0 if true == got or (math.isnan(true) and math.isnan(got)) else math.inf
