# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Golden cases: ``cases/NAME.txt`` has a program, the diff of what it becomes, and the report, with "=====" between.

``PYTHONPATH=tests python -m migrate.golden`` writes the last two parts again; read the diff.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from apex_npu.migrate import Options, plan, rewrite
from apex_npu.migrate.files import reports

CASES = Path(__file__).parent / "cases"
_LINE = "=====\n"


def parts(case: Path) -> list[str]:
    return case.read_text(encoding="utf-8").split(_LINE)


def options_of(program: str) -> Options:
    """The first line of a program may say `# options: NAME ...`."""
    first = program.partition("\n")[0]
    words = first.removeprefix("# options:").split() if first.startswith("# options:") else []
    return Options(
        **{name: name in words for name in ("unsure", "force", "similar")},
        to="portable" if "portable" in words else "npu",
        amp=next((word.removeprefix("amp=") for word in words if word.startswith("amp=")), ""),
        ignore=tuple(word.removeprefix("no=") for word in words if word.startswith("no=")),
        data_parallel="main" if "parallel" in words else "",
    )


def before_and_after(case: Path) -> tuple[str, str]:
    """The program of a case, and what it becomes now."""
    before = parts(case)[0]
    after = rewrite(before, "t.py", options_of(before)).source
    assert isinstance(after, str)
    return before, after


def expected(case: Path) -> list[str]:
    """The parts of a case as they are now."""
    before, after = before_and_after(case)
    lines = (text.splitlines(keepends=True) for text in (before, after))
    diff = list(difflib.unified_diff(*lines, n=0))[2:]  # without the names of files
    findings = rewrite(before, "t.py", options_of(before)).findings
    return [before, "".join(diff), "".join(f"{line}\n" for line in reports.lines(findings))]


def planned(folder: Path, files: dict[str, str], *arguments, **options):
    """What becomes of files, of which ``a__b`` is ``a/b.py``: their new text where they change, and the findings."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made = plan([folder], *arguments, **options)
    return {change.target.path: change.after.decode() for change in made.files}, made.findings


if __name__ == "__main__":
    for path in sorted(CASES.glob("*.txt")):
        path.write_text(_LINE.join(expected(path)), encoding="utf-8")
