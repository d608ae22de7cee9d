# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``torch.nn.utils.clip_grad_norm_`` under amp: the same values, in one pass over flat buffers where that can be."""

import contextlib
import math
import warnings

import pytest
import torch
from devices import DEVICE, needs
from small_programs import backward
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_by_name

from apex_npu import amp, optimizers


def make(level, cls=optimizers.NpuFusedSGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(DEVICE)
    options = {"loss_scale": 128.0, "verbosity": 0, **options}
    return amp.initialize(model, cls(model.parameters(), lr=0.1), opt_level=level, **options)


def block(model, optimizer, **options):
    backward(model(torch.ones(2, 5, device=DEVICE)).square().sum(), optimizer, **options)


def twins_of(params):
    twins = [nn.Parameter(p.detach().to(p.grad.dtype, copy=True)) for p in params]
    for twin, p in zip(twins, params, strict=True):
        twin.grad = p.grad.clone()
    return twins


@pytest.fixture
def fused_calls(monkeypatch):
    """The clippings that flat buffers did."""
    calls = []
    original = amp.amp_optimizer.clip_grad_norm_

    def spy(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(amp.amp_optimizer, "clip_grad_norm_", spy)
    return calls


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, "inf"])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_values_are_torchs_and_buffers_are_clipped_whole(level, norm_type, fused_calls):
    model, optimizer = make(level)
    block(model, optimizer)
    params = list(amp.master_params(optimizer))
    twins = twins_of(params)
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.25, norm_type=norm_type)
    assert len(fused_calls) == 1
    clipped = [p.grad.clone() for p in params]
    amp.shutdown()
    expected = nn.utils.clip_grad_norm_(twins, 0.25, norm_type=norm_type)
    assert (norm.dtype, norm.shape, norm.device) == (expected.dtype, expected.shape, expected.device)
    # Sums in another order.
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
    for grad, twin in zip(clipped, twins, strict=True):
        torch.testing.assert_close(grad, twin.grad, rtol=1e-6, atol=0.0)


@needs("inf")
def test_a_norm_that_is_not_finite_raises_where_asked(fused_calls):
    model, optimizer = make("O0")
    block(model, optimizer)
    model[0].weight.grad[0, 0] = math.inf
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 for gradients is non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert fused_calls


@pytest.mark.parametrize("case", ["some", "foreach", "torch's optimizer", "half"])
def test_what_is_left_to_torch(case, fused_calls):
    cls = torch.optim.SGD if case == "torch's optimizer" else optimizers.NpuFusedSGD
    model, optimizer = make("O3" if case == "half" else "O0", cls)
    block(model, optimizer)
    params = list(model.parameters())[: 2 if case == "some" else None]
    twins = twins_of(params)
    options = {"foreach": False} if case == "foreach" else {}
    norm = nn.utils.clip_grad_norm_(params, 0.25, **options)
    assert not fused_calls
    assert torch.equal(norm, nn.utils.clip_grad_norm_(twins, 0.25, **options))
    assert all(torch.equal(p.grad, twin.grad) for p, twin in zip(params, twins, strict=True))


def test_shutdown_gives_torch_its_functions_back():
    # What torch's wrapper calls is replaced, so that the function is the same by all names.
    functions = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_
    originals = [function.__wrapped__ for function in functions]
    make("O0")
    make("O0")
    assert (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_) == functions
    assert all(f.__closure__[0].cell_contents is not original for f, original in zip(functions, originals, strict=True))
    amp.shutdown()
    assert [function.__closure__[0].cell_contents for function in functions] == originals


def test_a_function_imported_by_name_clips_the_buffers(fused_calls):
    model, optimizer = make("O2")
    block(model, optimizer)
    clip_by_name(amp.master_params(optimizer), 0.25)
    assert len(fused_calls) == 1


def said_by(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in caught]


CLIPPED_BY_NAME = {
    # What is clipped by torch's own function between the block and the step, or the next block.
    "model": lambda model, optimizer: clip_by_name(model.parameters(), 1e-3),
    "what is stepped": lambda model, optimizer: clip_by_name(amp.master_params(optimizer), 1e-3),
    "asked for again": lambda model, optimizer: (
        clip_by_name(amp.master_params(optimizer), 1e-3),
        list(amp.master_params(optimizer)),
    ),
}


@pytest.mark.parametrize("case", CLIPPED_BY_NAME)
@pytest.mark.parametrize("blocks_after", [0, 1])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_scaled_gradients_that_a_function_imported_by_name_clips(level, blocks_after, case):
    model, optimizer = make(level, fuse_unscale=True)

    def train():
        block(model, optimizer)
        CLIPPED_BY_NAME[case](model, optimizer)
        for _ in range(blocks_after):
            block(model, optimizer)
        optimizer.step()

    assert any("clip_grad_norm_" in text for text in said_by(train))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("loss_scale", [1.0, 128.0])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scaled_gradients_of_parameters_in_no_optimizer(level, loss_scale, frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(DEVICE)
    optimizer = optimizers.NpuFusedSGD(model[2].parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0)
    model[0].requires_grad_(not frozen)

    def train():
        for _ in range(2):
            block(model, optimizer)
            clip_by_name(amp.master_params(optimizer), 1.0)
            clip_by_name(model.parameters(), 1.0)
            optimizer.step()

    said = [text for text in said_by(train) if "no optimizer" in text]
    assert len(said) == (loss_scale != 1.0 and not frozen)


def failing_block(model, optimizer):
    loss = model(torch.ones(2, 5, device=DEVICE)).square().sum()
    with contextlib.suppress(ZeroDivisionError), amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        raise ZeroDivisionError


WRITES = {
    # What may be done between a block and the step.
    "nothing": lambda model, optimizer: None,
    "clip others": lambda model, optimizer: nn.utils.clip_grad_norm_(nn.Linear(2, 2).parameters(), 0.5),
    "clip, fused": lambda model, optimizer: optimizer.clip_optimizer_grad_norm_fused(1e-3),
    "read": lambda model, optimizer: [p.grad.sum() for p in amp.master_params(optimizer)],
    "combined": lambda model, optimizer: optimizer.get_optimizer_combined_grads(),
    "drop one": lambda model, optimizer: setattr(next(model.parameters()), "grad", None),
    "zero one": lambda model, optimizer: next(model.parameters()).grad.zero_(),
    "clear, by the model": lambda model, optimizer: (model.zero_grad(set_to_none=False), block(model, optimizer)),
    "clear": lambda model, optimizer: (optimizer.zero_grad(), block(model, optimizer)),
    "a block that fails": failing_block,
    "a second block": lambda model, optimizer: block(model, optimizer),
    "a delayed block": lambda model, optimizer: (
        block(model, optimizer, delay_unscale=True),
        block(model, optimizer),
    ),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("fuse", [None, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_nothing_is_said_where_no_script_has_written(level, fuse, write):
    model, optimizer = make(level, fuse_unscale=fuse)

    def train():
        for _ in range(2):
            block(model, optimizer)
            WRITES[write](model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    assert said_by(train) == []


def test_a_wrapper_around_torchs_function_is_left_alone(monkeypatch):
    calls, original = [], torch.nn.utils.clip_grad.clip_grad_norm_

    def counting(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.utils.clip_grad, "clip_grad_norm_", counting)
    model, optimizer = make("O0")
    block(model, optimizer)
    counting(model.parameters(), 1.0)
    amp.shutdown()
    assert len(calls) == 1
