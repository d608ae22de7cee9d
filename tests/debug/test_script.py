# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``python -m apex_npu run`` prints of the steps of a script."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from debug import healthy
from debug.test_check_operators import Spoil
from debug.test_profile import iterate, set_up_gpt
from debug.test_watching import hooks_of_torch, set_up
from small_programs import backward
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _pop_mode, _push_mode
from torch.utils.flop_counter import FlopCounterMode

from apex_npu import amp
from apex_npu._cli.options import of_environment
from apex_npu.amp.amp_optimizer import AmpOptimizerMixin
from apex_npu.amp.session import settings
from apex_npu.backends._torch_private import dispatch_modes
from apex_npu.debug.comparison.recorded import load
from apex_npu.debug.script import (
    CheckOperatorsPart,
    FirstForward,
    GradientRangePart,
    ProfilePart,
    RecordPart,
    ScriptSteps,
    look,
)
from apex_npu.debug.watching.stream import Stream


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


@pytest.mark.parametrize(("first", "last", "said"), [(0, 9, "1 step of "), (5, 6, "has ended after 1 step\n")])
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


def test_the_first_forward_is_in_its_phase(capsys):
    model, optimizer = set_up_gpt(steps=0)
    ScriptSteps([part := ProfilePart(0, 1, None)])
    iterate(model, optimizer)
    phases = {phase.name: phase for phase in part._profile.phases}
    assert phases["amp.forward"].operators > 10
    assert "amp.forward" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [ProfilePart, GradientRangePart, CheckOperatorsPart])
def test_a_script_without_amp_is_told_so(kind, capsys):
    steps = ScriptSteps([kind(1, 2)])
    steps.end()
    assert (
        capsys.readouterr().out
        == f"{kind.option}: the script has ended and no optimizer of amp has stepped in this process\n"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_prints_though_its_process_group_is_gone(rank, capsys):
    amp.debug.explain_overflows(after=1)
    steps = ScriptSteps([ProfilePart(0, 9), GradientRangePart(5, 6)])
    waiting = FirstForward()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        model, optimizer = set_up_gpt(steps=0)
        with torch.no_grad():
            model.loss()  # not a forward for training, which would be reported on
        waiting._remove()
        iterate(model, optimizer)
    finally:
        dist.destroy_process_group()
    steps.end()
    waiting._script_ended()
    settings.observer.end_script()
    printed = capsys.readouterr()
    amp.debug.explain_overflows(None)
    if rank:
        assert printed.out == printed.err == ""
    else:
        assert "1 step of " in printed.out
        assert "--gradient-range: the script has ended after 1 step" in printed.out
        assert "--model-report: the script has ended" in printed.out
        assert "--explain-overflows: 1 block, 0 skipped steps" in printed.err


@pytest.mark.parametrize(
    "context", [amp.debug.find_overflow, amp.debug.check_operators, functools.partial(amp.debug.record, os.devnull)]
)
def test_what_the_script_itself_opens_comes_first(context, capsys):
    model, optimizer = set_up(healthy.ResNet, "O2", dynamic_init_scale=16.0)
    ScriptSteps([CheckOperatorsPart(1, 2)])
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.loss()
        with context(model), amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    said = capsys.readouterr().out
    assert "operators were compared with float64" in said
    assert "--check-operators has ended because the script itself opens find_overflow" in said


def test_what_watches_already_is_not_disturbed(capsys):
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=16.0)
    ScriptSteps([CheckOperatorsPart(1, 2), ProfilePart(1, 2)])
    with amp.debug.find_overflow(model) as found, torch.profiler.profile():
        for _ in range(3):
            iterate(model, optimizer)
    assert len(found.reports) == 3
    said = capsys.readouterr().out
    assert "--check-operators: check_operators, find_overflow or record" in said
    assert "--profile: amp.debug.profile was entered" in said
    iterate(model, optimizer)  # whose block finds no profiler


def test_explain_overflows_makes_way():
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=16.0)
    amp.debug.explain_overflows(after=1)
    try:
        backward(model.loss() * float("inf"), optimizer)
        optimizer.step()
        loss = model.loss()  # watched
        with amp.debug.find_overflow(model) as found, amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        assert len(found.reports) == 1
        optimizer.step()
    finally:
        amp.debug.explain_overflows(None)


def enter_below(mode):
    """Enter ``mode`` below the innermost one, where a device's kernels are."""
    inner = _pop_mode()
    mode.__enter__()
    _push_mode(inner)


