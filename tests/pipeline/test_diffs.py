# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Diffs in memory, compared with what git and tomllib make of the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apex_npu.compat.pipeline import diffs, eras, make_patch
from apex_npu.compat.pipeline.errors import PipelineError

TEXTS = st.builds(
    lambda lines, end: ("\n".join(lines) + ("\n" if end else "")).encode(),
    st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=14),
    st.booleans(),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(old=TEXTS, new=TEXTS)
def test_what_git_writes_is_applied_and_taken_back(tmp_path, old, new):
    for name, content in (("a", old), ("b", new)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "file").write_bytes(content)
    command = ["git", "diff", "--no-index", "--unified=1", "--no-prefix", "a/file", "b/file"]
    patch = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).stdout
    if old == new:
        assert patch == b""
        return
    (file,) = diffs.parse(patch)
    assert file.apply(old) == (new, [])
    assert file.reversed().apply(new) == (old, [])


def test_a_hunk_is_found_where_lines_have_moved_and_named_where_they_are_gone():
    patch = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n"
    patch += b"@@ -2,3 +2,3 @@\n one\n-two\n+2\n three\n@@ -9,2 +9,3 @@\n nine\n+9.5\n ten\n"
    (file,) = diffs.parse(patch)
    assert file.changed_lines == 3
    moved = b"x\ny\nz\none\ntwo\nthree\nnine\nten\n"
    assert file.apply(moved) == (b"x\ny\nz\none\n2\nthree\nnine\n9.5\nten\n", [])
    _, reasons = file.apply(b"one\nTWO\nthree\nten\nnine\n")
    assert reasons == [
        "f, hunk 1 at line 2: it changes what stands at 'two', and there is no such line",
        "f, hunk 2 at line 9: its lines are there, but not one after the other",
    ]
    assert "end with CR LF" in file.apply(moved.replace(b"\n", b"\r\n"))[1][0]
    assert file.apply(None)[1] == ["f is not there"]


def test_of_equal_places_the_nearest_is_changed():
    (file,) = diffs.parse(b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -4,2 +4,2 @@\n a\n-b\n+B\n")
    assert file.apply(b"a\nb\n-\na\nb\n") == (b"a\nb\n-\na\nB\n", [])


def test_patches_that_rename_or_hold_no_text_are_refused():
    with pytest.raises(PipelineError, match="change and add files of text"):
        diffs.parse(b"diff --git a/f b/g\nsimilarity index 100%\nrename from f\nrename to g\n")
    with pytest.raises(PipelineError, match="change and add files of text"):
        diffs.parse(b"diff --git a/f b/f\nBinary files a/f and b/f differ\n")


@pytest.mark.parametrize("era", eras.load().eras, ids=lambda era: era.name)
def test_patches_are_small_say_why_and_have_their_rows(era):
    patch = era.patch_file().read_bytes()
    make_patch.check_limits(patch)
    table = (eras.FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"\n| `{file.path}`" in table for file in diffs.parse(patch))
    assert not any(line.startswith((b"-", b"+")) and line.rstrip() != line for line in patch.splitlines())


def test_large_patches_and_silent_hunks_are_refused():
    large = b"diff --git a/f b/f\n--- /dev/null\n+++ b/f\n@@ -0,0 +1,61 @@\n" + b"+# apex_npu: a line\n" * 61
    with pytest.raises(PipelineError, match="at most 8 files and 60 lines; this one has 1 and 61"):
        make_patch.check_limits(large)
    with pytest.raises(PipelineError, match=r"one of f does not"):
        make_patch.check_limits(b"diff --git a/f b/f\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+import this\n")


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
