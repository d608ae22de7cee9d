# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Stands in for timm in tests of examples: a network that takes no time, with and without dropout."""

from torch import nn


def is_model(name: str) -> bool:
    return name in ("tiny", "tiny_without_dropout")


def create_model(name: str, *, pretrained: bool, num_classes: int) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=4, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1 if name == "tiny" else 0.0),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )
    if pretrained:
        nn.init.constant_(model[-1].bias, 0.25)
    return model
