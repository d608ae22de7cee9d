# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""apex_npu with what only the simulated device has: formats with padding, a flag of overflows, several devices."""

from __future__ import annotations

import npu_simulator
import pytest
import torch
import torch_npu
from torch import nn

pytest.importorskip("apex_npu", reason="apex_npu is not importable: this tests the simulator with it")

from apex_npu import amp, optimizers
from apex_npu.backends import for_device
from apex_npu.optimizers import NpuFusedAdam


def test_backend_asks_the_stand_in() -> None:
    backend, device = for_device(torch.device("npu", 0)), torch.device("npu", 1)
    x = torch.ones(5, 7, device="npu")
    assert (backend.storage_numel(x), backend.has_private_format(x), backend.saturates()) == (35, False, False)
    npu_simulator.configure(padded_format=True, saturate="fp16")
    padded = torch_npu.npu_format_cast(x, 29)
    assert (backend.storage_numel(padded), backend.has_private_format(padded)) == (256, True)
    assert backend.saturates()
    backend.clear_overflow_flag(device)
    assert not backend.overflow_flag(device)
    torch.full((2,), 6e4, dtype=torch.float16, device=device).mul_(2)
    assert backend.overflow_flag(device)
    assert torch.npu.current_device() == 0


@pytest.mark.parametrize("name", ["NpuFusedAdam", "NpuFusedLamb", "NpuFusedAdamP", "FusedLAMB"])
def test_parameters_on_several_devices(name: str) -> None:
    results = []
    for devices in (["cpu"] * 4, ["npu:0", "cpu", "npu:1", "npu:0"]):
        generator = torch.Generator().manual_seed(0)
        params = [
            nn.Parameter(torch.randn(size, generator=generator).to(device))
            for size, device in zip([(5, 4), (7,), (3, 3), ()], devices, strict=True)
        ]
        options = {"use_global_grad_norm": True} if name == "NpuFusedLamb" else {}
        optimizer = getattr(optimizers, name)(params, lr=0.01, **options)
        for step in range(5):
            for p in params:
                p.grad = torch.full(p.shape, 1.0 + step, device=p.device) * p.detach().sign()
            optimizer.clip_optimizer_grad_norm_fused(3.0)
            optimizer.step()
        results.append([p.detach().cpu() for p in params])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("settings", [{"padded_format": True}, {"saturate": "fp16"}, {"fused_foreach": True}], ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_training_is_the_same_on_another_chip(level: str, settings: dict) -> None:
    """With physical storages larger than the tensors the first fusing is between a forward and its backward."""
    losses = []
    for given in ({}, settings):
        npu_simulator.configure(**given)
        try:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5)).npu()
            for p in model.parameters() if "padded_format" in given else ():
                if p.dim() == 2:
                    torch_npu.npu_format_cast_(p, 29)
            optimizer = NpuFusedAdam(model.parameters(), lr=1e-2)
            model, optimizer = amp.initialize(
                model, optimizer, opt_level=level, loss_scale="dynamic", dynamic_init_scale=2.0**20, verbosity=0
            )
            course = []
            for step in range(8):
                x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).npu()
                loss = model(x).float().square().mean()
                optimizer.zero_grad()
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                course.append((loss.item(), amp.last_step(optimizer).skipped))
            losses.append(course)
        finally:
            npu_simulator.configure()
            amp.shutdown()
    assert losses[0] == losses[1]
    assert losses[0][0][1] == (level != "O0")
    assert not losses[0][-1][1]
