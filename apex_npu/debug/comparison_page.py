# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A page of HTML that shows all rows of a comparison, in one file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from apex_npu.debug.comparison_report import HEAD, Compared, ComparedRow, summary_of, verdict_of

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --bad: light-dark(#b3001b, #ff7a85); --soft: light-dark(#555, #aaa); }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; }
pre { white-space: pre-wrap; color: var(--soft); }
.verdict { border-left: 4px solid var(--line); padding: .2rem 1rem; }
.verdict.parts { border-color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .2rem .6rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { position: sticky; top: 0; background: Canvas; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.beyond td { color: var(--bad); }
tr.first td { font-weight: bold; outline: 1px solid var(--bad); }
svg { width: 100%; height: auto; }
svg .axis { stroke: var(--line); } svg text { fill: var(--soft); font-size: 11px; }
svg .row { fill: light-dark(#1a5fb4, #78aeed); } svg .beyond { fill: var(--bad); }
svg .limit { fill: none; stroke: var(--soft); }
"""
_WIDTH, _HEIGHT, _LEFT = 1000, 280, 50
_LOWEST, _HIGHEST = -7.0, 1.0


def html_of(comparison: Compared) -> str:
    """The page; it refers to no other file."""
    verdict = "".join(f"<p>{escape(line)}</p>" for line in verdict_of(comparison))
    is_bad = " parts" if comparison.first is not None or comparison.differing else ""
    head = "".join(f"<th{_number(i)}>{escape(name)}</th>" for i, name in enumerate((*HEAD, "line")))
    body = "\n".join(_rows(comparison))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(comparison.names[1])} beside {escape(comparison.names[0])}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(comparison.names[1])} beside {escape(comparison.names[0])}</h1>
<div class="verdict{is_bad}">{verdict}</div>
<pre>{escape(chr(10).join(summary_of(comparison)))}</pre>
{_picture(comparison)}
<div class="scroll"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>
</body>
</html>
"""


def _number(column: int) -> str:
    return ' class="number"' if 5 <= column < len(HEAD) else ""


def _is_beyond(row: ComparedRow) -> bool:
    return row.resolution is not None and row.relative > row.resolution


def _rows(comparison: Compared) -> Iterator[str]:
    for row in comparison.rows:
        kind = "first" if row is comparison.first else "beyond" if _is_beyond(row) and comparison.first else ""
        cells = (*row.cells(), f"{row.place}  {row.source}")
        filled = "".join(f"<td{_number(i)}>{escape(cell)}</td>" for i, cell in enumerate(cells))
        yield f"<tr{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{filled}</tr>"


def _y(value: float) -> float:
    exponent = _LOWEST if value <= 0 else _HIGHEST if math.isinf(value) else math.log10(value)
    part = (min(max(exponent, _LOWEST), _HIGHEST) - _LOWEST) / (_HIGHEST - _LOWEST)
    return round((_HEIGHT - 40) * (1 - part) + 10, 1)


def _picture(comparison: Compared) -> str:
    """Errors over the order of execution, with what the floor explains."""
    rows = comparison.rows
    step = (_WIDTH - _LEFT - 10) / max(len(rows), 1)
    xs = [round(_LEFT + step * (i + 0.5), 1) for i in range(len(rows))]
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="errors in the order of execution">']
    for exponent in range(int(_LOWEST) + 1, int(_HIGHEST) + 1, 2):
        y = _y(10.0**exponent)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">1e{exponent}</text>')
    limits = [f"{x},{_y(row.resolution)}" for x, row in zip(xs, rows, strict=True) if row.resolution is not None]
    if limits:
        parts.append(f'<polyline class="limit" points="{" ".join(limits)}"/>')
    for x, row in zip(xs, rows, strict=True):
        is_first = row is comparison.first
        kind = "beyond" if is_first or (comparison.first is not None and _is_beyond(row)) else "row"
        title = escape(f"{row}: {row.relative:.3g}")
        radius = 6 if is_first else 3
        parts.append(
            f'<circle class="{kind}" cx="{x}" cy="{_y(row.relative)}" r="{radius}"><title>{title}</title></circle>'
        )
    text = "relative error of each row in the order of execution"
    text += "; the line is what the floor explains, times 4" if limits else ""
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{text}</text>')
    return "\n".join([*parts, "</svg>"])
