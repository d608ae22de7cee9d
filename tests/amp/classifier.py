# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A small network with a convolution and a batch norm, trained on random images, under amp or in plain torch."""

import torch
from devices import DEVICE
from small_programs import backward
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 36, 4)
        self.to(DEVICE)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


def batch(step):
    x = torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return x, x.mean((1, 2, 3)).mul(12).add(2).clamp(0, 3.9).long()


def loss_of(model, step):
    x, y = batch(step)
    return nn.functional.cross_entropy(model(x), y)


def train(model, optimizer, steps, scaled=True):
    """The losses; in plain torch unless ``scaled``."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        optimizer.zero_grad()
        backward(loss, optimizer) if scaled else loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
