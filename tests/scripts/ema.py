# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A moving average of all weights, kept in one tensor. Prints the loss of the averaged model."""

import copy

import torch
from apex import amp
from apex.contrib.combine_tensors import combine_npu
from apex.optimizers import NpuFusedSGD
from torch import nn

try:
    import torch_npu  # noqa: F401

    device = torch.device("npu:0")
except ImportError:
    device = torch.device("cpu")

torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
average = copy.deepcopy(model)
optimizer = NpuFusedSGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, combine_grad=True)
flat_average = combine_npu(list(average.parameters()))
x = torch.randn(64, 6).to(device)
y = x.square().sum(1, keepdim=True) / 4
for _ in range(60):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).float(), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    with torch.no_grad():
        flat_model = combine_npu([p.clone() for p in model.parameters()])
        flat_average.mul_(0.9).add_(flat_model, alpha=0.1)
        print(f"loss {nn.functional.mse_loss(average(x).float(), y).item():.4f}")
