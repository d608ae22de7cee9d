# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A small transformer that fills in masked words: groups without decay, a schedule, model.zero_grad()."""

import torch
from apex import amp, optimizers
from torch import nn

try:
    import torch_npu  # noqa: F401

    device = torch.device("npu:0")
except ImportError:
    device = torch.device("cpu")


class Encoder(nn.Module):
    def __init__(self, words=20, width=32):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.zeros(10, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.LayerNorm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, words)

    def forward(self, tokens):
        return self.decoder(self.LayerNorm(self.layers(self.embedding(tokens) + self.position)))


torch.manual_seed(4)
start = torch.randint(0, 20, (64, 1))
sentences = (start + torch.arange(10)) % 19 + 1
masked = torch.where(torch.rand(64, 10) < 0.15, 0, sentences)
sentences, masked = sentences.to(device), masked.to(device)
model = Encoder().to(device)
no_decay = ["bias", "LayerNorm.weight"]
named = list(model.named_parameters())
groups = [
    {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = optimizers.NpuFusedAdamW(groups, lr=3e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", combine_grad=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
for _ in range(40):
    loss = nn.functional.cross_entropy(model(masked).float().flatten(0, 1), sentences.flatten())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    scheduler.step()
    model.zero_grad()
    print(f"loss {loss.item():.4f}")
