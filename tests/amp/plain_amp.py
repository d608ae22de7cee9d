# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``PlainAmp``: what docs/amp.md and Apex promise, on float32 parameters and an optimizer of torch, without amp.

Scaling by powers of two changes no number. Gradients here are therefore never scaled, and parameters have no 16-bit
data; what is left of amp is when a step is skipped, how the scale moves, and which gradients are cleared.
"""

from __future__ import annotations

import torch

INITIAL_SCALE, WINDOW, MAX_SCALE = 16.0, 3, 64.0


class Refused(Exception):
    """The operation has to raise, and to change nothing."""


class PlainScaler:
    def __init__(self, scale):
        self.dynamic = scale == "dynamic"
        self.scale, self.unskipped = INITIAL_SCALE if self.dynamic else scale, 0

    def update(self, found_inf):
        self.unskipped = 0 if found_inf else self.unskipped + 1
        if found_inf:
            self.scale /= 2
        elif self.dynamic and self.unskipped >= WINDOW:
            self.scale, self.unskipped = min(2 * self.scale, MAX_SCALE), 0

    def state(self):
        return {"loss_scale": self.scale, "unskipped": self.unskipped}


def clip_with_torch(params, max_norm, norm_type):
    """By torch's function, which takes the largest element of each gradient, where there is one."""
    return torch.nn.utils.clip_grad_norm_([p for p in params if p.numel()], max_norm, norm_type)


class PlainAmp:
    """amp of some optimizers.

    Args:
        optimizers: Of torch, over parameters in float32.
        scale: A number, or "dynamic".
        losses: How many loss scales there are.
        widens: The level widens gradients of 16-bit parameters.
        fuses: ``fuse_unscale``: overflow is looked for when the result is needed.
        drops: Whether a block that fails drops what its backward has given to a parameter.
    """

    def __init__(self, optimizers, scale, losses, widens, fuses, drops):
        self.optimizers = optimizers
        self.scalers = [PlainScaler(scale) for _ in range(losses)]
        self.skip, self.applied = [False] * len(optimizers), [None] * len(optimizers)
        self.delayed, self._were_delayed = [False] * len(optimizers), [False] * len(optimizers)
        self._unchecked = {}  # optimizer → scaler
        self._widens, self._fuses, self._drops = widens, fuses, drops

    def params(self, o):
        return [p for group in self.optimizers[o].param_groups for p in group["params"]]

    def grads(self, o):
        return [p.grad for p in self.params(o) if p.grad is not None]

    def check(self, *which):
        """Decide what has been left open of these optimizers, or of all."""
        for o in which or list(self._unchecked):
            if o in self._unchecked:
                self._decide([o], self._unchecked.pop(o))

    def _decide(self, which, scaler):
        overflow = scaler.dynamic and not all(bool(grad.isfinite().all()) for o in which for grad in self.grads(o))
        scaler.update(overflow)
        for o in which:
            self.skip[o] |= overflow

    def begin(self, which):
        """A block of these optimizers opens."""
        self.check()
        for o in which:
            self._were_delayed[o] = self.delayed[o]
            self.skip[o] = self.skip[o] and bool(self.grads(o))
            for p in self.params(o) if self.skip[o] else []:
                self.clear(p, set_to_none=False)

    def backward(self, which, loss, *, fails):
        """Backward in the block, after which it fails, maybe.

        What it has given to 16-bit parameters is dropped then, unless ``delay_unscale`` has left gradients before it.
        """
        params = [p for o in which if not self._were_delayed[o] for p in self.params(o) if self._drops(p)]
        before = [None if p.grad is None else p.grad.clone() for p in params]
        loss.backward()
        if fails:
            for p, grad in zip(params, before, strict=True):
                p.grad = grad

    def fail(self, which):
        for o in which:
            self.delayed[o] = self._were_delayed[o]

    def end(self, which, loss_id, delay):
        scaler = self.scalers[loss_id]
        for o in which:
            # A plain backward is as good as a block at a static scale of 1, but for 16-bit parameters.
            self.delayed[o] = delay == "delay_unscale" and (scaler.dynamic or scaler.scale != 1.0 or self._widens)
        if delay is not None:
            return
        if self._fuses and scaler.dynamic and len(which) == 1:
            self._unchecked[which[0]] = scaler
        else:
            self._decide(which, scaler)

    def require_unscaled(self, o):
        if self.delayed[o]:
            raise Refused

    def step(self, o):
        self.require_unscaled(o)
        self.check(o)
        self.applied[o] = not self.skip[o]
        if self.applied[o]:
            self.optimizers[o].step()
        self.skip[o] = False

    def zero_grad(self, o, set_to_none):
        self.check(o)
        for p in self.params(o):
            self.clear(p, set_to_none)
        self.skip[o] = self.delayed[o] = False

    @staticmethod
    def clear(p, set_to_none):
        if set_to_none:
            p.grad = None
        elif p.grad is not None:
            p.grad.zero_()

    def clip(self, o, max_norm, norm_type):
        self.check(o)
        return clip_with_torch(self.params(o), max_norm, norm_type)

    def state(self):
        self.check()
        return {f"loss_scaler{i}": scaler.state() for i, scaler in enumerate(self.scalers)}

    def load(self, state):
        self.check()
        for i, scaler in enumerate(self.scalers):
            scaler.scale = state[f"loss_scaler{i}"]["loss_scale"]
            scaler.unskipped = state[f"loss_scaler{i}"]["unskipped"]
