# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A gradient that a script keeps is its own once ``zero_grad`` has let go of it, as with torch.optim.

PCGrad, GradNorm, and whatever compares a gradient with the last step's, keep them so.
"""

import pytest
import torch
from small_programs import Weights, assert_values, backward, levels, start, train_step, vector

from apex_npu import amp, optimizers

pytestmark = pytest.mark.host

ALL = ("O0", "O1", "O4", "O2", "O5")
TASKS = (1.0, 2.0, -3.0)


def keep_of_each_task(params, clear, backward_of):
    kept = []
    for task in TASKS:
        backward_of(task)
        kept.append([p.grad for p in params()])
        clear()
    return [grads[0] for grads in kept]


def kept_under_amp(kind, level, clear_model=False):
    model, optimizer = start(Weights(1.0), kind=kind, level=level)
    train_step(model, optimizer)
    clear = model.zero_grad if clear_model else optimizer.zero_grad
    ones = (1.0, 1.0, 1.0)
    return keep_of_each_task(
        lambda: list(amp.master_params(optimizer)), clear, lambda task: backward(task * model(vector(*ones)), optimizer)
    )


@pytest.mark.parametrize("kind", ["combine_grad", "fused"])
@levels(ALL)
def test_gradients_of_three_tasks(level, kind):
    assert_values(kept_under_amp(kind, level), *TASKS)


@levels(ALL)
def test_gradients_of_three_tasks_with_torchs_optimizer(level):
    assert_values(kept_under_amp("torch", level), *TASKS)


@pytest.mark.parametrize("kind", ["combine_grad", "fused"])
@levels(("O0", "O1", "O4"))
def test_gradients_of_three_tasks_that_the_model_clears(level, kind):
    assert_values(kept_under_amp(kind, level, clear_model=True), *TASKS)


def bare(cls):
    model = Weights(1.0)
    optimizer = cls(model.parameters(), lr=1.0)
    model(vector(1.0, 1.0, 1.0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("cls", [optimizers.NpuFusedSGD, optimizers.NpuFusedLamb])
def test_gradients_of_three_tasks_that_clipping_has_gathered(cls):
    model, optimizer = bare(cls)
    kept = []
    for task in TASKS:
        (task * model(vector(1.0, 1.0, 1.0))).backward()
        optimizer.clip_optimizer_grad_norm_fused(torch.inf)
        optimizer.get_optimizer_combined_grads()
        kept.append(model.w[0].grad)
        optimizer.zero_grad()
    assert_values(kept, *TASKS)


@pytest.mark.parametrize("kind", ["combine_grad", "fused"])
@levels(("O0", "O1", "O4"))
def test_the_gradient_of_the_last_step_for_the_cosine_with_this_one(level, kind):
    model, optimizer = start(Weights(1.0), kind=kind, level=level)
    train_step(model, optimizer)
    backward(model(vector(1.0, 0.0, 0.0)), optimizer)
    last = model.w[0].grad
    optimizer.step()
    optimizer.zero_grad()
    backward(model(vector(0.0, 1.0, 0.0)), optimizer)
    assert torch.cosine_similarity(last, model.w[0].grad, dim=0).item() == 0.0


@pytest.mark.parametrize("kind", ["combine_grad", "fused"])
@levels(ALL)
def test_gradients_that_are_cleared_to_zeros_are_written_as_in_torch(level, kind):
    model, optimizer = start(Weights(1.0), kind=kind, level=level)
    train_step(model, optimizer)
    backward(model(vector(1.0, 1.0, 1.0)), optimizer)
    (master,) = amp.master_params(optimizer)
    kept = master.grad
    optimizer.zero_grad(set_to_none=False)
    assert_values([kept], 0.0)
