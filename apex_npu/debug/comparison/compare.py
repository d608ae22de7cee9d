# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``compare``: matches two records of the same iteration, and finds the first row where they diverge."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from apex_npu.debug.comparison.recorded import Held, Recorded, Row, TensorRow, load
from apex_npu.debug.comparison.report import ComparedRow, Comparison, Distance
from apex_npu.debug.text import listed, where_of

# Smaller errors of the floor are raised to this value; a row is blamed above this multiple of its floor.
_SMALLEST, _TIMES = 2.0**-12, 4.0
# The error of fewer elements varies too much by chance to serve as a floor.
_FEW = 16
# Draws of float32 and of bfloat16 are equal if no element differs by more than rounding does, with a margin.
_ROUNDING = 2.0**-6


def compare(
    reference: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    *,
    floor: str | os.PathLike[str] | None = None,
) -> Comparison:
    r"""Compare the results of two runs in an iteration that both have recorded with the same weights and batch.

    Rows are matched by module, operator and shape. For each row the error of the candidate is

    .. math:: \|c - r\| / \|r\|

    in float64, over the elements that are kept. A floor is a record of the candidate's level on a trusted device. With
    it, a row has the ratio of its error to the error of the floor, or to 2^-12 if that is more. The runs diverge at the
    operator or module of the first row, in the order of execution, whose ratio is above 4. A result of fewer than 16
    elements also uses the floor of the row before it.

    Args:
        reference: A file of ``record``, for example of O0 on the CPU.
        candidate: Another file of ``record``, for example of O1 on an NPU.
        floor: A file of the candidate's level, for example of O1 on the CPU. None shows values and blames no row.

    Returns:
        A ``Comparison`` with ``first``, ``rows``, ``differing``, ``unmatched``, ``plot(path)``, ``to_html(path)``.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A file was not written by ``record``; the files have different models or numbers of samples; no row
            of one is in the other; or the floor has another level than the candidate.

    Example::

        >>> c = amp.debug.compare("cpu_O0.pt", "npu_O1.pt", floor="cpu_O1.pt")  # doctest: +SKIP
        >>> print(c)  # doctest: +SKIP
    """
    paths = [os.fspath(path) for path in (reference, candidate, *([] if floor is None else [floor]))]
    first, *others = records = [load(path) for path in paths]
    second = others[0]
    for other, path in zip(others, paths[1:], strict=True):
        _check_comparable(first, other, (paths[0], path))
    if floor is not None and records[2].level != second.level:
        raise ValueError(
            f"floor={paths[2]} was recorded at level {records[2].level or 'none'}, but {paths[1]} at "
            f"{second.level or 'none'}: record the floor at the level of the candidate"
        )
    matched = [line_up(first.rows, other.rows) for other in others]
    compared = list(zip(others, paths[1:], matched, strict=True))
    differing = [f"{path}: {text}" for other, path, rows in compared for text in _what_differs(first, other, rows)]
    for other, path, rows in compared:
        if not differing and not any(other.rows[i].kind in ("operator", "module") for i in rows):
            raise ValueError(f"no operator and no module of {path} is in {paths[0]}: was the same iteration recorded?")
    found = _differences(first, second, matched[0])
    if floor is not None:
        floors = {matched[1][i]: one for i, one in _differences(first, records[2], matched[1]).items()}
        before = 0.0
        for i, row in found.items():
            if matched[0][i] in floors:
                before = _set_floor(row, floors[matched[0][i]], before)
    known = set(matched[0].values())
    unmatched = {
        "reference": [_title(row) for i, row in enumerate(first.rows) if i not in known],
        "candidate": [_title(row) for i, row in enumerate(second.rows) if i not in matched[0]],
    }
    blamed = [i for i, row in found.items() if row.ratio is not None and row.ratio > _TIMES and not differing]
    first_row = found[blamed[0]] if blamed else None
    about = [_about(record) for record in records]
    unjudged = [_title(second.rows[i]) for i, row in found.items() if floor is not None and row.ratio is None]
    notes = list(_notes(records, paths, unjudged))
    return Comparison(list(found.values()), first_row, differing, unmatched, paths, about, notes)


def _differences(reference: Recorded, other: Recorded, matched: Mapping[int, int]) -> dict[int, ComparedRow]:
    """Return the differences between the ``matched`` rows of ``other`` and ``reference``, by index in ``other``."""
    pairs = ((i, reference.rows[k], other.rows[i]) for i, k in matched.items())
    return {i: difference(true, row) for i, true, row in pairs if row.kind != "random"}


def _set_floor(row: ComparedRow, floor: ComparedRow, before: float) -> float:
    """Set the ``floor``, the ``ratio`` and the ``resolution`` of ``row`` by the same row of the floor.

    ``before`` is the relative error of the last floor with enough elements; return it for the next row.
    """
    row.floor = floor.relative
    if math.isinf(floor.kept.value):  # no error is larger
        row.ratio, row.resolution = 1.0 if math.isinf(row.kept.value) else 0.0, math.inf
        return before
    relative = _SMALLEST if math.isinf(floor.relative) else max(floor.relative, _SMALLEST)
    if math.prod(row.shape) < _FEW:
        relative = max(relative, before)
    else:
        before = relative
    judged = (_judged(row.kept, floor.kept, relative), _judged(row.all, floor.all, relative))
    row.ratio, row.resolution = max(judged, key=lambda found: found[0])
    return before


def _judged(apart: Distance, floor: Distance, relative: float) -> tuple[float, float]:
    """Return the ratio of ``apart`` to the usual error, and the smallest relative error that is blamed."""
    if math.isinf(apart.norm):
        return 0.0, math.inf
    limit = max(floor.value, relative * apart.norm, apart.spacing)
    ratio = apart.value / limit if limit else math.inf if apart.value else 0.0
    return ratio, _TIMES * limit / apart.norm if apart.norm else math.inf


def _notes(records: Sequence[Recorded], paths: Sequence[str], unjudged: Sequence[str]) -> Iterator[str]:
    """Yield the limits of the comparison of ``records``; the floor lacks the rows with the titles ``unjudged``."""
    for record, path in zip(records, paths, strict=True):
        yield from (f"{path}: {note}" for note in record.notes)
    scales = [f"{path} has {record.scale:g}" for record, path in zip(records, paths, strict=True)]
    if len({record.scale for record in records}) > 1:
        yield (
            f"the loss scales differ: {', '.join(scales)}; gradients are divided by them before the comparison, but "
            "overflow and underflow at other values: use the same static loss_scale in all runs"
        )
    if unjudged:
        yield f"{listed(unjudged)}: not judged, as {paths[2]} has no such row"


def _title(row: Row) -> str:
    return f"{row.phase}  {where_of(row.module)}  {row.operator} {list(row.shape)}"


def _about(record: Recorded) -> str:
    level = record.level or "without amp"
    return f"{level} on {record.device}, loss scale {record.scale:g}, torch {record.versions.get('torch', 'unknown')}"


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


def _check_comparable(reference: Recorded, other: Recorded, names: tuple[str, str]) -> None:
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


def _what_differs(reference: Recorded, other: Recorded, matched: Mapping[int, int]) -> list[str]:
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
