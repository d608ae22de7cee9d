# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random programs of amp, each run on amp and on ``PlainAmp``, and compared after every operation.

A program is a ``Config`` and a list of operations: the name of a method of ``Script``, with its arguments. There are
two models, two optimizers and two losses. Weights, gradients, learning rates and momentum are such that nothing is
rounded in another place than by torch.optim, so that everything has to be equal.

    PYTHONPATH=tests python -m amp.random_programs --programs 2000 [--first-seed 0]

runs many of them (2,000 on the CPU, 1,000 with ``APEX_NPU_TEST_DEVICE=npu`` before a release), and prints what
differs, with as few operations as reproduce it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import random
import sys
import warnings
from dataclasses import dataclass

import processes
import torch
import torch.distributed as dist
from amp.plain_amp import INITIAL_SCALE, MAX_SCALE, WINDOW, PlainAmp, Refused, clip_with_torch
from devices import DEVICE, SAME_KERNELS, lacks
from torch import nn

from apex_npu import amp, optimizers
from apex_npu._extension import extension

LOW = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
WITH_MASTERS = ("O2", "O5")  # where 16-bit parameters have float32 values
# The second is large enough to be read in place, the fourth is transposed, the last comes after those of BATCH_NORM.
SHAPES = ((3,), (65, 64), (), (3, 2), (0,))
BATCH_NORM = (4, 5)  # the indices of its parameters, which stay float32
PARAMS = len(SHAPES) + len(BATCH_NORM)
BOTH = (0, 1)
# Where a device has no inf, plain torch computes on the host, and an overflow is found by its inf there.
NO_INF = lacks("inf")
PLAIN_DEVICE = torch.device("cpu") if NO_INF else DEVICE

# Operations that are not drawn: those that reach faults whose tests are marked `known_fault`, and what several
# processes do not do.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "": (),
    "combine_ddp": ("fail",),  # which drops all gradients there
    "DistributedDataParallel": ("fail", "freeze", "unfreeze", "regroup", "add", "move"),
}


@dataclass(frozen=True)
class Settings:
    """How a program trains."""

    level: str
    rule: str  # sgd, or adam without averages
    how: str  # torch, combine_grad, fused, or float32: fused with store_param_remainders=False
    fuse_unscale: bool
    scale: float | str
    momentum: float
    weight_decay: float
    hook: bool

    @property
    def remainders(self):
        """Whether the bits that 16-bit parameters lack are kept."""
        in_kernels = DEVICE.type != "npu" and extension is not None
        return self.level in WITH_MASTERS and self.how == "fused" and in_kernels

    def options(self):
        """Those of the optimizer."""
        if self.rule == "adam":
            return {"lr": 2.0**-5, "betas": (0.0, 0.0), "eps": 1e-30}
        return {"lr": 2.0**-5, "momentum": self.momentum, "weight_decay": self.weight_decay}

    def optimizer_class(self, under_amp):
        name = {"sgd": "SGD", "adam": "Adam"}[self.rule]
        is_fused = under_amp and self.how in ("fused", "float32")
        return getattr(optimizers, f"NpuFused{name}") if is_fused else getattr(torch.optim, name)

    def initialize(self, models, made, **more):
        float32 = self.how == "float32" and self.level in WITH_MASTERS
        amp.initialize(
            models,
            made,
            opt_level=self.level,
            loss_scale=self.scale,
            dynamic_init_scale=INITIAL_SCALE,
            scale_window=WINDOW,
            max_loss_scale=MAX_SCALE,
            verbosity=0,
            skip_alarm=None,
            fuse_unscale=self.fuse_unscale,
            store_param_remainders=False if float32 else None,
            **{"combine_grad": self.how == "combine_grad", **more},
        )


@dataclass(frozen=True)
class Config(Settings):
    groups: tuple  # for each optimizer its groups, of indices of parameters; those in none are frozen
    averages: str = ""  # over two processes: combine_ddp, or DistributedDataParallel

    @property
    def is_wide(self):
        return self.level in WITH_MASTERS and self.how == "float32"

    @property
    def defers(self):
        return self.fuse_unscale and self.scale == "dynamic"


