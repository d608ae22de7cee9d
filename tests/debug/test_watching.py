# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Watching an iteration changes nothing, finds nothing where there is nothing, and costs nothing when it is off."""

import copy
import json
import random
import subprocess
import sys

import pytest
import torch
from debug import healthy, planted
from devices import DEVICE, SIMULATOR, needs, needs_counts
from torch.nn.modules import module as torch_module

from apex_npu import amp, optimizers
from apex_npu.backends._torch_private import dispatch_modes


def hooks_of_torch():
    return (
        dict(torch_module._global_forward_hooks),
        dict(torch_module._global_forward_pre_hooks),
        dict(torch_module._global_forward_hooks_always_called),
        dispatch_modes(),
    )


def set_up(make, level, optimizer=optimizers.NpuFusedAdam, **options):
    torch.manual_seed(1)
    model = make().to(DEVICE)
    made = optimizer(model.parameters(), lr=1e-3)
    return amp.initialize(model, made, opt_level=level, loss_scale="dynamic", verbosity=0, **options)


def train(model, optimizer, steps, watch, **scale):
    """What an iteration leaves: values, random numbers, reports."""
    seen = []
    for step in range(steps):
        if watch(step):
            with amp.debug.find_overflow(model) as found:
                iterate(model, optimizer)
            seen.append(found)
        else:
            iterate(model, optimizer)
    left = [p.detach().cpu().clone() for p in (*model.parameters(), *amp.master_params(optimizer))]
    left += [b.detach().cpu().clone() for b in model.buffers()]
    left += [t.cpu() for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    states = [torch.get_rng_state(), random.getstate(), amp.last_step(optimizer), json.dumps(amp.state_dict())]
    return left, states, seen


def iterate(model, optimizer):
    optimizer.zero_grad()
    with amp.scale_loss(model.loss(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", healthy.MODELS)
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"combine_grad": True, "fuse_unscale": True}]
)
def test_nothing_changes_and_nothing_is_found(make, level, options):
    # The first steps are skipped, as their scale is too large.
    options = {**options, "dynamic_init_scale": 2.0**24}
    before = hooks_of_torch()
    alone, states, _ = train(*set_up(make, level, **options), 12, lambda step: False)
    amp.shutdown()
    watched, states_watched, seen = train(*set_up(make, level, **options), 12, lambda step: step in (0, 1, 6, 11))
    assert len(alone) == len(watched)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert torch.equal(states[0], states_watched[0])
    assert states[1:] == states_watched[1:]
    assert hooks_of_torch() == before
    assert {cause.kind for found in seen for cause in found.causes} <= {"scale"}
    assert not [report.not_measured for found in seen for report in found.reports if report.not_measured]
    assert not seen[-1].causes
    assert str(seen[-1]).startswith("no overflow: loss 0 is ")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", healthy.MODELS)
def test_no_false_alarm_in_200_iterations(make, level):
    _, _, seen = train(*set_up(make, level), 200, lambda step: True)
    assert {cause.kind for found in seen for cause in found.causes} <= {"scale"}
    assert len(seen) == 200


def test_an_exception_ends_the_watch():
    model, optimizer = set_up(healthy.ResNet, "O2")
    before = hooks_of_torch()

    def fail():
        raise KeyError("in the block")

    with pytest.raises(KeyError), amp.debug.find_overflow(model):
        fail()
    with pytest.raises(KeyError), amp.debug.find_overflow(model), amp.scale_loss(model.loss(), optimizer):
        fail()
    assert hooks_of_torch() == before
    iterate(model, optimizer)
    assert amp.last_step(optimizer).applied


@needs_counts("stand_in_counts")
def test_it_costs_nothing_where_it_is_off():
    def counted():
        model, optimizer = set_up(healthy.GPT, "O2", combine_grad=True, dynamic_init_scale=128.0)
        iterate(model, optimizer)
        iterate(model, optimizer)
        with SIMULATOR.count() as counts:
            iterate(model, optimizer)
        amp.shutdown()
        return counts.launches, counts.syncs

    program = "import apex_npu.amp, sys; print([name for name in sys.modules if name.startswith('apex_npu.debug')])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
    first = counted()
    with amp.debug.find_overflow(healthy.GPT().to(DEVICE)):
        pass
    assert counted() == first


