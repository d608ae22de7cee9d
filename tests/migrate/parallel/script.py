# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One card: data sets, a loop over epochs in one function and one over batches in another, a checkpoint at each."""

import gc
import json
import os
import sys

import torch
import torch.distributed.nn  # while there is no group: its functions keep the default one as a default argument
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

path, batch_size, shuffle = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "shuffle"


def train(loader, model, optimizer, device):
    orders = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        orders.append(x[:, 0].tolist())
    return orders


def main():
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    points = TensorDataset(torch.arange(32.0)[:, None] / 32 + torch.arange(4.0), torch.randn(32, 1))
    loader = DataLoader(points, batch_size, shuffle=shuffle)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    orders = []
    for epoch in range(2):
        orders.append(train(loader, model, optimizer, device))
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        torch.save({"model": model.state_dict(), "epoch": epoch}, f"{path}.pt")
    return {"weights": weights, "orders": orders, "type": device.type}


if __name__ == "__main__":
    result = main()
    gc.collect()  # a DistributedDataParallel, which would keep the group
    with open(f"{path}.{os.getpid()}.json", "w") as file:
        json.dump(result, file)
