# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A model that ``.to()`` moves after ``initialize`` is trained, with its float32 values and fused optimizers' state."""

import pytest
import torch
from devices import DEVICE, require
from small_programs import (
    CASTING,
    LEVELS,
    WITH_MASTERS,
    Weights,
    X,
    assert_values,
    backward,
    initialize,
    kinds,
    levels,
    right_or_refused,
    start,
    step_on,
    train_step,
    vector,
)

from apex_npu import amp, optimizers

pytestmark = pytest.mark.skipif(DEVICE.type == "cpu", reason="there is one device alone")

HOST = torch.device("cpu")
HOST_X = torch.tensor(X)
MOVED = 10.0 - HOST_X
ALL_KINDS = ("torch", "combine_grad", "fused", "fuse_unscale")


@kinds(ALL_KINDS)
@levels(WITH_MASTERS)
@pytest.mark.parametrize("written", [False, True])
def test_a_model_with_float32_values_that_is_moved_after_initialize(written, level, kind):
    model, optimizer = start(Weights(1.0 if written else 10.0).cpu(), kind=kind, level=level)
    if written:
        with torch.no_grad():
            model.w[0].fill_(10.0)
    model.to(DEVICE)
    train_step(model, optimizer)
    assert_values(model.parameters(), MOVED)
    assert_values(model.state_dict().values(), MOVED)
    assert {p.device for p in amp.master_params(optimizer)} == {model.w[0].device}


@pytest.fixture(params=[False, True], ids=["assigned", "swapped"])
def module_to(request):
    """What ``Module.to`` does with parameters."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@kinds(("fused", "fuse_unscale"))
@levels(WITH_MASTERS)
@pytest.mark.usefixtures("module_to")
def test_a_model_that_is_moved_between_steps_keeps_its_momentum(level, kind):
    """torch's optimizers leave their state where it was, as without amp."""
    model, optimizer = start(Weights(10.0).cpu(), kind=kind, level=level, momentum=0.5)
    step_on(model(HOST_X), optimizer)
    model.to(DEVICE)
    train_step(model, optimizer)
    model.to(HOST)
    step_on(model(HOST_X), optimizer)
    assert_values(model.state_dict().values(), 10.0 - (1.0 + 1.5 + 1.75) * HOST_X)


@levels(WITH_MASTERS)
def test_a_model_that_is_moved_between_steps_keeps_the_state_of_adam(level):
    model, plain = Weights(10.0).cpu(), Weights(10.0).cpu()
    model, optimizer = initialize(model, optimizers.NpuFusedAdam(model.parameters(), lr=0.125), level)
    reference = torch.optim.Adam(plain.parameters(), lr=0.125)
    for x in (HOST_X, HOST_X[[1, 0, 2]], HOST_X[[2, 1, 0]]):
        step_on(model(x.to(model.w[0].device)), optimizer)
        plain(x).backward()
        reference.step()
        plain.zero_grad()
        model.to(DEVICE)
    torch.testing.assert_close(model.state_dict()["w.0"].cpu(), plain.w[0].detach())


@kinds(ALL_KINDS)
@levels(LEVELS)
def test_a_part_that_is_moved_between_steps_is_trained_or_refused(level, kind):
    if kind == "torch":
        require("lists_of_devices")
    model, optimizer = start(Weights(10.0, 10.0).cpu(), kind=kind, level=level)
    step_on(model(HOST_X), optimizer)
    model.w[1].data = model.w[1].data.to(DEVICE)

    def act():
        loss = (model.w[0] * HOST_X).sum() + (model.w[1] * vector(*X)).sum().cpu()
        backward(loss, optimizer)
        optimizer.step()

    right_or_refused(
        act, lambda _: assert_values(model.parameters(), *[10.0 - 2 * HOST_X] * 2), model.parameters(), "parameter 1"
    )


@kinds(ALL_KINDS)
@levels(("O0", *CASTING))
def test_a_model_that_is_moved_after_initialize(level, kind):
    model, optimizer = start(Weights(10.0).cpu(), kind=kind, level=level)
    model.to(DEVICE)
    right_or_refused(
        lambda: train_step(model, optimizer), lambda _: assert_values(model.parameters(), MOVED), model.parameters()
    )
