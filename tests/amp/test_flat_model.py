# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""16-bit parameters in buffers that fused optimizers lay out."""

import copy
import sys

import pytest
import torch
from devices import DEVICE, SIMULATOR, needs_counts
from torch import nn

from apex_npu import amp, optimizers

LEVELS = {"O2": torch.float16, "O5": torch.bfloat16}


def make(level="O2", cls=optimizers.NpuFusedAdam, model=None, **options):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 8), nn.Linear(8, 2)]
    model = (model or nn.Sequential(*layers)).to(DEVICE)
    optimizer = cls(model.parameters(), lr=1e-2)
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0, **options)


def step(model, optimizer, number=0):
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(number)).to(DEVICE)
    with amp.scale_loss(model(x).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def agrees(model, optimizer):
    """Every parameter is its float32 value, rounded; halves of the last bit may be rounded away from zero."""
    shown = model.state_dict()
    ulp = {dtype: torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16, torch.float32)}
    apart = [(p.float() - shown[name]).abs() for name, p in model.named_parameters()]
    bound = [0.5 * ulp[p.dtype] * p.float().abs() + 2.0**-25 for p in model.parameters()]
    return all(bool((a <= b).all()) for a, b in zip(apart, bound, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_keep_identity_and_values(level):
    model, optimizer = make(level)
    plain, other = make(level, torch.optim.Adam)
    before = list(model.parameters())
    for number in range(4):
        step(model, optimizer, number)
        step(plain, other, number)
        assert agrees(model, optimizer)
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        # One optimizer rounds its float32 step otherwise than the other; in half precision that is one place at most.
        torch.testing.assert_close(p, q, rtol=2 * torch.finfo(p.dtype).eps, atol=1e-6)
    flats = {flat.dtype: flat for flat in optimizer.get_model_combined_params()}
    assert flats.keys() == {LEVELS[level], torch.float32}  # the batch norm's are float32, in a buffer of their own
    for p in model.parameters():
        begin, nbytes = flats[p.dtype].data_ptr(), flats[p.dtype].numel() * p.element_size()
        assert begin <= p.data_ptr() < begin + nbytes


@needs_counts()
def test_one_copy_for_all_parameters():
    def launches(count):
        model, optimizer = make(model=nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)]))
        for _ in range(2):
            with amp.scale_loss(model(torch.ones(2, 4, device=DEVICE)).sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            with SIMULATOR.count() as counted:
                optimizer.step()
            optimizer.zero_grad()
        amp.shutdown()
        return counted.launches

    assert launches(4) == launches(30)


@needs_counts()
@pytest.mark.parametrize("fuse_unscale", [False, True])
def test_accumulation_launches_equally_often_for_any_number_of_parameters(fuse_unscale):
    def launches(count):
        model, optimizer = make(
            model=nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)]), fuse_unscale=fuse_unscale
        )
        found = []
        for _ in range(2):
            for _ in range(2):
                loss = model(torch.ones(2, 4, device=DEVICE)).sum()
                block = amp.scale_loss(loss, optimizer)
                with SIMULATOR.count() as entered:
                    scaled_loss = block.__enter__()
                scaled_loss.backward()
                with SIMULATOR.count() as left:
                    block.__exit__(None, None, None)
                found.append((entered.launches, left.launches))
            optimizer.step()
            optimizer.zero_grad()
        amp.shutdown()
        return found[-1]

    assert launches(4) == launches(30)


@pytest.mark.parametrize("change", ["data", "to", "assign in place", "share", "add_param_group", "load", "freeze"])
def test_what_users_do_in_between(change):
    model, optimizer = make()
    step(model, optimizer)
    weight = model[3].weight
    if change == "data":
        weight.data = weight.data.clone()
    elif change == "to":
        model.double().half()
        model[1].float()
    elif change == "assign in place":
        with torch.no_grad():
            weight.zero_()
    elif change == "share":
        model[4].weight.data = torch.zeros(100, dtype=torch.float16, device=DEVICE)[7:23].view(2, 8)
    elif change == "add_param_group":
        extra = nn.Linear(2, 2).to(DEVICE).half()
        model.append(extra)
        optimizer.add_param_group({"params": extra.parameters()})
    elif change == "load":
        model.load_state_dict(model.state_dict())
    elif change == "freeze":
        weight.requires_grad_(False)
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


def test_a_copy_has_buffers_of_its_own():
    model, optimizer = make()
    step(model, optimizer)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    step(twin, twin_optimizer)
    assert agrees(twin, twin_optimizer)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    step(model, optimizer)
    assert agrees(model, optimizer)


def test_channels_last_and_transposed_weights():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2)).to(memory_format=torch.channels_last)
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    model, optimizer = make(model=model)
    strides = [p.stride() for p in model.parameters()]
    for number in range(2):
        step(model, optimizer, number)
        assert agrees(model, optimizer)
    assert [p.stride() for p in model.parameters()] == strides


def test_an_array_over_a_parameter_follows_it():
    if DEVICE.type != "cpu" or "numpy" not in sys.modules:
        pytest.skip("an array looks at host memory")
    model, optimizer = make()
    array = model[4].weight.detach().numpy()
    for number in range(3):
        step(model, optimizer, number)
    assert (array == model[4].weight.detach().numpy()).all()  # such memory is not moved
