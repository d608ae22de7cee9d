# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is said of skipped steps without a change to the script: the first line, and the table after some skips."""

import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from debug import healthy, planted
from debug.test_watching import hooks_of_torch, iterate, set_up
from devices import DEVICE, START_SCRIPT
from small_programs import backward

from apex_npu import amp, optimizers
from apex_npu._cli.options import of_environment
from apex_npu.amp import session as amp_session
from apex_npu.debug.script import look

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _off():
    before = hooks_of_torch()
    yield
    amp.debug.explain_overflows(None)
    assert amp_session.settings.observer is None
    assert hooks_of_torch() == before


def tables(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "apex_npu.debug"]


@pytest.mark.parametrize(
    "level", [pytest.param("O1", marks=pytest.mark.slow), "O2", pytest.param("O3", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda fault: fault.name)
def test_planted(fault, level, caplog):
    if level not in fault.levels:
        pytest.skip("no such fault at this level")
    amp.debug.explain_overflows(after=1)
    # A scale that is skipped at twice in a row.
    options = {"dynamic_init_scale": 2.0**24, "scale_backoff_factor": 0.999} if fault.name == "scale" else {}
    model, optimizer, _ = planted.set_up(fault, level, torch.optim.SGD, **options)
    planted.iterate(fault, model, optimizer)
    assert tables(caplog) == []
    planted.iterate(fault, model, optimizer)
    applied = amp.last_step(optimizer).applied  # the loss has overflowed, and no gradient; or the scale has settled
    assert applied == (fault.name in ("bias", "product", "sum"))
    if fault.name == "sum":
        assert tables(caplog) == []
        return
    if applied:  # known by the next block
        planted.iterate(fault, model, optimizer)
    (table,) = tables(caplog)
    expected = fault.at(level)
    lines = table.splitlines()
    assert ("2 skips in a row" in lines[0]) is not applied
    assert lines[1].split()[:2] == [expected["kind"], expected["phase"]]
    assert expected["operator"] in lines[1]
    if expected["line"] is not None:
        assert f"planted.py:{expected['line']} " in lines[2]


def test_only_skipped_iterations_are_told_of_and_no_more_than_asked_for(caplog):
    amp.debug.explain_overflows(after=2, times=1)
    model, optimizer = set_up(healthy.ResNet, "O2", dynamic_init_scale=2.0**24)
    applied = 0
    while applied < 3:
        iterate(model, optimizer)
        applied += amp.last_step(optimizer).applied
    assert len(tables(caplog)) == 1
    assert "scale     " in tables(caplog)[0]


def test_the_same_training_with_and_without(caplog):
    def trained(explain):
        model, optimizer = set_up(healthy.GPT, "O2", dynamic_init_scale=2.0**24)
        amp.debug.explain_overflows(1 if explain else None)
        for _ in range(20):
            iterate(model, optimizer)
        left = [p.detach().clone() for p in amp.master_params(optimizer)], torch.get_rng_state()
        report = amp.last_step(optimizer)
        amp.shutdown()
        return left, report

    (params, rng), report = trained(False)
    (params_too, rng_too), report_too = trained(True)
    assert tables(caplog)
    assert report == report_too
    assert report.skipped_steps
    assert all(map(torch.equal, params, params_too))
    assert torch.equal(rng, rng_too)


def test_the_alarm_has_the_iteration_after_it_watched(caplog):
    fault = planted.FAULTS[0]
    model, optimizer, _ = planted.set_up(fault, "O2", torch.optim.SGD, skip_alarm=3)
    for _ in range(6):
        planted.iterate(fault, model, optimizer)
    (table,) = tables(caplog)
    assert "4 skips in a row" in table
    assert f"planted.py:{planted.MARKED['squared']} " in table
    assert not amp_session.current().observers


@pytest.mark.parametrize("shut_down", [True, False])
def test_what_the_alarm_has_begun_is_not_for_a_later_session(shut_down):
    before, batch = hooks_of_torch(), torch.ones(2, 3, device=DEVICE)

    def loss_of(model):
        return model(batch).sum()

    model, optimizer = set_up(lambda: torch.nn.Linear(3, 2), "O0", skip_alarm=1)
    backward(loss_of(model) * float("inf"), optimizer)
    optimizer.step()
    assert hooks_of_torch() != before
    if shut_down:
        amp.shutdown()
    model, optimizer = set_up(lambda: torch.nn.Linear(3, 2), "O0")
    loss_of(model)
    assert hooks_of_torch() == before  # it would not hear of blocks and steps, and watch on


def test_the_watch_ends_where_the_next_iteration_begins():
    amp.debug.explain_overflows(after=1)
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=16.0)
    before = hooks_of_torch()
    backward(model.loss() * float("inf"), optimizer)
    optimizer.step()
    iterate(model, optimizer)
    assert amp.last_step(optimizer).applied
    assert hooks_of_torch() != before  # still watched
    model.loss()
    assert hooks_of_torch() == before


def test_an_exception_in_a_watched_block_ends_it(caplog):
    amp.debug.explain_overflows(after=1)
    fault = planted.FAULTS[0]
    model, optimizer, _ = planted.set_up(fault, "O2", torch.optim.SGD)
    planted.iterate(fault, model, optimizer)
    before = len(hooks_of_torch()[1])
    with pytest.raises(KeyError), amp.scale_loss(fault.loss(model), optimizer):
        raise KeyError
    assert hooks_of_torch()[3] == []
    assert len(hooks_of_torch()[1]) < before
    planted.iterate(fault, model, optimizer)
    planted.iterate(fault, model, optimizer)
    assert len(tables(caplog)) == 1


SCRIPT = f"""
import torch
from apex import amp
torch.manual_seed(0)
model = torch.nn.Linear(4, 1).to("{DEVICE}")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
for _ in range(3):
    optimizer.zero_grad()
    y = model(torch.ones(2, 4).to("{DEVICE}"))
    loss = (y * 0).log().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


# The second batch overflows, and no other.
SOMETIMES = f"""
import torch
from apex import amp

class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.square())

