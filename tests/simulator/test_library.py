# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""apex_npu on the simulated device: what it does there is what it does on the CPU."""

from __future__ import annotations

import npu_simulator
import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor, nn

pytest.importorskip("apex_npu", reason="apex_npu is not importable: this tests the simulator with it")

from apex_npu import amp, optimizers
from apex_npu.backends import registry
from apex_npu.contrib.combine_tensors import change_data_ptr
from apex_npu.optimizers import NpuFusedAdam, NpuFusedSGD


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 12),
        nn.ReLU(),
        nn.Linear(12, 5),
    )


def batches(device: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(4, 3, 6, 6, generator=generator).to(device),
            torch.randint(0, 5, (4,), generator=generator).to(device),
        )
        for _ in range(5)
    ]


def parameters_after(device: str, steps: int = 5) -> list[Tensor]:
    model = net().to(device)
    optimizer = NpuFusedAdam(model.parameters(), lr=1e-2, weight_decay=1e-3)
    for x, y in batches(device)[:steps]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert all(p.device.type == device for p in model.parameters())
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("fused_foreach", [False, True])
def test_fused_adam(fused_foreach: bool) -> None:
    npu_simulator.configure(fused_foreach=fused_foreach)
    torch.testing.assert_close(parameters_after("npu"), parameters_after("cpu"), rtol=1e-4, atol=1e-6)


def amp_losses(device: str, cls: type[torch.optim.Optimizer], **options: object) -> list[float]:
    model = net().to(device)
    model, optimizer = amp.initialize(model, cls(model.parameters(), lr=1e-2), verbosity=0, **options)
    losses = []
    for x, y in batches(device):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("saturate", [False, "fp16"])
@pytest.mark.parametrize("combine_grad", [False, True])
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("cls", [NpuFusedAdam, NpuFusedSGD])
def test_amp(cls: type[torch.optim.Optimizer], opt_level: str, combine_grad: bool, saturate: str | bool) -> None:
    options = {"opt_level": opt_level, "combine_grad": combine_grad}
    want = amp_losses("cpu", cls, **options)
    npu_simulator.configure(saturate=saturate)
    torch.testing.assert_close(amp_losses("npu", cls, **options), want, rtol=1e-4, atol=1e-5)


def test_change_data_ptr() -> None:
    buffer, slot = torch.arange(10.0, device="npu"), torch.zeros(3, device="npu")
    alias = slot.view(-1)[1:]
    change_data_ptr(slot, buffer, 2)
    assert slot.tolist() == [2, 3, 4]
    slot.add_(10)
    assert buffer.tolist() == [0, 1, 12, 13, 14, 5, 6, 7, 8, 9]
    assert alias.tolist() == [13, 14]
    before = torch.npu.memory_allocated()
    del buffer
    assert slot.tolist() == [12, 13, 14]  # owns the memory with it
    assert torch.npu.memory_allocated() == before
    with pytest.raises((TypeError, ValueError), match="device"):
        change_data_ptr(slot, torch.zeros(10), 0)


def test_backend_asks_the_stand_in() -> None:
    backend, device = registry.for_device(torch.device("npu", 0)), torch.device("npu", 1)
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


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_parameters_in_a_private_format(level: str) -> None:
    """Physical storages larger than the tensors; the first fusing happens between a forward and its backward."""
    losses = []
    for padded in (False, True):
        npu_simulator.configure(padded_format=padded)
        try:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5)).npu()
            for p in model.parameters() if padded else ():
                if p.dim() == 2:
                    torch_npu.npu_format_cast_(p, 29)
            optimizer = NpuFusedAdam(model.parameters(), lr=1e-2)
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0)
            course = []
            for step in range(4):
                x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).npu()
                loss = model(x).float().square().mean()
                optimizer.zero_grad()
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                course.append(loss.item())
            losses.append(course)
        finally:
            npu_simulator.configure(padded_format=False)
            amp.shutdown()
    assert losses[0] == losses[1]
