# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``amp.debug.record`` of scripts that scale by ``torch.amp.GradScaler``, against the same without a GradScaler."""

import pytest
import torch
from devices import DEVICE
from torch.amp import GradScaler

from apex_npu import amp, optimizers


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    ).to(DEVICE)
    return model, torch.randn(16, 8).to(DEVICE)


def recorded(path, scaler=None, optimizer=torch.optim.SGD, losses=1, clip=False, half=False, eps=None):
    """A step; the loss is a sum of ``losses`` losses, each of which is scaled."""
    model, x = made()
    if eps is not None:
        model[1].eps = eps
    optimizer = optimizer(model.parameters(), lr=0.1)
    with amp.debug.record(path, model) as found:
        with torch.autocast(DEVICE.type, torch.float16, enabled=half):
            y = model(x).float()
        values = [y.square().mean() for _ in range(losses)]
        if scaler is None:
            torch.autograd.backward(values)
        else:
            scaled = scaler.scale(values if losses > 1 else values[0])
            torch.autograd.backward(scaled)
            if clip:
                scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return found


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, optimizers.NpuFusedAdam])  # the second unscales by itself
@pytest.mark.parametrize("options", [{}, {"losses": 2}, {"clip": True}])
def test_what_is_scaled_is_divided(optimizer, options, tmp_path):
    before = GradScaler.scale, GradScaler.unscale_
    plain = recorded(tmp_path / "a.pt", None, optimizer, **options).rows
    found = recorded(tmp_path / "b.pt", GradScaler(DEVICE.type, init_scale=1024.0), optimizer, **options)
    assert (GradScaler.scale, GradScaler.unscale_) == before
    assert found.scale == 1024.0
    rows = [row for row in found.rows if row.phase != "block"]  # unscaling and clipping
    plain = [row for row in plain if row.phase != "block"]
    assert [(row.kind, row.phase, row.module, row.operator) for row in rows] == [
        (row.kind, row.phase, row.module, row.operator) for row in plain
    ]
    # A power of two changes no digit.
    assert [row.norm for row in rows] == [row.norm for row in plain]
    assert all(torch.equal(a.exact, b.exact) for a, b in zip(rows, plain, strict=True))


def test_a_scaler_that_is_disabled(tmp_path):
    plain = recorded(tmp_path / "a.pt").rows
    found = recorded(tmp_path / "b.pt", GradScaler(DEVICE.type, enabled=False))
    assert found.scale == 1.0
    assert [row.norm for row in found.rows] == [row.norm for row in plain]


def test_a_scaler_that_multiplies_itself(tmp_path):
    class Own(GradScaler):
        def scale(self, outputs):
            return outputs * 64.0

        def get_scale(self):
            return 64.0

        def step(self, optimizer):
            optimizer.step()

        def update(self):
            pass

    def of_modules(found):
        return {row.module: row.norm for row in found.rows if (row.phase, row.kind) == ("backward", "module")}

    before = Own.scale
    found = recorded(tmp_path / "b.pt", Own(DEVICE.type))
    assert Own.scale is before
    assert of_modules(found) == of_modules(recorded(tmp_path / "a.pt"))


def test_runs_of_other_scales_are_compared(tmp_path):
    paths = [str(tmp_path / name) for name in ("reference.pt", "floor.pt", "candidate.pt", "wrong.pt")]
    recorded(paths[0])
    for path, scale, eps in zip(paths[1:], (64.0, 4096.0, 4096.0), (None, None, 0.05), strict=True):
        recorded(path, GradScaler(DEVICE.type, init_scale=scale), half=True, eps=eps)
    healthy = amp.debug.compare(paths[0], paths[2], floor=paths[1])
    assert healthy.first is None
    assert max(row.ratio for row in healthy.rows) < 2
    assert any(note.startswith("the loss scales differ: ") for note in healthy.notes)
    first = amp.debug.compare(paths[0], paths[3], floor=paths[1]).first
    assert (first.module, first.operator, first.phase) == ("1", "aten::native_layer_norm", "forward")