class Net(nn.Module):
    """The gradient of each parameter that is reached is a pattern of −2, −1, 1 and 2, times ``factor``."""

    def __init__(self, device):
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(pattern(shape, i, device)) for i, shape in enumerate(SHAPES)])
        self.bn = nn.BatchNorm1d(5, device=device)
        self.patterns = [pattern(p.shape, 5 - i, device).contiguous() for i, p in enumerate(self.in_order())]

    def in_order(self):
        return [*self.w[:4], self.bn.weight, self.bn.bias, *self.w[4:]]

    def forward(self, factor, reached):
        return sum(self._product(i, factor.reshape(())) for i in reached)

    def _product(self, i, factor):
        p, x = self.in_order()[i], self.patterns[i] * factor
        if p.dim() == 1:
            return torch.matmul(p.reshape(1, -1), x.to(p.dtype).reshape(-1, 1)).sum()  # which O1 casts
        return (p * x.to(p.dtype)).sum()


def pattern(shape, seed, device):
    values = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(seed))
    found = torch.tensor([-2.0, -1.0, 1.0, 2.0])[values].to(device)
    return found.t() if found.dim() == 2 and found.shape[1] == 2 else found


class Stop(Exception):
    """Raised inside a block by the program."""


class Script:
    """What a program does, with amp or, in ``Plain``, without it; everything that is the same for both.

    Attributes:
        groups: For each optimizer the indices of the parameters in its groups.
    """

    device, under_amp = DEVICE, True

    def __init__(self, config):
        self.config, self.models = config, [Net(self.device), Net(self.device)]
        self.forwards = self.models
        self.groups = [list(map(list, groups)) for groups in config.groups]
        self.saved = None
        for o in BOTH:
            self.freeze_unlisted(o)
        cls = config.optimizer_class(self.under_amp)
        self.optimizers = [
            cls([{"params": [self.params(o)[i] for i in g]} for g in self.groups[o]], **config.options()) for o in BOTH
        ]
        self.start()
        self.at_step, self.norm = [], None  # the gradients that hooks have seen, the last norm
        if config.hook:
            for optimizer in self.optimizers:
                optimizer.register_step_pre_hook(lambda optimizer, *_: self.at_step.append(grads_of(optimizer)))

    def params(self, o):
        return self.models[o].in_order()

    def listed(self, o):
        return [i for group in self.groups[o] for i in group]

    def freeze_unlisted(self, o):
        for i, p in enumerate(self.params(o)):
            p.requires_grad_(i in self.listed(o))
            p.grad = p.grad if p.requires_grad else None

    def loss(self, which, factor, reached):
        factor = self.share(factor)
        overflows = NO_INF and not math.isfinite(factor)
        x = torch.full((1,), 1.0 if overflows else factor, device=self.device)
        loss = sum(self.forwards[o](x, reached[o]) for o in which)
        if overflows:  # in the backward alone: in the forward it is not amp's
            loss.register_hook(lambda grad: grad * 2.0**100 * 2.0**100)
        return loss

    # Operations

    def block(self, which, loss_id, factor, reached, delay=None, clear=None, fail=None):
        which = tuple(o for o in which if any(self.params(o)[i].requires_grad for i in reached[o]))
        self.which = which
        if not which:
            return
        self.scale_loss(which, loss_id, self.loss(which, factor, reached), delay, clear, fail)

    def step(self, o):
        self.step_optimizer(o)

    def clip(self, o, by, norm_type, max_norm):
        self.norm = None if by == "torch" and self.is_delayed(o) else self.clip_grads(o, by, norm_type, max_norm)

    def halve_combined(self, o):
        """Unless the parameter without dimensions is listed, which as a part of a larger tensor is not combined."""
        if 2 not in self.listed(o):
            self.halve_grads(o)

    def model_zero_grad(self, o, set_to_none):
        for i in range(PARAMS):
            self.clear(o, i, set_to_none)

    def drop(self, o, i):
        self.clear(o, i, set_to_none=True)

    def zero(self, o, i):
        self.clear(o, i, set_to_none=False)

    def edit_grad(self, o, i, factor):
        grad = self.params(o)[i].grad
        if grad is not None and not self.is_delayed(o):
            grad.mul_(factor)

    def put_inf(self, o, i):
        grad = self.params(o)[i].grad
        if grad is None or self.is_delayed(o) or NO_INF:
            return
        with torch.no_grad():
            grad.view(-1)[-1:].fill_(torch.inf) if grad.is_contiguous() else grad[-1:].fill_(torch.inf)

    def assign_grad(self, o, i, factor):
        if i in self.listed(o) and not self.is_delayed(o):
            p = self.params(o)[i]
            p.grad = torch.full_like(p, factor)

    def freeze(self, o, i, clear):
        self.params(o)[i].requires_grad_(False)
        if clear:
            self.drop(o, i)

    def unfreeze(self, o, i):
        self.params(o)[i].requires_grad_(i in self.listed(o))

    def edit_weight(self, o, i, value):
        """Multiply by 0.5, or assign ``value`` to p.data."""
        p = self.params(o)[i]
        if value is None and self.config.level in WITH_MASTERS:
            if i in self.listed(o):
                self.halve(o, p)  # 16 bits would round
        elif self.config.remainders:  # a write that is not counted keeps the remainder
            with torch.no_grad():
                p.mul_(0.5) if value is None else p.fill_(value)
        elif value is None:
            p.data.mul_(0.5)
        else:
            p.data = torch.full_like(p, value)

    def move(self, o):
        if self.config.remainders:
            return  # as after other writes that are not counted, state dicts have 16 bits until the next step
        for p in self.params(o):
            p.data = p.data.clone()

    def set_lr(self, o, lr):
        for group in self.optimizers[o].param_groups:
            group["lr"] = lr

    def regroup(self, o, groups):
        self.zero_grad(o, True)
        self.optimizers[o].param_groups.clear()
        self.groups[o], self.saved = [], None
        for group in groups:
            self.add_group(o, group)
        self.freeze_unlisted(o)

    def add(self, o, i):
        if i not in self.listed(o):
            self.params(o)[i].requires_grad_(True)
            self.add_group(o, [i])

    def add_group(self, o, group):
        self.optimizers[o].add_param_group({"params": [self.params(o)[i] for i in group]})
        self.groups[o].append(list(group))
        self.saved = None

    def observe(self):
        """Read the loss scale."""

    def keep(self, o, i):
        """Keep a gradient."""

    def save(self):
        self.saved = copy.deepcopy(
            {
                "model": [model.state_dict() for model in self.models],
                "optimizer": [optimizer.state_dict() for optimizer in self.optimizers],
                "amp": self.amp_state(),
            }
        )

    def load(self, parts):
        if self.saved is None:
            return
        saved = copy.deepcopy(self.saved)
        if self.config.remainders and "optimizer" in parts and "model" not in parts:
            parts = (*parts, "model")  # an optimizer's state has master_param, which is the model's
        for part in parts:
            if part == "amp":
                self.load_amp_state(saved["amp"])
                continue
            for o in BOTH:
                getattr(self, f"{part}s")[o].load_state_dict(saved[part][o])


