# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The patches."""

from __future__ import annotations

import re

import pytest

from apex_npu.compat.pipeline import eras


@pytest.mark.parametrize("era", eras.ERAS, ids=lambda era: era.name)
def test_patches_are_small_say_why_and_have_their_rows(era):
    patch = era.patch_file.read_text(encoding="utf-8")
    files = re.split(r"^diff --git a/.* b/", patch, flags=re.MULTILINE)[1:]
    hunks = [hunk for file in files for hunk in re.split(r"^@@ .*\n", file, flags=re.MULTILINE)[1:]]
    assert all(re.search(r"^\+\s*# apex_npu: ", hunk, flags=re.MULTILINE) for hunk in hunks)
    lines = [line for hunk in hunks for line in hunk.splitlines() if line.startswith(("+", "-"))]
    assert (len(files), len(lines)) == (4, 14)
    assert all(line.rstrip() == line for line in lines)
    table = (eras.FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"\n| `{file.partition(chr(10))[0]}`" in table for file in files)
