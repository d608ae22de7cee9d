# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch.amp with its scaler, switched by an option, with a second pass for evaluation."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast

use_amp = torch.cuda.is_available()
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
x, y = torch.randn(32, 8).to(device), torch.randn(32, 1).to(device)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = GradScaler("cuda", enabled=use_amp)
losses = []
for _ in range(6):
    with autocast("cuda", enabled=use_amp):
        # The whole of the forward pass.
        loss = nn.functional.mse_loss(
            model(x),
            y,
        )
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
with torch.no_grad(), autocast("cuda", enabled=use_amp):
    losses.append(nn.functional.mse_loss(model(x), y).item())
saved = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
scaler.load_state_dict(saved["scaler"])
where = device.type
