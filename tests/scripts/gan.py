# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A GAN on points in a plane: two models, two optimizers, three losses with a scale each. Prints how far off it is."""

import torch
from apex import amp
from torch import nn

try:
    import torch_npu  # noqa: F401

    device = torch.device("npu:0")
except ImportError:
    device = torch.device("cpu")

torch.manual_seed(2)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)).to(device)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.9))
optimizer_d = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))
[generator, critic], [optimizer_g, optimizer_d] = amp.initialize(
    [generator, critic], [optimizer_g, optimizer_d], opt_level="O1", num_losses=3
)
criterion = nn.MSELoss()
real = (torch.randn(256, 2) * 0.3 + torch.tensor([2.0, -1.0])).to(device)
noise = torch.randn(256, 4).to(device)
ones, zeros = torch.ones(256, 1, device=device), torch.zeros(256, 1, device=device)
for _ in range(60):
    fake = generator(noise)
    optimizer_d.zero_grad()
    with amp.scale_loss(criterion(critic(real).float(), ones), optimizer_d, loss_id=0) as scaled_loss:
        scaled_loss.backward()
    with amp.scale_loss(criterion(critic(fake.detach()).float(), zeros), optimizer_d, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    with amp.scale_loss(criterion(critic(fake).float(), ones), optimizer_g, loss_id=2) as scaled_loss:
        scaled_loss.backward()
    optimizer_g.step()
    print(f"loss {(fake.float().mean(0) - real.mean(0)).norm().item():.4f}")
