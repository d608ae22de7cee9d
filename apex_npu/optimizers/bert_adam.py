# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""BertAdam: Adam without bias correction, with a built-in learning rate schedule."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.fusion import Run
from apex_npu.ops import Call, adam_, segment_add_, segment_dot
from apex_npu.optimizers.base import FusedOptions, ParamGroup
from apex_npu.optimizers.checks import as_number, check_non_negative, check_unit_interval
from apex_npu.optimizers.schedules import SCHEDULES, warmup_constant, warmup_cosine, warmup_linear, warmup_poly
from apex_npu.optimizers.whole_norms import Addend, NormOptimizer, Parts

__all__ = ["SCHEDULES", "NpuFusedBertAdam", "warmup_constant", "warmup_cosine", "warmup_linear", "warmup_poly"]


class NpuFusedBertAdam(NormOptimizer):
    """BertAdam on flat buffers.

    ::

        g ← g · min(1, max_grad_norm / (‖g‖ + 1e-6))   for each parameter, if max_grad_norm > 0
        m ← b1 · m + (1 − b1) · g
        v ← b2 · v + (1 − b2) · g²
        p ← p − lrₜ · (m / (sqrt(v) + e) + weight_decay · p)

    with lrₜ = lr · schedule(t / t_total, warmup), where t counts the parameter's finished steps. If t_total is
    -1, lrₜ = lr. https://github.com/huggingface/pytorch-pretrained-BERT, optimization.py. Gradients are not written.
    Defaults are Ascend's: ``b2`` = 0.99 and no clipping, instead of 0.999 and 1.0.
    State: ``step``, ``exp_avg`` m, ``exp_avg_sq`` v (of the parameter's shape and dtype, but float32 for float16 and
    bfloat16).

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate; required.
        warmup: Share of ``t_total`` for warm-up, in [0, 1), or -1 for none.
        t_total: Total number of steps, or -1 for no schedule.
        schedule: A name in ``SCHEDULES``.
        b1: Decay of m, in [0, 1).
        b2: Decay of v, in [0, 1).
        e: Added to the denominator.
        weight_decay: Decay added to the direction.
        max_grad_norm: Norm to which each parameter's gradient is clipped; no clipping if it is not positive.
        maximize: Ascend the gradient instead.
        options: See ``FusedOptions``.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number, or ``lr`` is missing.

    Example::

        >>> optimizer = optimizers.NpuFusedBertAdam(model.parameters(), lr=5e-5, warmup=0.1, t_total=1000)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    encodable_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        warmup: float = -1,
        t_total: int = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.99,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = -1,
        *,
        maximize: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "schedule": schedule,
            "warmup": warmup,
            "t_total": t_total,
            "b1": b1,
            "b2": b2,
            "e": e,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        if group["lr"] is None:
            raise TypeError("NpuFusedBertAdam has no default learning rate: pass lr, for example lr=5e-5")
        check_non_negative(group, "lr", "e", "weight_decay")
        if group["schedule"] not in SCHEDULES:
            raise ValueError(f"Invalid schedule parameter: {group['schedule']!r} (one of {', '.join(SCHEDULES)})")
        warmup = as_number("warmup", group["warmup"])
        if warmup != -1 and not 0.0 <= warmup < 1.0:
            raise ValueError(f"Invalid warmup: {warmup} (warmup must be in [0, 1), or -1)")
        total = as_number("t_total", group["t_total"])
        if total != -1 and not 0 < total < float("inf"):
            raise ValueError(f"Invalid t_total: {group['t_total']} (t_total must be > 0, or -1)")
        for name in ("b1", "b2"):
            check_unit_interval(f"{name} parameter", name, group[name], with_one=False)
        as_number("max_grad_norm", group["max_grad_norm"])

    def get_lr(self) -> list[float]:
        """Return the learning rate of the next step for each parameter with state; 0 for parameters without state."""
        return [
            _scheduled_lr(group, float(self.state[p]["step"])) if p in self.state else 0.0
            for group in self.param_groups
            for p in group["params"]
        ]

    def widens_grads(self, group: ParamGroup) -> bool:
        """Return True if gradients are clipped, which reads them in float32."""
        return self.reads_param_grads or group["max_grad_norm"] > 0

    def call(self, run: Run, group: ParamGroup) -> Call:
        """Bind the op of the rule to ``run``, with its arguments."""
        if group["max_grad_norm"] <= 0:
            return self._call(run, group, run.scaled_grad, run.grad_scale)
        grad, segments = run.wide_grad(), run.segments()
        return self._call(run, group, _clipped(run, group["max_grad_norm"], segment_dot(grad, grad, *segments)), None)

    def parts(self, run: Run, group: ParamGroup) -> Parts:
        """Apply the rule, and yield the squared norms for clipping."""
        grad, grad_scale = run.scaled_grad, run.grad_scale
        if group["max_grad_norm"] > 0:
            wide = run.wide_grad()
            squares = yield Addend(segment_dot(wide, wide, *run.segments()).unsqueeze(0))
            grad, grad_scale = _clipped(run, group["max_grad_norm"], squares[0]), None
        op, operands, options = self._call(run, group, grad, grad_scale)
        op(*operands, **options)

    def _call(self, run: Run, group: ParamGroup, grad: Tensor, grad_scale: Tensor | None) -> Call:
        return adam_.bind(
            run.param,
            grad,
            run.stored("exp_avg"),
            run.stored("exp_avg_sq"),
            None,
            lr=_scheduled_lr(group, int(run.step) - 1),
            beta1=group["b1"],
            beta2=group["b2"],
            eps=group["e"],
            weight_decay=group["weight_decay"],
            decoupled=True,
            maximize=group["maximize"],
            step=run.step,
            bias_correction=False,
            grad_scale=grad_scale,
            encoding=run.encoding,
        )


def _clipped(run: Run, max_norm: float, squares: Tensor) -> Tensor:
    """Return the gradients of ``run``, clipped to norm ``max_norm``. ``squares`` are their squared norms."""
    clipped, norm = run.scratch("clipped").zero_(), squares.sqrt()
    segment_add_(clipped, run.wide_grad(), (max_norm / (norm + 1e-6)).clamp_max_(1.0), *run.segments())
    return clipped


def _scheduled_lr(group: ParamGroup, steps_done: float) -> float:
    lr = as_number("lr of a parameter group", group["lr"])
    if group["t_total"] == -1:
        return lr
    return lr * SCHEDULES[group["schedule"]](steps_done / group["t_total"], group["warmup"])
