# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Weights that a script writes are those that are trained, and others keep their float32 values.

Apex makes masters at the first ``scale_loss``, from what the model holds then, and overwrites later writes.
"""

import contextlib
import gc
import warnings

import pytest
import torch
from devices import DEVICE
from small_programs import (
    WITH_MASTERS,
    Weights,
    X,
    assert_values,
    backward,
    initialize,
    kinds,
    levels,
    start,
    train_step,
    vector,
)
from torch import nn

from apex_npu import amp, optimizers

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

MOVED = torch.tensor(X)


with_kinds = kinds(("torch", "fused", "fuse_unscale"))


@with_kinds
@levels(WITH_MASTERS)
def test_float32_data_is_the_value(level, kind):
    model, optimizer = start(Weights(1.0, 2.0 + 2.0**-20), kind=kind, level=level)
    for count in range(3):
        model.w[0].data = torch.full_like(model.w[0], 5.0, dtype=torch.float32)
        assert_values(model.state_dict().values(), 5.0, 2.0 + 2.0**-20 - count * MOVED)
        train_step(model, optimizer)
        assert_values(model.state_dict().values(), 5.0 - MOVED, 2.0 + 2.0**-20 - (count + 1) * MOVED)


@with_kinds
@levels(WITH_MASTERS)
def test_an_accelerator_does_not_see_what_is_not_counted(level, kind):
    """The optimizer steps from the value before the write; docs/amp.md says so."""
    if DEVICE.type != "npu":
        pytest.skip("only NPUs compare counted writes alone")
    model, optimizer = start(Weights(1.0), kind=kind, level=level)
    train_step(model, optimizer)
    model.w[0].data.fill_(5.0)
    train_step(model, optimizer)
    assert_values(model.parameters(), 1.0 - 2 * MOVED)


class Net(nn.Module):
    """Weights w in a submodule, whose loss is |w|² / 2: the gradient is w."""

    def __init__(self, value=1.0):
        super().__init__()
        self.inner = Weights(value)

    def forward(self, x):
        return self.inner.w[0].float().square().sum() / 2 + 0.0 * x.float().sum()


@with_kinds
@levels(WITH_MASTERS)
def test_after_the_loop_and_in_a_list_parameters_have_16_bits(level, kind):
    model, optimizer = start(Weights(1.0, 2.0), kind=kind, level=level)
    listed = list(amp.master_params(optimizer))
    assert all(map(lambda p, q: p is q, listed, model.parameters()))
    seen = [[q.dtype for q in model.w] for _ in amp.master_params(optimizer)]
    low = model.w[0].dtype
    assert seen == [[torch.float32, low], [low, torch.float32]]
    with amp.float32_params(optimizer), amp.float32_params(optimizer):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {low}


class Sharp(torch.optim.Optimizer):
    """Steps by another optimizer that shares its groups, as SAM does."""

    def __init__(self, params, base):
        super().__init__(params, {})
        self.base = base(self.param_groups, lr=2.0**-20)
        self.param_groups = self.base.param_groups

    def move(self, by):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data + by

    def first_step(self):
        self.move(2.0**-20)

    def second_step(self):
        self.move(-(2.0**-20))
        self.base.step()

    def step(self):
        self.base.step()


@pytest.mark.parametrize("base", [torch.optim.SGD, optimizers.NpuFusedSGD])
@levels(WITH_MASTERS)
def test_methods_of_optimizers_that_write_weights_do_so_in_float32(level, base):
    model = Weights(1.0)
    model, optimizer = initialize(model, Sharp(model.parameters(), base), level)
    for count in (1, 2, 3):
        backward(model(vector(*X)), optimizer)
        optimizer.first_step()
        assert_values(model.state_dict().values(), 1.0 + 2.0**-20 - (count - 1) * 2.0**-20 * MOVED)
        optimizer.second_step()
        optimizer.zero_grad()
        assert_values(model.state_dict().values(), 1.0 - count * 2.0**-20 * MOVED)


def by_evaluation(model, optimizer):
    with torch.no_grad():
        model.eval()(vector(*X))


def by_block(model, optimizer):
    backward(model(vector(*X)), optimizer)
    optimizer.zero_grad()


def by_step(model, optimizer):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    optimizer.zero_grad()


LOOKS = {
    "forward": lambda model, optimizer: model(vector(*X)),
    "submodule": lambda model, optimizer: model.inner(vector(*X)),
    "evaluation": by_evaluation,
    "state_dict": lambda model, optimizer: assert_values(model.state_dict().values(), 0.25),
    "optimizer.state_dict": lambda model, optimizer: optimizer.state_dict(),
    "block": by_block,
    "step": by_step,
}


@pytest.mark.pairwise
@with_kinds
@levels(WITH_MASTERS)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("look", LOOKS)
def test_a_loop_that_is_left_early_ends_with_what_follows(look, steps, level, kind):
    model, optimizer = start(Net(), kind=kind, level=level, lr=0.5)
    for _ in range(steps):
        train_step(model, optimizer)
    left = iter(amp.master_params(optimizer))  # stays alive, as in a traceback that is kept
    next(left).data.fill_(0.25)
    LOOKS[look](model, optimizer)
    assert model.inner.w[0].dtype != torch.float32
    assert_values([model.inner.w[0]], 0.25)
    train_step(model.train(), optimizer)
    assert_values([model.inner.w[0]], 0.125)


@with_kinds
@levels(WITH_MASTERS)
def test_a_loop_that_is_dropped_ends_at_once(level, kind):
    """Not by garbage collection, which may come while the optimizer is at work on the data."""
    model, optimizer = start(Weights(1.0), kind=kind, level=level)
    gc.disable()
    try:
        for _ in amp.master_params(optimizer):
            break
        assert model.w[0].dtype != torch.float32
        first = next(amp.master_params(optimizer))
        assert first.dtype != torch.float32
        try:
            for _ in amp.master_params(optimizer):
                raise ValueError
        except ValueError:
            pass
        assert model.w[0].dtype != torch.float32
    finally:
        gc.enable()


def in_context(optimizer):
    with amp.float32_params(optimizer):
        yield from optimizer.param_groups[0]["params"]


@with_kinds
@levels(WITH_MASTERS)
@pytest.mark.parametrize("float32", [in_context, amp.master_params])
def test_a_write_to_the_state_dict_comes_before_float32_data(float32, level, kind):
    model, optimizer = start(Weights(1.0), kind=kind, level=level)
    model.state_dict()["w.0"].fill_(1.0 + 2.0**-20)
    for p in float32(optimizer):
        p.data.mul_(2.0)
    assert_values(model.state_dict().values(), 2.0 + 2.0**-19)


@levels(WITH_MASTERS)
@pytest.mark.parametrize("kind", ["torch", "fused"])
@pytest.mark.parametrize("by", ["a second initialize", "no optimizer"])
def test_float32_weights_of_a_model_that_another_trains_stay_float32(by, level, kind):
    model, optimizer = start(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(DEVICE), kind=kind, level=level)
    if by == "no optimizer":
        del optimizer
        gc.collect()
        model.float()
        weights = list(model.parameters())
    else:
        student = nn.Sequential(model[0], nn.Linear(3, 3)).to(DEVICE)
        start(student, kind=kind, level="O1")
        weights = list(student.parameters())
    with contextlib.suppress(RuntimeError):  # where the device refuses operands of two dtypes
        model(vector(*X))
    assert {p.dtype for p in weights} == {torch.float32}


IN_BODY = {
    "forward": lambda model, optimizer: model(vector(*X)),
    "state dict": lambda model, optimizer: model.state_dict(),
    "optimizer's state dict": lambda model, optimizer: optimizer.state_dict(),
    "block": lambda model, optimizer: backward(0.0 * model(vector(*X)), optimizer),
    "another loop": lambda model, optimizer: [p.data.mul_(1.0) for p in amp.master_params(optimizer)],
}


@pytest.mark.pairwise
@with_kinds
@levels(WITH_MASTERS)
@pytest.mark.parametrize("look", IN_BODY)
def test_a_loop_whose_body_reads_the_model_goes_on(look, level, kind):
    model, optimizer = start(Weights(1.0, 2.0, 3.0), kind=kind, level=level)
    for count, p in enumerate(amp.master_params(optimizer)):
        p.data.mul_(1.0 + 2.0**-20)
        IN_BODY[look](model, optimizer)
        assert model.w[count].dtype != torch.float32
    assert_values(model.state_dict().values(), *(value * (1.0 + 2.0**-20) for value in (1.0, 2.0, 3.0)))


@with_kinds
@levels(WITH_MASTERS)
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_done_inside_of_float32_params_is_exact(nested, level, kind):
    def inside(optimizer):
        with amp.float32_params(optimizer), amp.float32_params(optimizer) if nested else contextlib.nullcontext():
            yield

    exact = 1.0 + 2.0**-20
    model, optimizer = start(Weights(exact), kind=kind, level=level, lr=2.0**-18)
    saved = {name: value + 2.0**-18 for name, value in model.state_dict().items()}
    for _ in range(2):
        backward(model(vector(*X)), optimizer)
        for _ in inside(optimizer):
            optimizer.step()
        optimizer.zero_grad()
    assert_values(model.state_dict().values(), exact - 2.0**-17 * MOVED)
    for _ in inside(optimizer):
        model.load_state_dict(saved)
        assert_values(model.parameters(), exact + 2.0**-18)
    assert_values(model.state_dict().values(), exact + 2.0**-18)
    train_step(model, optimizer)
    assert_values(model.state_dict().values(), exact + 2.0**-18 - 2.0**-18 * MOVED)


@with_kinds
@levels(WITH_MASTERS)
@pytest.mark.parametrize("steps", [0, 1])
def test_assigned_float32_data_stays_when_the_optimizer_loads_its_state(steps, level, kind):
    model, optimizer = start(Weights(1.0), kind=kind, level=level, momentum=0.5)
    for _ in range(steps):
        train_step(model, optimizer)
    saved = optimizer.state_dict()
    model.w[0].data = torch.full_like(model.w[0], 1.0 + 2.0**-20, dtype=torch.float32)
    optimizer.load_state_dict(saved)
    assert_values(model.state_dict().values(), 1.0 + 2.0**-20)
    model(vector(*X))


@with_kinds
@levels(WITH_MASTERS)
def test_an_error_after_the_update_leaves_parameters_with_their_float32_values(level, kind):
    model, optimizer = start(Weights(1.0), kind=kind, level=level)
    train_step(model, optimizer)

    def fail(*_):
        raise ValueError("in a hook")

    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(ValueError, match="in a hook"):
        train_step(model, optimizer)
    expected = 1.0 - 2 * MOVED
    assert_values([model.w[0], model.state_dict()["w.0"]], expected, expected)
    handle.remove()
    optimizer.zero_grad()
    train_step(model, optimizer)
    assert_values([model.w[0]], 1.0 - 3 * MOVED)


@with_kinds
@levels(WITH_MASTERS)
def test_autograd_notices_that_a_step_has_changed_the_weights(level, kind):
    model, optimizer = start(Weights(1.0), kind=kind, level=level)
    x = vector(*X).requires_grad_()  # whose gradient is the weight
    for _ in range(2):
        loss = model(x)
        train_step(model, optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@with_kinds
@pytest.mark.parametrize("options", [{}, {"store_param_remainders": False}])
def test_zeros_inside_of_a_block_leave_gradients_in_16_bits(options, kind):
    """The reducer of DistributedDataParallel takes no others."""
    if kind == "torch" and options:
        pytest.skip("torch's optimizers have float32 values anyway")
    model, optimizer = start(Weights(1.0), kind=kind, **options)
    backward(model(vector(*X)), optimizer, delay_unscale=True)
    with amp.scale_loss(model(vector(*X)), optimizer) as scaled_loss:
        optimizer.zero_grad(set_to_none=False)
        assert model.w[0].grad.dtype == torch.float16
        scaled_loss.backward()
    optimizer.step()
    assert_values(model.parameters(), 1.0 - MOVED)
