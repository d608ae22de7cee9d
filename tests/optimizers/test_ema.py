# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
import io

import pytest
import torch
from torch import nn

from apex_npu.optimizers import FusedEMA


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).double())


def step(model, number):
    with torch.no_grad():
        for i, t in enumerate([*model.parameters(), *model.buffers()]):
            t.add_(number + i)


def test_same_as_torchs_averaged_model():
    model = make_model()
    model.register_buffer("phase", torch.ones(3, dtype=torch.complex64) * 1j)
    ema = FusedEMA(model, decay=0.9)
    reference = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    reference.update_parameters(model)  # its first update copies
    for i in range(5):
        step(model, i)
        ema.update()
        reference.update_parameters(model)
    expected = reference.module.state_dict()
    for name, average in ema.state_dict()["averages"].items():
        if average.is_floating_point() or average.is_complex():
            torch.testing.assert_close(average, expected[name])
        else:
            assert torch.equal(average, model.state_dict()[name])


def test_swap_and_back():
    model = make_model()
    ema = FusedEMA(model, decay=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    step(model, 1)
    ema.update()
    now = [p.detach().clone() for p in model.parameters()]
    addresses = [p.data_ptr() for p in model.parameters()]
    with ema.swapped() as swapped:
        for p, a, b in zip(swapped.parameters(), before, now, strict=True):
            torch.testing.assert_close(p.detach(), (a + b) / 2)
    with pytest.raises(ZeroDivisionError), ema.swapped():
        raise ZeroDivisionError
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), now, strict=True))
    assert addresses == [p.data_ptr() for p in model.parameters()]


def test_low_precision_is_averaged_in_float32():
    model = nn.Linear(2, 1).half()
    nn.init.ones_(model.weight)
    ema = FusedEMA(model, decay=0.9999)
    nn.init.zeros_(model.weight)
    for _ in range(10):
        ema.update()
    torch.testing.assert_close(ema.state_dict()["averages"]["weight"], torch.full((1, 2), 0.9999**10))


def test_state_dict_round_trip():
    model = make_model()
    ema = FusedEMA(model, decay=0.5)
    step(model, 3)
    ema.update()
    file = io.BytesIO()
    torch.save(ema.state_dict(), file)
    file.seek(0)
    twin = FusedEMA(make_model(), decay=0.9)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert twin.decay == 0.5
    for a, b in zip(twin.state_dict()["averages"].values(), ema.state_dict()["averages"].values(), strict=True):
        assert torch.equal(a, b)


def test_bad_input():
    with pytest.raises(ValueError, match=r"Invalid decay value: 1\.5"):
        FusedEMA(make_model(), decay=1.5)
    model = make_model()
    ema = FusedEMA(model)
    with pytest.raises(RuntimeError, match=r"do not fit the averages: 0\.bias, 0\.weight"):
        ema.load_state_dict({"decay": 0.5, "averages": {k: v for k, v in ema._averages.items() if k[0] != "0"}})
    assert ema.decay == 0.999
    model.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="averages: extra; make a new FusedEMA"):
        ema.update()
