# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``GradientRange``: counts the exponents of gradients, and compares them with the range of a dtype."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from apex_npu.debug.text import aligned, fitted, listed, name_of, new_figure

Counts: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

# The columns of a census: those between ``FIRST`` and ``NONFINITE`` are the exponents from -126 on.
ZERO, FIRST, NONFINITE = 0, 1, 255
BIAS = 127
# A gradient is copied to the host in pieces of 64 MiB.
_ELEMENTS = 2**24
# The share of the elements that are not zero that may lose bits.
_ACCEPTED = 0.01
# Binades above the smallest scale, as gradients of other batches are smaller.
_MARGIN = 2
_ROWS = 14
_NAMED = 5


def exponent_census(tensors: Sequence[Tensor], factor: float = 1.0) -> Counts:
    """Count the binary exponents of the elements of real ``tensors``, times ``factor``, as float32, in 256 columns.

    Element x is counted in column ``127 + floor(log2 |x|)``. Subnormal numbers of float32 are counted in column 1,
    zeros in column 0, inf and nan in column 255. The call waits for the device.
    """
    counts: Counts = np.zeros((len(tensors), 256), dtype=np.int64)
    for row, tensor in zip(counts, tensors, strict=True):
        for part in tensor.detach().reshape(-1).split(_ELEMENTS):
            scaled = part.cpu().float() * factor
            columns = (torch.frexp(scaled).exponent + (BIAS - 1)).clamp_(FIRST, NONFINITE - 1)
            columns.masked_fill_(scaled == 0, ZERO).masked_fill_(~scaled.isfinite(), NONFINITE)
            row += torch.bincount(columns, minlength=256).numpy()
    return counts


class ParameterRange:
    """The range of the elements of one gradient, or of all gradients.

    Attributes:
        name: The name of the parameter.
        counts: The number of elements with each binary exponent, as in ``exponent_census``; int64, (256,).
        scale_exponent: The exponent of two of the present loss scale.
        dtype: The dtype in which gradients are computed.
        elements: The number of elements.
        zeros: The number of elements that are zero.
        nonfinite: The number of elements that are inf or nan.
        nonzero: The number of elements that are finite and not zero.
        lossy: The number of nonzero elements so small at the present loss scale that ``dtype`` has fewer bits for them.
        normal: The number of nonzero elements that ``dtype`` holds with all its bits.
        lost: The number of elements that are zero at this scale but not at a larger one. None if no larger scale was
            tried, or if it overflowed.
        lost_counts: The ``counts`` of the elements known to be lost, measured at the larger scale.
    """

    def __init__(self, name: str, counts: Counts, scale_exponent: int, dtype: torch.dtype = torch.float16) -> None:
        """Set the attributes; no elements are known to be lost."""
        self.name, self.counts, self.scale_exponent, self.dtype = name, counts, scale_exponent, dtype
        self.elements, self.zeros, self.nonfinite = int(counts.sum()), int(counts[ZERO]), int(counts[NONFINITE])
        self.nonzero = self.elements - self.zeros - self.nonfinite
        self.lossy = int(counts[FIRST : self._limit(scale_exponent)].sum())
        self.normal = self.nonzero - self.lossy
        self.lost: int | None = None
        self.lost_counts: Counts = np.zeros_like(counts)

    def set_lost(self, counts: Counts) -> None:
        """Set the ``counts`` of elements that are zero at this scale, as measured at a larger one."""
        info = torch.finfo(self.dtype)
        # The sum of many elements that were rounded to zero can be larger than each of them.
        limit = _column(exponent_of(info.smallest_normal) + exponent_of(info.eps) - 1 - self.scale_exponent)
        self.lost, self.lost_counts = int(counts.sum()), counts.copy()
        self.lost_counts[limit:] = 0
        self.lost_counts[limit] += counts[limit:].sum()

    @property
    def true_nonzero(self) -> int:
        """The number of elements that are ``nonzero`` or known to be lost."""
        return self.nonzero + int(self.lost_counts.sum())

    def lossy_at(self, exponent: int) -> int:
        """Return how many elements would be lossy or lost at a loss scale of two to the power of ``exponent``."""
        return int((self.counts + self.lost_counts)[FIRST : self._limit(exponent)].sum())

    def _limit(self, exponent: int) -> int:
        return _column(_smallest(self.dtype) - exponent)

    @property
    def largest(self) -> int | None:
        """The exponent of the largest unscaled magnitude; None if all are zero."""
        present = np.flatnonzero(self.counts[FIRST:NONFINITE])
        return int(present[-1]) + FIRST - BIAS if present.size else None

    @property
    def smallest_scale(self) -> int | None:
        """The exponent of the smallest loss scale at which at most 1 % of ``true_nonzero`` are lossy or lost."""
        below = np.cumsum((self.counts + self.lost_counts)[FIRST:NONFINITE])
        if not self.true_nonzero:
            return None
        first = int(np.searchsorted(below, _ACCEPTED * self.true_nonzero, side="right"))
        return _smallest(self.dtype) - (first + FIRST - BIAS)

    @property
    def largest_scale(self) -> int | None:
        """The exponent of the largest loss scale at which all are below the largest number of ``dtype``."""
        return None if self.largest is None else _largest(self.dtype) - self.largest


