# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A tree that is not ours is hostile input: nothing outside of it is written, and nothing that it names is run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from known_faults.common import known_fault
from pipeline import synthetic
from pipeline.synthetic import git

from apex_npu.pipeline.checkout import Checkout
from apex_npu.pipeline.errors import PipelineError
from apex_npu.pipeline.patching import State, bring

ROOT = Path(__file__).parents[2]
FOLLOWED = "a link under the name of our temporary file is written through"
ANYWHERE = "the paths of a journal are taken as they are, out of the tree, too"
RUN = "git runs the command that the tree's own configuration names"
MISLED = "an exported CDPATH makes cd go elsewhere, and say so on standard output"


@pytest.fixture
def tree(tmp_path):
    return synthetic.write(tmp_path / "an apex", synthetic.files("2025"))


def bring_or_refuse(tree, wanted=State.PATCHED):
    """It may go through, or be refused."""
    with contextlib.suppress(PipelineError):
        bring(Checkout(tree), wanted)


@known_fault(FOLLOWED)
@pytest.mark.parametrize("path", ["setup.py", "apex/__init__.py", "change_data_ptr.py"])
def test_a_link_under_the_name_of_a_temporary_file_is_not_followed(tree, tmp_path, path):
    mine = tmp_path / "mine"
    mine.write_text("mine\n")
    target = tree / path
    target.with_name(f".{target.name}.apex_npu-tmp").symlink_to(mine)
    bring_or_refuse(tree)
    assert mine.read_text() == "mine\n"


def leave_journal(tree, path, **contents):
    journal = tree / ".git" / "apex_npu-journal"
    journal.mkdir()
    (journal / "paths.json").write_text(json.dumps([path]))
    for side, content in contents.items():
        (journal / f"{side}-0").write_text(content)


def outside(tree, kind):
    """A path out of the tree, as a journal may name it, and where that is."""
    victim = tree.parent / "victim"
    return {"relative": "../victim", "absolute": str(victim)}[kind], victim


kinds = pytest.mark.parametrize("kind", ["relative", "absolute"])


@known_fault(ANYWHERE)
@kinds
def test_a_journal_creates_no_files_out_of_the_tree(tree, kind):
    path, victim = outside(tree, kind)
    leave_journal(tree, path, before="planted\n")
    bring_or_refuse(tree)
    assert not victim.exists()


@known_fault(ANYWHERE)
@kinds
def test_a_journal_deletes_no_files_out_of_the_tree(tree, kind):
    path, victim = outside(tree, kind)
    victim.write_text("mine\n")
    leave_journal(tree, path, after="mine\n")
    bring_or_refuse(tree)
    assert victim.exists()


@known_fault(ANYWHERE)
def test_a_journal_creates_no_files_that_no_patch_knows(tree):
    leave_journal(tree, "apex/planted.py", before="planted\n")
    bring_or_refuse(tree)
    assert not (tree / "apex" / "planted.py").exists()


def test_a_journal_of_our_own_is_taken_back(tree):
    upstream = (tree / "setup.py").read_text()
    (tree / "setup.py").write_text("half\n")
    leave_journal(tree, "setup.py", before=upstream, after="half\n")
    bring(Checkout(tree), State.ORIGINAL)
    assert (tree / "setup.py").read_text() == upstream


@known_fault(RUN)
def test_the_file_system_monitor_of_a_tree_is_not_run(tree, tmp_path):
    marker, monitor = tmp_path / "has run", tmp_path / "monitor"
    monitor.write_text(f'#!/bin/sh\n: > "{marker}"\n')
    monitor.chmod(0o755)
    git(tree, "config", "core.fsmonitor", str(monitor))
    bring_or_refuse(tree)
    assert not marker.exists()


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
    [("build.sh", ("--python={python}",), str(ROOT)), ("pipeline.sh", ("patch",), str(ROOT / "apex_npu"))],
    ids=["build.sh", "pipeline.sh"],
)
@pytest.mark.parametrize("exported", [False, pytest.param(True, marks=known_fault(MISLED))])
def test_scripts_find_their_own_checkout(script, arguments, expected, exported, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "scripts").mkdir(parents=True)
    assert expected in what_is_run(script, elsewhere if exported else None, tmp_path, *arguments)
