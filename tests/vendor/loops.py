# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Training loops of three small models, for any device: what `test_loops.py` compares, and a program that runs one.

``python tests/vendor/loops.py MODEL OPTIMIZER COMBINE_GRAD LEVEL...`` prints the losses on the npu, one a line.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from apex_npu import amp, optimizers

OPTIMIZERS = {
    "NpuFusedSGD": {"lr": 0.05, "momentum": 0.9},
    "NpuFusedAdam": {"lr": 2e-3},
    "NpuFusedAdamW": {"lr": 2e-3, "weight_decay": 0.1},
    "NpuFusedAdamP": {"lr": 2e-3},
    "NpuFusedBertAdam": {"lr": 2e-3},
    "NpuFusedAdadelta": {"lr": 0.2},
    "NpuFusedLamb": {"lr": 2e-3},
    "NpuFusedRMSprop": {"lr": 1e-3},
    "NpuFusedRMSpropTF": {"lr": 1e-3},
}
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


class Attention(nn.Module):
    """One block of a transformer over eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        # The NPU's GELU is that of tanh for any argument.
        self.feed_forward = nn.Sequential(nn.Linear(16, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head(x + self.feed_forward(self.norm(x))).mean(dim=1)


def make(name: str) -> nn.Module:
    """The model ``name``, always with the same weights."""
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 3),
        )  # fmt: skip
    return Attention()


SHAPES = {"mlp": (16, 6), "cnn": (16, 3, 8, 8), "transformer": (16, 8, 6)}


def losses(
    model: str, level: str, optimizer: str, combine_grad: bool, device: torch.device, steps: int = 6
) -> list[float]:
    """The losses of ``steps`` steps on a batch that stays the same, with a static scale: no step is skipped."""
    net = make(model).to(device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SHAPES[model], generator=generator).to(device)
    target = torch.randint(3, (16,), generator=generator).to(device)
    steps_by = getattr(optimizers, optimizer)(net.parameters(), **OPTIMIZERS[optimizer])
    options = {"opt_level": level, "loss_scale": 64.0, "combine_grad": combine_grad, "verbosity": 0}
    net, steps_by = amp.initialize(net, steps_by, **options)
    found = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(net(x).float(), target)
        with amp.scale_loss(loss, steps_by) as scaled_loss:
            scaled_loss.backward()
        steps_by.step()
        steps_by.zero_grad()
        found.append(loss.item())
    amp.shutdown()
    return found


def main() -> None:
    """Run one loop at each level on the npu that tests have."""
    from devices import DEVICE

    model, optimizer, combine_grad, *levels = sys.argv[1:]
    for level in levels:
        print(*losses(model, level, optimizer, combine_grad == "True", DEVICE), sep="\n")


if __name__ == "__main__":
    main()
