# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``compare`` says: as text, and as a picture."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from apex_npu.debug.text import aligned, listed

_NAMED = 5
HEAD = ("phase", "module", "operator", "shape", "dtype", "error", "floor", "ratio", "largest", "cosine")


@dataclass
class ComparedRow:
    """A tensor of the candidate beside that of the reference.

    Attributes:
        kind: ``"operator"``, ``"module"``, ``"gradient"`` of a parameter, or ``"buffer"``.
        phase: ``"forward"``, ``"backward"``, ``"recompute"``, ``"block"`` or ``"after backward"``.
        module: The innermost module that it is part of, or the name of the parameter or buffer; None: of none.
        operator: The operator, or the class of the module.
        call: How many such rows of the candidate come before it.
        result: Which of several results.
        shape: Its shape.
        dtype: In the candidate.
        reference_dtype: In the reference.
        place: The line of code.
        source: Its text.
        norm: In the candidate, divided by the loss scale in backward; as ``low`` and ``high``.
        low: The smallest element.
        high: The largest.
        zeros: How many elements are 0.
        max_abs: The largest difference.
        relative: The norm of the difference over the norm of the reference.
        max_relative: The largest difference of an element over its magnitude in the reference.
        cosine: Of the angle between the two.
        saturated: The share of elements at the largest magnitude of the dtype.
        nonfinite: The share of elements that are inf or nan, and are not in the reference.
        new_zeros: The share of elements that are 0, and are not in the reference.
        floor: ``relative`` of the floor; None: there is none.
        ratio: The error over that of the floor, or over what is taken for it.
        resolution: The smallest ``relative`` that would be blamed.
    """

    kind: str
    phase: str
    module: str | None
    operator: str
    call: int
    result: int
    shape: tuple[int, ...]
    dtype: str
    reference_dtype: str
    place: str
    source: str
    norm: float
    low: float
    high: float
    zeros: int
    max_abs: float
    relative: float
    max_relative: float
    cosine: float
    saturated: float
    nonfinite: float
    new_zeros: float
    floor: float | None = None
    ratio: float | None = None
    resolution: float | None = None

    @property
    def where(self) -> str:
        """The module in words."""
        return where_of(self.module)

    @property
    def what(self) -> str:
        """The operator in words."""
        nth = f" #{self.call}" if self.call and self.kind == "operator" else ""
        result = f" result {self.result}" if self.result else ""
        return f"{self.operator}{nth}{result}"

    @property
    def dtypes(self) -> str:
        """The dtype, and that of the reference where it is another."""
        return self.dtype if self.dtype == self.reference_dtype else f"{self.reference_dtype} → {self.dtype}"

    def cells(self) -> tuple[str, ...]:
        """For the columns of ``HEAD``."""
        floor, ratio = ("" if value is None else _short(value) for value in (self.floor, self.ratio))
        return (
            *(self.phase, self.where, self.what, str(list(self.shape)), self.dtypes),
            *(_short(self.relative), floor, ratio, _short(self.max_abs), f"{self.cosine:.6f}"),
        )

    def __str__(self) -> str:
        place = f"  {self.place}  {self.source}" if self.place else ""
        return f"{self.phase}  {self.where}  {self.what}  {self.dtypes} {list(self.shape)}{place}"


def where_of(module: str | None) -> str:
    """The name of a module in words."""
    return "outside of modules" if module is None else module or "the model itself"


class Compared(Protocol):
    """What is shown; see ``Comparison``."""

    rows: list[ComparedRow]
    first: ComparedRow | None
    differing: list[str]
    extra: list[str]
    unmatched: dict[str, list[str]]
    names: list[str]
    about: list[str]
    notes: list[str]


def _short(value: float) -> str:
    return f"{value:.2e}" if value and (abs(value) < 0.01 or abs(value) >= 1e4) else f"{value:.3g}"


def verdict_of(comparison: Compared) -> list[str]:
    """What is to be known before the table: its limits, and what differs, where the runs part, or that they do not."""
    return [*comparison.notes, *_verdict_of(comparison)]


