# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trees there and back, and every tree that is refused: it is then as it was."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline import synthetic
from pipeline.synthetic import git, snapshot

from apex_npu.__main__ import main
from apex_npu.compat.pipeline import eras, files, make_patch
from apex_npu.compat.pipeline.checkout import Checkout
from apex_npu.compat.pipeline.errors import PipelineError
from apex_npu.compat.pipeline.patching import State, set_state

ROOT = Path(__file__).parents[2]


def refused(folder: Path, wanted: State = State.PATCHED) -> str:
    """The error for a tree that is not changed."""
    before = snapshot(folder)
    with pytest.raises(PipelineError) as said:
        set_state(Checkout(folder), wanted)
    assert snapshot(folder) == before
    return str(said.value)


def test_there_and_back_leaves_every_byte(tree, era):
    before = snapshot(tree)
    assert f"now patched: {tree}, Apex " in (said := set_state(Checkout(tree), State.PATCHED))
    assert said.endswith(f"(era {era})")
    patched = snapshot(tree)
    assert {path for path in patched if patched[path] != before.get(path)} == {
        "apex/__init__.py",
        "apex/optimizers/__init__.py",
        "change_data_ptr.py",
        "setup.py",
    }
    assert set_state(Checkout(tree), State.PATCHED).startswith("already patched: ")
    assert snapshot(tree) == patched
    assert set_state(Checkout(tree), State.ORIGINAL).startswith("now as upstream has it: ")
    assert snapshot(tree) == before
    assert set_state(Checkout(tree), State.ORIGINAL).startswith("already as upstream has it: ")
    assert git(tree, "status", "--porcelain", "--ignored") == ""


def test_modes_are_kept(tree_2025):
    (tree_2025 / "setup.py").chmod(0o750)
    git(tree_2025, "commit", "-qam", "executable")
    set_state(Checkout(tree_2025), State.PATCHED)
    assert (tree_2025 / "setup.py").stat().st_mode & 0o777 == 0o750


def test_git_apply_gives_the_same_bytes(tree, era, tmp_path):
    other = shutil.copytree(tree, tmp_path / "other")
    set_state(Checkout(tree), State.PATCHED)
    # With positions that are off: the synthetic files are shorter.
    git(other, "apply", str(eras.FOLDER / era / "npu.patch"))
    assert snapshot(other) == snapshot(tree)


def test_a_patch_that_was_committed_is_recognised(tree_2025):
    before = snapshot(tree_2025)
    set_state(Checkout(tree_2025), State.PATCHED)
    git(tree_2025, "add", "--all")
    git(tree_2025, "commit", "-qm", "patched")
    assert set_state(Checkout(tree_2025), State.PATCHED).startswith("already patched")
    set_state(Checkout(tree_2025), State.ORIGINAL)
    assert snapshot(tree_2025) == before


def test_what_git_ignores_or_does_not_know_is_no_dirt(tree_2025):
    (tree_2025 / "build").mkdir()
    (tree_2025 / "build" / "file").write_text("")
    (tree_2025 / "notes.txt").write_text("mine")
    set_state(Checkout(tree_2025), State.PATCHED)
    set_state(Checkout(tree_2025), State.ORIGINAL)
    assert (tree_2025 / "notes.txt").read_text() == "mine"


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("path", ["README.md", "setup.py"])
@pytest.mark.parametrize("staged", [False, True])
def test_a_dirty_tree(tree_2025, path, staged):
    with (tree_2025 / path).open("a") as file:
        file.write("# edited\n")
    if staged:
        git(tree_2025, "add", path)
    said = refused(tree_2025)
    assert f"{tree_2025} is dirty: expected the files of its commit" in said
    assert f"found other changes in {path}" in said


def test_a_dirty_patched_tree_is_not_taken_back(tree_2025):
    set_state(Checkout(tree_2025), State.PATCHED)
    with (tree_2025 / "apex" / "__init__.py").open("a") as file:
        file.write("# edited\n")
    assert "other changes in apex/__init__.py" in refused(tree_2025, State.ORIGINAL)


def test_a_file_in_the_way_of_a_new_one(tree_2025):
    (tree_2025 / "change_data_ptr.py").write_text("mine = True\n")
    assert "other changes in change_data_ptr.py" in refused(tree_2025)


