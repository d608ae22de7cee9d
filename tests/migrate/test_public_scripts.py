# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Public training scripts run on the npu, rewritten on disk and in memory, with the losses of the CPU.

``MIGRATE_SCRIPTS`` names a folder of clones, ``OWNER/NAME`` each, bare or not; without it these tests are skipped.
"""

import functools

import pytest
from devices import DEVICE, SIMULATOR, VENDOR
from migrate.public.catalogue import SCRIPTS
from migrate.public.harness import fetch, losses_of, migrated, why_not

from apex_npu.migrate import Options

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE.type != "npu", reason="rewritten scripts run on npu"),
]
RUN = ["-m", "apex_npu", "run"]
# What the same operators compute on another device; attention has another kernel there.
TOLERANCES = {"nanoGPT": 1e-6}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    @functools.cache
    def prepare(script):
        if reason := why_not(script):
            pytest.skip(reason)
        original = fetch(script, tmp_path_factory.mktemp(script.name))
        return original, losses_of(script, original, "cpu", RUN if script.knows_apex else [])

    return prepare


def check(losses, expected, tolerance):
    """All losses of all ranks; with the vendor's operators, the first one closely."""
    if VENDOR:
        tolerance = max(tolerance, 1e-5)
        assert [one[0] for one in losses] == pytest.approx([one[0] for one in expected], rel=tolerance, abs=0)
        tolerance *= 100
    for one, two in zip(losses, expected, strict=True):
        assert one == pytest.approx(two, rel=tolerance, abs=0)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_losses_are_those_of_the_cpu(script, prepared, tmp_path):
    original, expected = prepared(script)
    tolerance = TOLERANCES.get(script.name, 0)
    changed = tmp_path / "changed"
    migrated(original, changed, Options(("D", "X")))
    check(losses_of(script, changed, SIMULATOR.__name__), expected, tolerance)
    in_memory = losses_of(script, original, SIMULATOR.__name__, [*RUN, "--device", "npu"])
    check(in_memory, expected, tolerance)


@pytest.mark.parametrize("script", [one for one in SCRIPTS if one.amp], ids=lambda script: script.name)
def test_amp_is_put_in(script, prepared, tmp_path):
    original, expected = prepared(script)
    changed, scale = tmp_path / "changed", 128.0
    for level in script.amp:
        made = migrated(original, changed, Options(amp=level, amp_args=f"loss_scale={scale}, verbosity=0"))
        assert {finding.status for finding in made.findings if finding.rule[0] in "AT"} <= {"changed", "note"}
        losses = losses_of(script, changed, SIMULATOR.__name__)
        for one, two in zip(losses, expected, strict=True):
            assert one[0] / scale == pytest.approx(two[0], rel=1e-3, abs=0)
            assert [loss / scale for loss in one] == pytest.approx(two, rel=2e-2, abs=0)
