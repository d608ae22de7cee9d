# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The same on NVIDIA's own Apex, where ``APEX_UPSTREAM`` names a clone of it: `make patch-check`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from devices import DEVICE
from pipeline.environments import ROOT, Environment, script
from pipeline.lifecycle import build, live_through
from pipeline.synthetic import git
from pipeline.test_patched_tree import EVERY_MODULE

from apex_npu.compat.pipeline import checkouts, eras

UPSTREAM = os.environ.get("APEX_UPSTREAM", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not UPSTREAM, reason="APEX_UPSTREAM names no clone of Apex")]
ERAS = [era.name for era in eras.ERAS]
# The name that each era's tests/L0 has, with run_amp; master has none.
WITH_TESTS = ["2020", "2025"]
EXTENSION = {"APEX_NPU_NO_EXT": os.environ.get("APEX_NPU_NO_EXT", "")}


@pytest.mark.parametrize("era", eras.ERAS, ids=lambda era: era.name)
def test_the_patches_are_what_make_patch_writes(tmp_path, era):
    checkouts.generate(UPSTREAM, era.name, tmp_path / "apex")
    assert checkouts.difference(tmp_path / "apex") == era.patch_file.read_text(encoding="utf-8")


@pytest.mark.parametrize("ref", [*ERAS, "22.03", "23.05", "23.12", "24.04.01", "24.10", "25.04", "25.09"])
def test_releases_are_patched_and_restored(tmp_path, ref):
    out = tmp_path / "apex"
    assert script("gen", f"--source={UPSTREAM}", f"--ref={ref}", f"--out={out}", cwd=tmp_path).returncode == 0
    assert script("gen", "--reverse", f"--out={out}", cwd=tmp_path).returncode == 0
    assert git(out, "status", "--porcelain", "--ignored") == ""


@pytest.mark.parametrize("ref", ERAS)
def test_the_life_of_a_wheel(tmp_path, ref):
    live_through(Path(UPSTREAM), tmp_path, ref, **EXTENSION)


@pytest.mark.parametrize("ref", ERAS)
def test_modules_and_upstreams_own_tests_in_the_wheel(tmp_path, ref):
    environment = Environment(tmp_path / "an environment")
    environment.pip("install", build(environment, UPSTREAM, tmp_path / "wheels", f"--ref={ref}", APEX_NPU_NO_EXT="1"))
    environment.output("-W", "ignore", "-c", EVERY_MODULE)
    if ref not in WITH_TESTS:
        return
    tree = tmp_path / "apex"
    assert script("gen", f"--source={UPSTREAM}", f"--ref={ref}", f"--out={tree}", cwd=tmp_path).returncode == 0
    runner = ROOT / "tests" / "upstream" / "run_upstream.py"
    done = environment.run("-W", "ignore", runner, tree, "--device", DEVICE.type, "--installed")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].endswith("0 FAILED")
