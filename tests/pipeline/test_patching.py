# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trees there and back, and every tree that is refused: it is then as it was."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import pytest
from pipeline import synthetic
from pipeline.synthetic import git, snapshot

from apex_npu.__main__ import main
from apex_npu.compat.pipeline import PipelineError, eras, maintaining
from apex_npu.compat.pipeline.checkout import Checkout


def refused(folder: Path, *, reverse: bool = False) -> str:
    """The error for a tree that is not changed."""
    before = snapshot(folder)
    with pytest.raises(PipelineError) as said:
        Checkout(folder).patch(reverse=reverse)
    assert snapshot(folder) == before
    return str(said.value)


def test_there_and_back_leaves_every_byte(tree, era, tmp_path):
    before, other = snapshot(tree), shutil.copytree(tree, tmp_path / "other")
    said = Checkout(tree).patch()
    assert said.startswith(f"now patched: {tree}, Apex ")
    assert said.endswith(f"(era {era})")
    patched = snapshot(tree)
    git(other, "apply", str(eras.FOLDER / era / "npu.patch"))
    assert patched == snapshot(other) != before
    assert Checkout(tree).patch().startswith("already patched: ")
    assert snapshot(tree) == patched
    assert Checkout(tree).patch(reverse=True).startswith("now unmodified: ")
    assert Checkout(tree).patch(reverse=True).startswith("already unmodified: ")
    assert snapshot(tree) == before
    assert git(tree, "status", "--porcelain", "--ignored") == ""


def test_modes_and_files_that_git_does_not_know_are_kept(tree_2025):
    (tree_2025 / "setup.py").chmod(0o750)
    for name in ("build", "notes"):  # the first is in .gitignore
        (tree_2025 / name).mkdir()
        (tree_2025 / name / "file").write_text("mine\n")
    before = snapshot(tree_2025)
    Checkout(tree_2025).patch()
    assert (tree_2025 / "setup.py").stat().st_mode & 0o777 == 0o750
    Checkout(tree_2025).patch(reverse=True)
    assert snapshot(tree_2025) == before


def test_a_patch_that_was_committed_is_recognized(tree_2025):
    before = snapshot(tree_2025)
    Checkout(tree_2025).patch()
    git(tree_2025, "add", "--all")
    git(tree_2025, "commit", "-qm", "patched")
    assert Checkout(tree_2025).patch().startswith("already patched")
    Checkout(tree_2025).patch(reverse=True)
    assert snapshot(tree_2025) == before


@pytest.mark.parametrize("kind", ["file", "link", "worktree", "submodule", "folder of a repository"])
def test_git_folders_elsewhere_are_read_and_not_written(tree_2025, tmp_path, kind):
    tree, repository = tree_2025, tree_2025 / ".git"
    if kind in ("file", "link"):
        repository = repository.rename(tmp_path / "mine.git")
        if kind == "file":
            (tree / ".git").write_text(f"gitdir: {repository}\n")
        else:
            (tree / ".git").symlink_to(repository)
    elif kind == "worktree":
        tree = tmp_path / "linked"
        git(tree_2025, "worktree", "add", "--quiet", str(tree))
    else:
        outer = synthetic.write(tmp_path / "outer", {"file": "text"})
        tree, repository = outer / "apex", outer / ".git"
        if kind == "submodule":
            git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(tree_2025), "apex")
        else:
            synthetic.write(tree, synthetic.files("2025"))
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    upstream = snapshot(tree)
    Checkout(tree).patch()
    assert "serve(__file__)" in (tree / "apex" / "__init__.py").read_text()
    Checkout(tree).patch(reverse=True)
    assert snapshot(tree) == upstream
    assert {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()} == before


def test_the_users_settings_and_variables_do_not_matter(tree_2025, tmp_path, monkeypatch):
    expected = shutil.copytree(tree_2025, tmp_path / "expected")
    Checkout(expected).patch()
    settings = tmp_path / ".gitconfig"
    settings.write_text("[diff]\nnoprefix = true\ncontext = 9\n[core]\nautocrlf = true\n")
    for name, value in (
        ("HOME", tmp_path),
        ("GIT_CONFIG_GLOBAL", settings),
        ("GIT_DIR", synthetic.write(tmp_path / "other", {"file": "text"}) / ".git"),  # as in its hooks
        ("GIT_INDEX_FILE", tmp_path / "index"),
    ):
        monkeypatch.setenv(name, str(value))
    Checkout(tree_2025).patch()
    assert snapshot(tree_2025) == snapshot(expected)
    assert b"\n--- a/setup.py\n" in maintaining.difference(Checkout(tree_2025))


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("path", ["README.md", "setup.py", "change_data_ptr.py"])
@pytest.mark.parametrize("patched", [False, True])
def test_other_changes(tree_2025, path, patched):
    Checkout(tree_2025).patch(reverse=not patched)
    with (tree_2025 / path).open("a") as file:
        file.write("# edited\n")
    assert f"has other changes in {path};" in refused(tree_2025, reverse=patched)
    git(tree_2025, "stash", "--include-untracked")  # as the error says
    assert Checkout(tree_2025).patch().startswith("now patched")


