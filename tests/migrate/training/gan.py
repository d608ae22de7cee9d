# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two models with an optimizer each, and a loss that takes no half precision."""

import torch
from torch import nn, optim

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
real = torch.randn(6, 16, 4) + 2
noise = torch.randn(6, 16, 2)
netD = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid()).to(device)
netG = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=1e-2, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=1e-2, betas=(0.5, 0.999))
ones, zeros = torch.ones(16, 1, device=device), torch.zeros(16, 1, device=device)
losses = []
for x, z in zip(real.to(device), noise.to(device), strict=True):
    netD.zero_grad()
    errD_real = criterion(netD(x), ones)
    errD_real.backward()
    fake = netG(z)
    errD_fake = criterion(netD(fake.detach()), zeros)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    errG = criterion(netD(fake), ones)
    errG.backward()
    optimizerG.step()
    losses += [errD_real.item(), errD_fake.item(), errG.item()]
where = x.device.type
