# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trees there and back, and every tree that is refused: it is then as it was."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline import synthetic
from pipeline.environments import ROOT
from pipeline.synthetic import git, snapshot
from processes import HANG_TIMEOUT

from apex_npu.compat.pipeline import PipelineError, checkouts, eras
from apex_npu.compat.pipeline.patching import patch


def refused(folder: Path, *, reverse: bool = False) -> str:
    """The error for a tree that is not changed."""
    before = snapshot(folder)
    with pytest.raises(PipelineError) as said:
        patch(folder, reverse=reverse)
    assert snapshot(folder) == before
    return str(said.value)


def test_there_and_back_leaves_every_byte(tree, era, tmp_path):
    before, other = snapshot(tree), shutil.copytree(tree, tmp_path / "other")
    assert patch(tree) == f"now patched: {tree} (era {era})"
    patched = snapshot(tree)
    other_tool = ["patch", "-sp1", "--no-backup-if-mismatch", "-i"] if shutil.which("patch") else ["git", "apply"]
    subprocess.run([*other_tool, eras.FOLDER / era / "npu.patch"], cwd=other, check=True)
    assert patched == snapshot(other) != before
    assert patch(tree).startswith("already patched: ")
    assert snapshot(tree) == patched
    assert patch(tree, reverse=True).startswith("now unmodified: ")
    assert patch(tree, reverse=True).startswith("already unmodified: ")
    assert snapshot(tree) == before
    assert git(tree, "status", "--porcelain", "--ignored") == ""


def test_other_changes_stay(tree_2025):
    with (tree_2025 / "setup.py").open("a") as file:
        file.write("# edited\n")
    for name in ("build", "notes"):  # the first is in .gitignore
        (tree_2025 / name).mkdir()
        (tree_2025 / name / "file").write_text("mine\n")
    before = snapshot(tree_2025)
    patch(tree_2025)
    patch(tree_2025, reverse=True)
    assert snapshot(tree_2025) == before


def test_a_tree_needs_no_git_folder_and_gets_none(tree_2025):
    shutil.rmtree(tree_2025 / ".git")
    upstream = snapshot(tree_2025)
    patch(tree_2025)
    assert "serve(__file__)" in (tree_2025 / "apex" / "__init__.py").read_text()
    patch(tree_2025, reverse=True)
    assert snapshot(tree_2025) == upstream
    assert not (tree_2025 / ".git").exists()


def test_the_users_settings_and_variables_do_not_matter(tree_2025, tmp_path, monkeypatch):
    expected = shutil.copytree(tree_2025, tmp_path / "expected")
    patch(expected)
    settings = tmp_path / ".gitconfig"
    settings.write_text("[diff]\nnoprefix = true\ncontext = 9\n[core]\nautocrlf = true\n")
    for name, value in (
        ("HOME", tmp_path),
        ("GIT_CONFIG_GLOBAL", settings),
        ("GIT_DIR", synthetic.write(tmp_path / "other", {"file": "text"}) / ".git"),  # as in its hooks
        ("GIT_INDEX_FILE", tmp_path / "index"),
    ):
        monkeypatch.setenv(name, str(value))
    patch(tree_2025)
    assert snapshot(tree_2025) == snapshot(expected)
    assert "\n--- a/setup.py\n" in checkouts.difference(tree_2025)


