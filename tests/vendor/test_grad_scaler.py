# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The vendor's GradScaler passes itself to optimizers with ``fuse_grad_scaler=True``, as torch's formerly did."""

import inspect
import subprocess
import sys

import pytest
import torch
import torch_npu

from apex_npu import optimizers
from apex_npu.optimizers import FusedAdam, NpuFusedAdamW, NpuFusedSGD

DEVICE = torch.device("npu:0")
INF = float("inf")


def make_params(device, count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(7, 5, generator=generator).to(device)) for _ in range(count)]


def grads(seed, count=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, 5, generator=generator) for _ in range(count)]


class Loop:
    """Iterations with the vendor's scaler on its device, and the same without one, in torch.optim on the host."""

    def __init__(self, cls, reference, scaler=None, **options):
        self.params, self.expected = make_params(DEVICE), make_params("cpu")
        self.optimizer = cls(self.params, fuse_grad_scaler=True, **options)
        self.reference = reference(self.expected, **options)
        self.scaler = scaler or torch_npu.npu.amp.GradScaler(init_scale=64.0, growth_interval=3)

    def backward(self, seed, overflow=False):
        self.optimizer.zero_grad()
        loss = sum((p * g.to(DEVICE)).sum() for p, g in zip(self.params, grads(seed), strict=True))
        self.scaler.scale(loss).backward()
        for p, g in zip(self.expected, grads(seed), strict=True):
            p.grad = g
        if overflow:
            self.params[1].grad[2, 2] = INF

    def step(self, overflow=False):
        self.scaler.step(self.optimizer)
        if not overflow:
            self.reference.step()

    def check(self):
        for p, q in zip(self.params, self.expected, strict=True):
            torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=2e-6, atol=1e-6)
        for name in ("grad_scale", "found_inf"):
            assert getattr(self.optimizer, name, None) is None


SGD = (NpuFusedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAMW = (NpuFusedAdamW, torch.optim.AdamW, {"lr": 0.1})


@pytest.mark.parametrize(("cls", "reference", "options"), [SGD, ADAMW])
def test_a_dynamic_scale_with_an_overflow(cls, reference, options):
    loop = Loop(cls, reference, **options)
    scales = []
    for seed in range(8):
        overflow = seed in (0, 3)
        loop.backward(seed, overflow)
        loop.step(overflow)
        loop.scaler.update()
        scales.append(loop.scaler.get_scale())
        loop.check()
    assert scales == [32.0, 32.0, 32.0, 16.0, 16.0, 16.0, 32.0, 32.0]
    assert all(int(state.get("step", 6)) == 6 for state in loop.optimizer.state.values())  # SGD counts none


@pytest.mark.parametrize(("cls", "reference", "options"), [SGD, ADAMW])
def test_a_static_scale(cls, reference, options):
    loop = Loop(cls, reference, torch_npu.npu.amp.GradScaler(init_scale=64.0, dynamic=False), **options)
    for seed in range(3):
        loop.backward(seed)
        loop.step()
        loop.scaler.update()
        loop.check()


@pytest.mark.parametrize("overflow", [False, True])
def test_unscaled_and_clipped_before(overflow):
    loop = Loop(*SGD[:2], **SGD[2])
    for seed in range(3):
        loop.backward(seed, overflow)
        loop.scaler.unscale_(loop.optimizer)
        torch.nn.utils.clip_grad_norm_(loop.params, 1.0)
        torch.nn.utils.clip_grad_norm_(loop.expected, 1.0)
        loop.step(overflow)
        loop.scaler.update()
        loop.check()


def test_gradients_stay_scaled_where_they_have_not_been_unscaled():
    loop = Loop(*SGD[:2], **SGD[2])
    loop.backward(0)
    loop.step()
    for p, g in zip(loop.params, grads(0), strict=True):
        torch.testing.assert_close(p.grad.cpu(), 64.0 * g)


def test_two_optimizers():
    scaler = torch_npu.npu.amp.GradScaler(init_scale=64.0)
    loops = [Loop(cls, reference, scaler, **options) for cls, reference, options in (SGD, ADAMW)]
    for seed, overflowing in enumerate((None, 1, None, 0)):
        for i, loop in enumerate(loops):
            loop.backward(seed, i == overflowing)
        for i, loop in enumerate(loops):
            # The vendor's flag is one for all that step after the first that overflows.
            loop.step(overflow=overflowing is not None and i >= overflowing)
        scaler.update()
        for loop in loops:
            loop.check()
    assert scaler.get_scale() == 16.0


def test_hooks_and_schedulers_see_one_step():
    loop = Loop(*SGD[:2], **SGD[2])
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.5)
    expected = torch.optim.lr_scheduler.StepLR(loop.reference, 1, 0.5)
    before, after = [], []
    loop.optimizer.register_step_pre_hook(lambda *args: before.append(1))
    loop.optimizer.register_step_post_hook(lambda *args: after.append(1))
    for seed in range(3):
        loop.backward(seed)
        loop.step()
        loop.scaler.update()
        scheduler.step()
        expected.step()
        loop.check()
    assert len(before) == len(after) == 3


