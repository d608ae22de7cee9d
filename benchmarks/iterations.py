# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whole training iterations, forward and backward included: what a bare step hides is in here, and counts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from whole_steps import clip_step_clear, grad_scaler, initialized, torch_adam
from workloads import MAX_NORM

from apex_npu import amp

Step = Callable[[], object]


class Block(nn.Module):
    """Two convolutions around a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = (nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_one(self.one(x)))
        return F.relu(x + self.norm_two(self.two(y)))


def resnet(device: torch.device) -> tuple[nn.Module, Tensor]:
    """ResNet-like: 40 convolutions of 64 channels, 1.5 million parameters in 122 tensors, 4 images of 8 × 8."""
    torch.manual_seed(0)
    blocks = [Block(64) for _ in range(20)]
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return model.to(device), torch.randn(4, 3, 8, 8, device=device)


def transformer(device: torch.device) -> tuple[nn.Module, Tensor]:
    """12 layers of width 128: 2.4 million parameters in 144 tensors, 2 sequences of 16."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, dim_feedforward=512, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    return model.to(device), torch.randn(2, 16, 128, device=device)


TORCH_FP32, TORCH_BF16 = "GradScaler, clip, fused", "autocast, GradScaler, clip, fused"
MODELS = {"ResNet-like": resnet, "transformer": transformer}


def theirs(name: str, device: torch.device, dtype: torch.dtype | None) -> Step:
    """GradScaler, clip_grad_norm_ and torch's fused Adam, under torch.autocast where ``dtype`` is given."""
    model, x = MODELS[name](device)
    optimizer, scaler = torch_adam(list(model.parameters())), grad_scaler(device)

    def step() -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def ours(name: str, device: torch.device, level: str, *, fold: bool = False, set_to_none: bool = True) -> Step:
    """The same with amp and NpuFusedAdam; without ``set_to_none`` backward adds to gradients that stay."""
    model, x = MODELS[name](device)
    model, optimizer = initialized(model, level, fold)

    def step() -> None:
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        clip_step_clear(optimizer, fold, set_to_none)

    return step


def variants(name: str, device: torch.device) -> dict[str, Callable[[], Step]]:
    """Iterations of the model ``name``. O1 is left out: its casts would be on for the others."""
    return {
        TORCH_FP32: lambda: theirs(name, device, None),
        "apex_npu O0, as written": lambda: ours(name, device, "O0"),
        "apex_npu O0, as written, in place": lambda: ours(name, device, "O0", set_to_none=False),
        "apex_npu O0, folded": lambda: ours(name, device, "O0", fold=True),
        TORCH_BF16: lambda: theirs(name, device, torch.bfloat16),
        "apex_npu O5, as written": lambda: ours(name, device, "O5"),
        "apex_npu O5, folded": lambda: ours(name, device, "O5", fold=True),
    }
