# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random programs that write weights, gradients and buffers, compared with plain torch after each operation.

Each write to a parameter, a gradient or a buffer counts, whatever it is written with, and nothing is warned of. In the
program of plain torch, ``Truth``, a parameter is a float32 tensor, beside which ``low`` is what the model has in 16
bits. Where a write changes ``low``, the float32 tensor takes what was written; a write with ``amp.float32_params`` or
in a loop over ``amp.master_params`` is one to the float32 tensor. After each operation amp's parameters are ``low``,
and ``state_dict()`` has the float32 tensors.

Both are equal bit for bit, except in low bits of parameters that have been written: where they are kept as
remainders, and where an element is written twice before amp looks at it, a value is known up to half an ulp of its 16
bits. ``Truth.bound`` has this bound for each element.

    PYTHONPATH=tests python -m amp.random_writes --programs 1000 [--level O2] [--writes model] [--first-seed 0]

prints what differs, with as few operations as reproduce it.
"""

from __future__ import annotations

import argparse
import math
import random
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from amp.plain_amp import PlainAmp, clip_with_torch
from amp.random_programs import (
    BATCH_NORM,
    LOW,
    NO_INF,
    PARAMS,
    PLAIN_DEVICE,
    WITH_MASTERS,
    Difference,
    Net,
    Plain,
    Settings,
    failure_of,
    grads_of,
    is_tie,
    minimise,
    require,
    same,
    show,
    text_of,
)
from devices import DEVICE, VENDOR, synchronize
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from apex_npu import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
TRANSPOSED = 3  # which parameters_to_vector and collectives do not take
FROZEN = 0  # has no gradient, and is in no group
TRAINED = tuple(i for i in range(PARAMS) if i != FROZEN)
# float32 gradients of 16-bit parameters can be assigned.
ASSIGNS_FLOAT32 = hasattr(torch.Tensor, "grad_dtype")
# Warnings with a cause: a backward outside of a block, a step without gradients, a loss in 16 bits, gradients that are
# multiplied by the loss scale where they are written, a setting of the vendor's torch_npu.
EXPECTED = (
    "outside amp.scale_loss",
    "none of its parameters has a gradient",
    "the loss has been rounded to",
    "which with fuse_unscale=True leaves them multiplied by the loss scale",
    "internal format",
)


@dataclass(frozen=True)
class Config(Settings):
    thirds: bool  # a buffer and a frozen parameter have values that half precision does not hold

    @property
    def counted_only(self):
        """Whether writes to 16-bit parameters that autograd does not count are not seen."""
        return self.level in WITH_MASTERS and DEVICE.type == "npu"


class Model(Net):
    """With buffers, and a parameter that is frozen."""

    def __init__(self, device, thirds):
        super().__init__(device)
        self.in_order()[FROZEN].requires_grad_(False)
        self.register_buffer("exact", torch.tensor([0.5, 3.0, -8.0], device=device))
        self.register_buffer("third", torch.tensor([1.0, 2.0], device=device))
        if thirds:
            self.third.div_(3)
            self.in_order()[FROZEN].div_(3)


# Writing

IDIOMS = {
    "no_grad": lambda ps, change: [change(p) for p in ps],
    "detach": lambda ps, change: [change(p.detach()) for p in ps],
    "view": lambda ps, change: [change(p[:1] if p.dim() else p.view(())) for p in ps],
    "copy": lambda ps, change: [p.copy_(changed(p, change)) for p in ps],
    "foreach": lambda ps, change: torch._foreach_copy_(ps, [changed(p, change) for p in ps]),
    "out": lambda ps, change: [torch.add(changed(p, change), 0, out=p) for p in ps],
    "data": lambda ps, change: [change(p.data) for p in ps],
    "collective": lambda ps, change: [receive(p.data, changed(p, change)) for p in ps],
    "other address": lambda ps, change: [setattr(p, "data", changed(p, change)) for p in ps],
    "vector": lambda ps, change: vector_to_parameters(changed(parameters_to_vector(ps), change), ps),
    "numpy": lambda ps, change: [change(unseen(p)) for p in ps],
}

# Those that autograd's version counters do not count, at the same address.
UNCOUNTED = ("data", "collective", "numpy")
CONTIGUOUS = ("vector", "collective")

# What programs draw. torch_npu's operators on lists count no writes.
DRAWN = [name for name in IDIOMS if not VENDOR or name not in ("foreach", *UNCOUNTED)]


def unseen(p):
    """The same memory, of which torch does not know that it is."""
    if p.device.type != "cpu":
        return p.data
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[p.element_size()]
    return torch.from_numpy(p.detach().view(bits).numpy()).view(p.dtype)


def receive(p, value):
    """Have ``p`` receive ``value`` from this process."""
    if p.device.type == "cpu" and dist.is_gloo_available() and p.numel():
        if not GROUP:
            GROUP.append(dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
        GROUP[0].allgather([[p]], [value]).wait()
    else:
        p.copy_(value)


GROUP = []  # of this process alone


def changed(p, change):
    twin = p.detach().clone()
    change(twin)
    return twin


def halve(p):
    p.mul_(0.5)


def limit(p):
    p.clamp_(-2, 2)


def fill(p):
    nn.init.constant_(p, 3.0)


def negate(p):
    p.neg_()


CHANGES = {function.__name__: function for function in (halve, limit, fill, negate)}


@torch.no_grad()
def write(tensors, idiom, change):
    IDIOMS[idiom](list(tensors), CHANGES[change])


def of_one_dtype(which):
    parts = [i for i in which if i in BATCH_NORM], [i for i in which if i not in BATCH_NORM]
    return list(filter(None, parts))


class Script:
    """What a program does, with amp or in plain torch; everything that is the same for both."""

    device, under_amp = DEVICE, True

    def __init__(self, config):
        self.config, self.model = config, Model(self.device, config.thirds)
        self.params = self.model.in_order()
        groups = [{"params": [self.params[i] for i in part]} for part in (TRAINED[::2], TRAINED[1::2])]
        self.optimizer = config.optimizer_class(self.under_amp)(groups, **config.options())
        self.norm, self.at_step, self.shown = None, [], None
        self.start()
        if config.hook:
            self.optimizer.register_step_pre_hook(lambda optimizer, *_: self.at_step.append(grads_of(optimizer)))

    def has_float32(self, i):
        """Whether parameter ``i`` has 16 bits, and a float32 value beside them."""
        return self.config.level in WITH_MASTERS and i not in BATCH_NORM

    def loss(self, factor, reached):
        overflows = NO_INF and not math.isfinite(factor)
        x = torch.full((1,), 1.0 if overflows else factor, device=self.device)
        loss = self.model(x, reached)
        if overflows:
            loss.register_hook(lambda grad: grad * 2.0**100 * 2.0**100)
        return loss

    # Operations

    def forward(self):
        with torch.no_grad():
            self.model(torch.ones(1, device=self.device), range(PARAMS))

    def block(self, factor, reached):
        self.scale_loss(self.loss(factor, reached))

    def backward(self, factor, reached):
        """Outside of a block."""
        self.loss(factor, reached).backward()

    def step(self, set_to_none):
        self.step_optimizer()
        self.zero_grad(set_to_none)

    def write_grads(self, how, which, change):
        for p in (self.params[i] for i in which if i != FROZEN):
            if how.startswith("assign"):
                float32 = how == "assign float32" and ASSIGNS_FLOAT32 and self.config.level in WITH_MASTERS
                dtype = torch.float32 if float32 else p.dtype
                grad = torch.ones_like(p) if p.grad is None else changed(p.grad, CHANGES[change])
                p.grad = grad.to(dtype)
            elif p.grad is not None:
                write([p.grad], how, change)

    def assign_buffer(self, name, change):
        setattr(self.model, name, changed(getattr(self.model, name), CHANGES[change]))

    def write_buffer(self, name, idiom, change):
        write([getattr(self.model, name)], idiom, change)

    def save(self):
        self.shown = {name: value.clone() for name, value in self.model.state_dict().items()}

    def load(self, which):
        """As a script does that has saved some weights."""
        self.model.load_state_dict({self.names()[i]: torch.full_like(self.params[i], 3.0) for i in which}, strict=False)

    def names(self):
        names = {id(p): name for name, p in self.model.named_parameters()}
        return [names[id(p)] for p in self.params]


class Truth(Script):
    """In plain torch.

    Attributes:
        low: What the model has of each parameter.
        bound: For each parameter and element, how far its float32 value may be from this one.
        drift: The largest ``bound`` so far. With weight decay it is also in the momentum, after ``bound`` is 0 again.
        written: For each parameter which elements have been written since the last step.
        kept: What buffers were before they were cast.
    """

    device, under_amp = PLAIN_DEVICE, False

    def start(self):
        self.kept = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        if self.config.level == "O3":
            self.model.half()
        self.low = [self.rounded(i) for i in range(PARAMS)]
        self.bound = [torch.zeros_like(p, dtype=torch.float32) for p in self.params]
        self.drift = [bound.clone() for bound in self.bound]
        self.written = [torch.zeros_like(p, dtype=torch.bool) for p in self.params]
        widens = self.config.level in WITH_MASTERS
        self.amp = PlainAmp([self.optimizer], self.config.scale, 1, widens, self.config.fuse_unscale, lambda p: False)

    def rounded(self, i):
        q = self.params[i].detach()
        return q.to(LOW[self.config.level]) if self.has_float32(i) else q

    def round_all(self):
        self.low = [low if i == FROZEN else self.rounded(i) for i, low in enumerate(self.low)]

    def scale_loss(self, loss):
        self.amp.begin([0])
        self.amp.backward([0], loss, fails=False)
        self.amp.end([0], 0, None)

    def step_optimizer(self):
        self.drift = list(map(torch.maximum, self.drift, self.bound))
        self.amp.step(0)
        if self.amp.applied[0]:
            self.round_all()
            for i in TRAINED:
                self.written[i].fill_(False)
                if self.config.momentum and self.config.weight_decay:
                    self.bound[i] = torch.maximum(self.bound[i], 2.0**-6 * self.drift[i])

    def zero_grad(self, set_to_none):
        self.amp.zero_grad(0, set_to_none)

    def clip(self, by, norm_type, max_norm):
        self.norm = self.amp.clip(0, max_norm, norm_type)

    def max_norm(self, norm_type, halves):
        return Plain.max_norm(self, 0, norm_type, halves)

    @torch.no_grad()
    def write_model(self, idiom, which, change):
        for some in of_one_dtype(which):
            if not self.has_float32(some[0]):
                write([self.params[i] for i in some], idiom, change)
                for i in some:
                    self.low[i] = self.params[i].detach()
                continue
            after = [nn.Parameter(self.low[i].clone()) for i in some]
            write(after, idiom, change)
            for i, p in zip(some, after, strict=True):
                self.take(i, p.detach())

    def take(self, i, now):
        """``now`` is what the model has of parameter ``i`` after a write."""
        differs = now != self.low[i]
        q, bound = self.params[i], self.bound[i]
        if self.config.remainders and i != FROZEN:
            taken, is_rounded = torch.ones_like(differs), torch.ones_like(differs)
        else:
            taken, is_rounded = differs, differs & self.written[i]
        q.copy_(torch.where(taken, now.float(), q))
        bound.copy_(torch.where(taken, half_ulp(now) * is_rounded, bound))
        self.written[i] |= differs
        self.low[i] = now

    @torch.no_grad()
    def write_float32(self, how, idiom, which, change):
        for some in [[i] for i in which] if how == "loop" else of_one_dtype(which):
            write([self.params[i] for i in some], idiom, change)
        self.round_all()

    def write_buffer(self, name, idiom, change):
        """Where it is again what it was, rounded, the buffer is exact."""
        buffer, kept = getattr(self.model, name), self.kept[name]
        now = buffer.to(LOW[self.config.level]) if self.config.level in WITH_MASTERS else buffer.clone()
        write([now], idiom, change)
        exact = kept.to(now.dtype) == now if self.config.level in WITH_MASTERS else False
        buffer.copy_(torch.where(torch.as_tensor(exact), kept, now.to(buffer.dtype)))

    def assign_buffer(self, name, change):
        self.write_buffer(name, "no_grad", change)

    def load(self, which):
        super().load(which)
        for i in which:
            self.low[i] = self.rounded(i)
            self.bound[i].zero_()


def half_ulp(w):
    """Half of the distance of 16-bit numbers at ``w``."""
    info = torch.finfo(w.dtype)
    _, exponent = torch.frexp(w.float().abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(w, info.eps / 4, dtype=torch.float32), exponent)


class Amp(Script):
    """With amp."""

    def start(self):
        self.config.initialize(self.model, self.optimizer)

    def scale_loss(self, loss):
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def step_optimizer(self):
        self.optimizer.step()
        synchronize()

    def zero_grad(self, set_to_none):
        self.optimizer.zero_grad(set_to_none)

    def clip(self, by, norm_type, max_norm):
        if by == "fused":
            self.norm = self.optimizer.clip_optimizer_grad_norm_fused(max_norm, norm_type)
        else:
            params = amp.master_params(self.optimizer) if by == "master_params" else self.model.parameters()
            self.norm = clip_with_torch(params, max_norm, norm_type)

    def write_model(self, idiom, which, change):
        for some in of_one_dtype(which):
            write([self.params[i] for i in some], idiom, change)

    def write_float32(self, how, idiom, which, change):
        if how == "loop":
            chosen = {id(self.params[i]) for i in which}
            for p in amp.master_params(self.optimizer):
                if id(p) in chosen:
                    write([p], idiom, change)
        else:
            with amp.float32_params(self.optimizer):
                self.write_model(idiom, which, change)


# Comparing


def run(config, operations):
    """Run a program on both, and compare.

    Raises:
        Difference: They differ, or amp has warned of something.
    """
    torch.manual_seed(0)
    try:
        ours, truth = Amp(config), Truth(config)
        for n, (name, *arguments) in enumerate(operations):
            try:
                run_both(ours, truth, name, arguments)
            except Difference as error:
                raise Difference(f"operation {n}, {(name, *arguments)}: {error}") from error.__cause__
    finally:
        amp.shutdown()


def run_both(ours, truth, name, arguments):
    if name == "clip":
        by, norm_type, halves = arguments
        norm_type = torch.inf if ours.config.level == "O3" else norm_type
        arguments = by, norm_type, truth.max_norm(norm_type, halves)
    getattr(truth, name)(*arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            getattr(ours, name)(*arguments)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise Difference(f"raised {error!r}") from error
    said = [str(warning.message) for warning in caught]
    said = [text for text in said if not any(part in text for part in EXPECTED)]
    require(not said, f"warned: {said}")
    if name == "clip":
        norms = ours.norm.cpu().float(), truth.norm.cpu().float()
        require(torch.allclose(*norms, equal_nan=True), f"norm: {ours.norm}, not {truth.norm}")
    if name == "save":
        compare_saved(ours, truth)
    compare_at_step(ours, truth)
    compare(ours, truth)


def compare(ours, truth):
    for i, p in enumerate(ours.params):
        low, q, bound = truth.low[i], truth.params[i].detach(), truth.bound[i]
        found = p.detach().to(low.device)
        require(found.dtype == low.dtype, f"parameter {i} is {found.dtype}")
        if bound.any():
            close = is_within(found, q, bound + half_ulp(found)) & (same_elements(found, low) | (bound > 0))
            require(close.all(), f"parameter {i}: {show(found)}, not {show(q)}, within {show(bound)}")
            truth.low[i] = found.clone()
        else:
            close = same(found, low) or (ours.config.remainders and is_tie(found, q, low))
            require(close, f"parameter {i}: {show(found)}, not {show(low)}")


def same_elements(found, low):
    return (found == low) | (found.isnan() & low.isnan())


def is_within(found, q, bound):
    """With what float32 arithmetic rounds of values that are not exact."""
    return (found.float() - q.float()).abs() <= bound + 2.0**-20 * q.float().abs() * (bound > 0)


def compare_saved(ours, truth):
    """State dicts of the model and, where the optimizer's have float32 values, these."""
    bounds = dict(zip(truth.names(), truth.bound, strict=True))
    for name, value in ours.shown.items():
        wanted, found = truth.shown[name], value.to(truth.shown[name].device)
        bound = bounds.get(name, torch.zeros(()))
        close = is_within(found, wanted, bound).all() if bound.any() else same(found, wanted)
        require(close, f"saved: {name}: {show(found)}, not {show(wanted)}, within {show(bound)}")
    order = [*TRAINED[::2], *TRAINED[1::2]]
    for index, entry in ours.optimizer.state_dict()["state"].items():
        if "master_param" in entry and ours.has_float32(order[index]):
            q, bound, found = truth.params[order[index]], truth.bound[order[index]], entry["master_param"]
            close = is_within(found, q, bound).all() if bound.any() else same(found, q)
            require(close, f"saved: master_param of {order[index]}: {show(found)}, not {show(q)}")