model = Model(4, 1).to("{DEVICE}")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dynamic_init_scale=256.0, verbosity=0)
for largest in (1.0, 300.0, 1.0, 1.0):
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), largest).to("{DEVICE}")).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


def printed_by(folder, text, how, options, variable):
    """What a script prints to stderr under ``run`` with ``options``, or with the variable."""
    (folder / "train.py").write_text(text)
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if how == "variable":
        variables["APEX_NPU_EXPLAIN_OVERFLOWS"] = variable
        options = []
    command = [sys.executable, *START_SCRIPT, "-m", "apex_npu", "run", *options, "train.py"]
    ran = subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["option", pytest.param("variable", marks=pytest.mark.sweep)])
def test_a_script_stays_as_it_is(how, tmp_path):
    printed = printed_by(tmp_path, SCRIPT, how, ["--explain-overflows=2"], "2")
    assert "math        forward  outside of modules  aten::log" in printed
    assert "line        train.py:11  loss = (y * 0).log().mean()" in printed
    assert printed.count("skips in a row") == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("option", marks=pytest.mark.sweep), "variable"])
def test_the_skipped_step_of_a_script_is_run_again(how, tmp_path):
    printed = printed_by(tmp_path, SOMETIMES, how, ["--explain-overflows=1", "--replay"], "1,replay")
    assert "overflow    forward  the model itself  aten::pow  float16 [2, 4]" in printed
    assert "line        train.py:7  return super().forward(x.square())" in printed
    assert "run again as it was" in printed
    assert printed.count("1 skip in a row") == 1


@pytest.mark.parametrize("after", [0, -1, 1.5, True, "2"])
def test_bad_input(after):
    with pytest.raises(ValueError, match="after must be a positive integer, got"):
        amp.debug.explain_overflows(after)
    with pytest.raises(ValueError, match="times must be a positive integer, got 0"):
        amp.debug.explain_overflows(2, times=0)


@pytest.mark.parametrize("text", ["2", " 2", "2\n"])
def test_the_variable(text, monkeypatch):
    monkeypatch.setenv("APEX_NPU_EXPLAIN_OVERFLOWS", text)
    look(of_environment())
    assert amp_session.settings.observer is not None
    amp.debug.explain_overflows(None)
    for off in ("0", " 0 ", " ", ""):
        monkeypatch.setenv("APEX_NPU_EXPLAIN_OVERFLOWS", off)
        look(of_environment())
        assert amp_session.settings.observer is None
    for wrong in ("two", "2,", "2,replays", "replay", "-1"):
        monkeypatch.setenv("APEX_NPU_EXPLAIN_OVERFLOWS", wrong)
        with pytest.raises(ValueError, match=f"APEX_NPU_EXPLAIN_OVERFLOWS='{wrong}': give N"):
            of_environment()


# ---- what each row of skips begins with ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"combine_grad": True}, {"combine_grad": True, "fuse_unscale": True}])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_bad_gradients(level, options, caplog):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)).to(DEVICE)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", dynamic_init_scale=4.0, verbosity=0, **options
    )
    amp_session.current().verbosity = 1

    def step():
        optimizer.zero_grad()
        loss = model[0](planted.batch(2, 4)).float().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            model[0].weight.grad[1, 2] = float("nan")
            model[0].weight.grad[2] = float("inf")
        optimizer.step()

    step()
    said = "NpuFusedSGD.step() was skipped: 1 of 2 gradients (0.weight) were not finite at loss scale 4; normal"
    assert said in caplog.text
    caplog.clear()
    assert amp.debug.bad_gradients(optimizer) == {"0.weight": (1, 4)}
    step()
    assert said not in caplog.text  # the second in a row
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="found no gradient"):
        assert amp.debug.bad_gradients(optimizer) == {}


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_wrappers_of_frameworks():
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=4.0)
    wrapper = Wrapper(optimizer)
    with amp.debug.find_overflow(model) as found, amp.scale_loss(model.loss(), wrapper) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    assert found.parameters
    assert found.reports[0].gradients == len(list(model.parameters()))
    assert set(amp.debug.bad_gradients(wrapper)) == set(amp.debug.bad_gradients(optimizer)) == set(found.parameters)


