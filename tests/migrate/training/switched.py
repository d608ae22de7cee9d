# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch.amp that a comparison switches on, with a fused optimizer of torch's."""

import torch

dtype = "float16"
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x, y = torch.randn(32, 8).to(device), torch.randn(32, 1).to(device)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
scaler = torch.cuda.amp.GradScaler(enabled=(dtype == "float16"))
losses = []
for _ in range(6):
    with torch.autocast("cuda", dtype=torch.float16, enabled=(dtype == "float16")):
        loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
where = x.device.type
