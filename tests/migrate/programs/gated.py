# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A script without names of torch.cuda's own: it can become portable."""

import torch
from torch.nn import functional as F

device = "cuda:0" if torch.cuda.is_available() else "cpu"
device_type = "cuda" if "cuda" in device else "cpu"
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
torch.cuda.empty_cache()
if torch.cuda.is_available():
    torch.cuda.set_device(device)
    assert device == f"cuda:{torch.cuda.current_device()}"
x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
model = torch.nn.Linear(4, 3)
if device_type == "cuda":
    torch.cuda.reset_peak_memory_stats()
    x, y = x.cuda(), y.cuda(non_blocking=True)
    model = model.cuda()
    assert x.is_cuda
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for _ in range(4):
    with torch.autocast(device_type=device_type, enabled=False):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if loss.is_cuda or device in ("cuda", "cuda:0") or str(loss.device).startswith("cuda"):
        print(torch.cuda.get_device_name(), torch.cuda.max_memory_allocated())
assert torch.cuda.memory_allocated() >= 0
where = x.device.type
