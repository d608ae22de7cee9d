# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Operands and options of every op that has a Triton kernel: what is interpreted, and what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex_npu import ops
from apex_npu.ops import cuda, wide_dtype
from apex_npu.ops.dispatch import Rule

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01, "nesterov": False, "maximize": False,
       "step": 3, "decoupled": False}  # fmt: skip
ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "decoupled": False,
        "maximize": False, "step": 3, "bias_correction": True}  # fmt: skip
RMSPROP = {"lr": 0.01, "alpha": 0.9, "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9, "eps_inside_sqrt": False,
           "decoupled": False, "lr_in_momentum": False, "maximize": False}  # fmt: skip
ADADELTA = {"lr": 0.5, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.1, "maximize": False}
ADAGRAD = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.1, "decoupled": False, "maximize": False}
LAMB = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "beta3": 0.1, "eps": 1e-8, "step": 3,
        "bias_correction": True, "l2": 0.0, "decay": 0.1, "adapt": True, "max_weight_norm": 40.0,
        "maximize": False}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd_": SGD, "adam_": ADAM, "rmsprop_": RMSPROP, "adadelta_": ADADELTA, "adagrad_": ADAGRAD, "lamb_": LAMB,
}  # fmt: skip

# What else to try of each rule: changes of its options, and the places of the operands that are left out.
CHANGES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("sgd_", {}, ()),
    ("sgd_", {"nesterov": True, "dampening": 0.0, "weight_decay": 0.0}, ()),
    ("sgd_", {"nesterov": True, "step": 1, "maximize": True}, ()),
    ("sgd_", {"decoupled": True}, (2,)),
    ("adam_", {}, ()),
    ("adam_", {"decoupled": True, "step": 1, "maximize": True}, (4,)),
    ("adam_", {"bias_correction": False, "weight_decay": 0.0, "beta1": 0.3}, (4,)),
    ("rmsprop_", {}, ()),
    ("rmsprop_", {"eps_inside_sqrt": True, "lr_in_momentum": True, "decoupled": True}, (3,)),
    ("rmsprop_", {"decoupled": True, "lr": 0.0}, (3, 4)),
    ("rmsprop_", {"weight_decay": 0.0, "maximize": True}, (4,)),
    ("rmsprop_", {"lr_in_momentum": True, "eps_inside_sqrt": True}, (3, 4)),
    ("adadelta_", {}, ()),
    ("adadelta_", {"weight_decay": 0.0, "maximize": True}, ()),
    ("adagrad_", {}, ()),
    ("adagrad_", {"decoupled": True, "maximize": True}, ()),
]
SEGMENTED_CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("lamb_", {}),
    ("lamb_", {"adapt": False, "l2": 0.1, "decay": 0.0}),
    ("lamb_", {"beta3": 1.0, "maximize": True, "max_weight_norm": float("inf"), "bias_correction": False}),
]
# Of the parameter and of the gradient.
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
]
_STATES = {"sgd_": 1, "adam_": 3, "rmsprop_": 3, "adadelta_": 2, "adagrad_": 1, "lamb_": 2}


def operands(
    op: str,
    numel: int,
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    without: tuple[int, ...] = (),
) -> list[Tensor | None]:
    """Parameters, gradients and states; the places ``without`` are None."""
    generator = torch.Generator().manual_seed(numel)
    made = [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(2 + _STATES[op])]
    states = [state.abs() for state in made[2:]]
    if op == "rmsprop_":  # a mean, whose square is less than the mean square
        states[0] += 0.1
        states[1] = states[1].mul(0.1).minimum(states[0].sqrt() / 2)
    wide = wide_dtype(dtype)
    all_of_them = [made[0].to(dtype), made[1].to(grad_dtype or dtype), *(state.to(wide) for state in states)]
    return [None if i in without else operand for i, operand in enumerate(all_of_them)]


def on_device(options: dict[str, Any], found_inf: Tensor | None) -> dict[str, Any]:
    """``options`` with tensors for what may be one."""
    tensors = {name: torch.tensor(float(options[name])) for name in ("lr", "step") if name in options}
    return {**options, **tensors, "found_inf": found_inf}


# At odd places, and without elements.
SEGMENTS = [(0, 5000), (5053, 2300), (7400, 300), (7800, 0)]
NUMEL = 7_808
# The same where kernels may read and write on, into padding, up to a multiple of 16.
ALIGNED_SEGMENTS = [(0, 4992), (5056, 2300), (7408, 300), (7808, 0)]


def places(aligned: bool) -> list[tuple[int, int]]:
    """Start and length of each segment."""
    return ALIGNED_SEGMENTS if aligned else SEGMENTS


def inside(aligned: bool = False) -> Tensor:
    """The indices of what is no padding."""
    return torch.cat([torch.arange(b, b + n) for b, n in places(aligned)])


def segments(dtype: torch.dtype = torch.float32, aligned: bool = False) -> list[Any]:
    """Arguments of LAMB after its states: scratch and segments."""
    starts, lengths = (torch.tensor(column) for column in zip(*places(aligned), strict=True))
    return [torch.zeros(NUMEL, dtype=wide_dtype(dtype)), starts, lengths, None]


def apply_reference(op: str, args: list[Any], options: dict[str, Any]) -> None:
    """The op in plain torch."""
    getattr(ops, op).reference(*args, **options)


class Repeated:
    """Calls of a rule on cuda, as a run makes them: what is planned for operands is kept for the next call."""

    def __init__(self, rule: Rule[...]) -> None:
        self._rule = rule
        self._kept: dict[str, tuple[object, Any]] = {}

    def __call__(self, *operands: Any, **options: Any) -> None:
        _, _, given = self._rule.bind(*operands, **options)
        call = self._rule.kernels["cuda"], operands, given
        run, args, more = cuda.prepared(call, self._remember, elsewhere=False)
        run(*args, **more)

    def _remember(self, name: str, value: object, make: Callable[[], Any]) -> Any:
        if self._kept.get(name, (None,))[0] != value:
            self._kept[name] = value, make()
        return self._kept[name][1]
