# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Programs of several files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from apex_npu.migrate import Finding, plan


def planned(
    folder: Path, files: Mapping[str, str], *arguments, **options
) -> tuple[dict[str, str], tuple[Finding, ...]]:
    """What becomes of files: their new text where they change, and the findings. ``a__b`` is ``a/b.py``."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made = plan([folder], *arguments, **options)
    return {change.target.path: change.after.decode() for change in made.files}, made.findings
