# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A decoder-only transformer with layer norms before attention and MLP."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LanguageModel(nn.Module):
    """From tokens [batch, time] to the logits of each one's successor [batch, time, tokens]."""

    def __init__(self, tokens: int, *, layers: int, heads: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.token.weight
        for name, param in self.named_parameters():
            if param.dim() == 2:
                # 2 · layers matrices add to the residual stream, whose variance is to stay about the same.
                residual = name.endswith(("project.weight", "mlp.2.weight"))
                nn.init.normal_(param, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        return self.head(self.norm(self.blocks(x)))


class Block(nn.Module):
    """Attention to what is before, then an MLP; each is added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class CausalAttention(nn.Module):
    """Attention with several heads, in which a token sees itself and those before."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.project(x.transpose(1, 2).reshape(batch, time, width))
