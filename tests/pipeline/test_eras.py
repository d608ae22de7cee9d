# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The patches."""

from __future__ import annotations

import pytest

from apex_npu.compat.pipeline import PipelineError, eras, maintaining


@pytest.mark.parametrize("era", eras.ERAS, ids=lambda era: era.name)
def test_patches_are_small_say_why_and_have_their_rows(era):
    patch = era.patch_file.read_bytes()
    files = maintaining.check_limits(patch)
    assert (len(files), sum(files.values())) == (4, 14)
    table = (eras.FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"\n| `{path}`" in table for path in files)
    assert not any(line.startswith((b"-", b"+")) and line.rstrip() != line for line in patch.splitlines())


@pytest.mark.parametrize(
    "change",
    [
        b"--- /dev/null\n+++ b/f\n@@ -0,0 +1,61 @@\n" + b"+# apex_npu: a line\n" * 61,  # large
        b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+import this\n",  # does not say why
        b"Binary files a/f and b/f differ\n",
        b"old mode 100644\nnew mode 100755\n",
    ],
)
def test_other_patches_are_refused(change):
    with pytest.raises(PipelineError):
        maintaining.check_limits(b"diff --git a/f b/f\n" + change)
