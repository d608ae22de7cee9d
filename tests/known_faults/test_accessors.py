# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``get_*_combined_*()[0]`` is one buffer over all parameter groups, as scripts take it for.

At O2 and O5 the optimizer's are two, of masters and of the parameters that stay float32.
"""

import pytest
import torch
from devices import DEVICE
from known_faults.common import (
    WITH_MASTERS,
    Weights,
    X,
    assert_values,
    backward,
    levels,
    start,
    train_step,
    vector,
)
from torch import nn

from apex_npu import amp

ACCELERATED = ("combine_grad", "fused")
accelerated = pytest.mark.parametrize("kind", ACCELERATED)


def groups_of(model, count=2):
    params = list(model.parameters())
    return [{"params": params[i::count]} for i in range(count)]


def two_groups(level, kind):
    model = Weights(1.0, 2.0, 3.0)
    return start(model, groups_of(model), kind, level)


def norm_of(tensors):
    return torch.stack([t.detach().double().cpu().norm() for t in tensors]).norm().item()


def grads_of(optimizer):
    return [p.grad for group in optimizer.param_groups for p in group["params"]]


class Normed(nn.Module):
    """With parameters in half precision and in float32, in two groups each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x):
        return self.layers(x)


@accelerated
@levels(("O0", "O1", "O4", *WITH_MASTERS))
def test_clipping_the_first_gradient_buffer_clips_all_groups(level, kind):
    model, optimizer = two_groups(level, kind)
    backward(model(vector(1000.0, 0.0, 0.0)), optimizer)
    combined = optimizer.get_optimizer_combined_grads()
    combined[0].mul_(1.0 / combined[0].norm())
    assert norm_of(grads_of(optimizer)) == pytest.approx(1.0, rel=1e-6)


@accelerated
@levels(("O0", "O1", "O4", *WITH_MASTERS))
def test_clipping_every_gradient_buffer_clips_all_groups(level, kind):
    model, optimizer = two_groups(level, kind)
    backward(model(vector(1000.0, 0.0, 0.0)), optimizer)
    combined = optimizer.get_optimizer_combined_grads()
    norm = norm_of(combined)
    for flat in combined:
        flat.mul_(1.0 / norm)
    assert norm_of(grads_of(optimizer)) == pytest.approx(1.0, rel=1e-6)


@accelerated
@levels(WITH_MASTERS)
def test_with_masters_there_is_a_buffer_of_masters_and_one_of_float32(level, kind):
    model = Normed().to(DEVICE)
    model, optimizer = start(model, groups_of(model), kind, level)
    backward(model(torch.randn(8, 4, device=DEVICE)).square().sum(), optimizer)
    masters = {id(pair.master_param) for pair in optimizer._amp_state.pairs}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    halves = [p.grad for p in params if id(p) in masters]
    float32 = [p.grad for p in params if id(p) not in masters]
    found = optimizer.get_optimizer_combined_grads()
    assert [norm_of([flat]) for flat in found] == pytest.approx([norm_of(halves), norm_of(float32)], rel=1e-6)


@accelerated
@levels(("O0", "O1", *WITH_MASTERS))
def test_the_mask_of_the_first_gradient_buffer_covers_all_groups(level, kind):
    model, optimizer = two_groups(level, kind)
    backward(model(vector(1.0, 2.0, 3.0)), optimizer)
    assert optimizer.get_optimizer_combined_grad_masks()[0].sum().item() == 9


@levels(("O0", "O1", *WITH_MASTERS))
def test_an_average_of_the_first_parameter_buffer_follows_all_groups(level):
    model, optimizer = two_groups(level, "fused")
    train_step(model, optimizer)
    average = optimizer.get_optimizer_combined_params()[0].clone()
    train_step(model, optimizer)
    average.lerp_(optimizer.get_optimizer_combined_params()[0], 0.5)
    # Padding is zeros. Each of three weights moves by -X a step: its sum by 1, by 1.5 on average.
    assert average.sum().item() == pytest.approx(18.0 + 3 * 1.5, rel=1e-6)


@levels(("O0", "O1", *WITH_MASTERS))
def test_the_first_buffer_of_the_model_covers_all_groups(level):
    model, optimizer = two_groups(level, "fused")
    train_step(model, optimizer)
    flats = optimizer.get_model_combined_params()
    assert len(flats) == 1
    flat = flats[0]
    assert flat.dtype == next(model.parameters()).dtype
    assert flat.float().sum().item() == pytest.approx(18.0 + 3, rel=1e-6)


@levels(("O1",))
def test_the_first_gradient_buffer_of_the_model_covers_all_groups(level):
    model, optimizer = two_groups(level, "fused")
    backward(model(vector(1.0, 2.0, 3.0)), optimizer)
    assert optimizer.get_model_combined_grads()[0].sum().item() == pytest.approx(18.0, rel=1e-6)


@levels(("O0", "O1", *WITH_MASTERS))
def test_parameters_and_gradients_are_laid_out_alike(level):
    model = Weights(1.0, 2.0)
    model, optimizer = start(model, level=level)
    train_step(model, optimizer)
    backward(model(vector(1.0, 2.0, 3.0)), optimizer)
    (params,), (grads,) = optimizer.get_optimizer_combined_params(), optimizer.get_optimizer_combined_grads()
    assert params.shape == grads.shape
    params.add_(grads, alpha=-1.0)
    moved = vector(*X) + vector(1.0, 2.0, 3.0)
    assert_values(amp.master_params(optimizer), 1.0 - moved.cpu(), 2.0 - moved.cpu())
