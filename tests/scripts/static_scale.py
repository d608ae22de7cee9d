# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A small image net; amp's arguments come from the command line, as text."""

import argparse

import torch
from apex import amp
from apex.optimizers import NpuFusedSGD
from torch import nn

try:
    import torch_npu  # noqa: F401

    device = torch.device("npu:0")
except ImportError:
    device = torch.device("cpu")

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O2")
parser.add_argument("--loss-scale", default="128.0")
parser.add_argument("--keep-batchnorm-fp32", default="True")
args = parser.parse_args()
torch.manual_seed(10)
labels = torch.arange(48) % 3
images = 0.3 * torch.randn(48, 1, 8, 8)
images[range(48), 0, labels * 2] += 1
images, labels = images.to(device), labels.to(device)
model = nn.Sequential(
    *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
    *(nn.Flatten(), nn.Linear(128, 3)),
).to(device)
optimizer = NpuFusedSGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
model, optimizer = amp.initialize(
    model,
    optimizer,
    opt_level=args.opt_level,
    keep_batchnorm_fp32=args.keep_batchnorm_fp32,
    loss_scale=args.loss_scale,
    combine_grad=True,
)
for _ in range(25):
    loss = nn.functional.cross_entropy(model(images).float(), labels)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