def test_a_half_patched_tree(tree_2025):
    set_state(Checkout(tree_2025), State.PATCHED)
    git(tree_2025, "checkout", "--", "setup.py")
    said = refused(tree_2025)
    assert "is half patched: " in said
    assert "setup.py as upstream" in said
    assert "git checkout -- " in said
    assert "delete change_data_ptr.py" in said
    git(tree_2025, "checkout", "--", *said.partition("git checkout -- ")[2].partition(")")[0].split())
    (tree_2025 / "change_data_ptr.py").unlink()
    assert set_state(Checkout(tree_2025), State.PATCHED).startswith("now patched")


def test_a_tree_newer_than_known_names_the_hunks_that_fail(tmp_path):
    files = synthetic.files("master")
    files["setup.py"] = files["setup.py"].replace("setup(\n", "call_setup(\n").replace("raw_output", "printed")
    files["apex/optimizers/__init__.py"] = "from .novel import Novel\n"
    said = refused(synthetic.write(tmp_path / "apex", files))
    assert "the patch of era master, made for 6424da3b, does not fit the commit" in said
    assert "searching for:\n  from .fused_sgd import FusedSGD\n" in said
    assert "patch failed: apex/optimizers/__init__.py:1\n" in said
    assert "patch failed: setup.py:65\n" in said
    assert "Nothing has been changed" in said


@pytest.mark.parametrize("sign", ["apex/optimizers/npu_fused_adam.py", "setup.py"])
def test_a_tree_with_ascends_patch_is_named(tmp_path, sign):
    tree = synthetic.write(tmp_path / "apex", synthetic.files("2020"))
    with (tree / sign).open("a") as file:
        file.write("version = '0.1-ascend'\n")
    said = refused(tree)
    assert "has been patched by Ascend's apex patch" in said
    assert sign in said
    assert "fresh clone" in said


def test_another_project(tmp_path):
    tree = synthetic.write(tmp_path / "other", {"setup.py": "import setuptools\n"})
    assert "is not NVIDIA's Apex: expected apex/multi_tensor_apply/multi_tensor_apply.py" in refused(tree)


def test_an_apex_of_no_known_era(tmp_path):
    files = {path: text for path, text in synthetic.files("master").items() if "normalization" not in path}
    assert "is of no known era: expected one of 2020 has apex/amp" in refused(synthetic.write(tmp_path / "a", files))


def test_folders_that_are_no_git_tree(tmp_path, tree_2025):
    plain = tmp_path / "plain"
    plain.mkdir()
    for folder, said in (
        (plain, "is not a git tree"),
        (tmp_path / "nowhere", "is no folder"),
        (tree_2025 / "apex", "is not a git tree of its own but a folder of"),
        (tree_2025 / ".git", "is not a git tree"),
    ):
        with pytest.raises(PipelineError, match=said):
            Checkout(folder)
    git(plain, "init", "--quiet")
    with pytest.raises(PipelineError, match="has no commit yet"):
        Checkout(plain)


def test_a_link_in_place_of_a_file(tree_2025):
    (tree_2025 / "setup.py").rename(tree_2025 / "real.py")
    (tree_2025 / "setup.py").symlink_to("real.py")
    with pytest.raises(PipelineError, match=r"setup.py is a link"):
        set_state(Checkout(tree_2025), State.PATCHED)


def test_git_missing(tree_2025, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PipelineError, match="install git"):
        Checkout(tree_2025)


