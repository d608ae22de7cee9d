# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Names of torch.cuda by other names, streams and events, torch.amp, types."""

import torch as th
import torch.nn.functional as F
from torch import cuda
from torch.cuda import Event

tc = th.cuda
kind = "cuda" if cuda.is_available() else "cpu"
if kind == "cuda":
    stream, event = tc.Stream(), Event(enable_timing=True)
    stream.wait_stream(tc.current_stream())
    with tc.stream(stream):
        event.record()
    event.synchronize()
    message = f"{tc.memory_allocated() / 2**20:.1f} MB on {th.cuda.get_device_name()}"
    numbers = th.cuda.FloatTensor(2).fill_(1).type("torch.cuda.HalfTensor")
    assert numbers.type() == "torch.cuda.HalfTensor"

th.manual_seed(0)
x, y = th.randn(16, 4), th.randint(0, 3, (16,))
model = th.nn.Linear(4, 3)
x, y, model = x.to(kind), y.to(kind), model.to(kind)
optimizer = th.optim.AdamW(model.parameters(), lr=1e-2)
scaler = th.amp.GradScaler("cuda", enabled=False)
losses = []
for _ in range(4):
    with th.autocast(device_type="cuda" if kind != "cpu" else "cpu", enabled=False):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
where = x.device.type