@needs_counts("stand_in_counts")
@pytest.mark.parametrize("make", [healthy.GPT, healthy.ResNet])
def test_what_watching_costs(make):
    model, optimizer = set_up(make, "O2", combine_grad=True, dynamic_init_scale=128.0)
    for _ in range(2):
        iterate(model, optimizer)
    with SIMULATOR.count() as alone:
        iterate(model, optimizer)
    with SIMULATOR.count() as watched, amp.debug.find_overflow(model) as found:
        iterate(model, optimizer)
    operators = found.reports[0].operators
    print(make.__name__, alone.launches, watched.launches, alone.syncs, watched.syncs, operators)
    gradients = len(list(model.parameters()))
    assert watched.launches - alone.launches <= 1.3 * operators + gradients
    assert watched.syncs - alone.syncs <= 1.1 * operators


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: amp.debug.find_overflow("model"), TypeError, "takes models, torch.nn.Module, got str"),
        (lambda: amp.debug.find_overflow().__enter__(), ValueError, "needs a model: pass it, or call amp.initialize"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_nested():
    model = planted.Plain().to(DEVICE)
    before = hooks_of_torch()
    with amp.debug.find_overflow(model):  # noqa: SIM117
        with pytest.raises(ValueError, match="is open already"), amp.debug.find_overflow(model):
            pass
    assert hooks_of_torch() == before


def test_without_amp():
    model = planted.Squared().to(DEVICE).half()
    with amp.debug.find_overflow(model) as found:
        x = planted.batch(4, 8, value=1.0).half()
        model(x).float().mean().backward()
    (cause,) = found.causes
    assert (cause.kind, cause.operator, cause.line) == ("overflow", "aten::mul", planted.MARKED["squared"])
    assert found.reports[0].loss_id is None
    assert set(found.parameters) == {"last.weight"}  # h is finite, h² is not


def test_models_of_amp_are_the_default_and_copies_are_not_watched():
    model, optimizer = set_up(healthy.LSTM, "O2")
    copy.deepcopy(model)
    with amp.debug.find_overflow() as found:
        iterate(model, optimizer)
    assert found.reports[0].gradients == len(list(model.parameters()))


def test_json(tmp_path):
    fault = next(f for f in planted.FAULTS if f.name == "squared")
    model, optimizer, _ = planted.set_up(fault, "O2", torch.optim.SGD)
    with amp.debug.find_overflow(model) as found:
        planted.iterate(fault, model, optimizer)
    found.to_json(tmp_path / "found.json")
    (report,) = json.loads((tmp_path / "found.json").read_text())["reports"]
    assert report["loss"] in ("inf", "nan")
    assert report["scale"] == 65536.0
    assert report["scale_after"] == 32768.0
    (cause,) = report["causes"]
    assert cause["kind"] == "overflow"
    assert cause["line"] == planted.MARKED["squared"]
    # h = 8 · 50 · 1 + bias, and h² is computed in float16 from the rounded h.
    h = model.first(planted.batch(1, 8, value=1.0)).detach().double()
    assert cause["true_value"] == float((h * h).max())
    assert cause["limit"] == 65504.0


def product(x):
    return torch.vdot(x[0], torch.mv(x, x[1]))


def grid(x):
    return torch.nn.functional.affine_grid(x[None, :2], [1, 1, 4, 4], align_corners=False)


@pytest.mark.parametrize("watch", ["find_overflow", "record", "check_operators"])
@pytest.mark.parametrize("function", [product, pytest.param(grid, marks=needs("affine_grid"))])
def test_operators_whose_kernels_call_others_that_are_cast(watch, function, tmp_path):
    model, _ = set_up(lambda: torch.nn.Linear(3, 3), "O1")
    x = torch.randn(3, 3, device=DEVICE)
    once = function(x)
    context = {
        "find_overflow": lambda: amp.debug.find_overflow(model),
        "record": lambda: amp.debug.record(tmp_path / "run.pt", model),
        "check_operators": lambda: amp.debug.check_operators(model),
    }[watch]
    with context():
        watched = function(x)
    assert watched.dtype == once.dtype
    assert torch.equal(watched, once)