def compare_at_step(ours, truth):
    """What hooks before the step have seen."""
    require(len(ours.at_step) == len(truth.at_step), "the hook has run in one")
    for seen, wanted in zip(ours.at_step, truth.at_step, strict=True):
        for a, b in zip(seen, wanted, strict=True):
            require(same(a, b), f"the hook has seen: {show(a)}, not {show(b)}")
    ours.at_step, truth.at_step = [], []


# Drawing

WRITES = ("model", "float32", "gradients", "buffers")


def draw_config(draw, level, writes):
    how = draw.choice(["torch", "combine_grad", "fused", "fused", "fused", "float32"])
    exact_in_half = level == "O3"
    return Config(
        level,
        "sgd" if exact_in_half else draw.choice(["sgd", "sgd", "adam"]),
        how,
        fuse_unscale=draw.random() < (0.4 if how in ("fused", "float32") else 0.15),
        scale=draw.choice(["dynamic", "dynamic", 1.0, 16.0]),
        momentum=0.0 if exact_in_half else draw.choice([0.0, 0.5]),
        weight_decay=0.0 if exact_in_half else draw.choice([0.0, 2.0**-4]),
        hook=draw.random() < 0.15,
        thirds="buffers" in writes,
    )


def draw_write(draw, config, writes, has_grads):
    """An operation that writes, or None where there is nothing to be written."""
    kind, idiom = draw.choice(writes), draw.choice(DRAWN)
    change = draw.choice(list(CHANGES))
    if kind == "buffers":
        name = draw.choice(["exact", "third"])
        if draw.random() < 0.2:
            return ("assign_buffer", name, change)
        return ("write_buffer", name, idiom if idiom not in CONTIGUOUS else "no_grad", change)
    if kind == "model" and config.counted_only and idiom in UNCOUNTED:
        idiom = "no_grad"
    of = range(PARAMS) if kind == "model" else TRAINED
    whole = tuple(i for i in of if i != TRANSPOSED or idiom not in CONTIGUOUS)
    which = whole if idiom in ("vector", "foreach") else tuple(draw.sample(whole, draw.choice([1, 1, 2])))
    if kind == "model" and draw.random() < 0.1:
        return ("load", which)
    if kind == "float32":
        return ("write_float32", draw.choice(["context", "loop"]), idiom, which, change)
    if kind == "gradients":
        if not has_grads:
            return None
        how = draw.choice(["assign", "assign float32", *(name for name in DRAWN if name not in CONTIGUOUS)])
        if config.fuse_unscale:  # what is assigned would have to be scaled, and what is not linear sees it scaled
            how, change = ("no_grad" if how.startswith("assign") else how), draw.choice(["halve", "negate"])
        return ("write_grads", how, which, change)
    return ("write_model", idiom, which, change)