def grads_of(optimizer):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [None if p.grad is None else p.grad.detach().clone() for p in params]


class Plain(Script):
    """Without amp."""

    device, under_amp = PLAIN_DEVICE, False

    def share(self, factor):
        return 2 * factor if self.config.averages else factor  # the mean of those in ``Amp``

    def start(self):
        if self.config.level == "O3":
            for model in self.models:
                model.half()
        index = {id(p): i for o in BOTH for i, p in enumerate(self.params(o))}
        widens = self.config.level in WITH_MASTERS
        # Where float32 parameters share a buffer with the float32 values of others, they are treated alike.
        joint = self.config.how in ("fused", "float32") and not self.config.remainders and extension is not None
        drops = lambda p: widens and (joint or index[id(p)] not in BATCH_NORM)  # noqa: E731
        # What processes decide together is decided when the block ends.
        leaves_open = self.config.fuse_unscale and not lacks("flag_on_the_device")
        leaves_open = leaves_open and self.config.averages != "combine_ddp"
        self.amp = PlainAmp(self.optimizers, self.config.scale, 2, widens, leaves_open, drops)

    def scale_loss(self, which, loss_id, loss, delay, clear, fail):
        self.amp.begin(which)
        for o in which if clear is not None else ():
            self.amp.zero_grad(o, clear)
        if fail != "before":
            self.amp.backward(which, loss, fails=fail is not None)
        if fail is None:
            self.amp.end(which, loss_id, delay)
        else:
            self.amp.fail(which)

    def step_optimizer(self, o):
        self.amp.step(o)

    def applied(self, o):
        return self.amp.applied[o]

    def is_delayed(self, o):
        return self.amp.delayed[o]

    def zero_grad(self, o, set_to_none):
        self.amp.zero_grad(o, set_to_none)

    def clear(self, o, i, set_to_none):
        self.amp.clear(self.params(o)[i], set_to_none)

    def clip_grads(self, o, by, norm_type, max_norm):
        if by == "fused":
            self.amp.require_unscaled(o)
        return self.amp.clip(o, max_norm, norm_type)

    def halve_grads(self, o):
        self.amp.require_unscaled(o)
        self.amp.check(o)
        for grad in self.amp.grads(o):
            grad.mul_(0.5)

    def amp_state(self):
        return self.amp.state()

    def load_amp_state(self, state):
        self.amp.load(state)

    def halve(self, o, p):
        p.data.mul_(0.5)

    def is_finite(self):
        """No overflow has gone into weights, or a norm, which a device without inf makes other numbers of."""
        found = [p for model in self.models for p in model.parameters()] + ([] if self.norm is None else [self.norm])
        return all(bool(tensor.isfinite().all()) for tensor in found)

    def max_norm(self, o, norm_type, halves):
        """So large that nothing is clipped, or half of a norm whose reciprocal is exact."""
        grads = [grad.float() for grad in self.amp.grads(o) if grad.numel()]
        norm = torch.nn.utils.get_total_norm(grads, norm_type).item() if grads else 0.0
        if not norm < torch.inf:
            return 1.0
        exact = halves and norm_type == torch.inf and norm >= 32.0 and math.frexp(norm)[0] == 0.5
        return norm / 2 if exact else 2 * norm + 1


