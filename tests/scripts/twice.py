# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two models trained in turn by one program: initialize is called for each."""

import torch
from apex import amp
from apex.optimizers import NpuFusedAdam
from torch import nn

try:
    import torch_npu  # noqa: F401

    device = torch.device("npu:0")
except ImportError:
    device = torch.device("cpu")

torch.manual_seed(11)
x = torch.randn(64, 4).to(device)
targets = {"O1": x.sum(1, keepdim=True), "O2": x.abs().sum(1, keepdim=True)}
for opt_level, y in targets.items():
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = NpuFusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=256.0, combine_grad=True)
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")
