# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Matches the rows of two records, and computes the differences between matching rows."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TypeAlias

import torch

from apex_npu.debug.comparison.recorded import Row, TensorRow
from apex_npu.debug.comparison.report import ComparedRow, Distance

_Key: TypeAlias = "tuple[str | None, str, int, tuple[int, ...]]"


def line_up(reference: Sequence[Row], candidate: Sequence[Row]) -> dict[int, int]:
    """Return the indices of rows of ``candidate``, each with the index of the same row of ``reference``.

    Operators of a phase are matched in order, by module, operator, result and shape; an operator that only one of the
    two has is skipped. Other rows are matched by name and call, as autograd calls the hooks of a tensor in another
    order than those of a tensor and its cast.
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
        found.update(_in_order({i: _key(reference[i]) for i in theirs}, {i: _key(candidate[i]) for i in ours}))
    return dict(sorted(found.items()))


def _in_order(theirs: dict[int, _Key], ours: dict[int, _Key]) -> dict[int, int]:
    """Return the indices of ``ours``, each with the index of the same row of ``theirs``; the time is linear.

    Rows that both have equally often are matched in order; these are the anchors. The others are matched by their
    number since the last anchor before them.
    """
    counts = Counter(theirs.values()), Counter(ours.values())
    numbers: dict[_Key, deque[int]] = {}
    for i, key in theirs.items():
        numbers.setdefault(key, deque()).append(i)
    anchors = {i: numbers[key].popleft() for i, key in ours.items() if counts[0][key] == counts[1][key]}
    places = {other: i for i, other in anchors.items()}
    named = {(places.get(anchor, -1), key, n): i for i, (anchor, key, n) in _since(theirs, set(places))}
    between = {i: named[name] for i, name in _since(ours, set(anchors)) if name in named}
    return anchors | between


def _since(keys: dict[int, _Key], anchors: set[int]) -> Iterator[tuple[int, tuple[int, _Key, int]]]:
    """Yield the index of each row that is not an anchor, with the last anchor, its key, and its number since then."""
    last, seen = -1, Counter[_Key]()
    for i, key in keys.items():
        if i in anchors:
            last, seen = i, Counter()
        else:
            yield i, (last, key, seen[key])
            seen[key] += 1


def _key(row: Row) -> _Key:
    return row.module, row.operator, row.result, row.shape


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
