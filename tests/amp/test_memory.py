# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Bytes of a parameter, by the allocator of the simulated device: the first rows of docs/memory.md."""

import gc

import pytest
import torch
from devices import DEVICE, SIMULATOR, VENDOR
from optimizer_specs import SPECS
from torch import nn

from apex_npu import amp, optimizers
from apex_npu._extension import extension
from apex_npu.fusion import packed_grads
from apex_npu.optimizers.memory_choices import memory_choices

pytestmark = pytest.mark.skipif(SIMULATOR is None or VENDOR, reason="the stand-in has an allocator that counts")


def allocated(base, numel):
    gc.collect()
    return (torch.npu.memory_allocated() - base) / numel


@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(("fuse_unscale", "expected"), [(False, 20), (True, 16)], ids=["as written", "folded"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_bytes_of_a_parameter_of_adam(level, fuse_unscale, expected, clip, monkeypatch):
    if fuse_unscale and extension is None:
        pytest.skip("Python gives float32 masters no gradients of another dtype")
    monkeypatch.setattr(packed_grads, "PACKED_NUMEL", 0)
    gc.collect()
    base = torch.npu.memory_allocated()
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)]).to(DEVICE)
    numel = sum(p.numel() for p in model.parameters())
    optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, fuse_unscale=fuse_unscale, verbosity=0
    )
    peaks = []
    for _ in range(3):
        torch.npu.reset_peak_memory_stats()
        with amp.scale_loss(model(torch.ones(1, 256, device=DEVICE)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        del scaled_loss
        if clip:
            optimizer.clip_optimizer_grad_norm_fused(1.0)
        optimizer.step()
        assert allocated(base, numel) == pytest.approx(expected, rel=0.02)
        peaks.append(torch.npu.max_memory_allocated())
        optimizer.zero_grad()
        assert allocated(base, numel) == pytest.approx(expected - 2, rel=0.02)
    assert peaks[0] <= peaks[1] * 1.01


@pytest.mark.parametrize(
    ("cls", "options"), [*((spec.cls, {}) for spec in SPECS), (optimizers.NpuFusedBertAdam, {"max_grad_norm": 1.0})]
)
def test_where_a_rule_widens_gradients_its_masters_gradients_are_counted(cls, options, monkeypatch):
    if extension is None:
        pytest.skip("Python gives float32 masters no gradients of another dtype")
    monkeypatch.setattr(packed_grads, "PACKED_NUMEL", 0)
    model = nn.Linear(64, 64).to(DEVICE)
    optimizer = cls(model.parameters(), lr=1e-3, **options)
    (counted,) = [c.master_gradient for c in memory_choices(optimizer) if c.name == "O2, O5, fuse_unscale=True"]
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", fuse_unscale=True, verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 64, device=DEVICE)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert counted == (4 if any(flat.has_buffer for flat in optimizer.flat_grads()) else 0)
