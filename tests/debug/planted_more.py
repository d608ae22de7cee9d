# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A second table of faults, on other models. It was written before it was first run against the finder."""

from __future__ import annotations

import math

import torch
from debug.planted import AT_O1, Fault, batch, body, marked_lines, mean_over
from devices import DEVICE, VENDOR
from torch import nn
from torch.nn import functional as F

MARKED = marked_lines(__file__)
# cuDNN's takes float32 weights.
_OF_GPUS = {"O1": "aten::cudnn_batch_norm", "O2": "aten::cudnn_batch_norm", "O3": "aten::native_batch_norm"}
BATCH_NORM = _OF_GPUS if DEVICE.type == "cuda" else "aten::native_batch_norm"


def mean_of(model):
    return model(batch(4, 8, value=1.0)).float().mean()


def load_target(model):
    model.target = batch(4, 8)
    model.target[2, 1] = math.inf


def to_target(model):
    return F.mse_loss(model(batch(4, 8)).float(), model.target)  # fault: target


class Evaluated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.bn.eval()

    def forward(self, x):
        return self.bn(self.conv(x))  # fault: buffer


def spoil_average(model):
    model.bn.running_mean[1] = math.nan


def times_inf(h):
    return h * math.inf  # fault: gain


def normalized(h):
    return h / h.norm(dim=-1, keepdim=True)  # fault: normalize


def angle(h):
    return torch.acos(h)  # fault: angle


def unscaled_attention(h):
    q = h.reshape(2, 2, 8)
    return (q @ q.transpose(-1, -2)).softmax(-1)  # fault: logits


def load_large(model):
    model.batch = batch(4, 8) * 0 + 1e5


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x)  # fault: inner cast


def mean_of_large(model):
    return (model(model.batch) * 1e-6).float().mean()  # fault: cast


def with_hook(h):
    h.register_hook(lambda g: g * 1e9)  # fault: hook
    return h * 1


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a
        nn.init.constant_(self.a.weight, 120.0)

    def forward(self, x):
        return self.b(self.a(x))  # fault: shared


class Inverse(nn.Module):
    def forward(self, y):
        return torch.reciprocal(y * 0).mean()  # fault: criterion


def by_criterion(model):
    return Inverse()(model(batch(4, 8)).float())


def all_masked(h):
    mask = torch.ones(h.shape, dtype=torch.bool, device=h.device)
    return h.masked_fill(mask, -math.inf).softmax(-1)  # fault: all masked


PRODUCT = "aten::matmul" if VENDOR else "aten::bmm"  # torch_npu's matmul is one operator
TARGET = {"tensor": "a tensor given from outside", "plant": load_target}
AVERAGE = {"module": "bn", "tensor": "bn.running_mean", "plant": spoil_average}
CAST = {"module": AT_O1, "plant": load_large, "marks": {"O1": "inner cast"}}
FAULTS = [
    Fault("target", body(lambda h: h), to_target, "data", "aten::mse_loss", module=None, **TARGET),
    Fault("buffer", Evaluated, mean_over(2, 1, 5, 5), "weights", BATCH_NORM, **AVERAGE),
    Fault("gain", body(times_inf, 1.0), mean_of, "constant", "aten::mul"),
    Fault("normalize", body(normalized, 0.0), mean_of, "math", "aten::div"),
    Fault("angle", body(angle, 1.0), mean_of, "math", "aten::rsqrt", "backward"),
    Fault("logits", body(unscaled_attention, 200.0), mean_of, "overflow", PRODUCT),
    Fault("cast", Large, mean_of_large, "overflow", "aten::_to_copy", **CAST),
    Fault("hook", body(with_hook), mean_of, "gradient", "aten::mul", "backward", "fc", scale=4.0),
    Fault("shared", Twice, mean_of, "overflow", "aten::addmm", module="a=b"),
    Fault("criterion", body(lambda h: h), by_criterion, "math", "aten::reciprocal", module="(Inverse)"),
    Fault("all masked", body(all_masked), mean_of, "constant", "aten::masked_fill"),
]