def test_a_half_patched_tree(tree_2025):
    Checkout(tree_2025).patch()
    git(tree_2025, "checkout", "--", "setup.py")
    assert "is half patched" in refused(tree_2025)
    assert "is half patched" in refused(tree_2025, reverse=True)


def test_a_tree_newer_than_known_names_the_hunks_that_fail(tmp_path):
    files = synthetic.files("master")
    files["setup.py"] = files["setup.py"].replace("setup(\n", "call_setup(\n").replace("raw_output", "printed")
    files["apex/optimizers/__init__.py"] = "from .novel import Novel\n"
    said = refused(synthetic.write(tmp_path / "apex", files))
    assert "the patch of era master does not fit" in said
    assert "Check out 6424da3b" in said
    assert "searching for:\nfrom .fused_sgd import FusedSGD\n" in said
    assert "patch failed: apex/optimizers/__init__.py:1\n" in said
    assert "patch failed: setup.py:65\n" in said


def test_folders_that_are_no_apex(tmp_path, tree_2025, monkeypatch):
    for name in ("plain", "empty"):
        (tmp_path / name).mkdir()
    git(tmp_path / "empty", "init", "--quiet")
    other = synthetic.write(tmp_path / "other", {"setup.py": "import setuptools\n"})
    for folder, said in (
        (tmp_path / "plain", "not a git repository"),
        (tmp_path / "nowhere", "is not a folder"),
        (tmp_path / "empty", "git tree with a commit"),
        (tree_2025 / "apex", "is a folder of the git tree"),
        (tree_2025 / ".git", "work tree"),
        (other, "is of no known era"),
    ):
        with pytest.raises(PipelineError, match=said):
            Checkout(folder).patch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PipelineError, match="install git"):
        Checkout(tree_2025)


# ---------------------------------------------------------------------------------------------------------- interrupted


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("name", "calls", "failure"),
    [
        ("write_bytes", 7, "full disk"),
        ("replace", 3, "full disk"),
        ("replace", 3, "signal before"),
        ("replace", 3, "signal after"),
    ],
)
def test_a_failure_anywhere_leaves_the_tree_as_it_was(tree_2025, monkeypatch, reverse, name, calls, failure):
    """The command ends with 1 or 130. SIGTERM comes before or after a file is written or renamed."""
    Checkout(tree_2025).patch(reverse=not reverse)
    before, real, left = snapshot(tree_2025), getattr(Path, name), [0]

    def fails(*arguments):
        left[0] -= 1
        if left[0] == 0 and failure == "full disk":
            raise OSError(28, "No space left on device")
        if left[0] == 0 and failure == "signal before":
            os.kill(os.getpid(), signal.SIGTERM)
        result = real(*arguments)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(Path, name, fails)
    arguments = ["patch", str(tree_2025), *["--reverse"] * reverse]
    for call in range(1, calls + 1):
        left[0] = call
        assert main(arguments) == (1 if failure == "full disk" else 130)
        assert snapshot(tree_2025) == before
    assert main(arguments) == 0
    assert snapshot(tree_2025) != before


# ----------------------------------------------------------------------------------------------------------------- make


def test_an_edited_tree_gives_the_same_patch_each_time(tree, era, tmp_path, monkeypatch):
    original = (eras.FOLDER / era / "npu.patch").read_bytes().splitlines()
    Checkout(tree).patch()
    with pytest.raises(PipelineError, match="check out the commit of an era, 4ef930c1"):
        maintaining.make_patch(Checkout(tree))
    monkeypatch.setattr(eras, "FOLDER", shutil.copytree(eras.FOLDER, tmp_path / "patch"))
    known = next(known for known in eras.ERAS if known.name == era)
    monkeypatch.setattr(eras, "ERAS", [dataclasses.replace(known, commit=git(tree, "rev-parse", "HEAD"))])
    assert maintaining.make_patch(Checkout(tree)).startswith("written: ")
    patch = (eras.FOLDER / era / "npu.patch").read_bytes()
    assert maintaining.make_patch(Checkout(tree)).startswith("unchanged: ")
    assert git(tree, "diff", "--cached") == ""
    # Only the places differ from the patch that is made from upstream's longer files.
    kept = [line for line in patch.splitlines() if not line.startswith((b"@@", b"index"))]
    assert kept == [line for line in original if not line.startswith((b"@@", b"index"))]
