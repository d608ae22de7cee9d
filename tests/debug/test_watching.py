# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Watching an iteration changes nothing, finds nothing where there is nothing, and costs nothing when it is off."""

import copy
import functools
import json
import math
import os
import random
import subprocess
import sys
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from covering import by_turns
from debug import healthy, planted
from devices import DEVICE, SIMULATOR, needs, needs_counts
from small_programs import backward
from torch.nn.modules import module as torch_module

from apex_npu import amp, optimizers
from apex_npu.backends._torch_private import dispatch_modes
from apex_npu.debug.watching.operators import tensors_in


def hooks_of_torch():
    return (
        dict(torch_module._global_forward_hooks),
        dict(torch_module._global_forward_pre_hooks),
        dict(torch_module._global_forward_hooks_always_called),
        dispatch_modes(),
    )


def hooks_of(model):
    return [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()]


def set_up(make, level, optimizer=optimizers.NpuFusedAdam, **options):
    torch.manual_seed(1)
    model = make().to(DEVICE)
    made = optimizer(model.parameters(), lr=1e-3)
    return amp.initialize(model, made, opt_level=level, loss_scale="dynamic", verbosity=0, **options)


def train(model, optimizer, steps, watched=(), context=amp.debug.find_overflow):
    """What iterations leave, of which some are ``watched`` by ``context``: values, random numbers, reports."""
    seen, hooks = [], hooks_of(model)
    random.seed(3), np.random.seed(3)
    for step in range(steps):
        with context(model) if step in watched else nullcontext() as found:
            iterate(model, optimizer)
        seen += [found] * (step in watched)
    assert hooks_of(model) == hooks
    left = [p.detach().cpu().clone() for p in (*model.parameters(), *amp.master_params(optimizer))]
    left += [b.detach().cpu().clone() for b in model.buffers()]
    left += [t.cpu() for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    states = [torch.get_rng_state(), random.getstate(), float(np.random.rand())]
    return left, [*states, amp.last_step(optimizer), json.dumps(amp.state_dict())], seen


def iterate(model, optimizer):
    optimizer.zero_grad()
    backward(model.loss(), optimizer)
    optimizer.step()


def nothing_changes(made, watched, steps, context=amp.debug.find_overflow):
    """Train twice, once with some steps ``watched``, which leaves the same; return what was found."""
    before = hooks_of_torch()
    alone, states, _ = train(*made(), steps)
    amp.shutdown()
    left, states_watched, seen = train(*made(), steps, watched, context)
    assert len(alone) == len(left)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(alone, left, strict=True))
    assert torch.equal(states[0], states_watched[0])
    assert states[1:] == states_watched[1:]
    assert hooks_of_torch() == before
    return seen


