# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Comparison``: the result of ``compare`` as objects, as text, as a picture and as a page."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from statistics import median
from typing import NamedTuple

from apex_npu.debug.comparison.recorded import Kind, TensorRow
from apex_npu.debug.text import aligned, listed, new_figure, where_of

HEAD = ("phase", "module", "operator", "shape", "dtype", "error", "floor", "ratio", "largest", "cosine")


class Distance(NamedTuple):
    """The distance of some elements of a tensor from those of the reference.

    Attributes:
        value: The norm of the difference.
        norm: The norm of the reference.
        spacing: The norm of a difference by the smallest subnormal number of the dtype in each element.
    """

    value: float
    norm: float
    spacing: float

    @property
    def relative(self) -> float:
        """The ratio of ``value`` to ``norm``."""
        return self.value / self.norm if self.norm else (math.inf if self.value else 0.0)


@dataclass
class ComparedRow(TensorRow):
    """A tensor of the candidate, compared with that of the reference.

    Errors are those of the kept elements, and at least the lower bound on all elements.

    Attributes:
        reference_dtype: The dtype in the reference; the attributes of ``TensorRow`` are those of the candidate.
        max_abs: The largest difference.
        relative: The norm of the difference over the norm of the reference; inf if only one of the two is finite.
        max_relative: The largest difference of an element over its magnitude in the reference.
        cosine: The cosine of the angle between the two.
        saturated: The share of elements at the largest magnitude of the dtype.
        nonfinite: The share of elements that are inf or nan, where those of the reference are not.
        new_zeros: The share of elements that are 0, where those of the reference are not.
        kept: The distance of the elements that are kept.
        all: A lower bound of the distance of all elements, from their norms and ranges.
        floor: The ``relative`` error of the floor; None without a floor.
        ratio: The error divided by that of the floor, or by the value used in its place.
        resolution: The smallest ``relative`` error that would be blamed.
    """

    reference_dtype: str
    max_abs: float
    relative: float
    max_relative: float
    cosine: float
    saturated: float
    nonfinite: float
    new_zeros: float
    kept: Distance
    all: Distance
    floor: float | None = None
    ratio: float | None = None
    resolution: float | None = None

    @property
    def where(self) -> str:
        """The name of the module, in words."""
        return where_of(self.module)

    @property
    def what(self) -> str:
        """The name of the operator, with the numbers of its call and result."""
        nth = f" #{self.call}" if self.call and self.kind == "operator" else ""
        result = f" result {self.result}" if self.result else ""
        return f"{self.operator}{nth}{result}"

    @property
    def is_judged(self) -> bool:
        """True if an error of some size would be blamed."""
        return self.resolution is not None and math.isfinite(self.resolution)

    @property
    def dtypes(self) -> str:
        """The dtype, preceded by that of the reference if the two differ."""
        return self.dtype if self.dtype == self.reference_dtype else f"{self.reference_dtype} → {self.dtype}"

    def cells(self) -> tuple[str, ...]:
        """Return the cells for the columns of ``HEAD``."""
        floor, ratio = ("" if value is None else _short(value) for value in (self.floor, self.ratio))
        return (
            *(self.phase, self.where, self.what, str(list(self.shape)), self.dtypes),
            *(_short(self.relative), floor, ratio, _short(self.max_abs), f"{self.cosine:.6f}"),
        )

    def __str__(self) -> str:
        place = f"  {self.place}  {self.source}" if self.place else ""
        return f"{self.phase}  {self.where}  {self.what}  {self.dtypes} {list(self.shape)}{place}"


