# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Training that stops, saves what belongs together, and resumes from the file with new objects."""

import os
import tempfile

import torch
from apex import amp
from apex.optimizers import NpuFusedAdam
from torch import nn

try:
    import torch_npu  # noqa: F401

    device = torch.device("npu:0")
except ImportError:
    device = torch.device("cpu")


def build():
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(5, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = NpuFusedAdam(model.parameters(), lr=1e-2)
    return amp.initialize(model, optimizer, opt_level="O2", combine_grad=True)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")


torch.manual_seed(9)
x = torch.randn(64, 5).to(device)
y = x.sin().sum(1, keepdim=True)
model, optimizer = build()
train(model, optimizer, 30)
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "checkpoint.pt")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    torch.save(state, path)
    checkpoint = torch.load(path, map_location=device)
model, optimizer = build()
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
amp.load_state_dict(checkpoint["amp"])
train(model, optimizer, 30)
