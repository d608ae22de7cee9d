# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One card, as most scripts have it: a device that is chosen, a batch class with cuda(), a checkpoint."""

import io

import torch
from torch import nn

use_cuda = torch.cuda.is_available()
device = torch.device("cuda:0" if use_cuda else "cpu")


class Batch:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def cuda(self, non_blocking=False):
        self.x = self.x.cuda(non_blocking=non_blocking)
        self.y = self.y.cuda(non_blocking=non_blocking)
        return self


torch.manual_seed(0)
if use_cuda:
    torch.cuda.manual_seed_all(0)
    torch.cuda.set_device(0)
data = [Batch(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(5)]
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
criterion = nn.MSELoss()
if use_cuda:
    criterion = criterion.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
for batch in data:
    moved = batch.cuda(non_blocking=True) if use_cuda else batch
    loss = criterion(model(moved.x), moved.y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if use_cuda:
    torch.cuda.synchronize()
    assert next(model.parameters()).is_cuda
    assert f"cuda:{torch.cuda.current_device()}" == str(device)

file = io.BytesIO()
torch.save(model.state_dict(), file)
file.seek(0)
model.load_state_dict(torch.load(file, map_location="cuda:0" if use_cuda else "cpu"))
where = device.type