class Amp(Script):
    """With amp."""

    def __init__(self, config):
        self.kept = []
        super().__init__(config)

    def share(self, factor):
        if not self.config.averages:
            return factor
        second = dist.get_rank() == 1
        return 3.0 * (factor if math.isfinite(factor) else 1.0) if second else factor

    def start(self):
        averages = {"combine_grad": True, "combine_ddp": True} if self.config.averages == "combine_ddp" else {}
        self.config.initialize(self.models, self.optimizers, num_losses=2, **averages)
        if self.config.averages == "DistributedDataParallel":
            ddp = nn.parallel.DistributedDataParallel
            self.forwards = [ddp(model, find_unused_parameters=True) for model in self.models]

    def scale_loss(self, which, loss_id, loss, delay, clear, fail):
        chosen = [self.optimizers[o] for o in which]
        options = {} if delay is None else {delay: True}
        given = chosen if len(chosen) > 1 else chosen[0]
        with contextlib.suppress(Stop), amp.scale_loss(loss, given, loss_id, **options) as scaled_loss:
            for optimizer in chosen if clear is not None else ():
                optimizer.zero_grad(clear)
            if fail == "before":
                raise Stop
            scaled_loss.backward()
            if fail == "after":
                raise Stop

    def step_optimizer(self, o):
        with self.letting_go(o):
            self.optimizers[o].step()

    def applied(self, o):
        return amp.last_step(self.optimizers[o]).applied

    def is_delayed(self, o):
        return self.plain.is_delayed(o)

    def zero_grad(self, o, set_to_none):
        with self.letting_go(o):
            self.optimizers[o].zero_grad(set_to_none)

    def keep(self, o, i):
        """As PCGrad does; with ``fuse_unscale`` the values are scaled, or not yet clipped."""
        p = self.params(o)[i]
        if p.grad is not None and not self.is_delayed(o) and not self.config.fuse_unscale:
            self.kept.append([o, p, p.grad, None])

    @contextlib.contextmanager
    def letting_go(self, o):
        """What is no longer a gradient after this keeps the values that it has before."""
        current = [k for k in self.kept if k[0] == o and k[3] is None and k[1].grad is k[2]]
        values = [grad.clone() for _, _, grad, _ in current]
        yield
        for kept, value in zip(current, values, strict=True):
            kept[3] = value if kept[1].grad is not kept[2] else None

    def clear(self, o, i, set_to_none):
        p = self.params(o)[i]
        if set_to_none:
            p.grad = None
        elif p.grad is not None:
            p.grad.zero_()  # and what has been kept of it, as in plain torch
            self.kept = [k for k in self.kept if k[1] is not self.params(o)[i]]

    def halve(self, o, p):
        """As scripts do that decay weights by hand."""
        for q in amp.master_params(self.optimizers[o]):
            if q is p:
                q.data.mul_(0.5)

    def clip_grads(self, o, by, norm_type, max_norm):
        if by == "fused":
            return self.optimizers[o].clip_optimizer_grad_norm_fused(max_norm, norm_type)
        return clip_with_torch(amp.master_params(self.optimizers[o]), max_norm, norm_type)

    def halve_grads(self, o):
        for flat in self.optimizers[o].get_optimizer_combined_grads():
            flat.mul_(0.5)

    def amp_state(self):
        return amp.state_dict()

    def load_amp_state(self, state):
        amp.load_state_dict(state)


