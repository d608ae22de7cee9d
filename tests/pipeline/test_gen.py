# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/gen.sh: a patched copy that is there whole or not at all; the folder it came from is never written."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from pipeline import synthetic
from pipeline.environments import ROOT, run, script
from pipeline.synthetic import git, snapshot

from apex_npu.compat.pipeline.errors import PipelineError
from apex_npu.compat.pipeline.fetching import generate


def test_clone_patch_again_and_back(tree, era, tmp_path):
    before = snapshot(tree)
    out = tmp_path / "some where" / "apex"
    done = script("gen", "--source", tree, "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"now patched: {out}, Apex ")
    assert f"(era {era})" in done.stdout
    patched = snapshot(out)
    assert patched.keys() - before.keys() == {"change_data_ptr.py"}
    again = script("gen", "--source", tree, "--out", out, cwd=tmp_path)
    assert again.stdout.startswith("already patched: ")
    assert snapshot(out) == patched
    assert script("gen", "--reverse", "--out", out, cwd=tmp_path).returncode == 0
    assert snapshot(out) == snapshot(tree) == before
    assert [path.name for path in out.parent.iterdir()] == ["apex"]


def test_nothing_but_git_and_python_is_needed(tree_2025, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    program = "import sys; sys.path[:0] = sys.argv[1:3]\nfrom apex_npu.compat.pipeline.__main__ import main\n"
    program += "sys.exit(main(sys.argv[3:]))"
    gen = ("gen", "--source", tree_2025, "--out", tmp_path / "out")
    done = run(sys.executable, "-I", "-c", program, tmp_path, ROOT, *gen, cwd=tmp_path)
    assert done.stdout.startswith("now patched"), done.stderr


def test_colons_in_paths_are_no_obstacle(tree_2025, tmp_path):
    """PYTHONPATH would be cut at one."""
    here = tmp_path / "a:b c"
    for part in ("scripts", "patch", "apex_npu/_cli", "apex_npu/compat"):
        shutil.copytree(ROOT / part, here / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "apex_npu" / "__init__.py", here / "apex_npu")
    out = here / "out:apex"
    done = run(
        "bash", here / "scripts" / "gen.sh", "--source", tree_2025, "--out", out, cwd=tmp_path, PYTHON=sys.executable
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"now patched: {out}, Apex ")


def test_a_ref_is_a_commit_a_tag_or_a_branch(tree_2025, tmp_path):
    first = git(tree_2025, "rev-parse", "HEAD")
    git(tree_2025, "tag", "24.10")
    git(tree_2025, "checkout", "-q", "-b", "newer")
    git(tree_2025, "commit", "-q", "--allow-empty", "-m", "newer")
    for ref, commit in (("24.10", first), (first[:10], first), ("newer", git(tree_2025, "rev-parse", "HEAD"))):
        out = tmp_path / f"out {ref}"
        generate(str(tree_2025), ref, out)
        assert git(out, "rev-parse", "HEAD") == commit
    with pytest.raises(PipelineError, match=r"expected 24\.10 .* found"):
        generate(str(tree_2025), "24.10", tmp_path / "out newer")
    with pytest.raises(PipelineError, match=r"has no commit, tag or branch '99\.99'"):
        generate(str(tree_2025), "99.99", tmp_path / "other")
    with pytest.raises(PipelineError, match="has no commit, tag or branch '4ef930c1"):
        generate(str(tree_2025), "2020", tmp_path / "other")
    assert not list(tmp_path.glob("*other*"))


def test_a_bare_mirror_and_a_patched_source_will_do(tree_2025, tmp_path):
    git(tmp_path, "clone", "--quiet", "--bare", str(tree_2025), str(tmp_path / "mirror.git"))
    generate(str(tmp_path / "mirror.git"), None, tmp_path / "one")
    generate(str(tmp_path / "one"), None, tmp_path / "two")
    files = [{k: v for k, v in snapshot(tmp_path / name).items()} for name in ("one", "two")]
    assert files[0] == files[1]


def test_sources_that_are_refused_leave_nothing(tree_2025, tmp_path):
    with (tree_2025 / "README.md").open("a") as file:
        file.write("edited\n")
    (tmp_path / "plain").mkdir()
    for source, said in (
        (tree_2025, "is dirty"),
        (tmp_path / "plain", "is not a git tree"),
        (tmp_path / "nowhere", "does not exist"),
        ("file:///nowhere/apex.git", "git clone failed"),
    ):
        with pytest.raises(PipelineError, match=said):
            generate(str(source), None, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["an apex", "plain"]


def test_a_source_that_the_patch_does_not_fit_leaves_nothing(tmp_path):
    files = synthetic.files("2025") | {"apex/optimizers/__init__.py": "from .novel import Novel\n"}
    tree = synthetic.write(tmp_path / "apex", files)
    out = tmp_path / "out"
    with pytest.raises(PipelineError, match=f"does not fit the commit of {out}, ") as said:
        generate(str(tree), "HEAD", out)  # a folder without --ref is checked before it is copied
    assert "unfinished" not in str(said.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["apex"]


def test_a_place_that_cannot_be_written_is_named(tree_2025, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "apex", Path("/proc/apex_npu/apex")):
        done = script("gen", "--source", tree_2025, "--out", out, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith("apex_npu: ")
        assert str(out) in done.stderr
        assert len(done.stderr.splitlines()) == 1
