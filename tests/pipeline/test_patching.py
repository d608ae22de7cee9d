# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trees there and back, and every tree that is refused: it is then as it was."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline import synthetic
from pipeline.synthetic import git, snapshot

from apex_npu.__main__ import main
from apex_npu.compat.pipeline import eras, files, make_patch, replacing
from apex_npu.compat.pipeline.checkout import Checkout
from apex_npu.compat.pipeline.errors import PipelineError
from apex_npu.compat.pipeline.patching import State, bring

ROOT = Path(__file__).parents[2]


def refused(folder: Path, wanted: State = State.PATCHED) -> str:
    """The error for a tree that is not changed."""
    before = snapshot(folder)
    with pytest.raises(PipelineError) as said:
        bring(Checkout(folder), wanted)
    assert snapshot(folder) == before
    return str(said.value)


def test_there_and_back_leaves_every_byte(tree, era):
    before = snapshot(tree)
    assert f"now patched: {tree}, Apex " in (said := bring(Checkout(tree), State.PATCHED))
    assert said.endswith(f"(era {era})")
    patched = snapshot(tree)
    assert {path for path in patched if patched[path] != before.get(path)} == {
        "apex/__init__.py",
        "apex/optimizers/__init__.py",
        "change_data_ptr.py",
        "setup.py",
    }
    assert bring(Checkout(tree), State.PATCHED).startswith("already patched: ")
    assert snapshot(tree) == patched
    assert bring(Checkout(tree), State.ORIGINAL).startswith("now as upstream has it: ")
    assert snapshot(tree) == before
    assert bring(Checkout(tree), State.ORIGINAL).startswith("already as upstream has it: ")
    assert git(tree, "status", "--porcelain", "--ignored") == ""


def test_modes_are_kept(tree_2025):
    (tree_2025 / "setup.py").chmod(0o750)
    git(tree_2025, "commit", "-qam", "executable")
    bring(Checkout(tree_2025), State.PATCHED)
    assert (tree_2025 / "setup.py").stat().st_mode & 0o777 == 0o750


def test_git_apply_gives_the_same_bytes(tree, era, tmp_path):
    other = shutil.copytree(tree, tmp_path / "other")
    bring(Checkout(tree), State.PATCHED)
    # With positions that are off: the synthetic files are shorter.
    git(other, "apply", "--unidiff-zero", str(eras.FOLDER / era / "npu.patch"))
    assert snapshot(other) == snapshot(tree)


def test_a_patch_that_was_committed_is_recognised(tree_2025):
    before = snapshot(tree_2025)
    bring(Checkout(tree_2025), State.PATCHED)
    git(tree_2025, "add", "--all")
    git(tree_2025, "commit", "-qm", "patched")
    assert bring(Checkout(tree_2025), State.PATCHED).startswith("already patched")
    bring(Checkout(tree_2025), State.ORIGINAL)
    assert snapshot(tree_2025) == before


def test_what_git_ignores_or_does_not_know_is_no_dirt(tree_2025):
    (tree_2025 / "build").mkdir()
    (tree_2025 / "build" / "file").write_text("")
    (tree_2025 / "notes.txt").write_text("mine")
    bring(Checkout(tree_2025), State.PATCHED)
    bring(Checkout(tree_2025), State.ORIGINAL)
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
    bring(Checkout(tree_2025), State.PATCHED)
    with (tree_2025 / "apex" / "__init__.py").open("a") as file:
        file.write("# edited\n")
    assert "other changes in apex/__init__.py" in refused(tree_2025, State.ORIGINAL)


def test_a_file_in_the_way_of_a_new_one(tree_2025):
    (tree_2025 / "change_data_ptr.py").write_text("mine = True\n")
    assert "other changes in change_data_ptr.py" in refused(tree_2025)


def test_a_half_patched_tree(tree_2025):
    bring(Checkout(tree_2025), State.PATCHED)
    git(tree_2025, "checkout", "--", "setup.py")
    said = refused(tree_2025)
    assert "is half patched: " in said
    assert "setup.py as upstream" in said
    assert "git checkout -- " in said
    assert "delete change_data_ptr.py" in said