def draw_reached(draw):
    everything = tuple(range(PARAMS))
    if draw.random() < 0.6:
        return everything
    return tuple(sorted({FROZEN, *draw.sample(TRAINED, draw.randint(1, len(TRAINED)))}))


def draw_operations(draw, config, writes):
    operations = []

    def maybe_write(probability, has_grads=False):
        operation = draw_write(draw, config, writes, has_grads) if draw.random() < probability else None
        if operation is not None:
            operations.append(operation)

    for _ in range(draw.randint(2, 5)):
        maybe_write(0.4)
        if draw.random() < 0.2:
            operations.append(("forward",))
            maybe_write(0.2)
        if "gradients" in writes and draw.random() < 0.1:
            operations.append(("backward", 1.0, draw_reached(draw)))
        for _ in range(draw.choice([1, 1, 1, 2])):
            overflows = config.scale == "dynamic" and draw.random() < 0.1
            factor = draw.choice([torch.inf, torch.nan] if overflows else [1.0, 32.0, -32.0])
            operations.append(("block", factor, draw_reached(draw)))
            maybe_write(0.3, not overflows)
        if draw.random() < 0.2:
            by = "fused" if config.fuse_unscale else draw.choice(["fused", "master_params", "model"])
            operations.append(("clip", by, draw.choice([1.0, 2.0, torch.inf]), draw.random() < 0.5))
            maybe_write(0.2)
        operations.append(("step", "gradients" not in writes or draw.random() < 0.7))
        maybe_write(0.4)
        if draw.random() < 0.25:
            operations.append(("save",))
    return [*operations, ("save",), ("block", 1.0, tuple(range(PARAMS))), ("step", True), ("save",)]


def program(seed, level, writes):
    draw = random.Random(f"{seed} {level} {writes}")
    writes = WRITES if writes == "all" else (writes,)
    config = draw_config(draw, level, writes)
    return config, draw_operations(draw, config, writes)


failure = failure_of(run)


def describe(seed, level, writes):
    """None, or a program that fails and how."""
    config, operations = program(seed, level, writes)
    if failure(config, operations) is None:
        return None
    operations = minimise(config, operations, failure)
    return text_of(seed, failure(config, operations), config, operations)


def main():
    parser = argparse.ArgumentParser(description="Compare random programs that write weights with plain torch.")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--level", choices=LEVELS, nargs="*", default=LEVELS)
    parser.add_argument("--writes", choices=[*WRITES, "all"], default="all")
    parser.add_argument("--stop-after", type=int, default=5, help="this many differences")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for level in arguments.level:
        found = 0
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.programs):
            text = describe(seed, level, arguments.writes)
            if text is not None:
                found += 1
                print(text, flush=True)
            if found >= arguments.stop_after:
                break
        print(f"{level}: {seed + 1 - arguments.first_seed} programs, {found} differ", flush=True)


if __name__ == "__main__":
    main()
