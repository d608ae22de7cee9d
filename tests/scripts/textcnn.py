# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sentences sorted by a TextCNN: O2, a static scale, combined gradients."""

import torch
from apex import amp
from apex.optimizers import NpuFusedAdam
from torch import nn

try:
    import torch_npu  # noqa: F401

    device = torch.device("npu:0")
except ImportError:
    device = torch.device("cpu")


class TextCNN(nn.Module):
    def __init__(self, words=50, width=16, classes=4):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, 12, size, padding=1) for size in (2, 3))
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(24, classes)

    def forward(self, tokens):
        x = self.embedding(tokens).transpose(1, 2)
        x = torch.cat([torch.relu(conv(x)).amax(2) for conv in self.convs], 1)
        return self.fc(self.dropout(x))


torch.manual_seed(1)
tokens = torch.randint(0, 50, (128, 12))
labels = (tokens < 5).sum(1).clamp(max=3).to(device)
tokens = tokens.to(device)
model = TextCNN().to(device)
optimizer = NpuFusedAdam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, combine_grad=True)
for _ in range(30):
    loss = nn.functional.cross_entropy(model(tokens).float(), labels)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