def test_a_tree_newer_than_known_names_the_hunks_that_fail(tmp_path):
    files = synthetic.files("master")
    files["setup.py"] = files["setup.py"].replace("setup(\n", "call_setup(\n").replace("raw_output", "printed")
    files["apex/optimizers/__init__.py"] = "from .novel import Novel\n"
    said = refused(synthetic.write(tmp_path / "apex", files))
    assert "the patch of era master, made for 6424da3b, does not fit the commit" in said
    assert "\n  apex/optimizers/__init__.py, hunk 1 at line 1: it changes what stands at 'from .fused_sgd" in said
    assert "\n  setup.py, hunk 1 at line 65: it changes what stands at 'raw_output = subprocess" in said
    assert "\n  setup.py, hunk 2 at line 902: it changes what stands at 'setup('" in said
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
        bring(Checkout(tree_2025), State.PATCHED)


def test_git_missing(tree_2025, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PipelineError, match="install git"):
        Checkout(tree_2025)


def test_another_repository_in_the_environment_is_not_meant(tree_2025, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert bring(Checkout(tree_2025), State.PATCHED).startswith("now patched")


def test_two_at_once(tree_2025):
    checkout = Checkout(tree_2025)
    with replacing.alone(checkout.git_folder):
        assert "another process is at work" in refused(tree_2025)
    bring(checkout, State.PATCHED)


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
@pytest.mark.parametrize(("owner", "name", "calls"), [(files, "write", 11), (files, "rename", 4)])
def test_an_interruption_anywhere_is_undone(tree_2025, monkeypatch, wanted, error, owner, name, calls):
    bring(Checkout(tree_2025), State.PATCHED if wanted is State.ORIGINAL else State.ORIGINAL)
    before = snapshot(tree_2025)
    failed = 0
    for n in range(1, calls + 1):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _Nth(getattr(owner, name), n, error))
            said = outcome(lambda: bring(Checkout(tree_2025), wanted))
        if said is not None:
            failed += 1
            assert isinstance(said, KeyboardInterrupt) or "No space left on device" in str(said)
            assert snapshot(tree_2025) == before
            continue
        bring(Checkout(tree_2025), State.PATCHED if wanted is State.ORIGINAL else State.ORIGINAL)
        assert snapshot(tree_2025) == before
    assert failed >= 3


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pipeline import files
from pipeline.checkout import Checkout
from pipeline.patching import State, bring
left, rename = int(sys.argv[3]), files.rename
def killing(*arguments):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return rename(*arguments)
files.rename = killing
bring(Checkout(Path(sys.argv[2])), State.PATCHED)
"""
_SETUP = KILLED[: KILLED.index("bring(")].replace("SIGKILL", "SIGTERM").replace("left == 0", "left == -1")
SIGNALLED = {
    # While files move: when the third is renamed.
    "rename": _SETUP.replace("left == -1", "left == 0"),
    # Before any has: when the third is written to its temporary name.
    "write": _SETUP
    + """
write = files.write
def signalling(*arguments, **options):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return write(*arguments, **options)
files.write = signalling
""",
}


@pytest.mark.parametrize("renamed", [0, 1, 3])
def test_what_a_killed_process_has_left_is_taken_back_first(tree_2025, renamed):
    before = snapshot(tree_2025)
    command = [sys.executable, "-c", KILLED, str(ROOT / "apex_npu" / "compat"), str(tree_2025), str(renamed)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert snapshot(tree_2025) != before
    said = bring(Checkout(tree_2025), State.ORIGINAL)
    assert "already as upstream has it" in said
    assert "an interrupted run was taken back" in said
    assert snapshot(tree_2025) == before


def test_what_was_edited_after_a_kill_is_left_alone(tree_2025):
    command = [sys.executable, "-c", KILLED, str(ROOT / "apex_npu" / "compat"), str(tree_2025), "2"]
    subprocess.run(command, check=False)
    (tree_2025 / "setup.py").write_text("mine\n")
    assert "setup.py has been edited since" in refused(tree_2025)


@pytest.mark.parametrize(("method", "ends"), [("write", State.ORIGINAL), ("rename", State.PATCHED)])
def test_sigterm_waits_while_files_move(tree_2025, tmp_path, method, ends):
    expected = shutil.copytree(tree_2025, tmp_path / "expected")
    bring(Checkout(expected), ends)
    program = SIGNALLED[method] + "from pipeline.__main__ import main\nsys.exit(main(['patch', sys.argv[2]]))"
    command = [sys.executable, "-c", program, str(ROOT / "apex_npu" / "compat"), str(tree_2025), "2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 130
    assert "interrupted; every tree is whole" in done.stderr
    assert snapshot(tree_2025) == snapshot(expected)


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
    bring(Checkout(tree), State.PATCHED)
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
