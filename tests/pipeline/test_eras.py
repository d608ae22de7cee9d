# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The patches and the table of eras."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from apex_npu.compat.pipeline import eras, make_patch
from apex_npu.compat.pipeline.errors import PipelineError


@pytest.mark.parametrize("era", eras.load().eras, ids=lambda era: era.name)
def test_patches_are_small_say_why_and_have_their_rows(era):
    patch = era.patch_file().read_bytes()
    files = make_patch.check_limits(patch)
    assert (len(files), sum(files.values())) == (4, 14)
    table = (eras.FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"\n| `{path}`" in table for path in files)
    assert not any(line.startswith((b"-", b"+")) and line.rstrip() != line for line in patch.splitlines())


def test_large_patches_and_silent_hunks_are_refused():
    large = b"diff --git a/f b/f\n--- /dev/null\n+++ b/f\n@@ -0,0 +1,61 @@\n" + b"+# apex_npu: a line\n" * 61
    with pytest.raises(PipelineError, match="at most 8 files and 60 lines; this one has 1 and 61"):
        make_patch.check_limits(large)
    with pytest.raises(PipelineError, match=r"one of f does not"):
        make_patch.check_limits(b"diff --git a/f b/f\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+import this\n")
    for other in (b"similarity index 100%\nrename from f\nrename to g\n", b"Binary files a/f and b/f differ\n"):
        with pytest.raises(PipelineError, match="change and add files of text"):
            make_patch.check_limits(b"diff --git a/f b/g\n" + other)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib")
def test_the_table_of_eras_is_read_as_toml_is():
    import tomllib

    text = (eras.FOLDER / "ERAS.toml").read_text(encoding="utf-8")
    ours = eras.parse(text)
    assert {**ours.pop(""), **ours} == tomllib.loads(text)


@pytest.mark.parametrize("line", ["has = 3", "[a.b]", 'x = "y" # z', 'x = ["a", 3]', "nonsense"])
def test_more_of_toml_than_is_read_is_refused(line):
    with pytest.raises(PipelineError, match="line 2"):
        eras.parse(f'a = "b"\n{line}\n')


def test_the_package_ships_the_patches():
    # setup.py copies the target of the link.
    assert (Path(eras.__file__).with_name("patch") / "ERAS.toml").is_file()
    assert all(era.patch_file().is_file() for era in eras.load().eras)
