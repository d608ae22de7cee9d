# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""16-bit parameters in buffers that fused optimizers lay out."""

import pytest
import torch
from devices import DEVICE, SIMULATOR, needs_counts
from small_programs import step_on
from torch import nn

from apex_npu import amp, optimizers


def make(level="O2", cls=optimizers.NpuFusedAdam, model=None, **options):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 8), nn.Linear(8, 2)]
    model = (model or nn.Sequential(*layers)).to(DEVICE)
    optimizer = cls(model.parameters(), lr=1e-2)
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0, **options)


def step(model, optimizer, number=0):
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(number)).to(DEVICE)
    step_on(model(x).square().mean(), optimizer)


def agrees(model, optimizer):
    """Every parameter is its float32 value, rounded; halves of the last bit may be rounded away from zero."""
    shown = model.state_dict()
    ulp = {dtype: torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16, torch.float32)}
    apart = [(p.float() - shown[name]).abs() for name, p in model.named_parameters()]
    bound = [0.5 * ulp[p.dtype] * p.float().abs() + 2.0**-25 for p in model.parameters()]
    return all(bool((a <= b).all()) for a, b in zip(apart, bound, strict=True))


@needs_counts()
@pytest.mark.parametrize("fuse_unscale", [False, True])
def test_iterations_launch_equally_often_for_any_number_of_parameters(fuse_unscale):
    def launches(count):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])
        model, optimizer = make(model=model, fuse_unscale=fuse_unscale)
        found = []
        for _ in range(2):
            for _ in range(2):
                block = amp.scale_loss(model(torch.ones(2, 4, device=DEVICE)).sum(), optimizer)
                with SIMULATOR.count() as entered:
                    scaled_loss = block.__enter__()
                scaled_loss.backward()
                with SIMULATOR.count() as left:
                    block.__exit__(None, None, None)
            with SIMULATOR.count() as stepped:
                optimizer.step()
            found.append((entered.launches, left.launches, stepped.launches))
            optimizer.zero_grad()
        amp.shutdown()
        return found[-1]

    assert launches(4) == launches(30)


def test_a_model_that_is_converted_there_and_back():
    model, optimizer = make()
    step(model, optimizer)
    model.double().half()
    model[1].float()
    for number in range(2):
        step(model, optimizer, number)
        assert agrees(model, optimizer)


def test_memory_of_others_is_left_alone():
    """A weight that is part of a larger tensor, as a flattened RNN's."""
    model, optimizer = make()
    row = torch.zeros(1000, dtype=torch.float16, device=DEVICE)
    model[4].weight.data = row[10:26].view(2, 8)
    step(model, optimizer)
    assert agrees(model, optimizer)
    assert torch.equal(row[10:26].view(2, 8), model[4].weight)
    assert row[:10].count_nonzero() == row[26:].count_nonzero() == 0


def test_channels_last_and_transposed_weights():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2)).to(memory_format=torch.channels_last)
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    model, optimizer = make(model=model)
    strides = [p.stride() for p in model.parameters()]
    for number in range(2):
        step(model, optimizer, number)
        assert agrees(model, optimizer)
    assert [p.stride() for p in model.parameters()] == strides
