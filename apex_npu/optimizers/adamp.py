# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AdamP: Adam that does not let weights grow where growing does not change the function."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from apex_npu.fusion import Run, row_count
from apex_npu.ops import Segments, adam_direction_, segment_add_, segment_dot
from apex_npu.optimizers.base import FusedOptimizer, ParamGroup
from apex_npu.optimizers.checks import check_adam, check_bool, check_non_negative


class NpuFusedAdamP(FusedOptimizer):
    """AdamP on flat buffers, with the rule of its authors' code.

    ::

        m ← β₁ · m + (1 − β₁) · g
        v ← β₂ · v + (1 − β₂) · g²
        u ← n / (sqrt(v) / sqrt(1 − β₂ᵗ) + eps)     n = m,  or  β₁ · m + (1 − β₁) · g  for nesterov
        for parameters of two or more dimensions, for each view of p: its rows, then the whole:
            if max |cos(g, p)| over the view's vectors < delta / sqrt(length of a vector):
                u ← u − (n̂ · u) n̂  for each vector, n̂ = p / (‖p‖ + eps);   ratio ← wd_ratio;   stop
        p ← p · (1 − lr · weight_decay · ratio)      ratio = 1 where nothing was projected
        p ← p − lr / (1 − β₁ᵗ) · u

    Heo et al. 2021, https://arxiv.org/abs/2006.08217; https://github.com/clovaai/AdamP. No norm waits for the host.
    State: ``step``, ``exp_avg`` m, ``exp_avg_sq`` v (of the parameter's shape and dtype, but float32 for float16 and
    bfloat16).

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        betas: β₁ and β₂, each in [0, 1).
        eps: Added to the denominator, and to norms.
        weight_decay: Decoupled decay.
        delta: Threshold below which gradient and weight count as perpendicular.
        wd_ratio: Share of the decay that projected parameters get.
        nesterov: Look ahead.
        maximize: Ascend the gradient instead.
        fuse_grad_scaler: See ``FusedOptimizer``.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is no number.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        fuse_grad_scaler: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "delta": delta,
            "wd_ratio": wd_ratio,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, fuse_grad_scaler=fuse_grad_scaler)

    def validate(self, group: ParamGroup) -> None:
        """Check ``group``."""
        check_adam(group)
        check_non_negative("delta value", "delta", group["delta"])
        check_non_negative("wd_ratio value", "wd_ratio", group["wd_ratio"])
        check_bool("nesterov", group["nesterov"])

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def update(self, run: Run, group: ParamGroup) -> None:
        """Apply the rule."""
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        # All memory is taken before anything moves.
        direction, param, grad = run.scratch("direction"), run.wide_param(), run.wide_grad()
        adam_direction_(
            direction,
            param,
            grad,
            run.state("exp_avg"),
            run.state("exp_avg_sq"),
            beta1=beta1,
            beta2=beta2,
            beta3=1 - beta1,
            eps=group["eps"],
            bias_correction2=1 - beta2**run.step,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        rows = run.segments(rows=True)
        coefficient, projected = _projection(run, rows, param, grad, direction, group["delta"], group["eps"])
        segment_add_(direction, param, coefficient, rows)
        if group["weight_decay"]:
            ratio = torch.ones_like(coefficient).masked_fill_(projected, group["wd_ratio"])
            segment_add_(param, param, ratio.mul_(-lr * group["weight_decay"]), rows)
        param.add_(direction, alpha=-lr / (1 - beta1**run.step))
        run.write_back(param)


def _projection(
    run: Run, rows: Segments, param: Tensor, grad: Tensor, direction: Tensor, delta: float, eps: float
) -> tuple[Tensor, Tensor]:
    """What multiple of each row of ``param`` to add to ``direction``, and for each row whether it is projected."""
    owner, row_length, numel, matrix = run.remember("AdamP", lambda: _geometry(run))

    def whole(of_rows: Tensor) -> Tensor:
        return of_rows.new_zeros(len(numel)).index_add_(0, owner, of_rows)

    def cosine(grad_param: Tensor, grad_sq: Tensor, param_sq: Tensor) -> Tensor:
        return grad_param.abs() / ((grad_sq.sqrt() + eps) * (param_sq.sqrt() + eps))

    grad_param, grad_sq = segment_dot(grad, param, rows), segment_dot(grad, grad, rows)
    param_sq, param_direction = segment_dot(param, param, rows), segment_dot(param, direction, rows)
    row_cosine = param_sq.new_zeros(len(numel)).scatter_reduce_(0, owner, cosine(grad_param, grad_sq, param_sq), "amax")
    by_row = matrix & (row_cosine < delta / row_length.sqrt())
    whole_cosine = cosine(whole(grad_param), whole(grad_sq), whole(param_sq))
    by_whole = matrix & ~by_row & (whole_cosine < delta / numel.sqrt())

    row_coefficient = -param_direction / (param_sq.sqrt() + eps).square()
    whole_coefficient = -whole(param_direction) / (whole(param_sq).sqrt() + eps).square()
    coefficient = torch.where(by_whole[owner], whole_coefficient[owner], torch.zeros_like(row_coefficient))
    return torch.where(by_row[owner], row_coefficient, coefficient), (by_row | by_whole)[owner]


def _geometry(run: Run) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """On the device: each row's parameter; each parameter's row length and size, and whether it has rows at all."""
    counts = [row_count(p) for p in run.params]
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    row_length = torch.tensor([max(1, p.numel() // n) for p, n in zip(run.params, counts, strict=True)])
    numel = torch.tensor([max(1, p.numel()) for p in run.params])
    matrix = torch.tensor([p.dim() > 1 for p in run.params])
    device = run.param.device
    return owner.to(device), row_length.to(device), numel.to(device), matrix.to(device)
