# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What follows a backward: unscale, check, clip, a step of Adam, clear. In float32, and with float32 masters.

Gradients are passed outside of the timed region (``Gradients.hand_over``), as autograd passes them, to every variant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from ceiling import ceiling, compiler
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_  # as it is before amp watches it
from workloads import LOSS_SCALE, MAX_NORM, Bench, Gradients, Shapes, numel

from apex_npu import amp, optimizers

Step = Callable[[], object]
# Of variants whose gradients stay, as zeros, for the next backward to add to: zero_grad(set_to_none=False).
IN_PLACE = ", in place"
# Of those that have all elements in one: what remains of their time is that of the passes over memory.
ONE_TENSOR = ", one tensor"
# Of variants whose steps are skipped on the device, without a host sync.
CAPTURABLE = ", capturable"
REFERENCE = {"fp32": "GradScaler, clip, fused", "O2": "foreach copies, GradScaler, clip, fused"}


class Params(nn.Module):
    """Nothing but parameters."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)


def torch_adam(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """torch's best for the device."""
    return torch.optim.Adam(list(params), lr=1e-4, fused=params[0].device.type != "npu")


def grad_scaler(device: torch.device) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(device.type, init_scale=LOSS_SCALE)
    scaler.scale(torch.ones((), device=device))  # it makes its tensors when it first scales
    return scaler


def torch_fp32(bench: Bench, *, set_to_none: bool = True) -> Step:
    """GradScaler, clip_grad_norm_ and torch's fused Adam."""
    params = bench.params()
    gradients = bench.gradients(params)
    optimizer, scaler = torch_adam(params), grad_scaler(bench.device)
    take = gradients.hand_over if set_to_none else gradients.add_up

    def step() -> None:
        take()
        scaler.unscale_(optimizer)
        clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none)

    return step


def torch_o2(bench: Bench, *, set_to_none: bool = True) -> Step:
    """Half parameters, float32 masters with gradients of their own, torch's foreach copies and fused Adam."""
    masters = bench.params()
    params = [nn.Parameter(m.detach().half()) for m in masters]
    gradients = bench.gradients(params)
    optimizer, scaler = torch_adam(masters), grad_scaler(bench.device)
    for master in masters:
        master.grad = torch.zeros_like(master)
    grads = [m.grad for m in masters]
    take = gradients.hand_over if set_to_none else gradients.add_up
    clear = nn.ParameterList(params).zero_grad

    def step() -> None:
        take()
        torch._foreach_copy_(grads, [p.grad for p in params])
        scaler.unscale_(optimizer)
        clip_grad_norm_(masters, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        clear(set_to_none)

    return step


def initialized(
    model: nn.Module, level: str, fold: bool, *, capturable: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``model`` with NpuFusedAdam, under amp."""
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-4, capturable=capturable)
    return amp.initialize(
        model,
        optimizer,
        opt_level=level,
        loss_scale="dynamic",
        dynamic_init_scale=LOSS_SCALE,
        fuse_unscale=fold,
        verbosity=0,
    )


def clip(optimizer: torch.optim.Optimizer, fold: bool) -> None:
    """By torch, or with ``fold`` in the step, as is the loss scale."""
    if fold:
        optimizer.clip_optimizer_grad_norm_fused(MAX_NORM)
    else:
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)


def clip_step_clear(optimizer: torch.optim.Optimizer, fold: bool, set_to_none: bool) -> None:
    """What follows a block; see ``clip``."""
    clip(optimizer, fold)
    optimizer.step()
    optimizer.zero_grad(set_to_none)


def ours(
    bench: Bench,
    level: str,
    *,
    fold: bool = False,
    set_to_none: bool = True,
    capturable: bool = False,
    shapes: Shapes | None = None,
) -> Step:
    """scale_loss and NpuFusedAdam; see ``clip_step_clear``. Of parameters of ``shapes``, by default the workload's."""
    model, optimizer = initialized(Params(bench.params(shapes)), level, fold, capturable=capturable)
    gradients: Gradients = bench.gradients(list(model.parameters()))
    take = gradients.hand_over if set_to_none else gradients.add_up
    loss = torch.ones((), device=bench.device, requires_grad=True)

    def step() -> None:
        with amp.scale_loss(loss, optimizer):
            take()
        clip_step_clear(optimizer, fold, set_to_none)

    return step


def variants(precision: str, bench: Bench) -> dict[str, Callable[[], Step]]:
    """Those of "fp32" or "O2"; each makes its own parameters when it is called."""
    theirs, level = (torch_o2, "O2") if precision == "O2" else (torch_fp32, "O0")
    flat: Shapes = [(numel(bench.shapes),)]
    found: dict[str, Callable[[], Step]] = {
        REFERENCE[precision]: lambda: theirs(bench),
        "apex_npu, as written": lambda: ours(bench, level),
        "apex_npu, folded": lambda: ours(bench, level, fold=True),
        f"{REFERENCE[precision]}{IN_PLACE}": lambda: theirs(bench, set_to_none=False),
        f"apex_npu, as written{IN_PLACE}": lambda: ours(bench, level, set_to_none=False),
        f"apex_npu, folded{IN_PLACE}": lambda: ours(bench, level, fold=True, set_to_none=False),
        f"apex_npu, as written{ONE_TENSOR}": lambda: ours(bench, level, shapes=flat),
        f"apex_npu, folded{ONE_TENSOR}": lambda: ours(bench, level, fold=True, shapes=flat),
    }
    if bench.device.type == "cuda":
        found[f"apex_npu, folded{CAPTURABLE}"] = lambda: ours(bench, level, fold=True, capturable=True)
    if precision == "fp32" and bench.device.type == "cpu" and compiler() is not None:
        found["ceiling, as written"] = lambda: ceiling(bench, "in_place", "read_only", "in_place", "one_pass_3")
        found["ceiling, folded"] = lambda: ceiling(bench, "read_only", "one_pass_3")
    return found
