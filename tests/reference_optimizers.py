# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Update rules written out one tensor at a time, in float64, from papers and their authors' descriptions.

Slow and plain on purpose: what the fused optimizers without a twin in torch.optim are compared with.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch


class ReferenceOptimizer(torch.optim.Optimizer):
    """Calls ``rule(p, g, state, group)`` on float64 copies, for each parameter with a gradient."""

    defaults_: ClassVar[dict] = {}

    def __init__(self, params, **options):
        super().__init__(params, {**self.defaults_, "maximize": False, **options})

    @torch.no_grad()
    def step(self, closure=None):
        self.prepare()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = float(state.get("step", 0)) + 1
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        state[name] = value.double()
                grad = p.grad.double()
                p.copy_(self.rule(p.double(), -grad if group["maximize"] else grad, state, group))

    def prepare(self):
        pass

    def moments(self, g, state, beta1, beta2):
        state["exp_avg"] = beta1 * state.get("exp_avg", torch.zeros_like(g)) + (1 - beta1) * g
        state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", torch.zeros_like(g)) + (1 - beta2) * g * g
        return state["exp_avg"], state["exp_avg_sq"]


class Lamb(ReferenceOptimizer):
    defaults_: ClassVar = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "adam": False,
        "use_global_grad_norm": False,
    }  # fmt: skip

    def prepare(self):
        grads = [
            p.grad.double().flatten() for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        self.norm = torch.cat(grads).norm() if grads else torch.zeros(())

    def rule(self, p, g, state, group):
        if group["use_global_grad_norm"] and self.norm > 1:
            g = g / self.norm
        m, v = self.moments(g, state, *group["betas"])
        u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
        weight_norm, update_norm = p.norm().clamp(max=10), u.norm()
        ratio = 1.0 if group["adam"] or weight_norm == 0 or update_norm == 0 else weight_norm / update_norm
        return p - group["lr"] * ratio * u


class AdamP(ReferenceOptimizer):
    defaults_: ClassVar = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "delta": 0.1, "wd_ratio": 0.1,
        "nesterov": False,
    }  # fmt: skip

    def rule(self, p, g, state, group):
        (beta1, beta2), eps, step = group["betas"], group["eps"], state["step"]
        m, v = self.moments(g, state, beta1, beta2)
        denom = v.sqrt() / math.sqrt(1 - beta2**step) + eps
        u = (beta1 * m + (1 - beta1) * g if group["nesterov"] else m) / denom
        decay = 1.0
        if p.dim() > 1 and p.numel():
            for rows in (p.size(0), 1):
                weight, grad = p.reshape(rows, -1), g.reshape(rows, -1)
                cosine = [
                    (w @ d).abs() / ((w.norm() + eps) * (d.norm() + eps)) for w, d in zip(weight, grad, strict=True)
                ]
                if max(cosine) < group["delta"] / math.sqrt(weight.size(1)):
                    unit = [w / (w.norm() + eps) for w in weight]
                    u = torch.stack([r - n * (n @ r) for n, r in zip(unit, u.reshape(rows, -1), strict=True)])
                    u, decay = u.reshape(p.shape), group["wd_ratio"]
                    break
        p = p * (1 - group["lr"] * group["weight_decay"] * decay)
        return p - group["lr"] / (1 - beta1**step) * u


class BertAdam(ReferenceOptimizer):
    defaults_: ClassVar = {
        "lr": 1e-3, "warmup": -1, "t_total": -1, "schedule": "warmup_linear", "b1": 0.9, "b2": 0.99, "e": 1e-6,
        "weight_decay": 0.01, "max_grad_norm": -1,
    }  # fmt: skip

    def rule(self, p, g, state, group):
        if group["max_grad_norm"] > 0:
            g = g * min(1.0, group["max_grad_norm"] / (g.norm().item() + 1e-6))
        m, v = self.moments(g, state, group["b1"], group["b2"])
        lr = group["lr"]
        if group["t_total"] != -1:
            x, warmup = (state["step"] - 1) / group["t_total"], max(group["warmup"], 0)
            end = min(x, 1)
            lr *= (
                x / warmup
                if x < warmup
                else {
                    "warmup_linear": (1 - end) / (1 - warmup),
                    "warmup_constant": 1.0,
                    "warmup_cosine": (1 + math.cos(math.pi * end)) / 2,
                    "warmup_poly": math.sqrt(1 - end),
                }[group["schedule"]]
            )
        return p - lr * (m / (v.sqrt() + group["e"]) + group["weight_decay"] * p)


class RMSpropTF(ReferenceOptimizer):
    defaults_: ClassVar = {
        "lr": 1e-2, "alpha": 0.9, "eps": 1e-10, "weight_decay": 0.0, "momentum": 0.0, "centered": False,
        "decoupled_decay": False, "lr_in_momentum": True, "init_square_avg": 1.0,
    }  # fmt: skip

    def rule(self, p, g, state, group):
        keep, lr = group["alpha"], group["lr"]
        if group["decoupled_decay"]:
            p = p * (1 - group["weight_decay"])
        else:
            g = g + group["weight_decay"] * p
        state["square_avg"] = (
            keep * state.get("square_avg", torch.full_like(g, group["init_square_avg"])) + (1 - keep) * g**2
        )
        variance = state["square_avg"]
        if group["centered"]:
            state["grad_avg"] = keep * state.get("grad_avg", torch.zeros_like(g)) + (1 - keep) * g
            variance = variance - state["grad_avg"] ** 2
        scaled = g / (variance + group["eps"]).sqrt()
        if not group["momentum"]:
            return p - lr * scaled
        inside = lr if group["lr_in_momentum"] else 1.0
        state["momentum_buffer"] = (
            group["momentum"] * state.get("momentum_buffer", torch.zeros_like(g)) + inside * scaled
        )
        return p - (1.0 if group["lr_in_momentum"] else lr) * state["momentum_buffer"]
