# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What O1 and O4 cast inside of decorated functions."""

import torch
from devices import DEVICE
from known_faults.common import CASTING, backward, levels, start
from torch import nn

from apex_npu import amp

LOW = {"O1": torch.float16, "O4": torch.bfloat16}


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
