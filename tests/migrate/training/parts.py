# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One model with an optimizer for each of two parts, trained in turns by a function that gets a list of optimizers."""

import torch
from torch import nn, optim


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 6)

    def forward(self, x):
        return ((self.decoder(self.encoder(x)) - x) ** 2).mean()


def run(model, opts, data):
    for x in data:
        for optimizer in opts:
            optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        for optimizer in opts:
            optimizer.step()
        losses.append(loss.item())


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
data = torch.randn(3, 16, 6).to(device)
net = AutoEncoder().to(device)
encoder_params = set(net.encoder.parameters())
optimizer_encoder = optim.Adam(encoder_params, lr=1e-2)
optimizer_decoder = optim.Adam(net.decoder.parameters(), lr=1e-2)
losses = []
for _ in range(2):
    run(net, [optimizer_encoder], data)
    run(net, opts=[optimizer_decoder], data=data)
where = data.device.type