@dataclass
class Comparison:
    """The result of ``compare``; ``print`` it.

    Attributes:
        rows: The rows that both records have, in the order of execution.
        first: The first of ``rows`` whose ``ratio`` is above 4. None if there is no such row, if there is no floor, or
            if ``differing`` says why no row can be blamed.
        differing: The differences between the iterations: in the batch, weights, or results of random operators.
        unmatched: The rows that only one of the two has, or has more often, by ``"reference"`` and ``"candidate"``.
        names: The files of the reference and the candidate, and of the floor, if any.
        about: The level, device, loss scale and torch version of each file.
        notes: The limits of the comparison: compiled code that ran eagerly, loss scales that differ, rows that the
            floor does not have.
    """

    rows: list[ComparedRow]
    first: ComparedRow | None
    differing: list[str]
    unmatched: dict[str, list[str]]
    names: list[str]
    about: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def parts(self) -> bool:
        """True if there is a ``first`` row, or the iterations are not the same."""
        return self.first is not None or bool(self.differing)

    def to_text(self, rows: int = 20) -> str:
        """Return the text that ``print`` shows, with at most ``rows`` rows."""
        return self._text(rows)

    def _text(self, rows: int, *, places: bool = False) -> str:
        return "\n".join([*self.notes, *self._verdict(), "", *self._summary(), *self._table(rows, places)])

    def __str__(self) -> str:
        return self.to_text()

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained page with the text, all rows and their lines of code into a file."""
        text = self._text(len(self.rows), places=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(_PAGE.format(title=escape(self._title()), text=escape(text)))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the errors of all rows into a file, ``.png`` or another format of matplotlib.

        Raises:
            ImportError: matplotlib is missing.
        """
        figure, axes = new_figure(10, 4.5)
        errors = [min(max(row.relative, 2.0**-24), 10.0) for row in self.rows]
        for phase in dict.fromkeys(row.phase for row in self.rows):
            own = [i for i, row in enumerate(self.rows) if row.phase == phase]
            axes.scatter(own, [errors[i] for i in own], s=14, label=phase, zorder=3)
        limits = [(i, min(row.resolution or 0.0, 10.0)) for i, row in enumerate(self.rows) if row.is_judged]
        if limits:
            label = "what the floor explains, times 4"
            axes.step(*zip(*limits, strict=True), where="mid", color="gray", linewidth=1, label=label)
        for at, first in enumerate(self.rows):
            if first is self.first:
                axes.axvline(at, color="crimson", linewidth=1)
                side = "right" if at > len(self.rows) / 2 else "left"
                text = f" {first.where}, {first.what} "
                axes.annotate(text, (at, errors[at]), ha=side, va="bottom", color="crimson", parse_math=False)
        axes.set_yscale("log")
        axes.margins(y=0.15)
        axes.set_xlabel("rows in the order of execution")
        axes.set_ylabel("relative error")
        axes.set_title(self._title(), parse_math=False)
        axes.legend(loc="best", fontsize="small")
        figure.savefig(path)

    def _title(self) -> str:
        return f"{self.names[1]} beside {self.names[0]}"

    def _verdict(self) -> list[str]:
        """Return what differs, and where the runs diverge, if they do."""
        if self.differing:
            return [*self.differing, "no operator is blamed: these iterations do not compute the same"]
        first = self.first
        if first is not None:
            lines = [
                f"they diverge at  {first}",
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
                lines.append(
                    "elements that are inf or nan in only one of the two are not among those that the files keep"
                )
            return lines + ([f"of its elements: {', '.join(shares)}"] if shares else [])
        if len(self.names) < 3:
            trusted = "a record of the candidate's level on a trusted device"
            return [f"no verdict: pass floor=, {trusted}, to tell which errors are usual"]
        judged = [row for row in self.rows if row.is_judged]
        seen = [
            f"{phase} {_short(median(row.resolution or 0.0 for row in judged if row.phase == phase))}"
            for phase in dict.fromkeys(row.phase for row in judged)
        ]
        resolution = "the resolution, the relative error that would be detected in half of the rows"
        return [f"no row diverges; {resolution}: {', '.join(seen)}"]

    def _summary(self) -> Iterator[str]:
        """Yield the lines about the files and the number of matched rows."""
        roles = ("reference", "candidate", "floor")
        yield from aligned(list(zip(roles, self.names, self.about, strict=False)), left=3)
        counts = Counter(row.kind for row in self.rows)
        yield f"matched: {', '.join(f'{counts[kind]} {plural}' for kind, plural in _PLURAL.items())}"
        for side, titles in self.unmatched.items():
            if titles:
                yield f"only in the {side}, or more often: {listed(titles, '; ')}"

    def _table(self, count: int, places: bool) -> Iterator[str]:
        """Yield the ``count`` rows with the largest ratio, or error without a floor; ``places``: with lines of code."""

        def size(row: ComparedRow) -> tuple[bool, float]:
            return row is self.first, row.relative if row.ratio is None else row.ratio

        largest = {id(row) for row in sorted(self.rows, key=size, reverse=True)[:count]}
        shown = [row for row in self.rows if id(row) in largest]
        if shown:
            head, *lines = aligned([HEAD, *(row.cells() for row in shown)], left=5)
            yield from ("", head)
            for line, row in zip(lines, shown, strict=True):
                place = f"  {row.place}  {row.source}".rstrip() if places else ""
                yield line + place + ("  ← first" if row is self.first else "")
        if len(shown) < len(self.rows):
            yield f"and {len(self.rows) - len(shown)} more; --html and to_html show all"


def _short(value: float) -> str:
    return f"{value:.2e}" if value and (abs(value) < 0.01 or abs(value) >= 1e4) else f"{value:.3g}"


_PLURAL: dict[Kind, str] = {
    "operator": "results of operators",
    "module": "outputs of modules",
    "gradient": "gradients of parameters",
    "buffer": "buffers",
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>:root {{ color-scheme: light dark; }}</style>
<body>
<pre>{text}</pre>
</body>
</html>
"""
