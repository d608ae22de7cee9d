# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/gen.sh: a patched copy that is there whole or not at all; the folder it came from is never written."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from pipeline import synthetic
from pipeline.environments import ROOT, run, script
from pipeline.synthetic import git, snapshot

from apex_npu.compat.pipeline import PipelineError
from apex_npu.compat.pipeline.checkouts import generate


def test_clone_patch_again_and_back(tree, era, tmp_path):
    before = snapshot(tree)
    out = tmp_path / "some where" / "apex"
    done = script("gen", "--source", tree, "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"now patched: {out} (era {era})\n"
    patched = snapshot(out)
    assert patched.keys() - before.keys() == {"change_data_ptr.py"}
    again = script("gen", "--source", tree, "--out", out, cwd=tmp_path)
    assert again.stdout.startswith("already patched: ")
    assert snapshot(out) == patched
    assert script("gen", "--reverse", "--out", out, cwd=tmp_path).returncode == 0
    assert snapshot(out) == snapshot(tree) == before
    assert [path.name for path in out.parent.iterdir()] == ["apex"]


def test_git_and_python_are_enough_and_paths_may_have_colons(tree_2025, tmp_path):
    """PYTHONPATH would be cut at one."""
    here = tmp_path / "a:b c"
    for part in ("scripts", "patch", "apex_npu/_cli", "apex_npu/compat"):
        shutil.copytree(ROOT / part, here / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "apex_npu" / "__init__.py", here / "apex_npu")
    (here / "torch.py").write_text("raise RuntimeError('torch was imported')")
    command = ("bash", here / "scripts" / "gen.sh", "--source=an apex", f"--out={here}/out:apex")
    done = run(*command, cwd=tmp_path, PYTHON=sys.executable)
    assert done.stdout.startswith(f"now patched: {here}/out:apex (era "), done.stderr


def test_a_ref_is_a_commit_a_tag_or_a_branch(tree_2025, tmp_path):
    first = git(tree_2025, "rev-parse", "HEAD")
    git(tree_2025, "tag", "24.10")
    git(tree_2025, "checkout", "-q", "-b", "newer")
    git(tree_2025, "commit", "-q", "--allow-empty", "-m", "newer")
    git(tree_2025, "checkout", "-q", "--detach", "24.10")
    for ref, commit in (("24.10", first), (first[:10], first), ("newer", git(tree_2025, "rev-parse", "newer"))):
        out = tmp_path / f"out {ref}"
        generate(str(tree_2025), ref, out)
        assert git(out, "rev-parse", "HEAD") == commit
        assert generate(None, ref, out).startswith("already patched")
    with pytest.raises(PipelineError, match=r"is not 24\.10"):
        generate(str(tree_2025), "24.10", tmp_path / "out newer")


def test_a_bare_mirror_and_a_patched_source_will_do(tree_2025, tmp_path):
    head = git(tree_2025, "rev-parse", "HEAD")
    git(tree_2025, "update-index", "--add", "--cacheinfo", f"160000,{head},cutlass")  # a submodule, as upstream has
    git(tree_2025, "commit", "-q", "-m", "with a submodule")
    git(tmp_path, "clone", "--quiet", "--bare", str(tree_2025), str(tmp_path / "mirror.git"))
    generate(str(tmp_path / "mirror.git"), None, tmp_path / "one")
    generate(str(tmp_path / "one"), None, tmp_path / "two")
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


def test_refusals_leave_nothing(tree_2025, tmp_path):
    newer = synthetic.files("2025") | {"apex/optimizers/__init__.py": "from .novel import Novel\n"}
    synthetic.write(tmp_path / "newer", newer)
    (tmp_path / "plain").mkdir()
    shutil.copytree(tree_2025, tmp_path / "plain apex", ignore=shutil.ignore_patterns(".git"))
    shutil.copytree(tmp_path / "plain apex", tree_2025 / "inside")  # the commit of the checkout around is another's
    (tree_2025 / "README.md").write_text("edited\n")
    (tmp_path / "file").write_text("")
    there = sorted(path.name for path in tmp_path.iterdir())
    for source, ref, out, said in (
        ("an apex", None, "out", "an apex has changes that are not committed, as in README.md: "),
        ("an apex", "HEAD", "plain apex", "plain apex is no git checkout"),
        ("an apex", "HEAD", "an apex/inside", "inside is no git checkout"),
        ("an apex", "99.99", "out", "has no commit, tag or branch '99.99'"),
        ("an apex", "2020", "out", "has no commit, tag or branch '4ef930c1"),
        ("newer", None, "out", f"does not fit {tmp_path}/out"),
        ("plain", None, "out", "git clone failed"),
        ("nowhere", None, "out", "git clone failed"),
        ("file:///nowhere/apex.git", None, "out", "git clone failed"),
        ("an apex", "HEAD", "file", "file'"),
        ("an apex", "HEAD", "file/apex", "file'"),
        ("an apex", "HEAD", "/proc/apex_npu/apex", "/proc/apex_npu'"),
    ):
        options = [] if ref is None else [f"--ref={ref}"]
        done = script("gen", f"--source={source}", f"--out={out}", *options, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith("apex_npu: ")
        assert said in done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == there


def test_sigterm_leaves_no_temporary_folder(tree_2025, tmp_path):
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *checkout*) kill -TERM $PPID; sleep 9;; esac\nexec {shutil.which("git")} "$@"\n'
    )
    program.chmod(0o755)
    there = sorted(path.name for path in tmp_path.iterdir())
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    assert script("gen", "--source=an apex", "--out=out", cwd=tmp_path, PATH=path).returncode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == there
