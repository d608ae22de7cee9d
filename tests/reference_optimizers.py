# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Update rules written out one tensor at a time, in float64, from papers and their authors' descriptions.

Slow and plain on purpose: what the fused optimizers without a twin in torch.optim are compared with. ``low_precision``
makes of any reference one for float16 and bfloat16 parameters.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import ClassVar

import torch


@contextmanager
def widened(params):
    """Inside the block float16 and bfloat16 ``params`` are float32; after it they are rounded into their memory."""
    narrow = [(p, p.data, p.grad) for p in params if p.dtype in (torch.float16, torch.bfloat16)]
    for p, memory, grad in narrow:
        p.grad = None  # it must have the parameter's dtype at all times
        p.data = memory.float()
        p.grad = None if grad is None else grad.float()
    try:
        yield
    finally:
        for p, memory, grad in narrow:
            p.grad = None
            memory.copy_(p.data)
            p.data = memory
            p.grad = grad


class WideState(torch.optim.Optimizer):
    """State dicts are loaded as they are, where torch rounds state to the parameter's dtype."""

    def load_state_dict(self, state_dict):
        with widened([p for group in self.param_groups for p in group["params"]]):
            super().load_state_dict(state_dict)


class LowPrecision(WideState):
    """The next class's rule in float32, with float32 state, on parameters that are rounded once a step."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rule = super().step
        if getattr(rule, "hooked", False):
            rule = rule.__wrapped__.__get__(self)  # hooks are called for the whole step, not for each parameter
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if len({p.data_ptr() for p in params if p.numel()}) == sum(p.numel() > 0 for p in params):
            with widened(params):
                rule()
            return loss
        # Those that share memory see each other's rounded values: one after the other.
        grads = [p.grad for p in params]
        for p in params:
            p.grad = None
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
            with widened([p]):
                rule()
            p.grad = None
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        return loss


class LowPrecisionSGD(LowPrecision, torch.optim.SGD):
    pass


class LowPrecisionAdam(LowPrecision, torch.optim.Adam):
    pass


class LowPrecisionAdamW(LowPrecision, torch.optim.AdamW):
    pass


class LowPrecisionAdadelta(LowPrecision, torch.optim.Adadelta):
    pass


class LowPrecisionRMSprop(LowPrecision, torch.optim.RMSprop):
    pass


def low_precision(reference):
    """``reference`` for parameters of any dtype; those of this file are made for them."""
    return reference if issubclass(reference, ReferenceOptimizer) else globals()[f"LowPrecision{reference.__name__}"]


class ReferenceOptimizer(WideState):
    """Calls ``rule(p, g, state, group)`` on float64 copies on the host, for each parameter with a gradient."""

    defaults_: ClassVar[dict] = {}

    def __init__(self, params, **options):
        super().__init__(params, {**self.defaults_, "maximize": False, **options})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.prepare()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = float(state.get("step", 0)) + 1
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        state[name] = value.cpu().double()
                grad = p.grad.cpu().double().clone()  # not the very tensor: state may keep it
                p.copy_(self.rule(p.cpu().double(), -grad if group.get("maximize") else grad, state, group))
        return loss

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
            p.grad.cpu().double().flatten()
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
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
                weight_norm, grad_norm = weight.norm(dim=1) + eps, grad.norm(dim=1) + eps
                cosine = (weight * grad).sum(1).abs() / (weight_norm * grad_norm)
                if cosine.max() < group["delta"] / math.sqrt(weight.size(1)):
                    unit, along = weight / weight_norm[:, None], u.reshape(rows, -1)
                    u = (along - unit * (unit * along).sum(1, keepdim=True)).reshape(p.shape)
                    decay = group["wd_ratio"]
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


class NvidiaAdam(ReferenceOptimizer):
    defaults_: ClassVar = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "adam_w_mode": True,
        "weight_decay": 0.0,
    }  # fmt: skip

    def rule(self, p, g, state, group):
        beta1, beta2 = group["betas"]
        if not group["adam_w_mode"]:
            g = g + group["weight_decay"] * p
        m, v = self.moments(g, state, beta1, beta2)
        if group["bias_correction"]:
            m, v = m / (1 - beta1 ** state["step"]), v / (1 - beta2 ** state["step"])
        decay = group["weight_decay"] if group["adam_w_mode"] else 0.0
        return p - group["lr"] * (m / (v.sqrt() + group["eps"]) + decay * p)


class NvidiaSGD(ReferenceOptimizer):
    defaults_: ClassVar = {
        "lr": None, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False,
        "wd_after_momentum": False,
    }  # fmt: skip

    def rule(self, p, g, state, group):
        momentum = group["momentum"]
        late = group["wd_after_momentum"]
        step = g if late else g + group["weight_decay"] * p
        if momentum:
            if "momentum_buffer" in state:
                state["momentum_buffer"] = momentum * state["momentum_buffer"] + (1 - group["dampening"]) * step
            else:
                state["momentum_buffer"] = step
            step = step + momentum * state["momentum_buffer"] if group["nesterov"] else state["momentum_buffer"]
        return p - group["lr"] * (step + group["weight_decay"] * p if late else step)


class NvidiaLamb(ReferenceOptimizer):
    defaults_: ClassVar = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01,
        "adam_w_mode": True, "grad_averaging": True, "max_grad_norm": 1.0, "use_nvlamb": False,
    }  # fmt: skip

    def prepare(self):
        grads = [
            p.grad.cpu().double().flatten()
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        self.norm = torch.cat(grads).norm() if grads else torch.zeros(())

    def rule(self, p, g, state, group):
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        g = g / max(1.0, (self.norm / self.defaults["max_grad_norm"]).item())
        if not group["adam_w_mode"]:
            g = g + decay * p
        beta3 = 1 - beta1 if group["grad_averaging"] else 1.0
        m = state["exp_avg"] = beta1 * state.get("exp_avg", torch.zeros_like(g)) + beta3 * g
        v = state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", torch.zeros_like(g)) + (1 - beta2) * g * g
        if group["bias_correction"]:
            m, v = m / (1 - beta1 ** state["step"]), v / (1 - beta2 ** state["step"])
        u = m / (v.sqrt() + group["eps"]) + (decay * p if group["adam_w_mode"] else 0.0)
        ratio = 1.0
        if (decay or group["use_nvlamb"]) and p.norm() != 0 and u.norm() != 0:
            ratio = p.norm() / u.norm()
        return p - float(group["lr"]) * ratio * u


class NvidiaMixedPrecisionLamb(NvidiaLamb):
    """FusedMixedPrecisionLamb's learning rate is a float32 tensor."""

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32)


