# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""An autoencoder whose halves are stepped in turn, each by an optimizer of its own."""

import torch
from apex import amp
from apex.optimizers import NpuFusedAdam
from torch import nn

try:
    import torch_npu  # noqa: F401

    device = torch.device("npu:0")
except ImportError:
    device = torch.device("cpu")


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 12))

    def forward(self, x):
        return self.decoder(self.encoder(x))


torch.manual_seed(5)
data = (torch.randn(96, 4) @ torch.randn(4, 12)).to(device)
model = Autoencoder().to(device)
both = [NpuFusedAdam(half.parameters(), lr=1e-2) for half in (model.encoder, model.decoder)]
model, both = amp.initialize(model, both, opt_level="O2", loss_scale=128.0, combine_grad=True)
for step in range(80):
    optimizer = both[step // 2 % 2]
    for other in both:
        other.zero_grad()
    loss = nn.functional.mse_loss(model(data).float(), data)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