# Comparing


class Difference(AssertionError):
    """amp and plain torch have parted."""


# Of gradients that are inf, CANN's Adam makes a moment of inf where torch's lerp takes inf from inf.
NOT_FINITE = dict.fromkeys(("nan",) if SAME_KERNELS else ("nan", "posinf", "neginf"), 12345.0)


def same(a, b):
    if a is None or b is None:
        return a is b
    if NO_INF:
        a, b = a.cpu(), b.cpu()
        a = torch.where(b.isfinite(), a, b)
    return torch.equal(torch.nan_to_num(a.float(), **NOT_FINITE), torch.nan_to_num(b.float(), **NOT_FINITE))


def require(condition, *what):
    if not condition:
        raise Difference(" ".join(map(str, what)))


def compare(ours, plain, *, grads_of):
    for o in BOTH:
        low = LOW.get(ours.config.level)
        for i, (p, q) in enumerate(zip(ours.params(o), plain.params(o), strict=True)):
            rounded = q if low is None or i in BATCH_NORM else q.to(low)
            require(
                same(p, rounded) or (ours.config.remainders and is_tie(p, q, rounded)),
                f"weights: model {o}, parameter {i}:",
                show(p),
                "not",
                show(q),
            )
        for i in ours.listed(o) if o in grads_of and not plain.is_delayed(o) and not plain.amp.skip[o] else ():
            g, h = ours.params(o)[i].grad, plain.params(o)[i].grad
            require(same(g, h), f"gradients: model {o}, parameter {i}:", show(g), "not", show(h))


def is_tie(p, q, rounded):
    """Remainders round halves of the last bit away from zero, torch to even."""
    return same((p.float() - q).abs(), (rounded.float() - q).abs())


def show(t):
    return None if t is None else t.detach().flatten()[:3].tolist()


def run_operation(script, name, arguments):
    """The exception that it raised, if any."""
    try:
        getattr(script, name)(*arguments)
    except (RuntimeError, ValueError, KeyError, Refused) as error:
        return error
    return None


def run(config, operations):
    """Run a program on both, and compare.

    Raises:
        Difference: They differ.
    """
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, plain = Amp(config), Plain(config)
            ours.plain = plain
            for n, (name, *arguments) in enumerate(operations):
                try:
                    if not run_both(ours, plain, name, arguments):
                        break
                except Difference as error:
                    raise Difference(f"operation {n}, {(name, *arguments)}: {error}") from error.__cause__
    finally:
        amp.shutdown()


def run_both(ours, plain, name, arguments):
    """Run an operation on both, and compare; False where nothing is known of what follows."""
    config = ours.config
    if name == "clip":
        o, by, norm_type, halves = arguments
        norm_type = torch.inf if config.level == "O3" else norm_type  # in half precision a sum overflows
        arguments = o, by, norm_type, plain.max_norm(o, norm_type, halves)
    mine, theirs = run_operation(ours, name, arguments), run_operation(plain, name, arguments)
    if (mine is None) != (theirs is None):
        raise Difference(f"raised {mine!r}, and not {theirs!r}") from mine
    if NO_INF and not plain.is_finite():
        return False
    if name == "step" and theirs is None:
        o = arguments[0]
        require(ours.applied(o) == plain.applied(o), "applied:", ours.applied(o))
        require(len(ours.at_step) == len(plain.at_step), "the hook has run in one")
        for seen, wanted in zip(ours.at_step, plain.at_step, strict=True):
            for a, b in zip(seen, wanted, strict=True):
                require(same(a, b), "the hook has seen", show(a), "not", show(b))
        ours.at_step, plain.at_step = [], []
    if name == "clip" and theirs is None and ours.norm is not None:
        require(
            torch.allclose(ours.norm.cpu().float(), plain.norm.cpu().float(), equal_nan=True),
            f"norm: {ours.norm}, not {plain.norm}",
        )
    if name == "save" and theirs is None and ours.saved:
        compare_saved(ours, plain)
    if name == "observe" or not config.defers:
        require(ours.amp_state() == plain.amp_state(), f"scales: {ours.amp_state()}, not {plain.amp_state()}")
    for o, _, grad, value in ours.kept:
        require(value is None or same(grad, value), f"kept of model {o}:", show(grad), "not", show(value))
    looks = not config.fuse_unscale and name in ("block", "clip", "step")
    compare(ours, plain, grads_of=arguments[:1] if looks and name != "block" else plain.which if looks else ())
    return True