def test_gradients_of_another_optimizer():
    with pytest.raises(RuntimeError, match=r"SGD was not passed to amp\.initialize"):
        amp.debug.bad_gradients(torch.optim.SGD([torch.zeros(1)]))


def test_bad_gradients_of_several_dtypes():
    torch.manual_seed(0)
    shapes = [(4, 3), (), (5,), (2, 0), (7,), (1,)]
    params = [
        torch.nn.Parameter(torch.ones(s, dtype=[torch.float32, torch.float64][i % 2])) for i, s in enumerate(shapes)
    ]
    model = torch.nn.ParameterList(params).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    for p in model:
        p.grad = torch.tensor([1e4, math.nan, math.inf, -math.inf], dtype=p.dtype)[torch.randint(4, p.shape)].to(DEVICE)
    expected = {
        name: (int(p.grad.isnan().sum()), int(p.grad.isinf().sum()))
        for name, p in model.named_parameters()
        if not p.grad.isfinite().all()
    }
    assert len(expected) > 2
    assert amp.debug.bad_gradients(optimizer) == expected


# ---- steps that are applied though their loss is not finite ----------------------------------------------------------

NO_TARGET = torch.full((4,), -100)


def train_linear(loss_of, level, optimizer=None, steps=6, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(DEVICE)
    optimizer = (optimizer or functools.partial(torch.optim.SGD, lr=0.1))(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(torch.ones(4, 8, device=DEVICE)).float(), step)
        backward(loss, optimizer)
        optimizer.step()
    return optimizer


def log_of_zero(y, step):
    return (y * (0 if step == 1 else 1)).abs().log().mean()


@pytest.mark.parametrize(
    ("loss_of", "level", "options", "kind", "advice"),
    [
        (
            lambda y, step: torch.nn.functional.cross_entropy(y, NO_TARGET.to(DEVICE)),
            "O2",
            {"loss_scale": "dynamic"},
            "math",
            "no target counts, as all are ignore_index",
        ),
        (log_of_zero, "O3", {}, "weights", 'loss_scale="dynamic" skips such steps'),
        (
            lambda y, step: (y * 1e-4).square().mean(),
            "O3",
            {"optimizer": functools.partial(torch.optim.Adam, lr=1e-3)},
            "weights",
            "the eps of Adam, 1e-08, is 0 in float16",
        ),
    ],
    ids=["ignore_index", "static scale", "eps of Adam"],
)
def test_a_loss_that_is_not_finite_though_no_step_is_skipped(loss_of, level, options, kind, advice, caplog):
    amp.debug.explain_overflows(after=1)
    optimizer = train_linear(loss_of, level, **options)
    assert amp.last_step(optimizer).applied
    (table,) = tables(caplog)
    lines = table.splitlines()
    assert lines[0].startswith("loss 0 is nan")
    assert lines[1].split()[0] == kind
    assert advice in " ".join(table.split())
    caplog.clear()
    amp.debug.explain_overflows(None)
    assert re.fullmatch(r"the cause above was found again in \d later iterations?", tables(caplog)[0])


def test_the_first_step_that_a_static_scale_applies_is_run_again(caplog):
    class Logarithm(torch.nn.Linear):
        def forward(self, x):
            return super().forward((x - x[0, 0]).log() if self.bias.isnan().any() or self.spoilt else x)

    model = Logarithm(8, 8).to(DEVICE)
    amp.debug.explain_overflows(after=1, replay=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    model.spoilt = False
    for step in range(3):
        model.spoilt = step == 1
        optimizer.zero_grad()
        backward(model(torch.ones(4, 8, device=DEVICE)).float().mean(), optimizer)
        optimizer.step()
    first = tables(caplog)[0]
    assert first.splitlines()[1].startswith("math        forward  the model itself  aten::log  float16")
    assert "run again as it was" in first


def test_a_cause_that_stays_is_told_once(caplog):
    amp.debug.explain_overflows(after=1)
    train_linear(lambda y, step: (y * 0).log().mean(), "O1", steps=8, loss_scale="dynamic")
    assert len(tables(caplog)) == 1
    amp.debug.explain_overflows(None)
    assert tables(caplog)[1:] == ["the cause above was found again in 6 later iterations"]


FINE = SCRIPT.replace("(y * 0).log()", "y").replace("verbosity=0", "loss_scale=1.0")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("from apex import amp", "no scale_loss block of amp has run in it"),
        (FINE, "3 blocks, 0 skipped steps: all losses were finite, and nothing has "),
        (SCRIPT, "3 blocks, 3 skipped steps; 1 table above"),
        (SCRIPT.replace("range(3)", "range(1)"), "none was explained: this needs 2 in a row, and a further iteration"),
    ],
)
@pytest.mark.slow
def test_a_script_ends_with_a_sentence(text, sentence, tmp_path):
    printed = printed_by(tmp_path, text, "option", ["--explain-overflows=2"], "2")
    last = printed.rstrip().splitlines()[-1]
    assert last.startswith("--explain-overflows: ")
    assert sentence in last
