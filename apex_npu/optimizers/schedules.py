# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Learning rate schedules of BertAdam: functions of progress, and torch learning rate schedulers over them.

Each function takes x, the finished share of all steps, and ``warmup``, the share for warm-up (-1: no warm-up). It
returns a factor of the learning rate: x / warmup during warm-up, then the documented value, where x is at most 1.
https://github.com/huggingface/pytorch-pretrained-BERT, optimization.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Callable[[float, float], float]


def _after_warmup(x: float, warmup: float, then: Callable[[float, float], float]) -> float:
    warmup = max(warmup, 0.0)
    return x / warmup if x < warmup else then(min(x, 1.0), warmup)


def warmup_cosine(x: float, warmup: float = 0.002) -> float:
    """Return (1 + cos(π x)) / 2 after warm-up."""
    return _after_warmup(x, warmup, lambda x, _: 0.5 * (1.0 + math.cos(math.pi * x)))


def warmup_constant(x: float, warmup: float = 0.002) -> float:
    """Return 1 after warm-up."""
    return _after_warmup(x, warmup, lambda x, _: 1.0)


def warmup_linear(x: float, warmup: float = 0.002) -> float:
    """Return a linear decay from 1 at the end of warm-up to 0 at x = 1."""
    return _after_warmup(x, warmup, lambda x, warmup: (1.0 - x) / (1.0 - warmup))


def warmup_poly(x: float, warmup: float = 0.002, degree: float = 0.5) -> float:
    """Return (1 − x) to the power of ``degree`` after warm-up."""
    return _after_warmup(x, warmup, lambda x, _: (1.0 - x) ** degree)


SCHEDULES: dict[str, Schedule] = {
    "warmup_cosine": warmup_cosine,
    "warmup_constant": warmup_constant,
    "warmup_linear": warmup_linear,
    "warmup_poly": warmup_poly,
}


class WarmupLR(LambdaLR):
    """A BertAdam schedule for any optimizer: lr of step t is the base lr times ``schedule(t / t_total, warmup)``.

    Args:
        optimizer: The optimizer whose learning rates to set.
        schedule: A name in ``SCHEDULES``, or a function of (x, warmup).
        t_total: Total number of steps.
        warmup: Share of ``t_total`` for warm-up; -1: no warm-up.

    Raises:
        ValueError: There is no such schedule, or ``t_total`` is not positive.

    Example::

        >>> optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1e-3)
        >>> scheduler = optimizers.WarmupLR(optimizer, "warmup_linear", t_total=1000, warmup=0.1)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
        >>> scheduler.step()
    """

    def __init__(self, optimizer: Optimizer, schedule: str | Schedule, t_total: int, warmup: float = -1) -> None:
        if isinstance(schedule, str) and schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
        if not t_total > 0:
            raise ValueError(f"t_total must be > 0, got {t_total!r}")
        function = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
        super().__init__(optimizer, lambda step: function(step / t_total, warmup))
