# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The sum of a sequence by an LSTM: O1, gradients clipped after the block."""

import torch
from apex import amp
from torch import nn

try:
    import torch_npu  # noqa: F401

    device = torch.device("npu:0")
except ImportError:
    device = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(2, 16, num_layers=2, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


torch.manual_seed(3)
x = torch.randn(64, 8, 2).to(device)
y = x.mean((1, 2)).unsqueeze(1)
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=1024.0)
for _ in range(60):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).float(), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.25)
    optimizer.step()
    print(f"loss {loss.item():.4f}")