def _verdict_of(comparison: Compared) -> list[str]:
    if comparison.differing:
        return [*comparison.differing, "no operator is blamed: these iterations do not compute the same"]
    first = comparison.first
    if first is not None:
        lines = [
            f"they part at  {first}",
            f"its error is {_short(first.relative)}, {_short(first.ratio or 0.0)} times what the floor explains; "
            f"resolution here {_short(first.resolution or 0.0)}",
        ]
        shares = [
            f"{100 * share:.3g} % {text}"
            for share, text in (
                (first.nonfinite, "inf or nan"),
                (first.saturated, "at the largest number of the dtype"),
                (first.new_zeros, "0 where the reference is not"),
            )
            if share
        ]
        if math.isinf(first.relative) and not first.nonfinite:
            lines.append("elements that are inf or nan in only one of the two are not among those that the files keep")
        if comparison.extra:
            lines.append(f"right before it, only in the candidate: {'; '.join(comparison.extra[-_NAMED:])}")
        return lines + ([f"of its elements: {', '.join(shares)}"] if shares else [])
    if len(comparison.names) < 3:
        return ["no verdict: a floor, which is the candidate's level on a trusted device, tells which errors are usual"]
    judged = [row for row in comparison.rows if row.resolution is not None and math.isfinite(row.resolution)]
    seen = [
        f"{phase} {_short(median(row.resolution or 0.0 for row in judged if row.phase == phase))}"
        for phase in dict.fromkeys(row.phase for row in judged)
    ]
    return [f"no row parts; the resolution, a relative error that would be seen in half of the rows: {', '.join(seen)}"]


def summary_of(comparison: Compared) -> list[str]:
    """The files, and what is lined up."""
    roles = ("reference", "candidate", "floor")
    width = max(map(len, comparison.names))
    lines = [
        f"{role:9}  {name:{width}}  {about}"
        for role, name, about in zip(roles, comparison.names, comparison.about, strict=False)
    ]
    kinds = [(kind, sum(row.kind == kind for row in comparison.rows)) for kind in _plural]
    lines.append(f"lined up: {', '.join(f'{count} {_plural[kind]}' for kind, count in kinds)}")
    for side, titles in comparison.unmatched.items():
        if titles:
            lines.append(f"only in the {side}: {listed(titles, '; ')}")
    return lines


_plural = {
    "operator": "results of operators",
    "module": "outputs of modules",
    "gradient": "gradients of parameters",
    "buffer": "buffers",
}


def rows_to_show(comparison: Compared, count: int) -> list[ComparedRow]:
    """The ``count`` rows with the largest ratio, or without a floor the largest error, in the order of execution."""

    def size(row: ComparedRow) -> tuple[bool, float]:
        return row is comparison.first, row.relative if row.ratio is None else row.ratio

    shown = {id(row) for row in sorted(comparison.rows, key=size, reverse=True)[:count]}
    return [row for row in comparison.rows if id(row) in shown]


def table_of(rows: Sequence[ComparedRow], first: ComparedRow | None) -> Iterator[str]:
    """A line for each of ``rows``; that of ``first`` is marked."""
    for line, row in zip(aligned([HEAD, *(row.cells() for row in rows)], left=5), (None, *rows), strict=True):
        yield line + ("  ← first" if row is not None and row is first else "")


def lines_of(comparison: Compared, count: int) -> Iterator[str]:
    """All that is said, with ``count`` rows."""
    shown = rows_to_show(comparison, count)
    yield from lines_before(comparison)
    if shown:
        yield ""
        yield from table_of(shown, comparison.first)
    yield from lines_after(comparison, shown)


def lines_before(comparison: Compared) -> list[str]:
    """What is said before the table."""
    return [*verdict_of(comparison), "", *summary_of(comparison)]


def lines_after(comparison: Compared, shown: Sequence[ComparedRow]) -> list[str]:
    """What is said after a table of the rows ``shown``."""
    left = len(comparison.rows) - len(shown)
    return [f"and {left} more; --html and to_html show all"] if left else []


def plot(comparison: Compared, path: str | os.PathLike[str] | io.BytesIO) -> None:
    """See ``Comparison.plot``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install apex_npu[debug]") from error
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    rows = comparison.rows
    smallest = 2.0**-24
    for phase in dict.fromkeys(row.phase for row in rows):
        own = [i for i, row in enumerate(rows) if row.phase == phase]
        axes.scatter(own, [min(max(rows[i].relative, smallest), 10.0) for i in own], s=14, label=phase, zorder=3)
    with_floor = [i for i, row in enumerate(rows) if row.resolution is not None and math.isfinite(row.resolution)]
    if with_floor:
        limits = [min(rows[i].resolution or 0.0, 10.0) for i in with_floor]
        axes.step(with_floor, limits, where="mid", color="gray", linewidth=1, label="what the floor explains, times 4")
    first = comparison.first
    if first is not None:
        at = next(i for i, row in enumerate(rows) if row is first)
        level = min(max(first.relative, smallest), 10.0)
        axes.axvline(at, color="crimson", linewidth=1)
        side = "right" if at > len(rows) / 2 else "left"
        text = f" {first.where}, {first.what} "
        axes.annotate(
            text, (at, level), xytext=(0, 8), textcoords="offset points", ha=side, color="crimson", parse_math=False
        )
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xlabel("rows in the order of execution")
    axes.set_ylabel("relative error")
    axes.set_title(f"{comparison.names[1]} beside {comparison.names[0]}", parse_math=False)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(path)
