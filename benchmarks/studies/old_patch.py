# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the patch of Apex for Ascend does on its flat buffers: ATen's operators in the same order, temporaries included.

    PYTHONPATH=benchmarks python benchmarks/studies/old_patch.py "step of LAMB" resnet50 [OPTION...]

takes the arguments of ``measure.py`` and has these steps among the variants. This is an independent implementation of
the same computation. Hyper-parameters are fixed: only its time and launches matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from workloads import LOSS_SCALE, MAX_NORM, Bench

LR, BETA1, BETA2, EPS, MOMENTUM, ALPHA, RHO = 1e-3, 0.9, 0.999, 1e-8, 0.9, 0.99, 0.9
# Elements between two slots, and what their sizes are rounded up to.
PAD, ALIGN = 32, 16


class Flat:
    """Parameters, gradients and states, each in one zeroed buffer with a slot per tensor."""

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self.shapes = [p.shape for p in params]
        self.offsets, total = [], 0
        for p in params:
            self.offsets.append(total)
            total += -(-p.numel() // ALIGN) * ALIGN + PAD
        device = params[0].device
        self.param, self.grad, self.one, self.two = (torch.zeros(total, device=device) for _ in range(4))
        self.params, self.grads = self.views(self.param), self.views(self.grad)
        with torch.no_grad():
            torch._foreach_copy_(self.params, list(params))
            torch._foreach_copy_(self.grads, list(grads))
        self.step = 0

    def views(self, flat: Tensor) -> list[Tensor]:
        return [flat[o : o + s.numel()].view(s) for o, s in zip(self.offsets, self.shapes, strict=True)]


def sgd(flat: Flat) -> None:
    flat.one.mul_(MOMENTUM).add_(flat.grad)
    flat.param.add_(flat.one, alpha=-LR)


def _moments(flat: Flat, beta2: float = BETA2) -> None:
    flat.one.mul_(BETA1).add_(flat.grad, alpha=1 - BETA1)
    flat.two.mul_(beta2).addcmul_(flat.grad, flat.grad, value=1 - beta2)


def adam(flat: Flat) -> None:
    _moments(flat)
    denominator = (flat.two.sqrt() / math.sqrt(1 - BETA2**flat.step)).add_(EPS)
    flat.param.addcdiv_(flat.one, denominator, value=-LR / (1 - BETA1**flat.step))


def adamw(flat: Flat) -> None:
    flat.param.mul_(1 - LR * 1e-2)
    adam(flat)


def rmsprop(flat: Flat) -> None:
    flat.one.mul_(ALPHA).addcmul_(flat.grad, flat.grad, value=1 - ALPHA)
    flat.param.addcdiv_(flat.grad, flat.one.sqrt().add_(EPS), value=-LR)


def rmsprop_tf(flat: Flat) -> None:
    flat.one.add_(flat.grad.pow(2) - flat.one, alpha=0.1)
    flat.param.addcdiv_(flat.grad, flat.one.add(1e-10).sqrt_(), value=-LR)


def adadelta(flat: Flat) -> None:
    flat.one.mul_(RHO).addcmul_(flat.grad, flat.grad, value=1 - RHO)
    root = flat.one.add(1e-6).sqrt_()
    delta = flat.two.add(1e-6).sqrt_().div_(root).mul_(flat.grad)
    flat.param.add_(delta, alpha=-1.0)
    flat.two.mul_(RHO).addcmul_(delta, delta, value=1 - RHO)


def bert_adam(flat: Flat) -> None:
    _moments(flat, 0.99)
    update = flat.one / (flat.two.sqrt() + 1e-6)
    update += 0.01 * flat.param
    flat.param.add_(-(LR * update))


def lamb(flat: Flat) -> None:
    _moments(flat)
    direction = flat.one / flat.two.sqrt().add_(1e-6)
    trust = torch.ones_like(direction)
    for param, view, slot in zip(flat.params, flat.views(direction), flat.views(trust), strict=True):
        weight_norm = param.pow(2).sum().sqrt().clamp(0, 10)
        norm = view.pow(2).sum().sqrt()
        # Two waits for the device, for each tensor.
        slot.fill_(1.0 if weight_norm == 0 or norm == 0 else weight_norm / norm)
    flat.param.add_(direction * trust, alpha=-LR)


def adamp(flat: Flat) -> None:
    _moments(flat)
    direction = flat.one / (flat.two.sqrt() / math.sqrt(1 - BETA2**flat.step)).add_(EPS)
    for param, grad, view in zip(flat.params, flat.grads, flat.views(direction), strict=True):
        if param.dim() > 1:
            view.copy_(_projected(param, grad, view))
    flat.param.add_(direction, alpha=-LR / (1 - BETA1**flat.step))


def _projected(param: Tensor, grad: Tensor, direction: Tensor) -> Tensor:
    for size in (param.size(0), 1):
        p, g = param.view(size, -1), grad.view(size, -1)
        cosine = (p * g).sum(dim=1).abs() / ((p.norm(dim=1) + EPS) * (g.norm(dim=1) + EPS))
        if cosine.max() < 0.1 / math.sqrt(p.size(1)):
            unit = p / (p.norm(dim=1, keepdim=True) + EPS)
            d = direction.reshape(size, -1)
            return (d - unit * (unit * d).sum(dim=1, keepdim=True)).view_as(param)
    return direction


RULES: dict[str, Callable[[Flat], None]] = {
    "SGD": sgd,
    "Adam": adam,
    "AdamW": adamw,
    "RMSprop": rmsprop,
    "RMSpropTF": rmsprop_tf,
    "Adadelta": adadelta,
    "BertAdam": bert_adam,
    "LAMB": lamb,
    "AdamP": adamp,
}


def bare_step(rule: str, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Callable[[], None]:
    """A step of ``rule`` on gradients that are there."""
    flat, update = Flat(params, grads), RULES[rule]

    def step() -> None:
        flat.step += 1
        update(flat)

    return step


def whole_step(params: Sequence[Tensor], hand_over: Callable[[list[Tensor]], None]) -> Callable[[], None]:
    """Check, unscale, clip, step of Adam, zero. ``hand_over(views)`` writes gradients into the flat buffer's views."""
    flat = Flat(params, [torch.ones_like(p) for p in params])
    mask = (flat.grad != 0).float()
    flat.grad.zero_()
    flag, one = flat.grad.new_zeros(1), flat.grad.new_ones(1)

    def step() -> None:
        hand_over(flat.grads)
        torch._amp_foreach_non_finite_check_and_unscale_(flat.grads, flag.zero_(), one)
        if flag.item():
            raise AssertionError("the gradients are finite")
        flat.grad.mul_(1.0 / LOSS_SCALE)
        norm = flat.grad.float().abs().pow(2).mul_(mask).sum().pow(0.5)
        coefficient = MAX_NORM / (norm + 1e-6)
        if coefficient < 1:
            flat.grad.mul_(coefficient)
        flat.step += 1
        adam(flat)
        flat.grad.zero_()

    return step


def _bare(rule: str, bench: Bench) -> Callable[[], None]:
    params = bench.params()
    return bare_step(rule, params, [g.clone() for g in bench.gradients(params).values])


def _whole(bench: Bench) -> Callable[[], None]:
    """At O1 with combine_grad, where backward adds to a flat buffer of zeros."""
    params = bench.params()
    gradients = bench.gradients(params)

    def hand_over(views: list[Tensor]) -> None:
        bench.watch.stop()
        torch._foreach_copy_(views, gradients.values)
        bench.watch.start()

    return whole_step(params, hand_over)


def main() -> None:
    """``measure.main``, with the old patch in each comparison that it takes part in."""
    import measure

    made = {f"step of {rule}": partial(_bare, rule) for rule in RULES} | {"whole fp32 step": _whole}
    for name, old in made.items():
        others = measure.COMPARISONS[name]
        measure.COMPARISONS[name] = lambda bench, others=others, old=old: {
            **others(bench),
            "old patch": lambda: old(bench),
        }
    measure.main()


if __name__ == "__main__":
    main()
