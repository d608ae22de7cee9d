# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What packages above amp see: gradients divided by their scale are those of the loss, wherever a step is."""

import pytest
import torch
from devices import DEVICE
from small_programs import backward
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.amp import inspect

pytestmark = pytest.mark.host

SCALE = 8.0


def see(optimizer, model, expected):
    """The unscaled gradients of all parameters are ``expected``."""
    names = inspect.parameter_names()
    seen = {names[param]: grad / scale for param, grad, scale in inspect.gradients(optimizer) if grad is not None}
    assert {name: grad.flatten().tolist() for name, grad in seen.items()} == expected
    assert set(map(id, inspect.parameters(optimizer))) == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("cls", [optimizers.NpuFusedSGD, torch.optim.SGD])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_gradients_in_a_block_after_it_and_delayed(level, cls, fuse_unscale):
    model = nn.Linear(2, 1).to(DEVICE)
    optimizer = cls(model.parameters(), lr=0.5)
    options = {"combine_grad": True, "fuse_unscale": True} if fuse_unscale else {}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0, **options)
    one = {"weight": [1.0, 2.0], "bias": [1.0]}
    two = {"weight": [2.0, 4.0], "bias": [2.0]}
    x = torch.tensor([[1.0, 2.0]], device=DEVICE)
    see(optimizer, model, {})
    for delay in (True, False):
        loss = model(x).sum()
        with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()
            see(optimizer, model, one if delay else two)
        see([optimizer], model, one if delay else two)
    assert inspect.optimizers() == [optimizer]
    assert inspect.models() == [model]
    assert inspect.report_of(optimizer) is None
    before = [inspect.float32_of(p).detach().clone() for p in model.parameters()]
    optimizer.step()
    assert inspect.report_of(optimizer).applied
    for p, was, grads in zip(model.parameters(), before, two.values(), strict=True):
        now = inspect.float32_of(p)
        assert now.dtype == (p.dtype if level == "O3" else torch.float32)
        torch.testing.assert_close(
            was.float() - now.float(), 0.5 * torch.tensor(grads, device=DEVICE).reshape(p.shape), rtol=0, atol=2e-3
        )


def test_several_observers_hear_of_a_block_and_leave_in_any_order():
    class Hears:
        def __init__(self):
            self.heard = []

        def __getattr__(self, name):
            return lambda *args: self.heard.append(name)

    model = nn.Linear(2, 1).to(DEVICE)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), opt_level="O1", verbosity=0)

    def block():
        backward(model(torch.ones(1, 2, device=DEVICE)).sum(), optimizer)

    first, second = Hears(), Hears()
    inspect.observe(first)
    inspect.observe(second)
    assert inspect.observers() == [second, first]
    inspect.leave(first)
    block()
    inspect.leave(second)
    block()
    assert (first.heard, second.heard) == ([], ["block_begins", "backward_ended", "block_ended"])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_after_shutdown_an_optimizer_with_float32_values_has_no_model(level):
    model = nn.Linear(2, 1).to(DEVICE)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    assert inspect.policy().opt_level == inspect.policy_of(optimizer).opt_level == level
    assert not inspect.is_retired(optimizer)
    amp.shutdown()
    assert inspect.is_retired(optimizer) is (level == "O2")
    assert inspect.policy() is None
    assert inspect.models() == inspect.optimizers() == inspect.observers() == []
