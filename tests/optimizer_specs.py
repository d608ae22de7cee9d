# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One record per fused optimizer: adding one adds every generic test to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import reference_optimizers as reference
import torch
from devices import DEVICE, needs

from apex_npu import optimizers
from apex_npu.ops import newton_schulz, wide_dtype


@dataclass(frozen=True)
class OptimizerSpec:
    """The properties of an optimizer that the generic tests use.

    Attributes:
        cls: The fused optimizer.
        reference: One with the same rule that is known to be right.
        variants: Hyper-parameters; each is tested.
        bad: Hyper-parameters, the error and what it must name.
        in_torch: The reference is torch.optim's: state dicts are compared, and exchanged with it.
        tolerance: Largest difference after 100 steps, relative to the largest element of a tensor.
    """

    cls: type[optimizers.FusedOptimizer]
    reference: Callable[..., torch.optim.Optimizer]
    variants: tuple[dict[str, Any], ...]
    bad: tuple[tuple[dict[str, Any], type[Exception], str], ...] = field(default=())
    in_torch: bool = True
    tolerance: float = 1e-6

    def __str__(self) -> str:
        return self.cls.__name__

    def reference_for(self, dtype: torch.dtype) -> Callable[..., torch.optim.Optimizer]:
        """The reference, for parameters of ``dtype``."""
        return reference.low_precision(self.reference) if dtype.itemsize == 2 else self.reference


# The references of our own compute in float64 what the fused ones compute in float32: rounding differs at every step.
_AGAINST_FLOAT64 = 5e-6
# torch rounds a · b + c once where the processor can; we round twice, so that all machines get the same bits.
_ROUNDED_OTHERWISE = 3e-6

# Not 0.1: g + 0.1 p cancels exactly where g and p have few bits, and then a first step along its sign is undefined.
_DECAY = 0.10137

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
    ({"lr": torch.ones(2)}, ValueError, r"Tensor lr must be 1-element, got shape \(2,\)"),
)

_BAD_RMSPROP = (
    ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    ({"alpha": -0.5}, ValueError, "Invalid alpha value: -0.5"),
    ({"eps": -1.0}, ValueError, "Invalid epsilon value: -1.0"),
    ({"momentum": float("nan")}, ValueError, "Invalid momentum value: nan"),
    ({"weight_decay": "x"}, TypeError, "weight_decay must be a number, got 'x'"),
    ({"centered": 1}, TypeError, "centered must be True or False, got 1"),
)


class Muon(optimizers.NpuFusedMuon):
    """Takes parameters of any shape, and multiplies in the states' dtype: bfloat16's rounding would hide mistakes."""

    supports_capture = True

    def __init__(self, params, lr=1e-3, *, fuse_grad_scaler=False, **options):
        super().__init__(params, lr, fuse_grad_scaler=fuse_grad_scaler, **{"use_muon": "auto", **options})

    def update(self, run, group):
        with mock.patch.object(newton_schulz, "product_dtype", return_value=wide_dtype(run.param.dtype)):
            super().update(run, group)


