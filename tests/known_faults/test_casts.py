# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What O1 and O4 cast, and where: inside of decorated functions, and inside of a host's own autocast regions."""

import contextlib

import pytest
import torch
from devices import DEVICE
from known_faults.common import CASTING, backward, known_fault, levels, right_or_refused, start
from torch import nn

from apex_npu import amp

LOW = {"O1": torch.float16, "O4": torch.bfloat16}
OUTER_WINS = "a region of autocast that the host has entered takes the place of the level's casts"


class Decorated(nn.Module):
    """A module whose forward is cast as a whole, as those of Swin Transformers are."""

    def __init__(self, decorate):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.body = decorate(self.body)

    def body(self, x):
        self.seen = x.dtype
        return self.inner(x)

    def forward(self, x):
        return self.body(x)


def run_decorated(level, name):
    model = Decorated(getattr(amp, name)).to(DEVICE)
    x = torch.randn(8, 4, device=DEVICE)
    expected = nn.functional.linear(x, model.inner.weight, model.inner.bias).detach()
    model, optimizer = start(model, kind="torch", level=level)
    found = model(x)
    backward(found.float().sum(), optimizer)
    tolerance = 4 * torch.finfo(LOW[level]).eps
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(model.inner.bias.grad, torch.full((4,), 8.0, device=DEVICE))
    return model, found


@levels(CASTING)
def test_weights_inside_of_a_half_function_are_cast(level):
    model, found = run_decorated(level, "half_function")
    assert model.seen == found.dtype == LOW[level]


@levels(CASTING)
def test_weights_inside_of_a_float_function_stay_float32(level):
    model, found = run_decorated(level, "float_function")
    assert model.seen == found.dtype == torch.float32


class Asks(nn.Module):
    """Says what a product comes out as."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        self.seen = y.dtype
        return y.float()


def region(enabled, dtype):
    return torch.autocast(DEVICE.type, enabled=enabled, dtype=dtype)


def dtype_inside(level, outer):
    model, _ = start(Asks().to(DEVICE), kind="torch", level=level)

    def act():
        with outer:
            model(torch.ones(2, 4, device=DEVICE))
        return model.seen

    right_or_refused(act, lambda seen: _assert_is(seen, LOW[level]))


def _assert_is(found, expected):
    assert found == expected


@known_fault(OUTER_WINS)
@levels(CASTING)
def test_a_model_casts_inside_of_a_region_without_autocast(level):
    dtype_inside(level, region(False, torch.bfloat16))


@known_fault(OUTER_WINS)
@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.bfloat16), ("O4", torch.float16)])
def test_a_model_casts_to_its_own_dtype_inside_of_a_region_of_another(level, dtype):
    dtype_inside(level, region(True, dtype))


@levels(CASTING)
def test_a_model_casts_inside_of_a_region_of_its_own_dtype(level):
    dtype_inside(level, region(True, LOW[level]))
    dtype_inside(level, contextlib.nullcontext())


@levels(CASTING)
def test_a_region_inside_of_the_forward_counts(level):
    class Exempt(Asks):
        def forward(self, x):
            with region(False, torch.bfloat16):
                return super().forward(x)

    model, _ = start(Exempt().to(DEVICE), kind="torch", level=level)
    model(torch.ones(2, 4, device=DEVICE))
    assert model.seen == torch.float32
