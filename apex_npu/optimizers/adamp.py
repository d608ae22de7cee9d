# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AdamP: Adam that does not let weights grow where growing does not change the function."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from apex_npu.fusion import Run, row_count
from apex_npu.fusion.shards import Along
from apex_npu.ops import Call, Segments, adamp_, is_grad_list, segment_add_, segment_dot, wide_dtype
from apex_npu.ops.reference import bias_correction_of
from apex_npu.ops.reference_segments import update_moments_
from apex_npu.optimizers.base import ParamGroup
from apex_npu.optimizers.checks import check_adam, check_bool, check_non_negative
from apex_npu.optimizers.state_formats import StateDtype
from apex_npu.optimizers.whole_norms import Addend, NormOptimizer, Parts


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
        wd_ratio: Share of the decay that projected parameters get.
        nesterov: Look ahead.
        maximize: Ascend the gradient instead.
        fuse_grad_scaler: See ``FusedOptimizer``.
        capturable: Likewise.
        state_dtype: Likewise.
        stochastic_rounding: Likewise.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is no number.

    Example::

        >>> optimizer = optimizers.NpuFusedAdamP(model.parameters(), lr=1e-3, weight_decay=1e-2)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    encodable_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    supports_capture = True
    follows_addresses = False

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
        state_dtype: StateDtype = None,
        stochastic_rounding: bool = False,
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
        super().__init__(
            params,
            defaults,
            fuse_grad_scaler=fuse_grad_scaler,
            capturable=capturable,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
        )

    def validate(self, group: ParamGroup) -> None:
        """Check ``group``."""
        check_adam(group)
        check_non_negative("delta value", "delta", group["delta"])
        check_non_negative("wd_ratio value", "wd_ratio", group["wd_ratio"])
        check_bool("nesterov", group["nesterov"])

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def widens_grads(self, group: ParamGroup) -> bool:
        """See ``FusedOptimizer``."""
        ids = [Segments.of((), (), 0, param.device).ids for param in group["params"][:1]]
        return self.reads_param_grads or ids != [None]

    def call(self, run: Run, group: ParamGroup) -> Call:
        """The rule."""
        beta1, beta2 = group["betas"]
        delta = group["delta"]
        segments = run.segments(rows=True)
        return adamp_.bind(
            run.param,
            _grad(run, segments),
            run.state("exp_avg"),
            run.state("exp_avg_sq"),
            run.model_param(),
            run.scratch("direction"),
            *segments,
            *run.remember("AdamP", delta, lambda: self._owner_and_limits(run, delta)),
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

    def parts(self, run: Run, group: ParamGroup) -> Parts:
        """See ``NormOptimizer``, and ``adamp_``."""
        beta1, beta2 = group["betas"]
        segments, delta, step = run.segments(rows=True), group["delta"], run.step
        param, grad, direction = run.wide_param(), run.wide_grad(), run.scratch("direction")
        exp_avg, exp_avg_sq = run.wide_state("exp_avg"), run.wide_state("exp_avg_sq")
        update_moments_(
            direction,
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            beta1=beta1,
            beta2=beta2,
            beta3=1 - beta1,
            eps=group["eps"],
            step=step,
            correct_first=False,
            correct_second=True,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            grad_scale=None,
        )
        owner, row_limit, whole_limit = run.remember("AdamP", delta, lambda: self._owner_and_limits(run, delta))
        owner = owner[:-1]  # without padding
        pairs = [(param, grad), (grad, grad), (param, param), (param, direction)]
        rows = yield Addend(torch.stack([segment_dot(a, b, *segments) for a, b in pairs]), Along.COLUMNS)
        cosine, row_multiple = _cosine_and_multiple(rows, group["eps"])
        above = (cosine < row_limit[owner]).logical_not_().to(rows.dtype)
        wholes = rows.new_zeros(5, row_limit.numel()).index_add_(1, owner, torch.cat([rows, above.unsqueeze(0)]))
        found = yield Addend(wholes[:, 1:], Along.ROWS)
        by_row = found[4] == 0
        cosine, whole_multiple = _cosine_and_multiple(found[:4], group["eps"])
        by_whole = cosine < whole_limit[1:]
        owner = owner - 1
        of_whole = torch.where(by_whole, whole_multiple, 0.0)
        multiple = torch.where(by_row[owner], row_multiple, of_whole[owner])
        lr = self.learning_rate(run, group)
        segment_add_(direction, param, -multiple, *segments)
        if group["weight_decay"]:
            ratio = torch.ones_like(whole_multiple).masked_fill_(by_row | by_whole, group["wd_ratio"])[owner]
            segment_add_(param, param, ratio * (-lr * group["weight_decay"]), *segments)
        param.sub_(direction * (lr / bias_correction_of(beta1, step)))
        run.write_back(param, with_model=True, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)

    def _owner_and_limits(self, run: Run, delta: float) -> tuple[Tensor, Tensor, Tensor]:
        """The tables of ``adamp_``: each row's parameter, and the cosines below which rows and wholes are projected."""
        counts = [row_count(p) for p in run.params]
        owner = torch.arange(1, len(counts) + 1, device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
        wholes = list(map(self._fused.full_param_of, run.params))  # of a part the limits are those of the whole
        lengths = [(max(1, p.numel() // row_count(p)), max(1, p.numel())) for p in wholes]
        limits = [(0.0, 0.0)] + [
            (delta / row**0.5, delta / whole**0.5) if p.dim() > 1 else (0.0, 0.0)
            for p, (row, whole) in zip(wholes, lengths, strict=True)
        ]
        dtype, device = wide_dtype(run.param.dtype), run.param.device
        row_limit, whole_limit = torch.tensor(limits, dtype=dtype, device="cpu").unbind(1)
        owner = torch.cat([owner, owner.new_zeros(1)])
        return owner.to(device), row_limit.contiguous().to(device), whole_limit.contiguous().to(device)


def _cosine_and_multiple(sums: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """|cos(g, p)|, and how many p there are in u, from the sums of p · g, g², p² and p · u."""
    norms = sums[1:3].sqrt().add_(eps)
    return sums[0].abs().div(norms[0] * norms[1]), sums[3].div(norms[1].square())


def _grad(run: Run, segments: Segments) -> Tensor:
    """The gradients of ``run``, where they are if the kernel follows them there: those of a GPU follow rows alone."""
    grad = run.scaled_grad
    return run.flat_grad if segments.ids is not None or (grad.is_cuda and is_grad_list(grad)) else grad
