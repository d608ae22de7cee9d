# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A script with apex: O2, a fused optimizer, clipping, a layer."""

import torch

try:
    from apex import amp
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.") from None

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x, y = torch.randn(16, 8), torch.randn(16, 1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), FusedLayerNorm(16), torch.nn.Linear(16, 1))
x, y = x.to(device), y.to(device)
model = model.cuda() if device == "cuda" else model
optimizer = FusedAdam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
losses = []
for _ in range(4):
    loss = torch.nn.functional.mse_loss(model(x).float(), y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    losses.append(loss.item())
where = x.device.type
