# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables of accumulated gradients, of gradients that were not cleared, and of iterations that an exception ends."""

import pytest
import torch
from debug.planted import batch, marked_lines
from devices import DEVICE, needs

from apex_npu import amp, optimizers

MARKED = marked_lines(__file__)


def set_up(level, optimizer=optimizers.NpuFusedSGD, **options):
    model = torch.nn.Linear(8, 1).to(DEVICE)
    for p in model.parameters():
        torch.nn.init.constant_(p, 1.0)
    made = optimizer(model.parameters(), lr=0.0)
    return amp.initialize(model, made, opt_level=level, verbosity=0, **{"loss_scale": "dynamic", **options})


def backward(model, optimizer, factor=1.0, **options):
    """A block whose largest gradient of an output is 18 · ``factor``."""
    loss = model(batch(4, 8, value=1.0)).float().square().sum() * factor
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


@needs("inf")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, optimizers.NpuFusedSGD])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_delayed_overflow_is_that_of_its_block(level, optimizer):
    model, optimizer = set_up(level, optimizer, dynamic_init_scale=16.0)
    with amp.debug.find_overflow(model) as found:
        backward(model, optimizer, 1e3, delay_unscale=True)  # 16 · 18 · 1000 > 65504
        backward(model, optimizer)
        optimizer.step()
    first, second = found.reports
    assert [cause.kind for cause in first.causes] == ["scale"]
    assert (first.scale, first.scale_after, first.skips_in_a_row) == (16.0, None, None)
    (cause,) = second.causes
    assert (cause.kind, cause.phase, cause.operator) == ("stale", "backward", "aten::add_")
    assert cause.tensor in ("weight", "bias")
    assert cause.why == f"the gradient of {cause.tensor} was not finite before this backward"
    assert "block before" in cause.advice
    assert (second.scale, second.scale_after, second.skips_in_a_row) == (16.0, 8.0, 1)


@needs("inf")
@pytest.mark.parametrize("combine_grad", [False, True])
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_gradients_that_were_not_cleared_after_a_skip(level, combine_grad):
    model, optimizer = set_up(level, dynamic_init_scale=16.0, combine_grad=combine_grad)
    backward(model, optimizer, 1e37)
    optimizer.step()
    with amp.debug.find_overflow(model) as found:
        backward(model, optimizer)
    (cause,) = found.causes
    assert cause.kind == "stale"
    assert "zero_grad() is missing" in cause.advice
    optimizer.zero_grad()
    with amp.debug.find_overflow(model) as found:
        backward(model, optimizer)
    assert found.causes == []


@needs("inf")
def test_gradients_that_were_not_cleared_without_amp():
    model = torch.nn.Linear(8, 1).to(DEVICE)
    (model(batch(4, 8)).sum() * float("inf")).backward()
    with amp.debug.find_overflow(model) as found:
        model(batch(4, 8)).sum().backward()
    assert [cause.kind for cause in found.causes] == ["stale"]


@needs("inf")
@pytest.mark.parametrize("whose", ["model", "master"])
def test_a_loss_that_reads_gradients_from_before(whose):
    model, optimizer = set_up("O2", loss_scale=16.0)
    backward(model, optimizer, 1e3)
    (first, *_) = model.parameters() if whose == "model" else amp.master_params(optimizer)
    kept = first.grad
    with amp.debug.find_overflow(model) as found:
        loss = model(batch(4, 8, value=1.0)).float().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            (scaled_loss * kept.float().sum()).backward()
    (cause,) = found.causes
    assert (cause.kind, cause.tensor) == ("stale", "weight")
    assert cause.why == "the gradient of weight was not finite before this line"


@needs("inf")
def test_the_scale_after_each_block():
    model, optimizer = set_up("O2", dynamic_init_scale=16.0)
    with amp.debug.find_overflow(model) as found:
        for factor in (1e3, 1e5, 1.0):
            backward(model, optimizer, factor)
        optimizer.step()
    assert [report.overflowed for report in found.reports] == [True, True, False]
    assert [report.scale for report in found.reports] == [16.0, 8.0, 4.0]
    assert [report.scale_after for report in found.reports] == [8.0, 4.0, None]
    assert [report.skips_in_a_row for report in found.reports] == [1, None, None]
    lines = str(found).splitlines()
    assert sum("loss scale 16 → 8, 1 skip in a row:" in line for line in lines) == 1
    assert sum("loss scale 8 → 4:" in line for line in lines) == 1


@needs("inf")
def test_the_scale_after_the_last_of_several_blocks():
    model, optimizer = set_up("O2", dynamic_init_scale=16.0, num_losses=2)
    with amp.debug.find_overflow(model) as found:
        for loss_id in (0, 0, 1):
            backward(model, optimizer, 1e5, loss_id=loss_id)
        optimizer.step()
    scales = [(report.loss_id, report.scale, report.scale_after) for report in found.reports]
    assert scales == [(0, 16.0, 8.0), (0, 8.0, 4.0), (1, 16.0, 8.0)]
    assert [s["loss_scale"] for s in amp.state_dict().values()] == [4.0, 8.0]


