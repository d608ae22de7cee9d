# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A training loop that clips a part of its gradients, writes to some, and logs their norms."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
data = [(torch.randn(16, 8), torch.randn(16, 4)) for _ in range(6)]
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
losses = []
for x, y in data:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
    loss.backward()
    losses.append(torch.nn.utils.clip_grad_norm_(model[0].parameters(), 0.05).item())
    model[2].weight.grad.mul_(2.0)
    for name, value in model.named_parameters():
        if value.grad is not None and "weight" in name:
            losses.append(value.grad.norm().item())
    optimizer.step()
    losses.append(loss.item())
where = next(model.parameters()).device.type
