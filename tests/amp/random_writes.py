# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random programs that write weights, masters, gradients and buffers, compared with plain torch after each operation.

In the program of plain torch, ``Truth``, a parameter and its master are one float32 tensor. A write to the model finds
it rounded, and where that changes, the tensor has what was written; a write to the master is one to the tensor. amp's
program has to have this in the model, rounded, from the next forward on, in the masters from the next step on, and in
``state_dict()`` always. Else an error or a warning has named the write, and nothing is known of what follows.

    PYTHONPATH=tests python -m amp.random_writes --programs 1000 [--level O2] [--writes model] [--first-seed 0]

prints what differs, with as few operations as reproduce it, and how many programs have ended by an error or a warning.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import warnings
from dataclasses import dataclass

import torch
from amp.plain_amp import INITIAL_SCALE, MAX_SCALE, WINDOW, PlainAmp, clip_with_torch
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
    grads_of,
    minimise,
    require,
    same,
    show,
    text_of,
)
from devices import DEVICE, VENDOR, synchronize
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from apex_npu import amp, optimizers

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
TRANSPOSED = 3  # which parameters_to_vector does not take
FROZEN = 0  # has no gradient, and is in no group
TRAINED = tuple(i for i in range(PARAMS) if i != FROZEN)
# What a warning or an error has to say of a write that does not count.
NAMES_IT = re.compile(r"written|writes|overwrit|scale_loss")


@dataclass(frozen=True)
class Config:
    level: str
    rule: str
    how: str
    fuse_unscale: bool
    scale: float | str
    momentum: float
    weight_decay: float
    hook: bool
    thirds: bool  # a buffer and a frozen parameter have values that half precision does not hold


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
    "other address": lambda ps, change: [setattr(p, "data", changed(p, change)) for p in ps],
    "vector": lambda ps, change: vector_to_parameters(changed(parameters_to_vector(ps), change), ps),
    "numpy": lambda ps, change: [change(unseen(p)) for p in ps],
}

# What programs draw. torch_npu's operators on lists count no writes; and what a step has found there of writes that are
# not counted arrives at no certain time.
DRAWN = [name for name in IDIOMS if not VENDOR or name not in ("foreach", "data", "numpy")]

# Those that autograd's version counters do not count, at the same address.
UNCOUNTED = ("data", "numpy")


