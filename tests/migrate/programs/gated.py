# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A script without names of torch.cuda's own: it can become portable."""

import torch
from torch.nn import functional as F

device = "cuda:0" if torch.cuda.is_available() else "cpu"
device_type = "cuda" if "cuda" in device else "cpu"
torch.manual_seed(0)
if torch.cuda.is_available():
    torch.cuda.manual_seed_all(0)
    torch.cuda.set_device(device)
    assert device == f"cuda:{torch.cuda.current_device()}"
x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
model = torch.nn.Linear(4, 3)
if device_type == "cuda":
    x, y = x.cuda(), y.cuda(non_blocking=True)
    model = model.cuda()
    assert x.is_cuda
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for _ in range(4):
    with torch.autocast(device_type=device_type, enabled=False):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
where = x.device.type
