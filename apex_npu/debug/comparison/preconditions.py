# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks whether two records have the same iteration: models, batch, weights, and results of random operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from apex_npu.debug.comparison.recorded import Held, Recorded, Row
from apex_npu.debug.text import listed

# Draws of float32 and of bfloat16 are equal if no element differs by more than rounding does, with a margin.
_ROUNDING = 2.0**-6


def check_comparable(reference: Recorded, other: Recorded, names: tuple[str, str]) -> None:
    """Check that the files ``names`` have the same model and ``samples``.

    Raises:
        ValueError: The models or the numbers of samples differ.
    """
    if reference.samples != other.samples:
        raise ValueError(
            f"{names[1]} keeps samples={other.samples} elements of a tensor, but {names[0]} keeps "
            f"{reference.samples}: record both with the same number"
        )
    ours, theirs = ({(held.name, held.shape) for held in one.weights} for one in (reference, other))
    if ours != theirs:
        only = [
            f"only {name} has {listed(sorted(f'{n} {list(shape)}' for n, shape in mine - others))}"
            for name, mine, others in ((names[0], ours, theirs), (names[1], theirs, ours))
            if mine - others
        ]
        raise ValueError(f"{names[0]} and {names[1]} have different models: {'; '.join(only)}")


def what_differs(reference: Recorded, other: Recorded, matched: Mapping[int, int]) -> list[str]:
    """Return the differences between two iterations, in words; ``matched`` is the result of ``line_up`` for them."""
    found = []
    batch = list(_batch(reference.batch, other.batch))
    if batch:
        found.append(f"the batch differs: {listed(batch)}")
    mine, theirs = (sorted(one.weights, key=lambda held: held.name) for one in (reference, other))
    weights = [held.name for own, held in zip(mine, theirs, strict=True) if _differ(own, held)]
    if weights:
        found.append(f"the weights differ: {listed(weights)}; load the same state_dict in both")
    known = set(matched.values())
    # A device may draw by another operator, or in another form; then there is no matching row.
    alone = {row.module for k, row in enumerate(reference.rows) if row.kind == "random" and k not in known}
    drawn = [
        f"{row.operator} of {row.module or 'no module'}"
        for i, row in enumerate(other.rows)
        if row.kind == "random"
        and (_drawn_otherwise(reference.rows[matched[i]], row) if i in matched else row.module in alone)
    ]
    if drawn and not batch:
        hint = "set dropout to 0 in both runs, or on the same device the same seed"
        found.append(f"the results of random operators differ: {listed(drawn)}; {hint}")
    return found


def _batch(reference: list[Held], other: list[Held]) -> Iterator[str]:
    """Yield the tensors of the batch that differ: by the shape of an argument, or by the hash of the values."""
    given, given_there = _shapes_of_arguments(reference), _shapes_of_arguments(other)
    for name in [name for name in given_there if name in given]:
        if given[name] != given_there[name]:
            yield f"{name} is {', '.join(given[name])} and {', '.join(given_there[name])}"
    for kind in dict.fromkeys((held.shape, held.dtype) for held in other):
        mine = [held for held in reference if (held.shape, held.dtype) == kind]
        theirs = [held for held in other if (held.shape, held.dtype) == kind]
        # One of the two may read more: a level or a device copies what another uses directly.
        extra = Counter(h.digest for h in mine) - Counter(h.digest for h in theirs)
        others = Counter(h.digest for h in theirs) - Counter(h.digest for h in mine)
        if extra and others:
            for held in theirs:
                if held.digest in others:
                    yield f"{held.name} ({held.dtype} {list(held.shape)})"


def _shapes_of_arguments(batch: list[Held]) -> dict[str, list[str]]:
    """Return the shapes of the tensors of each argument, which may be a list."""
    found: dict[str, list[str]] = {}
    for held in batch:
        if held.name.startswith("argument"):
            found.setdefault(held.name, []).append(str(list(held.shape)))
    return found


def _differ(one: Held, other: Held) -> bool:
    """Return whether two weights differ by more than the rounding of one to the dtype of the other."""
    if one.dtype == other.dtype:
        return one.digest != other.digest
    if one.values is None or other.values is None:
        return False
    dtypes = [values.dtype for values in (one.values, other.values) if values.dtype.is_floating_point]
    infos = [torch.finfo(dtype) for dtype in dtypes]
    relative = sum(info.eps for info in infos) / 2
    spacing = max((info.smallest_normal * info.eps for info in infos), default=0.0)
    a, b = one.values.double(), other.values.double()
    tolerance = relative * torch.maximum(a.abs(), b.abs()) + spacing
    is_same = (((a - b).abs() <= tolerance) & tolerance.isfinite()) | (a.isnan() & b.isnan())
    for dtype in dtypes:  # a number may be rounded to inf
        is_same |= one.values.to(dtype).double() == other.values.to(dtype).double()
    return not bool(is_same.all())


def _drawn_otherwise(one: Row, other: Row) -> bool:
    a, b = one.exact, other.exact
    return bool(((a - b).abs() > _ROUNDING * torch.maximum(a.abs(), b.abs()) + _ROUNDING**3).any())
