# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A foreign tree is untrusted input: nothing outside of it is written, and nothing that it names is run."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from pipeline import synthetic
from pipeline.environments import script
from pipeline.synthetic import git, snapshot

from apex_npu.__main__ import main
from apex_npu.compat.pipeline import files
from apex_npu.compat.pipeline.checkout import Checkout
from apex_npu.compat.pipeline.errors import PipelineError
from apex_npu.compat.pipeline.fetching import generate
from apex_npu.compat.pipeline.make_patch import difference
from apex_npu.compat.pipeline.patching import State, set_state

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tree_2025):
    return tree_2025


def set_state_or_refuse(tree, wanted=State.PATCHED):
    """It may go through, or be refused."""
    with contextlib.suppress(PipelineError):
        set_state(Checkout(tree), wanted)


@pytest.mark.parametrize("path", ["setup.py", "apex/__init__.py", "change_data_ptr.py"])
def test_a_link_under_the_name_of_a_temporary_file_is_not_followed(tree, tmp_path, path):
    mine = tmp_path / "mine"
    mine.write_text("mine\n")
    target = tree / path
    target.with_name(f".{target.name}.apex_npu-tmp").symlink_to(mine)
    set_state_or_refuse(tree)
    assert mine.read_text() == "mine\n"


# ---------------------------------------------------------------------------------- links, and files that are no files


@pytest.fixture
def outside_folder(tmp_path):
    """A folder that nothing here may write to: the test fails if it changes."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "file").write_text("mine\n")
    before = snapshot(folder)
    yield folder
    assert snapshot(folder) == before


@pytest.mark.parametrize("wanted", State)
def test_a_folder_that_is_a_link_is_refused(tree, outside_folder, wanted):
    set_state(Checkout(tree), State.PATCHED if wanted is State.ORIGINAL else State.ORIGINAL)
    (tree / "apex" / "optimizers").rename(outside_folder / "optimizers")
    (tree / "apex" / "optimizers").symlink_to(outside_folder / "optimizers")
    before = snapshot(outside_folder)
    with pytest.raises(PipelineError, match=r"optimizers/.*\.py is a link, or is inside one"):
        set_state(Checkout(tree), wanted)
    assert snapshot(outside_folder) == before
    (outside_folder / "optimizers").rename(tree / "moved back")


def test_the_other_name_of_a_file_keeps_its_contents(tree, tmp_path):
    upstream = (tree / "setup.py").read_bytes()
    os.link(tree / "setup.py", tmp_path / "mine")
    os.link(tree / "README.md", tree / ".setup.py.apex_npu-tmp")
    for wanted in (State.PATCHED, State.ORIGINAL):
        set_state(Checkout(tree), wanted)
        assert (tmp_path / "mine").read_bytes() == upstream
        assert git(tree, "status", "--porcelain", "README.md") == ""
    assert not (tree / ".setup.py.apex_npu-tmp").exists()


def test_a_link_that_appears_while_files_are_written_is_replaced(tree, outside_folder, monkeypatch):
    write = files.write

    def plant(root, path, *arguments):
        write(root, path, *arguments)
        if path == ".setup.py.apex_npu-tmp":
            (tree / "setup.py").unlink()
            (tree / "setup.py").symlink_to(outside_folder / "file")

    monkeypatch.setattr(files, "write", plant)
    set_state(Checkout(tree), State.PATCHED)
    assert not (tree / "setup.py").is_symlink()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("path", ["setup.py", "change_data_ptr.py"])
def test_what_is_no_file_is_refused(tree, path, make):
    (tree / path).unlink(missing_ok=True)
    make(tree / path)
    with pytest.raises(PipelineError, match="is no regular file"):
        set_state(Checkout(tree), State.PATCHED)


def test_a_named_pipe_under_the_name_of_a_temporary_file_is_replaced(tree):
    os.mkfifo(tree / ".setup.py.apex_npu-tmp")
    assert set_state(Checkout(tree), State.PATCHED).startswith("now patched")


def test_a_folder_under_the_name_of_a_temporary_file_is_refused(tree):
    (tree / ".setup.py.apex_npu-tmp" / "inside").mkdir(parents=True)
    before = snapshot(tree)
    with pytest.raises(PipelineError, match=r"cannot be written .*apex_npu-tmp.*it is as it was"):
        set_state(Checkout(tree), State.PATCHED)
    assert snapshot(tree) == before
    assert (tree / ".setup.py.apex_npu-tmp" / "inside").is_dir()


def whole(folder):
    """All files, those of git included."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_git_folder_elsewhere_is_not_written(tree, tmp_path, kind):
    repository = tmp_path / "mine.git"
    (tree / ".git").rename(repository)
    if kind == "file":
        (tree / ".git").write_text(f"gitdir: {repository}\n")
    else:
        (tree / ".git").symlink_to(repository)
    before = whole(repository)
    for wanted in (State.PATCHED, State.ORIGINAL):
        assert set_state(Checkout(tree), wanted).startswith("now ")
    assert whole(repository) == before