# The first steps are skipped, as their scale is too large.
SKIPPED = {"dynamic_init_scale": 2.0**24}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", healthy.MODELS)
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"combine_grad": True, "fuse_unscale": True}]
)
def test_nothing_changes_and_nothing_is_found(make, level, options):
    seen = nothing_changes(lambda: set_up(make, level, **SKIPPED, **options), (0, 1, 6, 11), 12)
    assert {cause.kind for found in seen for cause in found.causes} <= {"scale"}
    assert not [report.not_measured for found in seen for report in found.reports if report.not_measured]
    assert not seen[-1].causes
    assert str(seen[-1]).startswith("no overflow: loss 0 is ")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [50, pytest.param(200, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("make", "level"), by_turns(healthy.MODELS, [("O1",), ("O2",)]))
def test_no_false_alarm(make, level, steps):
    _, _, seen = train(*set_up(make, level), steps, range(steps))
    assert {cause.kind for found in seen for cause in found.causes} <= {"scale"}
    assert len(seen) == steps


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
    gradients = len(list(model.parameters()))
    assert watched.launches - alone.launches <= 1.3 * operators + gradients
    assert watched.syncs - alone.syncs <= 1.1 * operators


CONTEXTS = [amp.debug.find_overflow, amp.debug.check_operators, functools.partial(amp.debug.record, os.devnull)]


@pytest.mark.parametrize("context", CONTEXTS)
def test_an_exception_ends_the_watch(context):
    model, optimizer = set_up(healthy.ResNet, "O2")
    before = hooks_of_torch()

    def fail():
        model.loss()
        raise KeyError

    with pytest.raises(KeyError), context(model) as found:
        fail()
    assert getattr(found, "checked", 6) > 5
    with pytest.raises(KeyError), context(model), amp.scale_loss(model.loss(), optimizer):
        fail()
    assert hooks_of_torch() == before
    iterate(model, optimizer)
    assert amp.last_step(optimizer).applied


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nothing_changes_where_operators_are_checked(level):
    nothing_changes(lambda: set_up(healthy.GPT, level), range(3), 3, amp.debug.check_operators)


@pytest.mark.parametrize("context", CONTEXTS)
def test_bad_input(context):
    with pytest.raises(TypeError, match=r"models must be .* got str"):
        context("model")
    with pytest.raises(ValueError, match="needs a model"):
        context().__enter__()


@pytest.mark.parametrize("inner", CONTEXTS)
@pytest.mark.parametrize("outer", CONTEXTS)
def test_nested(outer, inner):
    model = planted.Plain().to(DEVICE)
    before = hooks_of_torch()
    with outer(model):  # noqa: SIM117
        with pytest.raises(ValueError, match="is open already"), inner(model):
            pass
    assert hooks_of_torch() == before


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("context", [*CONTEXTS, functools.partial(amp.debug.find_overflow, replay=True)])
def test_scripted_modules(context, whole):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        model = torch.jit.script(torch.nn.Linear(8, 8)).to(DEVICE)
    model = model if whole else torch.nn.Sequential(model, torch.nn.Linear(8, 8)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_scale": "dynamic", "dynamic_init_scale": 8.0}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **options)
    for skips in (True, False):
        before = [p.detach().clone() for p in model.parameters()]
        with context(model) as found:
            loss = model(torch.ones(2, 8, device=DEVICE)).float().sum()
            optimizer.zero_grad()
            backward(loss * (math.inf if skips else 1.0), optimizer)
            optimizer.step()
        assert amp.last_step(optimizer).applied is not skips
        assert all(torch.equal(p, old) is skips for p, old in zip(model.parameters(), before, strict=True))
        if skips and context is amp.debug.find_overflow:
            assert [cause.kind for cause in found.causes] == ["constant"]
    assert amp.debug.report(model, torch.ones(2, 8, device=DEVICE)).levels["O1"].tally.flops


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
    assert cause["inputs"] == [[name, max(-low, high)] for name, low, high in cause["ranges"]] != []
    # All that a finding has is in the file.
    assert {name for name in dir(found.causes[0]) if not name.startswith("_")} == set(cause)


def product(x):
    return torch.vdot(x[0], torch.mv(x, x[1]))


def grid(x):
    return torch.nn.functional.affine_grid(x[None, :2], [1, 1, 4, 4], align_corners=False)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("function", [product, pytest.param(grid, marks=needs("affine_grid"))])
def test_operators_whose_kernels_call_others_that_are_cast(context, function):
    model, _ = set_up(lambda: torch.nn.Linear(3, 3), "O1")
    x = torch.randn(3, 3, device=DEVICE)
    once = function(x)
    with context(model):
        watched = function(x)
    assert watched.dtype == once.dtype
    assert torch.equal(watched, once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("watch", [amp.debug.check_operators, amp.debug.find_overflow])
def test_running_averages_move_once(watch, dtype):
    if dtype is torch.float64 and DEVICE.type != "cpu":
        pytest.skip("devices have no float64 kernels")
    averages = []
    for watched in (False, True):
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(3, dtype=dtype, device=DEVICE)
        # Its variance is lost to rounding, and its gradient to an overflow: both are asked in float64.
        x = 3e4 + torch.rand(16, 3, dtype=dtype, device=DEVICE)
        x[0, 0] = torch.finfo(dtype).max / 2
        with watch(norm) if watched else nullcontext():
            norm(x).sum().backward()
        averages.append([b.cpu() for b in norm.buffers()])
    assert all(torch.equal(a.nan_to_num(1.0), b.nan_to_num(1.0)) for a, b in zip(*averages, strict=True))


# Gradients of torch's own implementation depend on addresses of memory: under an empty dispatch mode they differ, too.
DEPENDS_ON_ADDRESSES = {"nn.LinearCrossEntropyLoss"}


def run_of_module(info, training, index, dtype, watch):
    """All that one sample of torch's database of modules computes and leaves; None: torch itself refuses it."""
    torch.manual_seed(0)
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    inputs, given = samples[index].constructor_input, samples[index].forward_input
    module = info.module_cls(*inputs.args, **inputs.kwargs).to(dtype).train(training)
    torch.manual_seed(1)
    with watch(module) if watch is not None else nullcontext():
        outputs = list(tensors_in(module(*given.args, **given.kwargs)))
        sum(t.sum() for t in outputs if t.requires_grad).backward()
    held = [*module.parameters(), *module.buffers(), *tensors_in([*given.args, *given.kwargs.values()])]
    left = [*outputs, *held, *(t.grad for t in held if t.grad is not None and t.is_leaf)]
    return [t.detach().clone() for t in left], torch.get_rng_state()


def as_bits(tensor):
    dense = tensor.values() if tensor.is_nested else tensor.to_dense()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.contiguous().flatten().view(torch.uint8) if real.numel() else real


@pytest.mark.sweep
@pytest.mark.skipif(DEVICE.type != "cpu", reason="the samples of torch's database are on the host")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("watch", [amp.debug.check_operators, amp.debug.find_overflow])
def test_nothing_changes_in_any_module_of_torch(watch, dtype):
    modules = pytest.importorskip("torch.testing._internal.common_modules")
    seen, changed = 0, []
    for info in modules.module_db:
        for training in (True, False):
            try:
                count = len(info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training))
            except Exception:
                continue
            for i in range(0, count, 1 + count // 8):
                try:
                    alone = run_of_module(info, training, i, dtype, None)
                except Exception:  # no floating result, no such dtype
                    continue
                left, state = run_of_module(info, training, i, dtype, watch)
                seen += 1
                same = [
                    torch.allclose(a, b) if info.name in DEPENDS_ON_ADDRESSES else torch.equal(as_bits(a), as_bits(b))
                    for a, b in zip(alone[0], left, strict=True)
                ]
                if not all(same) or not torch.equal(alone[1], state):
                    changed.append((info.name, training, i, same))
    assert changed == []
    assert seen > 400
