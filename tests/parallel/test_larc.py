# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""LARC against its formula in float64, and under amp."""

import copy

import pytest
import torch
from devices import DEVICE
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.parallel import LARC

pytestmark = pytest.mark.device


def step_in_float64(params, grads, buffers, *, lr, momentum, weight_decay, trust, clip, eps=1e-8):
    """One step of LARC over SGD with momentum, from the paper's rule."""
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        p_norm, g_norm = p.norm(), g.norm()
        if p_norm > 0 and g_norm > 0:
            local_lr = trust * p_norm / (g_norm + weight_decay * p_norm + eps)
            factor = min(local_lr / lr, 1.0) if clip else local_lr
            g = factor * (g + weight_decay * p)
        buffers[i] = g if buffers[i] is None else momentum * buffers[i] + g
        p -= lr * buffers[i]


@pytest.mark.parametrize("inner", [torch.optim.SGD, optimizers.NpuFusedSGD], ids=str)
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_it_follows_the_rule(inner, clip, weight_decay):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n, device=DEVICE) * size) for n, size in ((7, 1.0), (16, 5.0), (3, 0.0))]
    expected, buffers = [p.detach().double() for p in params], [None] * 3
    larc = LARC(inner(params, lr=0.05, momentum=0.9, weight_decay=weight_decay), trust_coefficient=0.02, clip=clip)
    for _ in range(5):
        grads = [torch.randn_like(p) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        larc.step()
        step_in_float64(
            expected, [g.double() for g in grads], buffers,
            lr=0.05, momentum=0.9, weight_decay=weight_decay, trust=0.02, clip=clip,
        )  # fmt: skip
        assert larc.param_groups[0]["weight_decay"] == weight_decay
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().double(), q, rtol=1e-5, atol=1e-7)


def test_a_failing_step_gives_the_weight_decay_back():
    p = nn.Parameter(torch.ones(2, device=DEVICE))
    larc = LARC(torch.optim.SGD([p], lr=0.1, weight_decay=0.5))
    p.grad = torch.ones_like(p)

    def fail():
        raise RuntimeError("no")

    larc.optim.step = fail
    with pytest.raises(RuntimeError, match=r"^no$"):
        larc.step()
    assert larc.param_groups[0]["weight_decay"] == 0.5


def test_groups_without_weight_decay_get_none():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            for group in self.param_groups:
                assert "weight_decay" not in group
                for p in group["params"]:
                    p.data.sub_(p.grad)

    p = nn.Parameter(torch.full((1,), 4.0, device=DEVICE))
    p.grad = torch.full_like(p, 2.0)
    LARC(Plain([p])).step()
    # min(0.02 · 4 / 2 / 0.1, 1) · 2 = 0.8
    assert p.item() == pytest.approx(4.0 - 0.8)


def test_it_is_the_optimizer_but_for_the_step():
    p = nn.Parameter(torch.ones(2, device=DEVICE))
    inner = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    larc = LARC(inner)
    p.grad = torch.ones_like(p)
    larc.step()
    assert larc.state is inner.state
    assert larc.param_groups is inner.param_groups
    assert "SGD" in repr(larc)
    other = LARC(torch.optim.SGD([p], lr=0.5, momentum=0.9))
    other.load_state_dict(larc.state_dict())
    assert other.param_groups[0]["lr"] == 0.1
    larc.zero_grad()
    assert p.grad is None
    larc.add_param_group({"params": [nn.Parameter(torch.ones(1, device=DEVICE))]})
    assert len(inner.param_groups) == 2
    scheduler = torch.optim.lr_scheduler.StepLR(larc.optim, 1)
    inner.step()
    scheduler.step()
    assert larc.param_groups[0]["lr"] == pytest.approx(0.01)
    assert copy.deepcopy(larc).param_groups[0]["momentum"] == 0.9
    with pytest.raises(TypeError, match="got LARC"):
        LARC(larc)


@pytest.mark.parametrize("inner", [torch.optim.SGD, optimizers.NpuFusedSGD], ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_amp_takes_it_at_every_level(level, inner):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)
    reference = copy.deepcopy(model)
    # Nothing is clipped to the optimizer's rate: every step is LARC's own.
    larc = LARC(inner(model.parameters(), lr=1.0, momentum=0.5), trust_coefficient=0.01)
    plain = LARC(torch.optim.SGD(reference.parameters(), lr=1.0, momentum=0.5), trust_coefficient=0.01)
    model, returned = amp.initialize(model, larc, opt_level=level, verbosity=0)
    assert returned is larc
    assert amp.last_step(larc) is None
    x, y = torch.randn(16, 6, device=DEVICE), torch.randn(16, 3, device=DEVICE)
    for _ in range(5):
        larc.zero_grad()
        with amp.scale_loss(nn.functional.mse_loss(model(x).float(), y), larc) as scaled_loss:
            scaled_loss.backward()
        larc.step()
        with amp.disable_casts():
            plain.zero_grad()
            nn.functional.mse_loss(reference(x), y).backward()
            plain.step()
    assert amp.last_step(larc).applied
    assert all(p.dtype == torch.float32 for p in amp.master_params(larc)) == (level != "O3")
    tolerance = {"O0": 1e-6, "O1": 5e-3, "O2": 5e-3, "O3": 2e-2}[level]
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_amp_skips_its_step_after_an_overflow(level):
    model = nn.Linear(6, 3).to(DEVICE)
    model, [larc] = amp.initialize(
        model, [LARC(torch.optim.SGD(model.parameters(), lr=0.1))], opt_level=level, verbosity=0
    )
    before = model.state_dict()["weight"].clone()
    loss = model(torch.randn(4, 6, device=DEVICE)).float().sum() * float("inf")
    with amp.scale_loss(loss, [larc]) as scaled_loss:
        scaled_loss.backward()
    larc.step()
    assert amp.last_step(larc).skipped
    assert torch.equal(model.state_dict()["weight"], before)
    assert larc._amp_stash.lazy_init_called
