# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One record per fused optimizer: adding one adds every generic test to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from apex_npu import optimizers


@dataclass(frozen=True)
class OptimizerSpec:
    """What the generic tests need to know of an optimizer.

    Attributes:
        cls: The fused optimizer.
        reference: One with the same rule that is known to be right.
        variants: Hyper-parameters; each is tested.
        bad: Hyper-parameters, the error and what it must name.
    """

    cls: type[optimizers.FusedOptimizer]
    reference: Callable[..., torch.optim.Optimizer]
    variants: tuple[dict[str, Any], ...]
    bad: tuple[tuple[dict[str, Any], type[Exception], str], ...] = field(default=())

    def __str__(self) -> str:
        return self.cls.__name__


_BAD_ADAM = (
    ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    ({"lr": float("nan")}, ValueError, "Invalid learning rate: nan"),
    ({"lr": "fast"}, TypeError, "lr must be a number, got 'fast'"),
    ({"betas": (1.0, 0.9)}, ValueError, "Invalid beta parameter at index 0: 1.0"),
    ({"betas": (0.9, -0.1)}, ValueError, "Invalid beta parameter at index 1: -0.1"),
    ({"betas": 0.9}, TypeError, "betas must be two numbers"),
    ({"eps": -1e-8}, ValueError, "Invalid epsilon value: -1e-08"),
    ({"weight_decay": -1}, ValueError, "Invalid weight_decay value: -1"),
    ({"weight_decay": float("inf")}, ValueError, "Invalid weight_decay value: inf"),
    ({"amsgrad": "no"}, TypeError, "amsgrad must be True or False, got 'no'"),
    ({"lr": torch.ones(2)}, TypeError, r"tensor of one element, got shape \(2,\)"),
)

SPECS = [
    OptimizerSpec(
        optimizers.NpuFusedSGD,
        torch.optim.SGD,
        (
            {"lr": 0.05},
            {"lr": 0.05, "weight_decay": 0.1},
            {"lr": 0.05, "momentum": 0.9},
            {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
            {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
            {"lr": 0.02, "momentum": 0.5, "maximize": True},
        ),
        (
            ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
            ({}, TypeError, "no default learning rate"),
            ({"lr": 0.1, "momentum": -0.5}, ValueError, "Invalid momentum value: -0.5"),
            ({"lr": 0.1, "weight_decay": float("nan")}, ValueError, "Invalid weight_decay value: nan"),
            ({"lr": 0.1, "nesterov": True}, ValueError, "Nesterov momentum requires a momentum and zero dampening"),
            ({"lr": 0.1, "dampening": "x"}, TypeError, "dampening must be a number, got 'x'"),
        ),
    ),
    OptimizerSpec(
        optimizers.NpuFusedAdam,
        torch.optim.Adam,
        (
            {},
            {"lr": 1e-2, "weight_decay": 0.1},
            {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "amsgrad": True},
            {"lr": 1e-2, "betas": (0.0, 0.9), "maximize": True},
        ),
        _BAD_ADAM,
    ),
    OptimizerSpec(
        optimizers.NpuFusedAdamW,
        torch.optim.AdamW,
        ({}, {"lr": 1e-2, "weight_decay": 0.3}, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.0}),
        _BAD_ADAM,
    ),
]

CASES = [(spec, kwargs) for spec in SPECS for kwargs in spec.variants]
CASE_IDS = [f"{spec}-{'-'.join(f'{k}={v}' for k, v in kwargs.items()) or 'defaults'}" for spec, kwargs in CASES]