def compare_saved(ours, plain):
    for o in BOTH:
        mine, theirs = (script.saved["optimizer"][o]["state"] for script in (ours, plain))
        if ours.config.remainders:  # all state is there from the start, and the count of random bits
            mine = {i: {k: v for k, v in mine[i].items() if k in entry} for i, entry in theirs.items()}
        for name, tensor in ours.saved["model"][o].items():
            wanted = plain.saved["model"][o][name]
            require(same(tensor, wanted) or not wanted.isfinite().all(), f"saved: model {o}, {name}")
        for i in {*mine, *theirs}:
            entries = [{k: v for k, v in state.get(i, {}).items() if v is not None} for state in (mine, theirs)]
            require(entries[0].keys() == entries[1].keys(), f"saved: state {i} of optimizer {o}: {entries}")
            for key in entries[0]:
                a, b = (torch.as_tensor(entry[key]).cpu() for entry in entries)
                require(same(a, b), f"saved: {key} of {i} of optimizer {o}: {show(a)}, not {show(b)}")


# Drawing


def draw_config(draw, processes):
    averages = draw.choice(["combine_ddp", "DistributedDataParallel"]) if processes > 1 else ""
    level = draw.choice(["O0", "O1", "O2", "O2", "O3", "O4", "O5"])
    how = draw.choice(["combine_grad" if averages == "combine_ddp" else "torch", "combine_grad", "fused", "fused"])
    if level in WITH_MASTERS and how == "fused" and draw.random() < 0.3:
        how = "float32"
    rule = "sgd" if level == "O3" else draw.choice(["sgd", "sgd", "adam"])
    exact_in_half = level == "O3"
    return Config(
        level,
        rule,
        how,
        fuse_unscale=draw.random() < (0.4 if how in ("fused", "float32") else 0.15),
        scale=draw.choice(["dynamic", "dynamic", "dynamic", 1.0, 16.0]),
        momentum=0.0 if exact_in_half else draw.choice([0.0, 0.5]),
        weight_decay=0.0 if exact_in_half else draw.choice([0.0, 2.0**-4]),
        hook=draw.random() < 0.15,
        groups=tuple(draw_groups(draw) for _ in BOTH),
        averages=averages,
    )


def draw_groups(draw):
    listed = draw.sample(range(PARAMS), draw.randint(1, PARAMS))
    cut = draw.randint(0, len(listed) - 1)
    return tuple(tuple(part) for part in (listed[:cut], listed[cut:]) if part)


def draw_reached(draw):
    everything = tuple(range(PARAMS))
    return tuple(
        everything if draw.random() < 0.6 else tuple(sorted(draw.sample(everything, draw.randint(1, PARAMS))))
        for _ in BOTH
    )


def draw_block(draw, config):
    which = draw.choice([(0,), (1,), (0, 1)])
    overflows = draw.random() < (0.12 if config.scale == "dynamic" else 0.01)
    finite = [1.0, 32.0, -32.0, *([] if config.averages else [64.0])]  # sums of more would overflow in float16
    factor = draw.choice([torch.inf, -torch.inf, torch.nan] if overflows else finite)
    delay = draw.choice(["delay_unscale", "delay_overflow_check"]) if draw.random() < 0.15 else None
    clear = draw.choice([True, False]) if draw.random() < 0.1 else None
    fail = draw.choice(["before", "after"]) if draw.random() < 0.1 else None
    if "fail" in LEFT_OUT[config.averages]:
        fail = None
    return ("block", which, draw.choice(BOTH), factor, draw_reached(draw), delay, clear, fail)


