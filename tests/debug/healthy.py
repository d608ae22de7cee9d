# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small models of usual kinds without any fault, each with a loss on random batches."""

from __future__ import annotations

import math

import torch
from devices import DEVICE
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(mask, -math.inf).softmax(-1)
        x = x + self.out(weights.to(v.dtype) @ v)
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.blocks = nn.Embedding(11, 8), nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self):
        tokens = torch.randint(11, (2, 6)).to(DEVICE)
        return F.cross_entropy(self(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.act(self.bn(self.stem(x)))
        x = F.max_pool2d(self.act(self.conv(x) + x), 2)
        return self.fc(x.mean((2, 3)))

    def loss(self):
        return F.cross_entropy(self(torch.randn(4, 3, 6, 6).to(DEVICE)).float(), torch.tensor([0, 1, 2, 0]).to(DEVICE))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.fc(self.rnn(x)[0][:, -1])

    def loss(self):
        return self(torch.randn(3, 4, 4).to(DEVICE)).float().square().mean()


class Padded(nn.Module):
    """Attention with padding, by torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, x, mask):
        return self.layer(x, src_key_padding_mask=mask)

    def loss(self):
        mask = torch.tensor([[False, False, True], [False, True, True]]).to(DEVICE)
        y = self(torch.randn(2, 3, 8).to(DEVICE), mask).float()
        return y.masked_fill(mask[..., None], 0).square().mean()


MODELS = [GPT, ResNet, LSTM, Padded]
