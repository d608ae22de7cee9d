# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One optimizer that is chosen, clipping, two batches a step, a checkpoint that is saved and loaded."""

import io

import torch
from torch import nn


def train(model, data, optimizer, device):
    losses = []
    for number, (x, y) in enumerate(data):
        loss = nn.functional.mse_loss(model(x.to(device)).float(), y.to(device)) / 2
        loss.backward()
        losses.append(loss.item())
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main(kind):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    data = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(2)] * 6
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = train(model, data[:6], optimizer, device)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return losses + train(model, data[6:], optimizer, device), device.type


losses, where = main("adamw")