@needs("inf")
def test_columns_of_a_table_are_apart():
    model, optimizer = set_up("O3", dynamic_init_scale=16.0)
    with amp.debug.find_overflow(model) as found:
        for _ in range(2):
            backward(model, optimizer, 40.0)  # gradients of 16 · 18 · 40 · 4 = 46080
    (cause, *_) = found.causes
    assert cause.kind == "accumulation"
    assert any(line.startswith("accumulation  backward  ") for line in str(found).splitlines())


# ---- exceptions ------------------------------------------------------------------------------------------------------


def ended_by_an_exception(model, iteration):
    def end():
        iteration()
        raise KeyError

    with pytest.raises(KeyError), amp.debug.find_overflow(model) as found:
        end()
    return found


def interrupted(model, iteration):
    found = ended_by_an_exception(model, iteration)
    (cause,) = found.causes
    assert (cause.kind, cause.line) == ("math", MARKED["log"])
    assert "nothing was seen" not in str(found)
    return found


def log_of_zero(model):
    return (model(batch(4, 8)).float() * 0).log().mean()  # fault: log


@needs("inf")
def test_an_exception_after_backward():
    model = torch.nn.Linear(8, 1).to(DEVICE)
    found = ended_by_an_exception(model, lambda: log_of_zero(model).backward())
    assert {cause.kind for cause in found.causes} == {"math"}
    assert found.causes[0].line == MARKED["log"]
    assert set(found.parameters) == {"weight", "bias"}


@needs("inf")
def test_an_exception_before_backward():
    model = torch.nn.Linear(8, 1).to(DEVICE)
    found = interrupted(model, lambda: log_of_zero(model))
    assert str(found).startswith("without amp: no gradient")
    assert "an exception has ended the iteration" in str(found)


@needs("inf")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_the_block(level):
    model, optimizer = set_up(level, dynamic_init_scale=1.0)

    def iteration():
        backward(model, optimizer)
        with amp.scale_loss(log_of_zero(model), optimizer):
            raise KeyError

    found = interrupted(model, iteration)
    assert [report.overflowed for report in found.reports] == [False, True]
    assert found.reports[1].loss_id == 0


def test_an_exception_in_an_iteration_without_a_fault():
    model, optimizer = set_up("O2", dynamic_init_scale=1.0)
    found = ended_by_an_exception(model, lambda: backward(model, optimizer))
    assert found.causes == []
    assert str(found).startswith("no overflow")


# ---- negative arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "advised", "stable"),
    [
        ("sqrt", "torch.sqrt(x.clamp(min=0) + eps)", lambda x: torch.sqrt(x.clamp(min=0) + 1e-2)),
        ("rsqrt", "torch.rsqrt(x.clamp(min=0) + eps)", lambda x: torch.rsqrt(x.clamp(min=0) + 1e-2)),
        ("log", "torch.log(x.clamp(min=eps))", lambda x: torch.log(x.clamp(min=1e-2))),
        ("pow", "x.clamp(min=eps)", lambda x: x.clamp(min=1e-2).pow(1.5)),
    ],
)
@needs("inf")
def test_math_of_negative_numbers(name, advised, stable):
    model, optimizer = set_up("O1", dynamic_init_scale=1.0)
    values = torch.tensor([[-0.75], [0.0], [0.125]]).expand(3, 8) / 8
    function = (lambda x: x.pow(1.5)) if name == "pow" else getattr(torch, name)

    def gradient_of(run):
        optimizer.zero_grad()
        with amp.debug.find_overflow(model) as found:
            loss = run(model(values.to(DEVICE)).float() - 1.0).mean()  # the bias is 1
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        return model.weight.grad, found

    _, found = gradient_of(function)
    (cause,) = found.causes
    assert (cause.kind, cause.phase, cause.operator.split("_")[0]) == ("math", "forward", f"aten::{name}")
    assert cause.inputs == (("self", 0.75),)
    assert cause.ranges == (("self", -0.75, 0.125),)
    assert "self from -0.75 to 0.125" in str(found)
    assert cause.advice.startswith(advised)
    # What is advised is finite, forward and backward: here, and below for torch.where.
    for run in (stable, lambda x: torch.where(x > 0, function(torch.where(x > 0, x, 1.0)), 0.0)):
        grad, found = gradient_of(run)
        assert grad.isfinite().all()
        assert found.causes == []
    # torch.where around it alone is not enough, and is told of.
    grad, found = gradient_of(lambda x: torch.where(x > 0, function(x), 0.0))
    assert not grad.isfinite().all()
    assert {cause.kind for cause in found.causes} == {"math"}
    if name != "log":  # its derivative is not finite at 0 alone
        assert any("torch.where(x > 0, f(torch.where(x > 0, x, 1.0)), 0.0)" in cause.advice for cause in found.causes)
