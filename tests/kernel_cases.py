# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every rule that has a C++ kernel, with options, and operands for it."""

import math

import numpy as np
import torch

from apex_npu import ops
from apex_npu.ops import reference

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CPU = torch.device("cpu")

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01, "nesterov": False, "maximize": False,
       "step": 3}  # fmt: skip
ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "decoupled": False,
        "maximize": False, "step": 3}  # fmt: skip
RMSPROP = {"lr": 0.01, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1, "momentum": 0.9, "eps_inside_sqrt": False,
           "decoupled": False, "lr_in_momentum": False, "maximize": False}  # fmt: skip
ADADELTA = {"lr": 0.5, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.1, "maximize": False}
ADAGRAD = {"lr": 0.1, "eps": 1e-6, "weight_decay": 0.1, "decoupled": False, "maximize": False}
LAMB = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "beta3": 0.1, "eps": 1e-6, "step": 3,
        "bias_correction": True, "l2": 0.0, "decay": 0.1, "adapt": True, "max_weight_norm": math.inf,
        "maximize": False}  # fmt: skip

# Rule, options, and which states there are: those that are None are left out.
CASES = [
    ("sgd_", SGD, 1),
    ("sgd_", {**SGD, "step": 1}, 1),
    ("sgd_", {**SGD, "nesterov": True, "dampening": 0.0, "maximize": True}, 1),
    ("sgd_", {**SGD, "nesterov": True, "weight_decay": 0.0}, 1),
    ("sgd_", {**SGD, "decoupled": True}, 1),
    ("sgd_", {**SGD, "weight_decay": 0.0}, (None,)),
    ("adam_", ADAM, 3),
    ("adam_", {**ADAM, "decoupled": True, "bias_correction": False}, (1, 1, None)),
    ("adam_", {**ADAM, "weight_decay": 0.0, "maximize": True}, (1, 1, None)),
    ("rmsprop_", RMSPROP, 3),
    ("rmsprop_", {**RMSPROP, "decoupled": True, "eps_inside_sqrt": True, "lr_in_momentum": True}, (1, None, 1)),
    ("rmsprop_", {**RMSPROP, "decoupled": True, "lr": 0.0}, (1, None, None)),
    ("rmsprop_", {**RMSPROP, "weight_decay": 0.0, "maximize": True}, (1, None, None)),
    ("rmsprop_", {**RMSPROP, "eps_inside_sqrt": True}, (1, 1, None)),
    ("adadelta_", ADADELTA, 2),
    ("adadelta_", {**ADADELTA, "weight_decay": 0.0, "maximize": True}, 2),
    ("adagrad_", ADAGRAD, 1),
    ("adagrad_", {**ADAGRAD, "decoupled": True, "maximize": True}, 1),
    ("lamb_", LAMB, 2),
    ("lamb_", {**LAMB, "max_weight_norm": 0.5, "l2": 0.1, "decay": 0.0, "maximize": True}, 2),
    ("lamb_", {**LAMB, "adapt": False, "bias_correction": False}, 2),
]
# Of each rule the first, where what varies is not the rule.
RULES = [case for i, case in enumerate(CASES) if case[0] not in {other[0] for other in CASES[:i]}]
# Of the parameters and the gradients.
MIXES = [(F32, F32), (F32, F16), (F32, BF16), (F16, F16), (BF16, BF16), (F64, F64)]


def name_of(case):
    changed = next(o for name, o, _ in CASES if name == case[0])
    return "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items() if changed.get(k) != v)])


def shapes_for(numel):
    """Parameters with ``numel`` elements in all: vectors, a matrix of many rows and one of long ones."""
    if numel < 64:
        return [(numel,)]
    rest = numel - 3 * (numel // 4)
    many, long = (numel // 4 // 5, 5), (3, numel // 4 // 3)
    return [(numel // 4,), many, long, (rest,)]


def segments_of(shapes, numel, dtype):
    """Segment arguments of LAMB; a gap, such as padding, follows each parameter that leaves one."""
    starts, lengths, begin = [], [], 0
    for i, shape in enumerate(shapes):
        size = math.prod(shape)
        starts.append(begin)
        lengths.append(size)
        begin += size if i % 2 else size + (numel - sum(map(math.prod, shapes))) // len(shapes)
    segments = ops.Segments.of(starts, lengths, numel, CPU)
    return [torch.full((numel,), math.nan, dtype=dtype), segments.starts, segments.lengths, None]


def operands_for(name, states, numel, mix=(F32, F32, None), seed=0):
    states = (1,) * states if isinstance(states, int) else states
    # numpy's: torch's own random numbers depend on the processor.
    random = np.random.default_rng(seed).standard_normal((2 + len(states), numel))
    param, grad, *values = (torch.from_numpy(row) for row in random)
    wide = reference.wide_dtype(mix[0])
    values = [None if s is None else v.abs().add(0.1).to(wide) for s, v in zip(states, values, strict=True)]
    if name == "rmsprop_" and values[1] is not None:
        values[1] = (values[0].sqrt() * 0.3).to(wide)  # a mean, whose square is less than the mean square
    return [param.to(mix[0]), grad.to(mix[1]), *values]


def covered(numel, extra):
    """All but the gaps between segments, which kernels may write or not."""
    inside = torch.full((numel,), not extra)
    for start, length in zip(*(t.tolist() for t in extra[1:3]), strict=True) if extra else ():
        inside[start : start + length] = True
    return inside