def other_git(tmp_path: Path, at: str, act: str) -> str:
    """A PATH with a git that first runs shell code, at the commands of a pattern."""
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\ncase "$*" in {at}) {act};; esac\nexec {shutil.which("git")} "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("at", ["*--check*", "*apply*--verbose?/* | *apply*--verbose?--reverse?/*"])
@pytest.mark.parametrize("reverse", [False, True])
def test_ctrl_c_leaves_the_tree_as_it_was_or_finished(tree_2025, tmp_path, reverse, at):
    """It reaches this program and git, which are of one group."""
    path = other_git(tmp_path, at, "kill -INT 0; sleep 0.1")
    patch(tree_2025)
    patched = snapshot(tree_2025)
    patch(tree_2025, reverse=True)
    upstream = snapshot(tree_2025)
    if reverse:
        patch(tree_2025)
    command = [sys.executable, "-m", "apex_npu", "patch", str(tree_2025), *["--reverse"] * reverse]
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": path},
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        check=False,
    )
    assert done.returncode == 130
    assert snapshot(tree_2025) in (upstream, patched)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_attributes_that_cannot_be_read_to_their_end_can_be_interrupted(tree_2025, number):
    os.mkfifo(tree_2025 / ".gitattributes")
    command = [sys.executable, "-m", "apex_npu", "patch", str(tree_2025)]
    # A shell starts jobs in the background with SIGINT ignored.
    take = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=take) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        os.killpg(process.pid, number)
        try:
            process.wait(HANG_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_disk_that_is_full_leaves_the_tree_as_it_was(tree_2025, tmp_path, monkeypatch, reverse, blocks):
    """A limit of the size of files stands for it. At one block, git writes the first files and fails at setup.py."""
    with (tree_2025 / "setup.py").open("a") as file:
        file.write("# long\n" * 500)
    (tree_2025 / "setup.py").chmod(0o640)
    patch(tree_2025, reverse=not reverse)
    (tree_2025 / "setup.py").chmod(0o640)
    at = "*--check*) ;; *apply*"
    monkeypatch.setenv("PATH", other_git(tmp_path, at, f"trap '' XFSZ; ulimit -f {blocks}"))
    said = refused(tree_2025, reverse=reverse)
    assert f"{tree_2025} cannot be written, and is as it was: git apply failed: " in said
    assert "does not fit" not in said
    assert (tree_2025 / "setup.py").stat().st_mode & 0o777 == 0o640


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("path", ["setup.py", "change_data_ptr.py"])
@pytest.mark.parametrize("patched", [False, True])
def test_other_changes_of_the_same_lines(tree_2025, path, patched):
    patch(tree_2025, reverse=not patched)
    file = tree_2025 / path
    file.write_text((file.read_text() if file.exists() else "").replace("setup(", "set_up(") + "# edited\n")
    for reverse in (False, True):
        assert "does not fit" in refused(tree_2025, reverse=reverse)
    git(tree_2025, "stash", "--include-untracked")  # as the error says
    assert patch(tree_2025).startswith("now patched")


def test_a_half_patched_tree(tree_2025):
    patch(tree_2025)
    git(tree_2025, "checkout", "--", "setup.py")
    assert "git stash" in refused(tree_2025)
    assert "git stash" in refused(tree_2025, reverse=True)


def test_a_tree_newer_than_known_names_the_hunks_that_fail(tmp_path):
    files = synthetic.files("master")
    files["setup.py"] = files["setup.py"].replace("setup(\n", "call_setup(\n").replace("raw_output", "printed")
    files["apex/optimizers/__init__.py"] = "from .novel import Novel\n"
    said = refused(synthetic.write(tmp_path / "apex", files))
    assert "the patch of era master does not fit" in said
    assert "check out 6424da3b" in said
    assert "searching for:\nfrom .fused_sgd import FusedSGD\n" in said
    assert "patch failed: apex/optimizers/__init__.py:1\n" in said
    assert "patch failed: setup.py:65\n" in said


def test_folders_that_are_no_apex(tmp_path, tree_2025, monkeypatch):
    other = synthetic.write(tmp_path / "other", {"setup.py": "import setuptools\n"})
    for folder, said in (
        (tmp_path / "nowhere", "is not a folder"),
        (tree_2025 / "setup.py", "is not a folder"),
        (tree_2025 / "apex", "is of no known era"),
        (other, "is of no known era"),
    ):
        with pytest.raises(PipelineError, match=said):
            patch(folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PipelineError, match="install git"):
        patch(tree_2025)


# ----------------------------------------------------------------------------------------------------------------- make


def test_a_patch_is_made_from_a_checkout(tmp_path, tree_2025):
    for folder, said in (
        (tmp_path / "nowhere", "is not a folder"),
        (tmp_path, "is no git checkout"),
        (tree_2025 / "apex", "is no git checkout"),
    ):
        with pytest.raises(PipelineError, match=said):
            checkouts.make_patch(folder)


def test_an_edited_tree_gives_the_same_patch_each_time(tree, era, tmp_path, monkeypatch):
    original = (eras.FOLDER / era / "npu.patch").read_bytes().splitlines()
    patch(tree)
    with pytest.raises(PipelineError, match="check out 4ef930c1"):
        checkouts.make_patch(tree)
    monkeypatch.setattr(eras, "FOLDER", shutil.copytree(eras.FOLDER, tmp_path / "patch"))
    known = next(known for known in eras.ERAS if known.name == era)
    monkeypatch.setattr(eras, "ERAS", [dataclasses.replace(known, commit=git(tree, "rev-parse", "HEAD"))])
    assert checkouts.make_patch(tree).startswith("written: ")
    made = (eras.FOLDER / era / "npu.patch").read_bytes()
    checkouts.make_patch(tree)
    assert (eras.FOLDER / era / "npu.patch").read_bytes() == made
    assert git(tree, "diff", "--cached") == ""
    # Only the places differ from the patch that is made from upstream's longer files.
    kept = [line for line in made.splitlines() if not line.startswith((b"@@", b"index"))]
    assert kept == [line for line in original if not line.startswith((b"@@", b"index"))]
