# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A class that trains: its model and its optimizer are attributes."""

import torch
from torch import nn


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=lr)

    def fit(self, x, y):
        loss = nn.functional.smooth_l1_loss(self.model(x).float(), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self):
        state = {}
        state["optimizer"] = self.optimizer.state_dict()
        return state

    def resume(self, state):
        self.optimizer.load_state_dict(state["optimizer"])


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = torch.randn(32, 8).to(device), torch.randn(32, 1).to(device)
trainer = Trainer(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device), 1e-3)
losses = [trainer.fit(x, y) for _ in range(3)]
trainer.resume(trainer.state())
losses += [trainer.fit(x, y) for _ in range(3)]
where = x.device.type
