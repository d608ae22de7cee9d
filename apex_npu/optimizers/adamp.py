# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AdamP: Adam that does not let weights grow where growing does not change the function."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from apex_npu.fusion import Run, row_count
from apex_npu.ops import Call, adamp_
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
        capturable: Likewise.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is no number.

    Example::

        >>> optimizer = optimizers.NpuFusedAdamP(model.parameters(), lr=1e-3, weight_decay=1e-2)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    supports_capture = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        fuse_grad_scaler: bool = False,
        capturable: bool = False,
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
        super().__init__(params, defaults, fuse_grad_scaler=fuse_grad_scaler, capturable=capturable)

    def validate(self, group: ParamGroup) -> None:
        """Check ``group``."""
        check_adam(group)
        check_non_negative("delta value", "delta", group["delta"])
        check_non_negative("wd_ratio value", "wd_ratio", group["wd_ratio"])
        check_bool("nesterov", group["nesterov"])

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def call(self, run: Run, group: ParamGroup) -> Call:
        """The rule."""
        beta1, beta2 = group["betas"]
        delta = group["delta"]
        segments = run.segments(rows=True)
        return adamp_.bind(
            run.param,
            run.scaled_grad if segments.ids is None else run.flat_grad,
            run.state("exp_avg"),
            run.state("exp_avg_sq"),
            run.model_param(),
            run.scratch("direction"),
            *segments,
            *run.remember("AdamP", delta, lambda: _owner_and_limits(run, delta)),
            lr=self.learning_rate(run, group),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            wd_ratio=group["wd_ratio"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            step=run.step,
            grad_scale=run.grad_scale,
            found_inf=run.found_inf,
        )


def _owner_and_limits(run: Run, delta: float) -> tuple[Tensor, Tensor, Tensor]:
    """The tables of ``adamp_``: each row's parameter, and the cosines below which rows and wholes are projected."""
    counts = [row_count(p) for p in run.params]
    owner = torch.repeat_interleave(torch.arange(1, len(counts) + 1), torch.tensor(counts))
    lengths = [(max(1, p.numel() // n), max(1, p.numel())) for p, n in zip(run.params, counts, strict=True)]
    limits = [(0.0, 0.0)] + [
        (delta / row**0.5, delta / whole**0.5) if p.dim() > 1 else (0.0, 0.0)
        for p, (row, whole) in zip(run.params, lengths, strict=True)
    ]
    dtype, device = run.state("exp_avg").dtype, run.param.device
    row_limit, whole_limit = torch.tensor(limits, dtype=dtype).unbind(1)
    owner = torch.cat([owner, owner.new_zeros(1)])
    return owner.to(device), row_limit.contiguous().to(device), whole_limit.contiguous().to(device)