def test_a_failed_step_leaves_no_scale_for_the_next():
    loop = Loop(*SGD[:2], **SGD[2])
    loop.backward(0)
    loop.step()
    loop.scaler.update()
    loop.backward(1)
    data = loop.params[0].data
    loop.params[0].data = data.to(torch.complex64)
    with pytest.raises(TypeError, match="complex64"):
        loop.scaler.step(loop.optimizer)
    loop.params[0].data = data
    loop.params[0].grad = grads(1)[0].to(DEVICE) * 64.0
    loop.step()
    loop.scaler.update()
    loop.check()


@pytest.mark.parametrize("cls", [NpuFusedSGD, FusedAdam])
def test_optimizers_that_are_not_told_are_stepped_as_before(cls):
    params = make_params(DEVICE)
    optimizer = cls(params, lr=0.1)
    scaler = torch_npu.npu.amp.GradScaler(init_scale=64.0)
    scaler.scale(sum(p.sum() for p in params)).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(params[0].grad, torch.ones_like(params[0]))


@pytest.mark.parametrize("name", [n for n in optimizers.__all__ if hasattr(getattr(optimizers, n), "step")])
def test_torchs_own_scaler_does_not_take_it_for_the_older_contract(name):
    assert "grad_scaler" not in inspect.signature(getattr(optimizers, name).step).parameters


@pytest.mark.parametrize("overflow", [False, True])
def test_torchs_own_scaler_on_the_vendors_device(overflow):
    loop = Loop(*ADAMW[:2], torch.amp.GradScaler("npu", init_scale=64.0), **ADAMW[2])
    loop.backward(0, overflow)
    loop.step(overflow)
    loop.scaler.update()
    loop.check()
    assert loop.scaler.get_scale() == (32.0 if overflow else 64.0)


def test_another_argument_is_refused():
    with pytest.raises(TypeError, match=r"NpuFusedSGD.step\(\) got an unexpected keyword argument 'scale'"):
        NpuFusedSGD(make_params("cpu"), lr=0.1).step(scale=1.0)


TRANSFERRED = """
import host_cann
host_cann.install()
import torch
from torch_npu.contrib import transfer_to_npu
from apex_npu.optimizers import NpuFusedSGD

model = torch.nn.Linear(3, 2).cuda()
before = [p.detach().cpu() for p in model.parameters()]
optimizer = NpuFusedSGD(model.parameters(), lr=0.5, fuse_grad_scaler=True)
scaler = torch.cuda.amp.GradScaler(init_scale=64.0)
with torch.autocast("cuda"):
    loss = model(torch.ones(1, 3).cuda()).float().sum()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
for p, old in zip(model.parameters(), before):
    torch.testing.assert_close(p.detach().cpu(), old - 0.5)
print("scaler:", type(scaler).__module__)
"""


def test_by_the_names_of_cuda():
    ran = subprocess.run([sys.executable, "-c", TRANSFERRED], capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr
    assert "scaler: torch_npu.npu.amp.grad_scaler" in ran.stdout
