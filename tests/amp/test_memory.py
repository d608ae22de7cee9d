# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Bytes of a parameter, by the allocator of the simulated device: the first rows of docs/memory.md."""

import gc

import pytest
import torch
from devices import DEVICE, SIMULATOR, VENDOR, memory_of
from optimizer_specs import SPECS
from small_programs import initialize
from torch import nn

from apex_npu import amp, optimizers
from apex_npu._extension import extension
from apex_npu.fusion import grad_memory
from apex_npu.optimizers.memory_choices import memory_choices

pytestmark = pytest.mark.skipif(SIMULATOR is None or VENDOR, reason="the stand-in has an allocator that counts")


def allocated(base, numel):
    gc.collect()
    return (torch.npu.memory_allocated() - base) / numel


@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(("fuse_unscale", "expected"), [(False, 18), (True, 16)], ids=["as written", "folded"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_bytes_of_a_parameter_of_adam(level, fuse_unscale, expected, clip, monkeypatch):
    if fuse_unscale and extension is None:
        pytest.skip("Python gives float32 masters no gradients of another dtype")
    monkeypatch.setattr(grad_memory, "LENT_NUMEL", 0)
    gc.collect()
    base = torch.npu.memory_allocated()
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)]).to(DEVICE)
    numel = sum(p.numel() for p in model.parameters())
    optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1e-3)
    model, optimizer = initialize(model, optimizer, level, fuse_unscale=fuse_unscale)
    peaks = []
    for i in range(3):
        torch.npu.reset_peak_memory_stats()
        with amp.scale_loss(model(torch.ones(1, 256, device=DEVICE)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        del scaled_loss
        if clip:
            optimizer.clip_optimizer_grad_norm_fused(1.0)
        assert allocated(base, numel) == pytest.approx(expected - (0 if i else 8), rel=0.02)  # moments come later
        optimizer.step()
        assert allocated(base, numel) == pytest.approx(expected, rel=0.02)  # gradients stay until they are cleared
        peaks.append(torch.npu.max_memory_allocated())
        optimizer.zero_grad()
        assert allocated(base, numel) == pytest.approx(14, rel=0.02)
    assert peaks[0] <= peaks[1] * 1.01


class Layers(nn.Sequential):
    """Layers whose activations take more than gradients do, so that memory is full where backward begins."""

    def __init__(self):
        super().__init__(*[nn.Linear(128, 128) for _ in range(6)])

    def forward(self, x):
        for layer in self:
            x = layer(x).relu()
        return x.float().square().mean()


def torchs_recipe(level, data):
    """An iteration of torch.optim.AdamW: of a float32 model; or of float32 copies of a model in 16 bits."""
    model = Layers().to(DEVICE)
    if level != "O0":
        model = model.to({"O2": torch.float16, "O5": torch.bfloat16}[level])
        data = data.to(model[0].weight.dtype)
    params = list(model.parameters())
    masters = params if level == "O0" else [p.detach().float().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, foreach=False)

    def iteration():
        loss = model(data)
        (loss * 64.0).backward()
        for p, master in zip(params, masters, strict=True):
            if p is not master:
                master.grad, p.grad = p.grad.float(), None
            master.grad.div_(64.0)
        optimizer.step()
        optimizer.zero_grad()
        for p, master in zip(params, masters, strict=True):
            if p is not master:
                p.data.copy_(master.detach())

    return iteration


@pytest.mark.skipif(extension is None, reason="without the extension buffers keep their memory")
@pytest.mark.parametrize("clear", ["optimizer.zero_grad", "model.zero_grad"])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_training_takes_no_more_memory_than_torchs_own(level, clear, monkeypatch):
    monkeypatch.setattr(grad_memory, "LENT_NUMEL", 0)
    data = torch.randn(1024, 128, device=DEVICE)
    gc.collect()
    base = torch.npu.memory_allocated()
    theirs, left_of_theirs = (found - base for found in memory_of(torchs_recipe(level, data)))
    gc.collect()
    base = torch.npu.memory_allocated()
    model = Layers().to(DEVICE)
    numel, count = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1e-3)
    model, optimizer = initialize(model, optimizer, level)

    def iteration():
        with amp.scale_loss(model(data), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        (optimizer if clear == "optimizer.zero_grad" else model).zero_grad()

    ours, left_of_ours = (found - base for found in memory_of(iteration))
    # Parameters, float32 values, moments and gradients each have less than 48 elements of padding for each tensor.
    padding = 4 * 48 * 4 * count
    assert theirs - left_of_theirs > 8 * numel
    assert left_of_ours <= left_of_theirs + padding
    assert ours <= theirs + padding


@pytest.mark.parametrize(
    ("cls", "options"), [*((spec.cls, {}) for spec in SPECS), (optimizers.NpuFusedBertAdam, {"max_grad_norm": 1.0})]
)
def test_where_a_rule_widens_gradients_its_masters_gradients_are_counted(cls, options, monkeypatch):
    if extension is None:
        pytest.skip("Python gives float32 masters no gradients of another dtype")
    monkeypatch.setattr(grad_memory, "LENT_NUMEL", 0)
    model = nn.Linear(64, 64).to(DEVICE)
    optimizer = cls(model.parameters(), lr=1e-3, **options)
    (counted,) = [c.gradient - 2 for c in memory_choices(optimizer) if c.name == "O2, O5, fuse_unscale=True"]
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", fuse_unscale=True, verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 64, device=DEVICE)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert counted == (4 if any(flat.memory.views or flat.memory.is_lent for flat in optimizer.flat_grads()) else 0)
