# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AdamP: Adam that projects out the growth of weights whose norm does not affect the function."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.fusion import Run
from apex_npu.fusion.run import row_count
from apex_npu.fusion.shards import Along
from apex_npu.ops import Segments, segment_add_, segment_dot, wide_dtype
from apex_npu.ops.reference import add_, bias_correction_of, update_moments_
from apex_npu.optimizers.base import FusedOptions, ParamGroup
from apex_npu.optimizers.checks import check_adam, check_bools, check_non_negative
from apex_npu.optimizers.whole_norms import Addend, NormOptimizer, Parts, alone


class NpuFusedAdamP(NormOptimizer):
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
        wd_ratio: Factor of the decay for projected parameters.
        nesterov: Nesterov momentum.
        maximize: Ascend the gradient instead.
        options: See ``FusedOptions``.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.

    Example::

        >>> optimizer = optimizers.NpuFusedAdamP(model.parameters(), lr=1e-3, weight_decay=1e-2)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    encodable_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    reads_wide_grads = True
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
        **options: Unpack[FusedOptions],
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
        super().__init__(params, defaults, **options)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        check_adam(group)
        check_non_negative(group, "delta", "wd_ratio")
        check_bools(group, "nesterov")

    def update(self, run: Run, group: ParamGroup) -> None:
        """Apply the rule."""
        alone(self.parts(run, group))

    def parts(self, run: Run, group: ParamGroup) -> Parts:
        """Apply the rule, and yield the sums that the projections need."""
        beta1, beta2 = group["betas"]
        eps, weight_decay, delta = group["eps"], group["weight_decay"], group["delta"]
        lr, segments = self.learning_rate(run, group), run.segments(rows=True)
        if not isinstance(run.step, Tensor):
            lr = float(lr)  # the host counts steps, so it also computes the rate
        tables = run.remember("AdamP", delta, lambda: _Tables.of(run, delta, self._fused.full_param_of))
        param, grad, direction = run.wide_param(), run.wide_grad(), run.scratch("direction")
        exp_avg, exp_avg_sq = run.wide_state("exp_avg"), run.wide_state("exp_avg_sq")
        written = () if run.found_inf is None else (param, exp_avg, exp_avg_sq)
        before = [t.clone() for t in written]
        # The bias correction of v is applied to eps and the step size, which saves a pass over u.
        root_correction2 = bias_correction_of(beta2, run.step) ** 0.5
        step_size = lr * root_correction2 / bias_correction_of(beta1, run.step)
        update_moments_(
            direction,
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            beta1=beta1,
            beta2=beta2,
            beta3=1 - beta1,
            eps=eps * root_correction2,
            step=run.step,
            correct_first=False,
            correct_second=False,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            grad_scale=None,
        )
        pairs = [(param, grad), (grad, grad), (param, param), (param, direction)]
        rows = yield Addend(segments.dots(pairs), Along.COLUMNS)
        cosine, row_multiple = _cosine_and_multiple(rows, eps)
        # Rows that are not below their limit, or nan, are counted as -1.
        above = cosine.lt_(tables.row_limit).sub_(1)
        found = yield Addend(tables.sums_of_rows(torch.cat([rows, above.unsqueeze(0)])), Along.ROWS)
        by_row = found[4] == 0
        cosine, whole_multiple = _cosine_and_multiple(found[:4], eps)
        by_whole = cosine < tables.whole_limit
        of_whole = torch.where(by_whole, whole_multiple, 0.0)
        multiple = torch.where(by_row[tables.owner], row_multiple, of_whole[tables.owner])
        # p ← (1 − decay + step size · multiple) · p − step size · u is equivalent to projecting u.
        factors = multiple * step_size
        if weight_decay:
            ratio = torch.ones_like(whole_multiple).masked_fill_(by_row | by_whole, group["wd_ratio"])
            factors.sub_(ratio[tables.owner] * (lr * weight_decay))
        segment_add_(param, param, factors, *segments)
        add_(param, direction, -step_size)
        for now, then in zip(written, before, strict=True):
            assert run.found_inf is not None
            torch.where(run.found_inf.reshape(()) != 0, then, now, out=now)
        run.write_back(param, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


class _Tables(NamedTuple):
    """The constants of a run's projections.

    Attributes:
        owner: The index of each row's parameter.
        row_limit: The cosine below which a row is projected, for each row; 0 means never.
        whole_limit: The cosine below which a whole parameter is projected, for each parameter; 0 means never.
        ones: Ones, five for each row.
        of_params: The segments of ``ones`` that belong to each parameter.
    """

    owner: Tensor
    row_limit: Tensor
    whole_limit: Tensor
    ones: Tensor
    of_params: Segments

    @classmethod
    def of(cls, run: Run, delta: float, full_param_of: Callable[[Tensor], Tensor]) -> _Tables:
        """Make the tables of ``run``. A part of a parameter has the limits of the full parameter."""
        counts = [row_count(p) for p in run.params]
        limits = [
            (delta / max(1, p.numel() // row_count(p)) ** 0.5, delta / max(1, p.numel()) ** 0.5)
            if p.dim() > 1
            else (0.0, 0.0)
            for p in map(full_param_of, run.params)
        ]
        dtype, device = wide_dtype(run.param.dtype), run.param.device
        row_limit, whole_limit = torch.tensor(limits, dtype=dtype, device="cpu").unbind(1)
        owner = torch.arange(len(counts), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
        numel = 5 * owner.numel()
        starts = list(itertools.accumulate(5 * counts, initial=0))[:-1]
        return cls(
            owner.to(device),
            row_limit[owner].to(device),
            whole_limit.contiguous().to(device),
            torch.ones(numel, dtype=dtype, device=device),
            Segments.of(starts, 5 * counts, numel, device),
        )

    def sums_of_rows(self, values: Tensor) -> Tensor:
        """Sum five numbers for each row into five numbers for each parameter."""
        return segment_dot(values.flatten(), self.ones, *self.of_params).view(5, -1)


def _cosine_and_multiple(sums: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return |cos(g, p)| and (p · u) / ‖p‖² from the sums of p · g, g², p² and p · u."""
    norms = sums[1:3].sqrt().add_(eps)
    return sums[0].abs().div_(norms[0] * norms[1]), sums[3].div(norms[1].square())