def test_another_repository_in_the_environment_is_not_meant(tree_2025, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert set_state(Checkout(tree_2025), State.PATCHED).startswith("now patched")


@pytest.mark.parametrize("era", ["2025"])
def test_settings_for_all_repositories_do_not_matter(tree, tmp_path, monkeypatch):
    expected = shutil.copytree(tree, tmp_path / "expected")
    set_state(Checkout(expected), State.PATCHED)
    (tmp_path / "config").write_text("[apply]\nwhitespace = error-all\nignoreWhitespace = change\n[core]\neol = crlf\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    set_state(Checkout(tree), State.PATCHED)
    assert snapshot(tree) == snapshot(expected)
    set_state(Checkout(tree), State.ORIGINAL)
    (tree / "setup.py").write_bytes((tree / "setup.py").read_bytes().replace(b"    raw_output", b"\traw_output"))
    git(tree, "commit", "-qam", "tabs")
    assert "patch failed: setup.py" in refused(tree)


def test_a_tree_in_a_folder_of_another_repository(tmp_path):
    synthetic.write(tmp_path / "outer", {"file": "text"})
    tree = synthetic.write(tmp_path / "outer" / "apex", synthetic.files("2025"))
    assert set_state(Checkout(tree), State.PATCHED).startswith("now patched")
    assert "serve(__file__)" in (tree / "apex" / "__init__.py").read_text()


# ---------------------------------------------------------------------------------------------------------- interrupted


def outcome(function) -> BaseException | None:
    """What ``function`` raises."""
    try:
        function()
    except (KeyboardInterrupt, PipelineError) as error:
        return error
    return None


class _Nth:
    """``function``, whose ``n``-th call fails."""

    def __init__(self, function, n, error):
        self.function, self.left, self.error = function, n, error

    def __call__(self, *arguments, **options):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.function(*arguments, **options)


@pytest.mark.parametrize("wanted", State)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device", "x")])
@pytest.mark.parametrize(("owner", "name", "calls"), [(files, "write", 5), (files, "rename", 5)])
def test_an_interruption_anywhere_is_undone(tree_2025, monkeypatch, wanted, error, owner, name, calls):
    set_state(Checkout(tree_2025), State.PATCHED if wanted is State.ORIGINAL else State.ORIGINAL)
    before = snapshot(tree_2025)
    failed = 0
    for n in range(1, calls + 1):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _Nth(getattr(owner, name), n, error))
            said = outcome(lambda: set_state(Checkout(tree_2025), wanted))
        if said is not None:
            failed += 1
            assert isinstance(said, KeyboardInterrupt) or "No space left on device" in str(said)
            assert snapshot(tree_2025) == before
            continue
        set_state(Checkout(tree_2025), State.PATCHED if wanted is State.ORIGINAL else State.ORIGINAL)
        assert snapshot(tree_2025) == before
    assert failed >= 3


SIGNALLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from apex_npu.compat.pipeline import files
from apex_npu.compat.pipeline.__main__ import main
left, rename = 2, files.rename
def signalling(*arguments):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return rename(*arguments)
files.rename = signalling
sys.exit(main(["patch", sys.argv[2]]))
"""


def test_sigterm_while_files_are_replaced_is_undone(tree_2025):
    before = snapshot(tree_2025)
    command = [sys.executable, "-c", SIGNALLED, str(ROOT), str(tree_2025)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert "interrupted; every tree is whole" in done.stderr
    assert snapshot(tree_2025) == before


# -------------------------------------------------------------------------------------------------------- command, make


def test_the_command_of_the_package(tree_2025, capsys, monkeypatch):
    before = snapshot(tree_2025)
    assert main(["patch", str(tree_2025)]) == 0
    assert "now patched" in capsys.readouterr().out
    monkeypatch.chdir(tree_2025)
    assert main(["patch", "--reverse", "."]) == 0
    assert snapshot(tree_2025) == before
    assert main(["patch", str(tree_2025 / "apex")]) == 1
    assert capsys.readouterr().err.startswith("apex_npu: ")
    with pytest.raises(SystemExit):
        main(["patch"])


def test_an_edited_tree_gives_the_same_patch_each_time(tree, era, tmp_path):
    folder = shutil.copytree(eras.FOLDER, tmp_path / "patch")
    table = folder / "ERAS.toml"
    pin = eras.load().named(era).commit
    table.write_text(table.read_text().replace(pin, git(tree, "rev-parse", "HEAD")))
    set_state(Checkout(tree), State.PATCHED)
    assert make_patch.make_patch(Checkout(tree), folder).startswith("written: ")
    patch = (folder / era / "npu.patch").read_bytes()
    assert make_patch.make_patch(Checkout(tree), folder).startswith("unchanged: ")
    assert os.listdir(folder / era) == ["npu.patch"]
    # Only the places differ from the patch that is made from upstream's longer files.
    kept = [line for line in patch.splitlines() if not line.startswith((b"@@", b"index"))]
    original = (eras.FOLDER / era / "npu.patch").read_bytes().splitlines()
    assert kept == [line for line in original if not line.startswith((b"@@", b"index"))]
    assert git(tree, "diff", "--cached") == ""
    with pytest.raises(PipelineError, match="expected a checkout at 4ef930c1"):
        make_patch.make_patch(Checkout(tree))