class NvidiaNovoGrad(ReferenceOptimizer):
    defaults_: ClassVar = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
        "reg_inside_moment": False, "grad_averaging": True, "norm_type": 2, "init_zero": False,
    }  # fmt: skip

    def rule(self, p, g, state, group):
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        euclidean = group["norm_type"] == 2
        norm = g.norm() if euclidean else (g.abs().max() if g.numel() else g.sum())
        before = state.get("exp_avg_sq", torch.zeros(()).double() if group["init_zero"] else norm)
        if euclidean:
            state["exp_avg_sq"] = (beta2 * before**2 + (1 - beta2) * norm**2).sqrt()
        else:
            state["exp_avg_sq"] = beta2 * before + (1 - beta2) * norm
        correction1, correction2 = 1.0, 1.0
        if group["bias_correction"]:
            correction1, correction2 = 1 - beta1 ** state["step"], math.sqrt(1 - beta2 ** state["step"])
        denom = state["exp_avg_sq"] / correction2 + group["eps"]
        if group["reg_inside_moment"]:
            g = g / denom + decay * p
        beta3 = 1 - beta1 if group["grad_averaging"] else 1.0
        m = state["exp_avg"] = beta1 * state.get("exp_avg", torch.zeros_like(g)) + beta3 * g
        if group["reg_inside_moment"]:
            return p - group["lr"] * m / correction1
        return p - group["lr"] * (m / correction1 / denom + decay * p)


class NvidiaAdagrad(ReferenceOptimizer):
    defaults_: ClassVar = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "adagrad_w_mode": False}

    def rule(self, p, g, state, group):
        decay, late = group["weight_decay"], group["adagrad_w_mode"]
        g = g if late else g + decay * p
        state["sum"] = state.get("sum", torch.zeros_like(g)) + g * g
        return p - group["lr"] * (g / (state["sum"].sqrt() + group["eps"]) + (decay * p if late else 0.0))


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


class Muon(ReferenceOptimizer):
    """Muon for matrices, and AdamW for all others; each group is split in two, as NpuFusedMuon does for "auto"."""

    defaults_: ClassVar = {
        "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True,
        "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None,
    }  # fmt: skip
    adamw: ClassVar = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}

    def add_param_group(self, group):
        params = list(group["params"])
        for of_matrices, defaults in ((True, {}), (False, self.adamw)):
            part = [p for p in params if (p.dim() == 2) is of_matrices]
            if part:
                super().add_param_group({**defaults, **group, "params": part, "use_muon": of_matrices})

    def rule(self, p, g, state, group):
        lr, decay = group["lr"], group["weight_decay"]
        if not group["use_muon"]:
            m, v = self.moments(g, state, *group["betas"])
            beta1, beta2 = (1 - beta ** state["step"] for beta in group["betas"])
            return (1 - lr * decay) * p - lr * (m / beta1) / ((v / beta2).sqrt() + group["eps"])
        momentum = group["momentum"]
        b = momentum * state.get("momentum_buffer", torch.zeros_like(g)) + (1 - momentum) * g
        state["momentum_buffer"] = b
        o = (1 - momentum) * g + momentum * b if group["nesterov"] else b
        o = orthogonalized(o, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = p.shape
        ratio = max(1, rows / max(1, columns)) ** 0.5
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * max(rows, columns) ** 0.5
        elif group["adjust_lr_fn"] == "spectral_unclamped":
            ratio = (rows / max(1, columns)) ** 0.5
        return (1 - lr * decay) * p - lr * ratio * o


def orthogonalized(x, coefficients, steps, eps):
    """The polynomial on the singular values, which Newton-Schulz iterations compute without these."""
    a, b, c = coefficients
    if not x.isfinite().all():  # products with such a number spread it, and an SVD refuses it
        return torch.full_like(x, math.nan)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / max(s.norm().item(), eps) if s.numel() and not s.isnan().any() else s
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u * s @ vh