def draw_operations(draw, config):
    def o():
        return draw.choice(BOTH)

    def i():
        return draw.randrange(PARAMS)

    def flag():
        return draw.random() < 0.5

    kinds = {
        "model_zero_grad": lambda: (o(), flag()),
        "zero_grad": lambda: (o(), flag()),
        "drop": lambda: (o(), i()),
        "zero": lambda: (o(), i()),
        "edit_grad": lambda: (o(), i(), draw.choice([0.5, 2.0])),
        "put_inf": lambda: (o(), i()),
        "assign_grad": lambda: (o(), i(), draw.choice([1.0, 32.0])),
        "freeze": lambda: (o(), i(), flag()),
        "unfreeze": lambda: (o(), i()),
        "edit_weight": lambda: (o(), i(), draw.choice([None, 3.0, -8.0])),
        "move": lambda: (o(),),
        "set_lr": lambda: (o(), draw.choice([2.0**-6, 2.0**-5, 2.0**-4])),
        "regroup": lambda: (o(), draw_groups(draw)),
        "add": lambda: (o(), i()),
        "save": lambda: (),
        "load": lambda: (tuple(draw.sample(["model", "optimizer", "amp"], draw.randint(1, 3))),),
        "clip": lambda: (
            o(),
            "fused" if config.fuse_unscale else draw.choice(["fused", "torch"]),
            draw.choice([1.0, 2.0, torch.inf]),
            flag(),
        ),
        "halve_combined": lambda: (o(),),
        "observe": lambda: (),
        "keep": lambda: (o(), i()),
    }
    if config.fuse_unscale:  # what is assigned would have to be scaled
        del kinds["assign_grad"]
    if config.how == "torch":  # has no combined gradients
        del kinds["halve_combined"]
    names = [name for name in kinds if name not in LEFT_OUT[config.averages]]
    operations = []
    for _ in range(draw.randint(4, 14)):
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            operations.append(draw_block(draw, config))
            operations += [(name, *kinds[name]()) for name in draw.choices(names, k=draw.choice([0, 0, 0, 1, 2]))]
        which = [o()] if flag() else BOTH
        operations += [("step", k) for k in which]
        operations += [(name, *kinds[name]()) for name in draw.choices(names, k=draw.choice([0, 0, 1]))]
        if flag():
            operations += [("zero_grad", k, draw.random() < 0.7) for k in which]
    return [*operations, ("observe",), ("save",)]


def program(seed, processes=1):
    draw = random.Random(seed)
    config = draw_config(draw, processes)
    return config, draw_operations(draw, config)


def failure_of(run):
    """A function that returns what differs in a program that it runs, or None."""

    def failure(config, operations):
        try:
            run(config, operations)
        except Exception as error:
            return error
        return None

    return failure


failure = failure_of(run)


def minimise(config, operations, failure=failure):
    """As few operations as still fail, as ``failure`` says."""
    kind, size = type(failure(config, operations)), len(operations)
    while size:
        start = 0
        while start < len(operations):
            fewer = operations[:start] + operations[start + size :]
            if isinstance(failure(config, fewer), kind):
                operations = fewer
            else:
                start += size
        size //= 2
    return operations


def describe(seed, processes=1):
    """None, or a program that fails and how."""
    config, operations = program(seed, processes)
    error = failure(config, operations)
    if error is None:
        return None
    if processes == 1:  # elsewhere the others may be waiting
        operations = minimise(config, operations)
        error = failure(config, operations)
    return text_of(seed, error, config, operations)


def text_of(seed, error, config, operations):
    """The failure of a program, and the call that repeats it."""
    lines = [f"seed {seed}: {type(error).__name__}: {error}", f"run({config},", "    ["]
    return "\n".join([*lines, *(f"        {operation}," for operation in operations), "    ])"])


def main():
    parser = argparse.ArgumentParser(description="Compare random programs under amp with plain torch.")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--stop-after", type=int, default=10, help="this many differences")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    processes = join_others()
    found = 0
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.programs):
        text = describe(seed, processes)
        if text is not None:
            print(text, flush=True)
            found += 1
            if found >= arguments.stop_after or processes > 1:
                break
        if seed % 25 == 24:
            print(f"up to seed {seed}: {found} differ", file=sys.stderr, flush=True)
    print(f"{seed + 1 - arguments.first_seed} programs on {DEVICE}, {found} differ", flush=True)
    if processes == 1:
        sys.exit(found > 0)
    os._exit(found > 0)  # gloo's threads may outlive the group


def join_others():
    """Join the process group of ``processes.start``; how many processes there are."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        processes.join()
    return world


if __name__ == "__main__":
    main()