def test_a_linked_work_tree_is_patched(tree, tmp_path):
    linked = tmp_path / "linked"
    git(tree, "worktree", "add", "--quiet", str(linked))
    before, upstream = whole(tree), snapshot(linked)
    set_state(Checkout(linked), State.PATCHED)
    assert git(linked, "status", "--porcelain").splitlines()[0].startswith("M apex/__init__.py")
    set_state(Checkout(linked), State.ORIGINAL)
    assert snapshot(linked) == upstream
    assert {path.name for path in whole(tree).keys() - before.keys()} <= {"index"}


# ------------------------------------------------------------------------------------- programs that a repository names


def add_to_config(tree, text):
    with (tree / ".git" / "config").open("a") as file:
        file.write(text)


def add_filter(tree, program, *, key="clean", attributes=".git/info/attributes"):
    (tree / attributes).write_text("*.py filter=evil diff=evil\n")
    add_to_config(tree, f'[filter "evil"]\n{key} = {program}\nrequired = true\n')


def add_signed_commit(tree, program):
    commit = git(tree, "cat-file", "commit", "HEAD").replace(
        "\n\n", "\ngpgsig -----BEGIN PGP SIGNATURE-----\n -----END PGP SIGNATURE-----\n\n", 1
    )
    made = subprocess.run(
        ["git", "hash-object", "-t", "commit", "-w", "--stdin"],
        cwd=tree,
        input=f"{commit}\n",
        capture_output=True,
        text=True,
        check=True,
    )
    git(tree, "update-ref", "HEAD", made.stdout.strip())
    add_to_config(tree, f"[log]\nshowSignature = true\n[gpg]\nprogram = {program}\n")


def lose_object(tree, program):
    """A partial clone whose server is a program."""
    lost = git(tree, "rev-parse", "HEAD:setup.py")
    (tree / ".git" / "objects" / lost[:2] / lost[2:]).unlink()
    git(tree, "config", "core.repositoryFormatVersion", "1")
    add_to_config(tree, "[extensions]\npartialClone = origin\n[protocol]\nallow = always\n")
    add_to_config(tree, f'[remote "origin"]\npromisor = true\nurl = "ext::{program} %S"\n')


def add_hooks(tree, program, folder=".git/hooks"):
    (tree / folder).mkdir(exist_ok=True)
    for hook in ("post-index-change", "post-checkout", "reference-transaction", "pre-auto-gc"):
        (tree / folder / hook).unlink(missing_ok=True)
        (tree / folder / hook).symlink_to(program)


def add_hooks_path(tree, program):
    add_hooks(tree, program, "hooks")
    add_to_config(tree, f"[core]\nhooksPath = {tree / 'hooks'}\n")


def add_submodule(tree, program):
    module = synthetic.write(tree / "module", {"file": "text\n"})
    git(tree, "add", "module")
    git(tree, "commit", "--quiet", "--message", "with a module")
    add_to_config(module, f"[core]\nfsmonitor = {program}\n")
    (module / "file").write_text("other\n")


def add_filter_to_submodule(tree, program):
    add_submodule(tree, program)
    (tree / "module" / ".git" / "info" / "attributes").write_text("* filter=evil\n")
    add_to_config(tree / "module", f'[filter "evil"]\nclean = {program}\nrequired = true\n')
    os.utime(tree / "module" / "file", (0, 0))


def include(tree, program):
    (tree / "settings").write_text(f"[core]\nfsmonitor = {program}\npager = {program}\n")
    add_to_config(tree, f"[include]\npath = {tree / 'settings'}\n")


