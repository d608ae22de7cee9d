# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A tree is untrusted input: nothing outside of it is written, and no program runs that it names."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest
from pipeline import synthetic
from pipeline.environments import script
from pipeline.synthetic import git, snapshot

from apex_npu.compat.pipeline import PipelineError
from apex_npu.compat.pipeline.checkouts import generate
from apex_npu.compat.pipeline.patching import patch

PROGRAMS = (
    *("core.fsmonitor", "core.pager", "core.editor", "core.sshCommand", "core.alternateRefsCommand", "gpg.program"),
    *("diff.external", "diff.evil.command", "diff.evil.textconv", "credential.helper", "uploadpack.packObjectsHook"),
    *("filter.evil.clean", "filter.evil.smudge", "filter.evil.process"),
)
HOOKS = ("post-index-change", "post-checkout", "reference-transaction", "pre-auto-gc")


@pytest.fixture
def evil(tmp_path):
    """A program that may not run."""
    program = tmp_path / "evil"
    program.write_text(f'#!/bin/sh\n: > "{tmp_path}/has-run"\nexit 1\n')
    program.chmod(0o755)
    yield program
    assert not (tmp_path / "has-run").exists()


@pytest.fixture
def tree(tree_2025, tmp_path):
    return tree_2025.rename(tmp_path / "apex")  # no space: some settings are split at spaces


def configure(tree, program):
    """Name ``program`` wherever git's settings can."""
    for key in PROGRAMS:
        git(tree, "config", key, str(program))
    for name in ("apply", "diff", "rev-parse"):
        git(tree, "config", f"alias.{name}", f"!{program}")
    git(tree, "config", "filter.evil.required", "true")
    git(tree, "config", "log.showSignature", "true")
    git(tree, "config", "core.hooksPath", str(tree / "hooks"))
    for folder in (tree / "hooks", tree / ".git" / "hooks"):
        folder.mkdir(exist_ok=True)
        for hook in HOOKS:
            (folder / hook).unlink(missing_ok=True)
            (folder / hook).symlink_to(program)


def do_everything(tree, out):
    """It may be refused."""
    for name in ("README.md", "setup.py"):  # not as in git's index, so that git compares contents
        os.utime(tree / name, (0, 0))
    for act in (
        lambda: generate(str(tree), None, out / "one"),
        lambda: patch(tree),
        lambda: generate(None, "newest", tree),
        lambda: generate(str(tree), None, out / "two"),
        lambda: generate(str(tree), "HEAD", out / "three"),
        lambda: patch(tree, reverse=True),
    ):
        with contextlib.suppress(PipelineError):
            act()


@pytest.mark.parametrize("attributes", [".gitattributes", ".git/info/attributes"])
@pytest.mark.parametrize("included", [False, True])
def test_settings_and_hooks_run_nothing(tree, evil, tmp_path, attributes, included):
    (tree / attributes).write_text("* filter=evil diff=evil\n")
    configure(tree, evil)
    if included:
        settings = (tree / ".git" / "config").rename(tree / "settings")
        (tree / ".git" / "config").write_text(f'[includeIf "gitdir:{tree}/"]\npath = {settings}\n')
    module = synthetic.write(tree / "module", {"file": "text\n"})
    (module / ".git" / "info" / "attributes").write_text("* filter=evil\n")
    configure(module, evil)
    upstream = snapshot(tree)
    assert patch(tree).startswith("now patched")
    patch(tree, reverse=True)
    assert snapshot(tree) == upstream
    do_everything(tree, tmp_path)
    assert not (tmp_path / "has-run").exists()
    subprocess.run(["git", "status"], cwd=tree, capture_output=True, check=False)
    (tmp_path / "has-run").unlink()  # the settings work


@pytest.mark.parametrize("name", ["HEAD", "HEAD:setup.py"])
def test_a_partial_clone_runs_no_program_as_its_server(tree, evil, tmp_path, name):
    lost = git(tree, "rev-parse", name)
    (tree / ".git" / "objects" / lost[:2] / lost[2:]).unlink()
    git(tree, "config", "core.repositoryFormatVersion", "1")
    git(tree, "config", "protocol.allow", "always")
    git(tree, "config", "remote.origin.url", f"ext::{evil} %S")
    git(tree, "config", "remote.origin.promisor", "true")
    git(tree, "config", "extensions.partialClone", "origin")
    do_everything(tree, tmp_path)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("path", ["setup.py", "change_data_ptr.py", "apex/optimizers"])
@pytest.mark.parametrize("kind", ["link", "link to the same", "pipe", "folder"])
def test_what_is_no_file_is_refused(tree, tmp_path, path, kind, patched):
    patch(tree, reverse=not patched)
    away = tmp_path / "mine"
    if (tree / path).exists():
        (tree / path).rename(away)
    if kind == "link":
        away = synthetic.write(tmp_path / "other", {"__init__.py": "mine\n"})
    if kind.startswith("link"):
        (tree / path).symlink_to(away)
    else:
        (os.mkfifo if kind == "pipe" else os.mkdir)(tree / path)
    before = snapshot(tmp_path)
    for reverse in (False, True):
        with pytest.raises(PipelineError):
            patch(tree, reverse=reverse)
    assert snapshot(tmp_path) == before


def test_the_other_name_of_a_file_keeps_its_contents(tree, tmp_path):
    upstream = (tree / "setup.py").read_bytes()
    os.link(tree / "setup.py", tmp_path / "other name")
    patch(tree)
    assert (tree / "setup.py").read_bytes() != upstream
    patch(tree, reverse=True)
    assert (tmp_path / "other name").read_bytes() == upstream


def test_attributes_convert_nothing(tree):
    upstream = snapshot(tree)
    (tree / ".gitattributes").write_text("*.py text eol=crlf working-tree-encoding=UTF-16\n")
    patch(tree)
    assert b"\r\n" not in (tree / "setup.py").read_bytes()
    patch(tree, reverse=True)
    assert {**snapshot(tree), ".gitattributes": None} == {**upstream, ".gitattributes": None}


def test_modules_of_the_current_folder_are_not_imported(tree, tmp_path):
    for name in ("argparse", "runpy", "json", "pip", "torch"):
        (tree / f"{name}.py").write_text(f"open({str(tmp_path / 'has run')!r}, 'w')\n")
    done = script("gen", "--reverse", "--out=.", cwd=tree)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "has run").exists()
