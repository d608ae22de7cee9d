# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""LARC, layer-wise adaptive rate control. You et al. 2017, https://arxiv.org/abs/1708.03888."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LARC"]


class LARC:
    """An optimizer wrapper that gives each parameter its own learning rate by scaling its gradient before the step.

    p is the parameter, g its gradient and wd the group's weight decay. LARC applies the decay itself:

        local_lr = trust_coefficient · |p| / (|g| + wd · |p| + eps)
        factor = min(local_lr / lr, 1) if clip else local_lr
        g ← factor · (g + wd · p)

    A parameter whose |p| or |g| is 0 keeps its gradient, without decay. ``amp.initialize`` and ``amp.scale_loss``
    accept a LARC like its inner optimizer ``optim``. LARC passes other attributes on to ``optim``.

    Example::

        >>> optimizer = parallel.LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"LARC wraps a torch optimizer, got {type(optimizer).__name__}")
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def step(self) -> Any:
        """Scale the gradients, and step the optimizer without weight decay."""
        groups = self.optim.param_groups
        weight_decays = [group.get("weight_decay") for group in groups]
        try:
            for group, weight_decay in zip(groups, weight_decays, strict=True):
                if weight_decay is not None:
                    group["weight_decay"] = 0
                self._scale_grads(group, weight_decay or 0)
            return self.optim.step()
        finally:
            for group, weight_decay in zip(groups, weight_decays, strict=True):
                if weight_decay is not None:
                    group["weight_decay"] = weight_decay

    @torch.no_grad()
    def _scale_grads(self, group: dict[str, Any], weight_decay: float) -> None:
        params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        for param in params:
            grad = param.grad
            assert grad is not None
            # In float32, since squares of float16 overflow.
            param_norm, grad_norm = (torch.linalg.vector_norm(t, dtype=torch.float32) for t in (param, grad))
            factor = self.trust_coefficient * param_norm / (grad_norm + weight_decay * param_norm + self.eps)
            if self.clip:
                factor = (factor / group["lr"]).clamp(max=1.0)
            # On the device, since reading the norms here would wait for it once per parameter.
            applies = (param_norm != 0) & (grad_norm != 0)
            scaled = (grad + weight_decay * param) * factor.to(grad.dtype)
            grad.copy_(torch.where(applies, scaled, grad))

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "param_groups":
            self.optim.param_groups = value
        else:
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"