def unseen(p):
    """The same memory, of which torch does not know that it is."""
    if p.device.type != "cpu":
        return p.data
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[p.element_size()]
    return torch.from_numpy(p.detach().view(bits).numpy()).view(p.dtype)


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
    """What a program does, with amp or in plain torch; everything that is the same for both.

    Attributes:
        late: What may still be without the last writes: "model" until a forward, "masters" until a step.
    """

    device = DEVICE

    def __init__(self, config):
        self.config, self.model = config, Model(self.device, config.thirds)
        self.params = self.model.in_order()
        rule = {"lr": 2.0**-5, "betas": (0.0, 0.0), "eps": 1e-30}
        if config.rule == "sgd":
            rule = {"lr": 2.0**-5, "momentum": config.momentum, "weight_decay": config.weight_decay}
        groups = [{"params": [self.params[i] for i in part]} for part in (TRAINED[::2], TRAINED[1::2])]
        self.optimizer = self.optimizer_class()(groups, **rule)
        self.late, self.norm, self.at_step, self.shown = set(), None, [], None
        self.start()
        if config.hook:
            self.optimizer.register_step_pre_hook(lambda optimizer, *_: self.at_step.append(grads_of(optimizer)))

    def has_master(self, i):
        return self.config.level in WITH_MASTERS and i not in BATCH_NORM

    def stepped(self, i):
        """What the optimizer steps for parameter ``i``: itself, or its master."""
        if i == FROZEN:
            return self.params[i]
        order = [*TRAINED[::2], *TRAINED[1::2]]
        return self.all_stepped()[order.index(i)]

    def all_stepped(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

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
        self.late.discard("model")

    def block(self, factor, reached):
        self.scale_loss(self.loss(factor, reached))
        self.late.discard("model")

    def backward(self, factor, reached):
        """Outside of a block."""
        self.loss(factor, reached).backward()
        self.late.discard("model")

    def step(self, set_to_none):
        """And zero_grad, since a step clears the gradients of masters alone."""
        if self.step_optimizer():
            self.late.clear()
        self.zero_grad(set_to_none)

    def write_grads(self, side, how, which, change):
        for i in which:
            p = self.params[i] if side == "model" else self.stepped(i)
            if how == "assign" and p.requires_grad:
                p.grad = torch.full_like(p, 1.0) if p.grad is None else changed(p.grad, CHANGES[change])
            elif p.grad is not None and how != "assign":
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
        written: What has been written to the model since the last step, or since the last block where that is counted,
            as the model has it.
        uncounted: Which of these by idioms alone that are not counted.
        kept: What buffers and the frozen parameter were before they were cast.
    """

    device = PLAIN_DEVICE

    def optimizer_class(self):
        return torch.optim.SGD if self.config.rule == "sgd" else torch.optim.Adam

    def start(self):
        self.written, self.uncounted = {}, set()
        self.kept = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        if self.config.level == "O3":
            self.model.half()
        leaves_open = self.config.fuse_unscale
        self.amp = PlainAmp([self.optimizer], self.config.scale, 1, False, lambda p: False, leaves_open)

    def scale_loss(self, loss):
        self.amp.begin([0])
        self.amp.backward([0], loss, fails=False)
        self.amp.end([0], 0, None)

    def block(self, factor, reached):
        super().block(factor, reached)
        self.merge(*self.trained() - self.uncounted)

    def step_optimizer(self):
        self.merge(*self.trained())
        self.amp.step(0)
        return self.amp.applied[0]

    def zero_grad(self, set_to_none):
        self.amp.zero_grad(0, set_to_none)

    def clip(self, by, norm_type, max_norm):
        self.norm = self.amp.clip(0, max_norm, norm_type)

    def max_norm(self, norm_type, halves):
        return Plain.max_norm(self, 0, norm_type, halves)

    @torch.no_grad()
    def write_model(self, idiom, which, change):
        for some in of_one_dtype(which):
            after = [nn.Parameter(self.in_model(i).clone()) for i in some]
            write(after, idiom, change)
            new = [i for i in some if i not in self.written]
            self.written.update(zip(some, (p.detach() for p in after), strict=True))
            self.uncounted = self.uncounted.union(new) if idiom in UNCOUNTED else self.uncounted.difference(some)
        self.merge(*(i for i in self.written if not self.has_master(i)))
        self.late.add("masters")

    def trained(self):
        """Those that have been written and are trained: the frozen one has what was kept where it rounds to that."""
        return self.written.keys() - {FROZEN}

    def in_model(self, i):
        """What the model has for parameter ``i``."""
        low = None if i in BATCH_NORM else LOW.get(self.config.level)
        q = self.params[i].detach()
        return self.written.get(i, q if low is None else q.to(low))

    def value(self, i):
        """Both, as one."""
        now, q = self.in_model(i), self.params[i].detach()
        return torch.where(now == q.to(now.dtype), q, now.to(q.dtype))

    @torch.no_grad()
    def merge(self, *which):
        for i in which:
            self.params[i].copy_(self.value(i))
            del self.written[i]

    def write_masters(self, idiom, which, change):
        self.merge(*self.trained())
        write([self.params[i] for i in which], idiom, change)
        self.late.add("model")

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
        for i in which:
            self.written.pop(i, None)
        super().load(which)

    def save(self):
        super().save()
        self.shown.update({self.names()[i]: self.value(i) for i in self.written})


class Amp(Script):
    """With amp."""

    def optimizer_class(self):
        if self.config.how == "fused":
            return optimizers.NpuFusedSGD if self.config.rule == "sgd" else optimizers.NpuFusedAdam
        return torch.optim.SGD if self.config.rule == "sgd" else torch.optim.Adam

    def start(self):
        amp.initialize(
            self.model,
            self.optimizer,
            opt_level=self.config.level,
            loss_scale=self.config.scale,
            dynamic_init_scale=INITIAL_SCALE,
            scale_window=WINDOW,
            max_loss_scale=MAX_SCALE,
            verbosity=0,
            skip_alarm=None,
            combine_grad=self.config.how == "combine_grad",
            fuse_unscale=self.config.fuse_unscale,
        )

    def scale_loss(self, loss):
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def step_optimizer(self):
        self.optimizer.step()
        synchronize()
        return amp.last_step(self.optimizer).applied

    def zero_grad(self, set_to_none):
        self.optimizer.zero_grad(set_to_none)

    def clip(self, by, norm_type, max_norm):
        if by == "fused":
            self.norm = self.optimizer.clip_optimizer_grad_norm_fused(max_norm, norm_type)
        else:
            self.norm = clip_with_torch(amp.master_params(self.optimizer), max_norm, norm_type)

    def write_model(self, idiom, which, change):
        for some in of_one_dtype(which):
            write([self.params[i] for i in some], idiom, change)

    def write_masters(self, idiom, which, change):
        write([self.stepped(i) for i in which], idiom, change)


# Comparing


def run(config, operations):
    """Run a program on both, and compare.

    Returns:
        The error or the warning by which it has ended, if any.

    Raises:
        Difference: They differ, and nothing has said so.
    """
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, truth = Amp(config), Truth(config)
            for n, (name, *arguments) in enumerate(operations):
                try:
                    said = run_both(ours, truth, name, arguments)
                except Difference as error:
                    said = is_named_later(ours, name == "step")
                    if said is None:
                        raise Difference(f"operation {n}, {(name, *arguments)}: {error}") from error.__cause__
                if said is not None:
                    return said
    finally:
        amp.shutdown()
    return None


def is_named_later(ours, is_step):
    """What the next step that is not skipped says of a difference that has been found before it or in it, if anything.

    On an accelerator it is the step after it, since the host does not wait for what has been found.
    """
    steps = (0 if is_step else 1) + (0 if DEVICE.type == "cpu" else 1)
    for name, *arguments in 6 * [("block", 1.0, tuple(range(PARAMS))), ("step", True)]:
        if steps:
            error, caught = run_operation(ours, name, arguments)
            texts = [*caught, str(error)]
            said = [text for text in texts if NAMES_IT.search(text)]
            if said:
                return said[0]
            steps -= name == "step" and amp.last_step(ours.optimizer).applied
    return None


def run_both(ours, truth, name, arguments):
    if name == "clip":
        by, norm_type, halves = arguments
        norm_type = torch.inf if ours.config.level == "O3" else norm_type
        arguments = by, norm_type, truth.max_norm(norm_type, halves)
    getattr(truth, name)(*arguments)
    error, caught = run_operation(ours, name, arguments)
    said = [text for text in [*caught, str(error)] if NAMES_IT.search(text)]
    if said:
        return said[0]
    if error is not None:
        raise Difference(f"raised {error!r}") from error
    if name == "clip":
        norms = ours.norm.cpu().float(), truth.norm.cpu().float()
        require(torch.allclose(*norms, equal_nan=True), f"norm: {ours.norm}, not {truth.norm}")
    if name == "save":
        compare_shown(ours, truth)
    compare_at_step(ours, truth)
    compare(ours, truth)
    return None


def run_operation(script, name, arguments):
    """The exception that it raised, if any, and the texts of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            getattr(script, name)(*arguments)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            return error, []
    return None, [str(warning.message) for warning in caught]


def require_same(found, wanted, what):
    if not same(found, wanted):
        raise Difference(f"{what}: {show(found)}, not {show(wanted)}")


def compare(ours, truth):
    for i, p in enumerate(ours.params):
        if "model" not in truth.late:
            require_same(p, truth.in_model(i), f"weights: parameter {i}")
        if "masters" not in truth.late and i != FROZEN:
            require_same(ours.stepped(i), truth.params[i], f"masters: parameter {i}")


def compare_shown(ours, truth):
    for name, value in ours.shown.items():
        require_same(value, truth.shown[name], f"saved: {name}")


def compare_at_step(ours, truth):
    """What hooks before the step have seen."""
    require(len(ours.at_step) == len(truth.at_step), "the hook has run in one")
    for seen, wanted in zip(ours.at_step, truth.at_step, strict=True):
        for a, b in zip(seen, wanted, strict=True):
            require_same(a, b, "the hook has seen")
    ours.at_step, truth.at_step = [], []


# Drawing

WRITES = ("model", "masters", "gradients", "buffers")


def draw_config(draw, level, writes):
    how = draw.choice(["torch", "combine_grad", "fused", "fused"])
    exact_in_half = level == "O3"
    return Config(
        level,
        "sgd" if exact_in_half else draw.choice(["sgd", "sgd", "adam"]),
        how,
        fuse_unscale=draw.random() < (0.4 if how == "fused" else 0.15),
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
        return ("write_buffer", name, idiom if idiom != "vector" else "no_grad", change)
    of = range(PARAMS) if kind == "model" else TRAINED
    whole = tuple(i for i in of if i != TRANSPOSED or idiom != "vector")
    which = whole if idiom in ("vector", "foreach") else tuple(draw.sample(of, draw.choice([1, 1, 2])))
    if kind == "model" and draw.random() < 0.1:
        return ("load", which)
    if kind == "gradients":
        if not has_grads:
            return None
        side, how = draw.choice(["model", "master"]), draw.choice(["assign", "no_grad", "copy", "view", "foreach"])
        how = how if how in ("assign", *DRAWN) else "copy"
        if config.fuse_unscale:  # what is assigned would have to be scaled, and what is not linear sees it scaled
            how, change = ("no_grad" if how == "assign" else how), draw.choice(["halve", "negate"])
        return ("write_grads", side, how, which, change)
    return (f"write_{kind}", idiom, which, change)


def draw_reached(draw):
    everything = tuple(range(PARAMS))
    if draw.random() < 0.6:
        return everything
    return tuple(sorted({FROZEN, *draw.sample(TRAINED, draw.randint(1, len(TRAINED)))}))


def since_step(operations):
    """Those after the last step that is not skipped."""
    since, overflowed = [], False
    for operation in operations:
        overflowed |= operation[0] == "block" and not math.isfinite(operation[1])
        since.append(operation)
        if operation[0] == "step":
            since, overflowed = (since if overflowed else []), False
    return since


def is_unseen(operations, operation):
    """Whether it is one of the writes of which docs/amp.md says that an accelerator does not see them.

    One of a pair is written in a way that is not counted, and the other in one that is.
    """
    sides = {"write_model", "write_masters"}
    begun = any(name == "block" for name, *_ in operations)
    for other in since_step(operations):
        if {other[0], operation[0]} == sides and set(other[2]) & set(operation[2]):
            uncounted = {side for side, idiom, *_ in (other, operation) if idiom in UNCOUNTED}
            if uncounted == {"write_model"} or (begun and uncounted == {"write_masters"}):
                return True
    return False


def is_written_alike(operations, operation):
    """Whether it does to the model what has been done to masters, before the model has got that.

    Both then agree, and have what was written once; the one tensor of plain torch has it twice.
    """
    if operation[0] != "write_model":
        return False
    names = [name for name, *_ in operations]
    since = max((i for i, name in enumerate(names) if name in ("forward", "block", "backward", "save")), default=-1) + 1
    return any(
        name == "write_masters" and change == operation[3] and set(which) & set(operation[2])
        for name, _, which, change in [(*o, None, None, None)[:4] for o in operations[since:]]
    )


def draw_operations(draw, config, writes):
    operations = []

    def maybe_write(probability, has_grads=False):
        operation = draw_write(draw, config, writes, has_grads) if draw.random() < probability else None
        if operation is None or (DEVICE.type != "cpu" and is_unseen(operations, operation)):
            return
        if config.level not in WITH_MASTERS or not is_written_alike(operations, operation):
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
            by = "fused" if config.fuse_unscale else draw.choice(["fused", "torch"])
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


def failure(config, operations):
    """What differs in silence, or None."""
    try:
        run(config, operations)
    except Exception as error:
        return error
    return None


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
        found, ended = 0, 0
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.programs):
            config, operations = program(seed, level, arguments.writes)
            try:
                ended += run(config, operations) is not None
            except Exception:
                found += 1
                print(describe(seed, level, arguments.writes), flush=True)
            if found >= arguments.stop_after:
                break
        print(f"{level}: {seed + 1 - arguments.first_seed} programs, {found} differ, {ended} are named", flush=True)


if __name__ == "__main__":
    main()
