# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Computes the memory of a model and its optimizer at a level, from sizes and dtypes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu.amp.inspect import adopted_inside
from apex_npu.amp.policy import Policy
from apex_npu.backends._torch_private import tree_leaves
from apex_npu.fusion import MASTER_PARAM, EncodedView
from apex_npu.ops import LOW_PRECISION
from apex_npu.optimizers import FusedOptimizer, NpuFusedAdam
from apex_npu.optimizers.memory_choices import MemoryChoice, memory_choices


@dataclass
class Memory:
    """The memory of a model, in bytes for each dtype.

    Attributes:
        parameters: The bytes of the model's parameters and buffers.
        gradients: The bytes of the parameters' gradients, as ``scale_loss`` leaves them.
        masters: The bytes of the float32 values of 16-bit parameters. Fused optimizers on a CPU and a GPU need half.
        states: The bytes of the state of each requested optimizer.
    """

    parameters: Counter[torch.dtype] = field(default_factory=Counter)
    gradients: Counter[torch.dtype] = field(default_factory=Counter)
    masters: Counter[torch.dtype] = field(default_factory=Counter)
    states: dict[str, int] = field(default_factory=dict)


# For each optimizer and parameter, by names: the elements of the state in the dtype of the stepped tensor, and the
# bytes of all else, such as a count of steps.
Sizes = dict[str, dict[str, tuple[int, int]]]


def measure(model: nn.Module, policy: Policy, sizes: Sizes) -> Memory:
    """Return the memory of ``model``, converted for ``policy``, after a backward; its tensors have only sizes."""
    found = Memory(states=dict.fromkeys(sizes, 0))
    for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
        found.parameters[tensor.dtype] += tensor.nbytes
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        stepped = torch.float32 if policy.master_weights and param.dtype in LOW_PRECISION else param.dtype
        if stepped != param.dtype:
            found.masters[stepped] += param.numel() * stepped.itemsize
        if param.grad is not None:
            if param.grad.layout == torch.sparse_coo:
                raise NotImplementedError(f"the number of rows of the sparse gradient of {name}")
            found.gradients[stepped] += param.grad.numel() * stepped.itemsize
        for optimizer, of in sizes.items():
            if name in of:
                elements, others = of[name]
                found.states[optimizer] += elements * stepped.itemsize + others
    return found


def usual_sizes(model: nn.Module) -> Sizes:
    """Return the state sizes of SGD with momentum and of Adam, without counts of steps."""
    named, titles = list(model.named_parameters()), {"SGD with momentum": 1, "Adam": 2}
    return {title: {name: (n * p.numel(), 0) for name, p in named} for title, n in titles.items()}


def sizes_of(optimizer: Optimizer, model: nn.Module) -> Sizes:
    """Return the state sizes of ``optimizer``, which has stepped parameters of ``model``.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: ``optimizer`` steps no parameter of the model, or has not stepped.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    optimizer = adopted_inside(optimizer)
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    stepped = {name: p for name, p in model.named_parameters() if id(p) in listed}
    title = type(optimizer).__name__
    if not stepped:
        raise ValueError(
            f"this {title} steps no parameter of the model: create it from model.parameters(), or leave optimizer out"
        )
    state: Any = optimizer.state
    if not any(p in state for p in stepped.values()):
        raise ValueError(
            f"this {title} has no state yet: call amp.debug.report after its first step, or leave optimizer out"
        )
    return {title: {name: _size(p, state[p]) for name, p in stepped.items() if p in state}}


def choices_of(optimizer: Optimizer | None) -> list[MemoryChoice]:
    """Return the memory choices of ``optimizer``, or of Adam if it is None; empty if it is not of this library."""
    own = NpuFusedAdam([nn.Parameter(torch.zeros(1))]) if optimizer is None else adopted_inside(optimizer)
    return memory_choices(own) if isinstance(own, FusedOptimizer) else []


def _size(param: Tensor, state: dict[str, Any]) -> tuple[int, int]:
    # The float32 values of 16-bit parameters are counted as such.
    own = tree_leaves({name: value for name, value in state.items() if name != MASTER_PARAM})
    elements = others = 0
    for value in {id(value): value for value in own if isinstance(value, (Tensor, EncodedView))}.values():
        is_count = isinstance(value, Tensor) and value.numel() == 1 and value.shape != param.shape
        if isinstance(value, Tensor) and value.dtype == param.dtype and not is_count:
            elements += value.numel()
        else:
            others += value.nbytes
    return elements, others
