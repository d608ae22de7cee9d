# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A page of HTML that shows all rows of a comparison, in one file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from html import escape

from apex_npu.debug.comparison.report import HEAD, Compared, ComparedRow, plot, summary_of, verdict_of

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
img { width: 100%; height: auto; }
"""


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


def _picture(comparison: Compared) -> str:
    """Errors over the order of execution, as ``plot`` draws them; empty without matplotlib."""
    drawn = io.BytesIO()
    try:
        plot(comparison, drawn)
    except ImportError:
        return ""
    data = base64.b64encode(drawn.getvalue()).decode()
    return f'<img alt="errors in the order of execution" src="data:image/png;base64,{data}">'
