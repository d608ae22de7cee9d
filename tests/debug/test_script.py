# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``python -m apex_npu run`` prints of the steps of a script."""

import pytest
from debug import healthy
from debug.test_check_operators import Spoil
from debug.test_profile import iterate, set_up_gpt
from debug.test_watching import hooks_of_torch, set_up

from apex_npu.amp.amp_optimizer import AmpOptimizerMixin
from apex_npu.amp.session import settings
from apex_npu.debug.script import (
    CheckOperatorsPart,
    GradientRangePart,
    ProfilePart,
    ScriptSteps,
    look_as_environment_says,
)


@pytest.fixture(autouse=True)
def _nothing_stays():
    before = hooks_of_torch(), AmpOptimizerMixin.step
    yield
    assert (hooks_of_torch(), AmpOptimizerMixin.step) == before
    assert settings.labels is None


def test_a_profile(capsys, tmp_path):
    model, optimizer = set_up_gpt(steps=0)
    ScriptSteps([ProfilePart(1, 3, str(tmp_path))])
    for i in range(4):
        iterate(model, optimizer)
        assert (settings.labels is not None) is (i in (0, 1))
    assert capsys.readouterr().out.startswith("2 steps of ")
    assert len(list(tmp_path.glob("*.pt.trace.json"))) == 1


@pytest.mark.parametrize(("first", "last", "said"), [(0, 9, "1 step of "), (5, 6, "has ended after step 1")])
def test_a_script_that_ends_before(first, last, said, capsys):
    model, optimizer = set_up_gpt(steps=0)
    steps = ScriptSteps([ProfilePart(first, last, None)])
    iterate(model, optimizer)
    steps.end()
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("step", [0, 2])
def test_the_range_of_gradients(step, capsys):
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=16.0, scale_window=1)
    ScriptSteps([GradientRangePart(step, step + 1)])
    for _ in range(4):
        iterate(model, optimizer)
    # The scale doubles after each step.
    assert capsys.readouterr().out.startswith(f"gradients of NpuFusedAdam at loss scale {16 * 2**step}: ")


@pytest.mark.parametrize("step", [0, 1])
def test_operators(step, capsys):
    model, optimizer = set_up(healthy.ResNet, "O2", dynamic_init_scale=16.0)
    with Spoil("aten::convolution") as spoil:
        spoil.done = True  # not before the step that is looked at
        ScriptSteps([CheckOperatorsPart(step, step + 1)])
        for i in range(3):
            spoil.done = i != step
            iterate(model, optimizer)
    said = capsys.readouterr().out
    assert "forward  stem  aten::convolution  float16" in said
    assert said.count("its error, relative to the norm, is") == 1


def test_all_of_them_in_one_step(capsys, monkeypatch):
    for name in ("PROFILE", "GRADIENT_RANGE", "CHECK_OPERATORS"):
        monkeypatch.setenv(f"APEX_NPU_{name}", {"PROFILE": "1:2"}.get(name, "1"))
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=16.0)
    look_as_environment_says()
    for _ in range(3):
        iterate(model, optimizer)
    said = capsys.readouterr().out
    for begin in ("1 step of ", "gradients of NpuFusedAdam", "operators were compared with float64"):
        assert said.count(begin) == 1


@pytest.mark.parametrize("value", ["x", "3:3", "1:", ":2", "-1", "1:2:3"])
def test_bad_input(value, monkeypatch):
    monkeypatch.setenv("APEX_NPU_PROFILE", value)
    with pytest.raises(ValueError, match=f"APEX_NPU_PROFILE is A:B, .* got '{value}'"):
        look_as_environment_says()