class GradientRange:
    """The result of ``gradient_range``: ``print`` it, or index it with the name of a parameter.

    Attributes:
        optimizer: The name of the optimizer's class.
        level: The ``opt_level``.
        dtype: The dtype in which gradients are computed.
        scale: The loss scale.
        parameters: A dict from name to ``ParameterRange``.
        probe: The factor to the larger scale that was tried; None if no larger scale was tried.
        notes: Further remarks.
    """

    def __init__(
        self, optimizer: str, level: str, probe: float | None = None, dtype: torch.dtype = torch.float16
    ) -> None:
        """Create a result without parameters."""
        self.optimizer, self.level, self.probe, self.dtype = optimizer, level, probe, dtype
        self.scale = 1.0
        self.parameters: dict[str, ParameterRange] = {}
        self.notes: list[str] = []

    def __getitem__(self, name: str) -> ParameterRange:
        if name not in self.parameters:
            there = f"there are {listed(list(self.parameters))}" if self.parameters else "none was measured yet"
            raise KeyError(f"{name!r} is not a parameter with a gradient; {there}")
        return self.parameters[name]

    @property
    def total(self) -> ParameterRange:
        """The range of all parameters together."""
        counts: Counts = np.zeros((2, 256), np.int64)
        for one in self.parameters.values():
            counts += (one.counts, one.lost_counts)
        total = ParameterRange("all", counts[0], exponent_of(self.scale), self.dtype)
        total.lost_counts = counts[1]
        if self.parameters and not self.unknown:
            total.lost = int(counts[1].sum())
        return total

    @property
    def unknown(self) -> list[str]:
        """The names of the parameters whose lost elements are unknown."""
        return [one.name for one in self.parameters.values() if one.lost is None]

    @property
    def advice(self) -> str:
        """The advice which loss scale suffices, in a sentence or two."""
        total, present = self.total, exponent_of(self.scale)
        bad = [one.name for one in self.parameters.values() if one.nonfinite]
        if bad:
            return f"{listed(bad)} have inf or nan, so that this step is skipped: amp.debug.find_overflow tells why"
        if self.dtype is not torch.float16:
            why = "bfloat16 has the range of float32" if self.dtype is torch.bfloat16 else ""
            return f"{self.level} needs no loss scale: {why or f'its gradients are {name_of(self.dtype)}'}"
        lost = ""
        if known := total.true_nonzero - total.nonzero:
            lost = f"; {_percent(known, total.elements)} of all elements are zero for lack of range, and lost"
        elif total.lost == 0 and total.zeros:
            lost = "; the zeros are true ones: they stay at a larger scale"
        if self.probe is not None and self.unknown:
            lost += f"; what is lost of {listed(self.unknown)} is unknown"
        smallest, largest = total.smallest_scale, total.largest_scale
        if largest is None:
            fits = (
                ""
                if smallest is None
                else f": a static loss scale of 2^{smallest + _MARGIN} would do, or a dynamic one"
            )
            return f"all gradients are zero{lost}{fits}"
        assert smallest is not None
        if smallest > largest:
            needed = _largest(self.dtype) - _smallest(self.dtype) + 1 + smallest - largest
            return (
                f"no loss scale fits: the gradients need {needed} binades, and float16 has 30. Use O4 or O5, whose "
                f"bfloat16 has the range of float32, or keep {listed(_lossy_at(self, largest))} in float32{lost}"
            )
        static = min(max(smallest, 0) + _MARGIN, largest)
        if smallest <= present <= largest:
            text = f"the loss scale fits; a static one of 2^{static} would do, too, and a dynamic one is fine"
        else:
            size = "small" if present < smallest else "large"
            text = f"the loss scale is too {size}: a static one of 2^{static} would do, or a dynamic one"
        if static > present:
            text += "; above the present one, gradients inside of the model may overflow before those of parameters do"
        if small := _lossy_at(self, static):
            text += f"; {listed(small)} would need a larger one, or float32"
        return text + lost

    def shares(self) -> dict[str, float]:
        """Return for ``scalars`` the shares that are zero, lossy, not finite and, if known for all, lost."""
        total = self.total
        elements = max(total.elements, 1)
        found = {"zero": total.zeros, "lossy": total.lossy, "lost": total.lost, "not_finite": total.nonfinite}
        return {f"amp/gradients_{name}": n / elements for name, n in found.items() if n is not None}

    def __str__(self) -> str:
        return fitted("\n".join(_lines_of(self) if self.parameters else ["no gradient was measured yet", *self.notes]))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the histogram into a file, ``.png`` or another format of matplotlib.

        Raises:
            ImportError: matplotlib is missing.
        """
        total, shift = self.total, exponent_of(self.scale)
        figure, axes = new_figure(8, 4)
        exponents: Any = np.arange(FIRST, NONFINITE) - BIAS
        here, lost = (100.0 * c[FIRST:NONFINITE] / max(total.elements, 1) for c in (total.counts, total.lost_counts))
        used = np.flatnonzero(here + lost)
        begin, end = (used[0], used[-1] + 1) if used.size else (0, 1)
        axes.bar(exponents[begin:end], here[begin:end], width=0.9, label="not zero")
        if lost.any():
            axes.bar(exponents[begin:end], lost[begin:end], 0.9, here[begin:end], color="red", label="lost")
            axes.legend()
        low, high = _smallest(self.dtype) - shift - 0.5, _largest(self.dtype) - shift + 0.5
        axes.axvspan(max(low, exponents[0]), min(high, exponents[-1]), alpha=0.15, color="green")
        axes.set_xlabel("binary exponent of the unscaled gradient")
        axes.set_ylabel("elements, %")
        shaded = f"shaded: {name_of(self.dtype)} with all its bits"
        axes.set_title(f"{self.optimizer} at loss scale {self.scale:g}; {shaded}")
        figure.savefig(os.fspath(path))


def exponent_of(scale: float) -> int:
    """Return the largest whole exponent whose power of two is at most ``scale``."""
    return math.floor(math.log2(scale))


def _column(exponent: int) -> int:
    """Return the column in which a census counts ``exponent``."""
    return min(max(exponent + BIAS, FIRST), NONFINITE)


def _smallest(dtype: torch.dtype) -> int:
    """Return the exponent of the smallest normal number of ``dtype``."""
    return exponent_of(torch.finfo(dtype).smallest_normal)


def _largest(dtype: torch.dtype) -> int:
    """Return the exponent of the largest number of ``dtype``."""
    return math.frexp(torch.finfo(dtype).max)[1] - 1


def _percent(part: float, total: float) -> str:
    share = 100.0 * part / total if total else 0.0
    digits = 0 if share == 0 or share >= 10 else 1 if share >= 1 else 2
    return "less than 0.01 %" if 0 < share < 0.01 else f"{share:.{digits}f} %"


def _lines_of(found: GradientRange) -> Iterator[str]:
    total, elements = found.total, found.total.elements
    yield (
        f"gradients of {found.optimizer} at loss scale {found.scale:g}: {elements} elements, "
        f"{_percent(total.zeros, elements)} zero, {_percent(total.nonfinite, elements)} inf or nan"
    )
    name = name_of(found.dtype)
    yield (
        f"lossy: so small at this loss scale that {name} has fewer bits for them (below 2^{_smallest(found.dtype)} "
        "when scaled)"
    )
    if found.probe is not None:
        yield f"lost: zero at this loss scale, and not at {found.probe:g} times this scale"
    if total.largest is not None:
        yield (
            f"largest: from 2^{total.largest} on, unscaled; a loss scale of 2^{total.largest_scale} takes it to the "
            f"largest {name}"
        )
    if total.true_nonzero:
        yield ""
        yield from _histogram(total)
    yield ""
    yield from _parameters(found)
    yield ""
    if found.dtype is torch.float16:
        yield from _scales(total)
    yield from found.notes
    yield f"advice: {found.advice}"


def _histogram(total: ParameterRange) -> Iterator[str]:
    """Yield a row for some exponents each, with a boundary between rows where float16 begins to lose bits."""
    every = total.counts + total.lost_counts
    used: Any = np.flatnonzero(every[FIRST:NONFINITE]) + FIRST - BIAS
    low, high = int(used[0]), int(used[-1])
    width = -(-(high - low + 1) // _ROWS)
    limit = _smallest(total.dtype) - total.scale_exponent
    top = limit + -(-(high + 1 - limit) // width) * width  # rows end at the limit
    rows = []
    for end in range(top, low, -width):
        of_row = slice(max(end - width + BIAS, FIRST), min(max(end + BIAS, FIRST), NONFINITE))
        rows.append((end - width, end, int(total.counts[of_row].sum()), int(total.lost_counts[of_row].sum())))
    most = max(here + lost for _, _, here, lost in rows)
    names = [f"2^{begin} to 2^{end}" for begin, end, _, _ in rows]
    for name, (_, end, here, lost) in zip(names, rows, strict=True):
        bar = "█" * math.ceil(30 * here / most) + "░" * math.ceil(30 * lost / most)
        marks = [_percent(here, total.elements) + " lossy" * (end <= limit)] if here or not lost else []
        marks += [f"{_percent(lost, total.elements)} lost"] if lost else []
        yield f"{name:>{max(map(len, names))}}  {bar[:30]:30}  {', '.join(marks)}"


def _parameters(found: GradientRange) -> Iterator[str]:
    """Yield a table of the parameters that lose most."""

    def lossiness(one: ParameterRange) -> float:
        return (one.lossy + (one.lost or 0) + one.nonfinite) / max(one.elements, 1)

    shown = sorted(found.parameters.values(), key=lossiness, reverse=True)[:_NAMED]
    probed, overflowed = found.probe is not None, found.total.nonfinite > 0
    heads = ["zero", "lossy"] + ["lost"] * probed + ["inf, nan"] * overflowed
    rows = [["those that lose most", "elements", *heads]]
    for one in shown:
        shares = [one.zeros, one.lossy] + [one.lost] * probed + [one.nonfinite] * overflowed
        cells = ["unknown" if n is None else _percent(n, one.elements).replace("less than ", "<") for n in shares]
        rows.append([one.name, str(one.elements), *cells])
    yield from aligned(rows)


def _scales(total: ParameterRange) -> Iterator[str]:
    exponents = sorted({0, 4, 8, 12, 16, total.scale_exponent})
    cells = [f"2^{k}: {_percent(total.lossy_at(k), total.true_nonzero)}" for k in exponents]
    lost = total.true_nonzero > total.nonzero
    yield (
        f"lossy{' or lost' * lost} at a loss scale of {' · '.join(cells)} (of those that are not zero"
        f"{', or lost' * lost})"
    )


def _lossy_at(found: GradientRange, exponent: int) -> list[str]:
    """Return the names of the parameters of which too much is lossy at a loss scale of 2 ** ``exponent``."""
    return [o.name for o in found.parameters.values() if o.lossy_at(exponent) > _ACCEPTED * o.true_nonzero]
