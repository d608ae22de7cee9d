# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Overflows``: the findings as objects, as a table and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from apex_npu.amp import StepReport
from apex_npu.debug.overflow.causes import Finding
from apex_npu.debug.text import count, fitted, listed, where_of

_WIDTH = 12
_SHOWN = 5


@dataclass
class OverflowReport:
    """The findings in one ``scale_loss`` block, or in an iteration without blocks.

    Attributes:
        loss_id: The ``loss_id`` of the block; None without amp.
        loss: The value of the loss; None without amp, and if the loss has more than one element.
        scale: The factor that the loss was multiplied with.
        scale_after: The loss scale after the block if it has shrunk; else None.
        skips_in_a_row: The number of consecutive skipped steps, including the step of this block. None if the step was
            not skipped or not called, or if another block has decided that it is skipped.
        gradients: The number of gradients.
        parameters: The names of the parameters whose gradients are not finite → the numbers of nan and inf elements.
        causes: The causes, the most informative first; empty if nothing has overflowed.
        operators: The number of operators that were examined.
        not_measured: The reasons why results of operators were not measured, with the number of results.
        notes: Further remarks.
        reproduced: Whether the gradients of a replay are not finite in the same places; if not, the cause may differ.
            None if the step was not replayed.
    """

    loss_id: int | None = None
    loss: float | None = None
    scale: float = 1.0
    scale_after: float | None = None
    skips_in_a_row: int | None = None
    gradients: int = 0
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    causes: list[Finding] = field(default_factory=list)
    operators: int = 0
    not_measured: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reproduced: bool | None = None

    @property
    def overflowed(self) -> bool:
        """True if the loss or a gradient is not finite."""
        return bool(self.causes or self.parameters)

    def __str__(self) -> str:
        head = self._head()
        if not self.overflowed and self.notes:
            return "\n".join([f"{head}: no cause was found", *self.notes])
        if not self.overflowed:
            return f"no overflow: {head}, all {self.gradients} gradients are finite ({self.operators} operators)"
        lines = [f"{head}: {self._gradients()}"]
        given = [cause for cause in self.causes if cause.kind in ("data", "weights")]
        for cause in self.causes:
            if cause not in given[1:]:
                lines += _lines_of(cause)
            if cause in given[:1] and len(given) > 1:
                lines.append(f"{'also':{_WIDTH}}{listed([other.tensor or '' for other in given[1:]])}")
        if not self.causes:
            lines.append("no cause was found: no operator that was watched has written them")
        if self.not_measured:
            some = "; ".join(f"{why} ({count})" for why, count in list(self.not_measured.items())[:_SHOWN])
            lines.append(f"not measured: {some}")
        return fitted("\n".join([*lines, *self.notes]), _WIDTH)

    def _gradients(self) -> str:
        if not self.gradients:
            return "no gradient"
        if not self.parameters:
            return f"all {self.gradients} gradients are finite"
        bad = f"{len(self.parameters)} of {self.gradients} gradients are not finite"
        return f"{bad} ({listed(list(self.parameters))})"

    def _head(self) -> str:
        if self.loss_id is None:
            return "without amp"
        value = "" if self.loss is None else f" is {self.loss:.4g}"
        after = "" if self.scale_after is None else f" → {self.scale_after:g}"
        row = "" if self.skips_in_a_row is None else f", {count(self.skips_in_a_row, 'skip')} in a row"
        return f"loss {self.loss_id}{value}, loss scale {self.scale:g}{after}{row}"


def _range(name: str, low: float, high: float) -> str:
    low, high = low + 0.0, high + 0.0  # -0 is 0
    return f"{name} {low:.3g}" if low == high else f"{name} from {low:.3g} to {high:.3g}"


def _lines_of(cause: Finding) -> list[str]:
    operator = cause.operator
    if cause.forward_operator is not None:
        operator = f"{cause.forward_operator}, in its backward {cause.operator}"
    elif cause.node is not None:
        operator = f"{cause.operator} in {cause.node}"
    what = f"{cause.dtype} {list(cause.shape)}" if cause.dtype else ""
    tensor = f" {cause.tensor}" if cause.tensor else ""
    magnitudes = "largest magnitudes: " + ", ".join(f"{name} {value:.3g}" for name, value in cause.inputs)
    ranges = ", ".join(_range(*ends) for ends in cause.ranges)
    steps = cause.path if len(cause.path) <= 8 else (*cause.path[:5], "…", *cause.path[-2:])
    rows = {
        cause.kind: f"{cause.phase}  {where_of(cause.module)}  {operator}  {what}{tensor}",
        "line": cause.place and f"{cause.place}  {cause.source}",
        "why": cause.why,
        "inputs": cause.inputs and (ranges if cause.kind == "math" else magnitudes),  # the sign matters
        "path": " → ".join(steps) if len(steps) > 1 else "",
        "do": cause.advice,
    }
    return [f"{label:{_WIDTH - 2}}  {text}".rstrip() for label, text in rows.items() if text]


class Overflows:
    """The result of ``find_overflow``: a report for each ``scale_loss`` block.

    Attributes:
        reports: The reports in the order of the blocks; without amp, one report for the whole iteration.
    """

    def __init__(self, nothing: str = "nothing was seen: no scale_loss block, and no gradient") -> None:
        """Create an empty result, which prints as ``nothing``."""
        self.reports: list[OverflowReport] = []
        self._nothing = nothing

    def _told(self) -> OverflowReport | None:
        """Return the first report of an overflow, or else the last report."""
        overflowed = (report for report in self.reports if report.overflowed)
        return next(overflowed, self.reports[-1] if self.reports else None)

    @property
    def causes(self) -> list[Finding]:
        """The causes in all blocks; empty if nothing has overflowed."""
        return [cause for report in self.reports for cause in report.causes]

    @property
    def parameters(self) -> dict[str, tuple[int, int]]:
        """The gradients that are not finite in any block: name → numbers of nan and inf elements."""
        return {name: counts for report in self.reports for name, counts in report.parameters.items()}

    @property
    def loss(self) -> float | None:
        """The loss of the first block that has overflowed, or else of the last."""
        told = self._told()
        return None if told is None else told.loss

    @property
    def scale(self) -> float | None:
        """The loss scale of the first block that has overflowed, or else of the last."""
        told = self._told()
        return None if told is None else told.scale

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the reports as JSON, with inf and nan as strings.

        Args:
            path: A file to which the JSON is also written; None for no file.

        Returns:
            The JSON text.
        """
        found = json.dumps({"format": 1, "reports": list(map(asdict, self.reports))})
        text = json.dumps(json.loads(found, parse_constant=lambda number: str(float(number))), indent=2)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        return text

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.reports)) or self._nothing


def note_skip(reports: Sequence[OverflowReport], skip: StepReport) -> None:
    """Record the skipped step in the report of the block that has decided it: the last one with this loss scale."""
    deciding = (r for r in reversed(reports) if (r.loss_id, r.scale) == (skip.loss_id, skip.scale_before))
    if (report := next(deciding, None)) is not None:
        report.scale_after, report.skips_in_a_row = skip.scale_after, skip.skips_in_a_row
