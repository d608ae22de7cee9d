# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Finding``: one row of a report. A finding that changes text gives the span, and what stands there afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

STATUSES = ("changed", "unsure", "refused", "note", "kept")


@dataclass(frozen=True, order=True)
class Finding:
    """What a rule says of one place.

    Attributes:
        path: The file.
        line: Of the first character, from 1; ``column`` likewise, in characters.
        column: See ``line``.
        rule: Its id, as in ``rules.py``.
        status: "changed"; "unsure", applied with ``--unsure`` alone; "refused", left for a person; "note";
            "kept", by a comment in the source.
        end_line: Of the character after the last one; ``end_column`` likewise.
        end_column: See ``end_line``.
        before: The text of the span.
        after: What takes its place; None where nothing does.
        message: The reason and the way out; for a change what there is to know about it, if anything.

    Example::

        >>> migrate.rewrite("x = x.cuda()").findings[0].after
        '.npu'
    """

    path: str
    line: int
    column: int
    rule: str
    status: str
    end_line: int
    end_column: int
    before: str
    after: str | None
    message: str


def count(findings: Iterable[Finding], *statuses: str) -> int:
    """How many findings have one of ``statuses``."""
    return sum(finding.status in statuses for finding in findings)


def once(findings: Sequence[Finding]) -> Iterator[Finding]:
    """The findings of a file, with each note at its first place alone, which says how many more there are."""
    notes = Counter((one.rule, one.message) for one in findings if one.status == "note")
    for finding in findings:
        places = notes.pop((finding.rule, finding.message), 0) if finding.status == "note" else 1
        if places > 1:
            yield replace(finding, message=f"{finding.message}; {places - 1} more place{'s' * (places > 2)}")
        elif places:
            yield finding
