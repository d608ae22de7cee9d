# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The frameworks' own training scripts learn under amp what they learn in full precision, by the same way."""

import pytest
from integrations.public_scripts import SCRIPTS, losses_of, why_not

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_are_near_those_of_full_precision(name, tmp_path):
    script = SCRIPTS[name]
    if reason := why_not(script):
        pytest.skip(reason)
    losses = {}
    for kind, way in script.ways.items():
        (tmp_path / kind).mkdir()
        losses[kind] = losses_of(script, way, tmp_path / kind)
    expected, *others = losses.values()
    assert len(expected) > 5
    for kind, found in zip(list(losses)[1:], others, strict=True):
        assert len(found) == len(expected)
        assert found[: script.compared] == pytest.approx(expected[: script.compared], rel=0.05, abs=0.02), kind