class FusedMixedPrecisionLamb(optimizers.FusedMixedPrecisionLamb):
    """Counts on the host, where corrections are computed in float64."""

    def __init__(self, params, lr=1e-3, *, fuse_grad_scaler=None, capturable=False, **options):
        super().__init__(params, lr, fuse_grad_scaler=fuse_grad_scaler, capturable=capturable, **options)


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
            ({"lr": 0.1, "momentum": -0.5}, ValueError, "Invalid momentum value: -0.5"),
            ({"lr": 0.1, "weight_decay": float("nan")}, ValueError, "Invalid weight_decay value: nan"),
            ({"lr": 0.1, "nesterov": True}, ValueError, "Nesterov momentum requires a momentum and zero dampening"),
            ({"lr": 0.1, "dampening": "x"}, TypeError, "dampening must be a number, got 'x'"),
        ),
        tolerance=_ROUNDED_OTHERWISE,
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
    OptimizerSpec(
        optimizers.NpuFusedAdadelta,
        torch.optim.Adadelta,
        ({}, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1, "eps": 1e-5}, {"maximize": True}),
        (
            ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
            ({"rho": 1.5}, ValueError, "Invalid rho value: 1.5"),
            ({"rho": None}, TypeError, "rho must be a number, got None"),
            ({"eps": float("nan")}, ValueError, "Invalid epsilon value: nan"),
            ({"weight_decay": -0.1}, ValueError, "Invalid weight_decay value: -0.1"),
        ),
        tolerance=_ROUNDED_OTHERWISE,
    ),
    OptimizerSpec(
        optimizers.NpuFusedRMSprop,
        torch.optim.RMSprop,
        (
            {},
            {"lr": 1e-3, "momentum": 0.9, "weight_decay": _DECAY},
            {"lr": 1e-3, "alpha": 0.9, "centered": True, "eps": 1e-6},
            {"lr": 1e-3, "momentum": 0.5, "centered": True, "maximize": True},
        ),
        _BAD_RMSPROP,
        tolerance=_ROUNDED_OTHERWISE,
    ),
    OptimizerSpec(
        optimizers.NpuFusedRMSpropTF,
        reference.RMSpropTF,
        (
            {},
            {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1},
            # With a small eps the first step of an element whose gradient is near its square root is ill-conditioned.
            {"lr": 1e-3, "momentum": 0.9, "lr_in_momentum": False, "init_square_avg": 0.0, "eps": 1e-3},
            {"lr": 1e-3, "centered": True, "decoupled_decay": True, "weight_decay": 1e-3, "alpha": 0.8},
        ),
        (
            *_BAD_RMSPROP,
            ({"decoupled_decay": "yes"}, TypeError, "decoupled_decay must be True or False"),
            ({"init_square_avg": -1.0}, ValueError, "Invalid init_square_avg: -1.0"),
        ),
        in_torch=False,
        tolerance=_AGAINST_FLOAT64,
    ),
    OptimizerSpec(
        optimizers.NpuFusedLamb,
        reference.Lamb,
        (
            {},
            {"lr": 1e-2, "weight_decay": 0.1},
            {"lr": 1e-2, "betas": (0.8, 0.99), "use_global_grad_norm": True},
            {"lr": 1e-3, "adam": True, "maximize": True},
        ),
        (*_BAD_ADAM[:8], ({"adam": 1}, TypeError, "adam must be True or False, got 1")),
        in_torch=False,
        tolerance=_AGAINST_FLOAT64,
    ),
    OptimizerSpec(
        optimizers.NpuFusedAdamP,
        reference.AdamP,
        (
            {},
            {"lr": 1e-2, "weight_decay": 0.1, "delta": 0.5},
            {"lr": 1e-2, "nesterov": True, "weight_decay": 0.1, "wd_ratio": 0.3},
            {"lr": 1e-2, "delta": 5.0, "maximize": True},
        ),
        (
            *_BAD_ADAM[:8],
            ({"delta": -0.1}, ValueError, "Invalid delta value: -0.1"),
            ({"wd_ratio": float("nan")}, ValueError, "Invalid wd_ratio value: nan"),
            ({"nesterov": 0}, TypeError, "nesterov must be True or False, got 0"),
        ),
        in_torch=False,
        tolerance=_AGAINST_FLOAT64,
    ),
    OptimizerSpec(
        optimizers.NpuFusedBertAdam,
        reference.BertAdam,
        (
            {"lr": 1e-2},
            {"lr": 1e-2, "t_total": 80, "warmup": 0.1},
            {"lr": 1e-2, "t_total": 80, "schedule": "warmup_cosine", "max_grad_norm": 1.0},
            {"lr": 1e-2, "t_total": 120, "schedule": "warmup_poly", "warmup": 0.05, "weight_decay": 0.0},
            {"lr": 1e-2, "t_total": 50, "schedule": "warmup_constant", "warmup": 0.5, "b2": 0.999},
        ),
        (
            ({}, TypeError, "no default learning rate"),
            ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
            ({"lr": 0.1, "warmup": 1.0}, ValueError, "Invalid warmup: 1.0"),
            ({"lr": 0.1, "warmup": -0.5}, ValueError, "Invalid warmup: -0.5"),
            ({"lr": 0.1, "schedule": "linear"}, ValueError, "Invalid schedule parameter: 'linear'"),
            ({"lr": 0.1, "t_total": 0}, ValueError, "Invalid t_total: 0"),
            ({"lr": 0.1, "b1": 1.0}, ValueError, "Invalid b1 parameter: 1.0"),
            ({"lr": 0.1, "b2": -1}, ValueError, "Invalid b2 parameter: -1"),
            ({"lr": 0.1, "e": -1e-9}, ValueError, "Invalid epsilon value: -1e-09"),
            ({"lr": 0.1, "max_grad_norm": "one"}, TypeError, "max_grad_norm must be a number, got 'one'"),
        ),
        in_torch=False,
        tolerance=_AGAINST_FLOAT64,
    ),
    OptimizerSpec(
        Muon,
        reference.Muon,
        (
            {},
            {"lr": 0.02, "momentum": 0.8, "nesterov": False, "weight_decay": 0.3},
            {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "ns_coefficients": (3.0, -3.2, 1.2)},
            {"lr": 0.01, "momentum": 0.0, "eps": 1e-3, "adjust_lr_fn": "spectral_unclamped"},
        ),
        (
            ({"lr": -1.0}, ValueError, "Learning rate should be >= 0 but is: -1.0"),
            ({"lr": torch.ones(2)}, ValueError, r"Tensor lr must be 1-element, got shape \(2,\)"),
            ({"momentum": -0.5}, ValueError, "momentum should be >= 0 but is: -0.5"),
            ({"weight_decay": float("nan")}, ValueError, "weight decay should be >= 0 but is: nan"),
            ({"nesterov": 1}, TypeError, "nesterov must be True or False, got 1"),
            ({"ns_steps": 100}, ValueError, "Number of steps must be less than 100"),
            ({"ns_steps": 2.5}, TypeError, "ns_steps must be an int, got 2.5"),
            ({"ns_coefficients": (1.0, 2.0)}, ValueError, "Coefficients must be a tuple of exactly 3 values"),
            ({"eps": -1e-7}, ValueError, "Invalid epsilon value: -1e-07"),
            ({"adjust_lr_fn": "rms"}, ValueError, "Adjust learning rate function rms is not supported"),
            ({"adjust_lr_fn": ["original"]}, ValueError, "adjust_lr_fn must be one of .*spectral_unclamped"),
            ({"use_muon": "yes"}, TypeError, "use_muon must be True or False, got 'yes'"),
        ),
        in_torch=False,
        tolerance=_AGAINST_FLOAT64,
    ),
    OptimizerSpec(
        optimizers.FusedAdam,
        reference.NvidiaAdam,
        (
            {},
            {"lr": 1e-2, "weight_decay": 0.1},
            {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False, "bias_correction": False},
            {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": False},
        ),
        (
            *_BAD_ADAM[:8],
            ({"amsgrad": True}, RuntimeError, "FusedAdam does not support the AMSGrad variant"),
            ({"master_weights": 1}, TypeError, "master_weights must be True or False, got 1"),
            ({"adam_w_mode": 1}, TypeError, "adam_w_mode must be True or False, got 1"),
        ),
        in_torch=False,
        tolerance=_AGAINST_FLOAT64,
    ),
    OptimizerSpec(
        optimizers.FusedSGD,
        reference.NvidiaSGD,
        (
            {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
            {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True, "nesterov": True},
        ),
        (
            ({}, TypeError, "no default learning rate"),
            ({"lr": 0.1, "wd_after_momentum": "x"}, TypeError, "wd_after_momentum must be True or False"),
        ),
        in_torch=False,
        tolerance=_AGAINST_FLOAT64,
    ),
    OptimizerSpec(
        optimizers.FusedLAMB,
        reference.NvidiaLamb,
        (
            {},
            {"lr": 1e-2, "weight_decay": 0.0, "max_grad_norm": 0.5},
            {"lr": 1e-2, "weight_decay": 0.0, "use_nvlamb": True, "grad_averaging": False},
            {"lr": 1e-2, "adam_w_mode": False, "bias_correction": False},
        ),
        (*_BAD_ADAM[:8], ({"max_grad_norm": -1.0}, ValueError, "Invalid max_grad_norm: -1.0")),
        in_torch=False,
        tolerance=_AGAINST_FLOAT64,
    ),
    OptimizerSpec(
        FusedMixedPrecisionLamb,
        reference.NvidiaMixedPrecisionLamb,
        (
            {},
            {"lr": 1e-2, "weight_decay": 0.0, "use_nvlamb": True, "grad_averaging": False},
            {"lr": 1e-2, "adam_w_mode": False, "max_grad_norm": 0.5},
        ),
        (
            *_BAD_ADAM[:8],
            ({"max_grad_norm": -1.0}, ValueError, "Invalid max_grad_norm: -1.0"),
            ({"step": 0.5}, ValueError, "Invalid step: 0.5"),
            ({"amsgrad": True}, RuntimeError, "FusedMixedPrecisionLamb does not support the AMSGrad variant"),
            ({"reduced_precision_dtype": "half"}, ValueError, "reduced_precision_dtype must be .* got 'half'"),
        ),
        in_torch=False,
        tolerance=_AGAINST_FLOAT64,
    ),
    OptimizerSpec(
        optimizers.FusedNovoGrad,
        reference.NvidiaNovoGrad,
        (
            {},
            {"lr": 1e-2, "weight_decay": 0.01, "init_zero": True},
            {"lr": 1e-2, "weight_decay": 0.01, "norm_type": 0, "bias_correction": False},
            {"lr": 1e-2, "weight_decay": 0.01, "reg_inside_moment": True, "grad_averaging": False},
        ),
        (*_BAD_ADAM[:8], ({"norm_type": 1}, ValueError, "Invalid norm_type: 1")),
        in_torch=False,
        tolerance=_AGAINST_FLOAT64,
    ),
    OptimizerSpec(
        optimizers.FusedAdagrad,
        reference.NvidiaAdagrad,
        ({}, {"lr": 0.1, "weight_decay": _DECAY}, {"lr": 0.1, "weight_decay": _DECAY, "adagrad_w_mode": True}),
        (
            ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
            ({"eps": float("nan")}, ValueError, "Invalid epsilon value: nan"),
            ({"adagrad_w_mode": 2}, TypeError, "adagrad_w_mode must be True or False, got 2"),
        ),
        in_torch=False,
        tolerance=_AGAINST_FLOAT64,
    ),
]

CASES = [(spec, kwargs) for spec in SPECS for kwargs in spec.variants]
CASE_IDS = [f"{spec}-{'-'.join(f'{k}={v}' for k, v in kwargs.items()) or 'defaults'}" for spec, kwargs in CASES]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def needs_dtype(dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    """The marks of a case on parameters of ``dtype``."""
    return [needs("float64")] if dtype == torch.float64 else []


def _is_quick(spec: OptimizerSpec, kwargs: dict[str, Any], dtype: torch.dtype) -> bool:
    """Every variant in float32, and one in one of the other dtypes by turns: what differs is shared by all.

    On a simulated NPU, whose arithmetic is the CPU's, one variant in float32.
    """
    if DEVICE.type == "npu":
        return dtype == torch.float32 and kwargs is spec.variants[0]
    by_turns = DTYPES[1 + SPECS.index(spec) % 3]
    return dtype == torch.float32 or (dtype == by_turns and kwargs is spec.variants[-1])


# Every variant of every optimizer, on parameters of every dtype.
MATRIX = [
    pytest.param(
        spec,
        kwargs,
        dtype,
        id=f"{name}-{str(dtype).removeprefix('torch.')}",
        marks=[*needs_dtype(dtype), *([] if _is_quick(spec, kwargs, dtype) else [pytest.mark.sweep])],
    )
    for dtype in DTYPES
    for (spec, kwargs), name in zip(CASES, CASE_IDS, strict=True)
]
