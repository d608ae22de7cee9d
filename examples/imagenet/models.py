# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Networks by name: torchvision's, then timm's, and without either the ResNets of this file."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def create_model(arch: str, num_classes: int, pretrained: bool) -> nn.Module:
    """The network named ``arch`` for ``num_classes``."""
    try:
        from torchvision import models
    except (ImportError, RuntimeError):  # RuntimeError: one that is built for another torch
        models = None
    try:
        import timm
    except (ImportError, RuntimeError):
        timm = None
    if models and arch in models.list_models(models) and (num_classes == 1000 or not pretrained):
        return models.get_model(arch, weights="DEFAULT" if pretrained else None, num_classes=num_classes)
    if timm and timm.is_model(arch):
        return timm.create_model(arch, pretrained=pretrained, num_classes=num_classes)
    if pretrained:
        raise SystemExit(f"--pretrained: weights of {arch} for {num_classes} classes need timm: pip install timm")
    if arch not in RESNETS:
        there = "neither torchvision nor timm has it" if models or timm else "torchvision and timm are not installed"
        raise SystemExit(f"--arch {arch}: {there}; models.py has {', '.join(RESNETS)}")
    return ResNet(*RESNETS[arch], num_classes)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around which the input is added."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = projection(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class Bottleneck(nn.Module):
    """A 3x3 convolution of fewer channels between two of 1x1, around which the input is added."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = projection(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.downsample(x))


def projection(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """What brings a block's input to the shape of its output; nothing where it has that shape."""
    if inputs == outputs and stride == 1:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """He et al. 2015, https://arxiv.org/abs/1512.03385, with the stride in the 3x3 convolution.

    Parameters have the names of torchvision's, so that state dicts fit either.
    """

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for number, depth in enumerate(depths):
            blocks = []
            for position in range(depth):
                blocks.append(block(inputs, 64 << number, 2 if number > 0 and position == 0 else 1))
                inputs = block.expansion * (64 << number)
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


RESNETS = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}