@pytest.mark.parametrize("step", [0, 1])
def test_operators(step, capsys):
    model, optimizer = set_up(healthy.ResNet, "O2", dynamic_init_scale=16.0)
    ScriptSteps([CheckOperatorsPart(step, step + 1)])
    for i in range(3):
        spoil = Spoil("aten::convolution")
        hook = model.stem.register_forward_pre_hook(lambda *_, spoil=spoil: enter_below(spoil)) if i == step else None
        iterate(model, optimizer)
        if hook is not None:
            hook.remove()
            spoil.__exit__(None, None, None)
    said = capsys.readouterr().out
    assert "forward  stem  aten::convolution  float16" in said
    assert said.count("its error, relative to the norm, is") == 1


def test_within_another_mode_nothing_begins(capsys, tmp_path):
    model, optimizer = set_up(healthy.ResNet, "O2", dynamic_init_scale=16.0)
    ScriptSteps(
        [CheckOperatorsPart(0, 1), RecordPart(0, str(tmp_path / "a.pt")), RecordPart(1, str(tmp_path / "b.pt"))]
    )
    for _ in range(3):
        optimizer.zero_grad()
        with FlopCounterMode(display=False):
            loss = model.loss()
        backward(loss, optimizer)
        optimizer.step()
        assert not [mode for mode in dispatch_modes() if not isinstance(mode, Stream)]
    said = capsys.readouterr().out
    for option in ("--check-operators", "--record"):
        assert f"{option}: the first forward" in said
    assert [path.name for path in tmp_path.iterdir()] == ["b.pt"]
    assert {"forward", "backward"} <= {row.phase for row in load(tmp_path / "b.pt").rows}


def test_a_mode_that_ends_the_record(capsys, tmp_path):
    model, optimizer = set_up(healthy.ResNet, "O2", dynamic_init_scale=16.0)
    ScriptSteps([CheckOperatorsPart(1, 2), RecordPart(3, str(tmp_path / "a.pt"))])
    for _ in range(5):
        with FlopCounterMode(display=False):  # also around the step, after which they begin
            iterate(model, optimizer)
    assert dispatch_modes() == []
    said = capsys.readouterr().out
    assert "1 not: all after an outer dispatch mode" in said
    assert "--record: no file is written: the record" in said
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_does_not_end_the_script(capsys, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=16.0)
    ScriptSteps([RecordPart(0, str(tmp_path / "a.pt"))])
    monkeypatch.setattr(torch, "save", fail)
    iterate(model, optimizer)
    assert "--record: no file is written: [Errno 28] No space left on device" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [0, 2])
def test_a_record(step, capsys, tmp_path):
    path = tmp_path / "step.pt"
    model, optimizer = set_up(healthy.ResNet, "O2", dynamic_init_scale=16.0, scale_window=1)
    ScriptSteps([RecordPart(step, str(path))])
    for i in range(4):
        iterate(model, optimizer)
        assert path.exists() is (i >= step)
    recorded = load(path)
    assert recorded.scale == 16 * 2**step  # it doubles after each step
    assert {row.phase for row in recorded.rows} == {"forward", "backward", "after backward"}
    assert "stem" in {row.module for row in recorded.rows if row.phase == "forward"}
    assert capsys.readouterr().out == f"--record: step {step} is in {path}, {len(recorded.rows)} tensors\n"


def test_a_record_that_is_not_complete_is_not_written(capsys, tmp_path):
    path = tmp_path / "step.pt"
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=16.0)
    ScriptSteps([RecordPart(1, str(path))])
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.loss()
        with amp.debug.find_overflow(model), amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert "--record: no file is written: the script itself opens find_overflow" in capsys.readouterr().out
    steps = ScriptSteps([RecordPart(1, str(path))])
    iterate(model, optimizer)
    model.loss()
    steps.end()
    assert "--record: no file is written: the script ended before" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing(capsys, tmp_path):
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=16.0)
    ScriptSteps([RecordPart(0, str(tmp_path / "no" / "step.pt"))])
    iterate(model, optimizer)
    assert "--record: record cannot write" in capsys.readouterr().out


def test_all_of_them_in_one_step(capsys, monkeypatch):
    for name in ("PROFILE", "GRADIENT_RANGE", "CHECK_OPERATORS"):
        monkeypatch.setenv(f"APEX_NPU_{name}", {"PROFILE": "1:2"}.get(name, "1"))
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=16.0)
    look(of_environment())
    for _ in range(3):
        iterate(model, optimizer)
    said = capsys.readouterr().out
    for begin in ("1 step of ", "gradients of NpuFusedAdam", "operators were compared with float64"):
        assert said.count(begin) == 1