PROGRAMS = {
    "core.fsmonitor": lambda tree, program: add_to_config(tree, f"[core]\nfsmonitor = {program}\n"),
    "include.path": include,
    "hooks": add_hooks,
    "core.hooksPath": add_hooks_path,
    "filter.clean": add_filter,
    "filter.clean of a submodule": add_filter_to_submodule,
    "filter.process": lambda tree, program: add_filter(tree, program, key="process"),
    "filter.smudge": lambda tree, program: add_filter(tree, program, key="smudge"),
    "filter in .gitattributes": lambda tree, program: add_filter(tree, program, attributes=".gitattributes"),
    "diff.external": lambda tree, program: add_to_config(tree, f"[diff]\nexternal = {program}\n"),
    "diff.command": lambda tree, program: (
        add_filter(tree, "cat"),
        add_to_config(tree, f'[diff "evil"]\ncommand = {program}\ntextconv = {program}\n'),
    ),
    "gpg.program": add_signed_commit,
    "lazy fetch": lose_object,
    "core.pager": lambda tree, program: add_to_config(tree, f"[core]\npager = {program}\neditor = {program}\n"),
    "alias": lambda tree, program: add_to_config(tree, f'[alias]\nrev-parse = "!{program}"\ndiff = "!{program}"\n'),
    "submodule": add_submodule,
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_no_program_that_a_tree_names_is_run(tree, tmp_path, kind):
    marker, program = tmp_path / "has-run", tmp_path / "program"
    program.write_text(f'#!/bin/sh\n: > "{marker}"\nexit 1\n')
    program.chmod(0o755)
    tree = tree.rename(tmp_path / "apex")  # no space: some settings are split at spaces
    PROGRAMS[kind](tree, program)
    for path in ("README.md", "setup.py"):  # not as in the index, so that git compares contents
        os.utime(tree / path, (0, 0))
    for act in (
        lambda: set_state(Checkout(tree), State.PATCHED),
        lambda: difference(Checkout(tree)),
        lambda: Checkout(tree).resolve("newest"),
        lambda: set_state(Checkout(tree), State.ORIGINAL),
        lambda: (tree / "README.md").write_text("other\n"),
        lambda: set_state(Checkout(tree), State.PATCHED),
        lambda: generate(str(tree), "HEAD", tmp_path / "out"),
    ):
        with contextlib.suppress(PipelineError):
            act()
        assert not marker.exists()


def test_work_trees_of_another_place_are_refused(tree, tmp_path):
    other = synthetic.write(tmp_path / "other", {"file": "mine\n"})
    git(tree, "config", "core.worktree", str(other))
    with pytest.raises(PipelineError, match="is not a git tree of its own but a folder of"):
        Checkout(tree)


def test_replaced_objects_do_not_stand_for_the_commit(tree):
    upstream = git(tree, "rev-parse", "HEAD")
    (tree / "setup.py").write_text("edited\n")
    git(tree, "commit", "--quiet", "--all", "--message", "edited")
    edited = git(tree, "rev-parse", "HEAD")
    git(tree, "reset", "--quiet", "--soft", upstream)
    git(tree, "replace", upstream, edited)
    with pytest.raises(PipelineError, match=r"setup\.py"):
        set_state(Checkout(tree), State.PATCHED)


def test_messages_have_no_control_characters(tree, capsys):
    (tree / "\x1b[31mred").write_text("")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "\x1b[2J")
    (tree / "\x1b[31mred").write_text("other\n")
    assert main(["patch", str(tree)]) == 1
    said = capsys.readouterr().err
    assert "?[31mred" in said
    assert "\x1b" not in said


def test_modules_of_the_current_folder_are_not_imported(tree, tmp_path):
    for name in ("argparse", "runpy", "json", "pip", "torch"):
        (tree / f"{name}.py").write_text(f"open({str(tmp_path / 'has run')!r}, 'w')\n")
    done = script("gen", "--reverse", "--out=.", cwd=tree)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "has run").exists()


def what_is_run(script, cdpath, tmp_path, *arguments):
    """The arguments that ``script`` gives to its Python, when it is called from this checkout."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor argument; do printf "%s\\0" "$argument"; done\nexit 1\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), **({} if cdpath is None else {"CDPATH": str(cdpath)})}
    command = [f"scripts/{script}", *(argument.format(python=python) for argument in arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.split("\0")


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [("build.sh", ("--python={python}",), str(ROOT)), ("pipeline.sh", ("patch",), str(ROOT))],
    ids=["build.sh", "pipeline.sh"],
)
@pytest.mark.parametrize("exported", [False, True])
def test_scripts_find_their_own_checkout(script, arguments, expected, exported, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "scripts").mkdir(parents=True)
    assert expected in what_is_run(script, elsewhere if exported else None, tmp_path, *arguments)
