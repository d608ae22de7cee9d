# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ctrl-C in any call of a small program, which then goes on: as if the interrupted action had been taken, or had not.

The reference is the same program without an interrupt, with and without that action.
"""

import copy
import functools
import itertools
import math
import random
from contextlib import nullcontext

import pytest
import torch
from covering import on_one_device
from devices import DEVICE
from interrupting import Interrupt
from small_programs import KINDS, LEVELS, WITH_MASTERS, Weights, values, vector

from apex_npu import amp, optimizers

pytestmark = [
    pytest.mark.host,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # interrupts in generators' close()
    pytest.mark.filterwarnings("ignore:.*none of its parameters has a gradient:RuntimeWarning"),
]
X = (1.0, 2.0, -4.0)
NEVER = 1 << 60
KINDS_AND_ADAM = {**KINDS, "adam": (optimizers.NpuFusedAdam, {"fuse_unscale": True})}  # which counts its steps
# Functions that amp patches, at one level or another.
PATCHABLE = (
    (torch.nn.utils, "clip_grad_norm_"),
    (torch.nn.utils.clip_grad, "clip_grad_value_"),
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.function.BackwardCFunction, "__init__"),
    (torch.autograd.function.BackwardCFunction, "apply"),
    (torch.nn.parallel.DistributedDataParallel, "__setstate__"),
    (torch.nn.functional, "interpolate"),
    (torch.nn.functional, "binary_cross_entropy"),
    (torch.Tensor, "cpu"),
    (torch.Tensor, "__ipow__"),
)


class Net(Weights):
    """Notes the dtypes of what comes in, and of what a product in its forward gives."""

    def __init__(self, *values):
        super().__init__(*values)
        self.inner = torch.nn.Linear(1, 1, device=DEVICE).requires_grad_(False)

    def forward(self, x, only=None):
        one = torch.ones(1, 1, dtype=x.dtype, device=DEVICE)
        self.dtypes = x.dtype, torch.mm(one, one).dtype
        return super().forward(x, only)


class Program:
    """A model, its optimizer, and what a script does with them: ``ACTIONS``, in this order."""

    TRAIN = ("backward", "step", "clear")
    ACTIONS = (
        ("initialize",),
        TRAIN,
        TRAIN,
        ("overflow", "step", "clear"),
        ("add_group",),
        TRAIN,
        ("unfreeze",),
        TRAIN,
        ("load_optimizer",),
        ("load_model",),
        ("load_scaler",),
        ("accumulate", *TRAIN),
        ("backward", "clip", "step", "clear"),
        TRAIN,
    )

    def __init__(self, level, kind):
        self.level, (cls, self.options) = level, KINDS_AND_ADAM[kind]
        self.model = Net(8, 16, 32, 64)
        self.model.w[1].requires_grad_(False)
        self.model.w[3].requires_grad_(False)
        groups = [{"params": [self.model.w[0], self.model.w[1]]}, {"params": [self.model.w[2]]}]
        hyper = {} if cls is optimizers.NpuFusedAdam else {"momentum": 0.5}
        self.optimizer = cls(groups, lr=1.0, **hyper)

    @property
    def is_initialized(self):
        return hasattr(self.optimizer, "_amp_state")

    def initialize(self):
        amp.initialize(
            self.model,
            self.optimizer,
            opt_level=self.level,
            verbosity=0,
            loss_scale=1.0 if self.level == "O0" else "dynamic",
            dynamic_init_scale=64.0,
            scale_window=3,
            **self.options,
        )

    def backward(self, factor=1.0, **options):
        loss = self.model(vector(*X) * factor)
        with amp.scale_loss(loss, self.optimizer, **options) as scaled_loss:
            scaled_loss.backward()

    def step(self):
        self.optimizer.step()

    def clear(self):
        self.optimizer.zero_grad()

    def overflow(self):
        self.backward(1.0 if self.level == "O0" else math.inf)

    def accumulate(self):
        self.backward(delay_unscale=True)

    def clip(self):
        self.optimizer.clip_optimizer_grad_norm_fused(1.0)

    def add_group(self):
        self.model.w[3].requires_grad_(True)
        self.optimizer.add_param_group({"params": [self.model.w[3]], "lr": 0.5})

    def unfreeze(self):
        self.model.w[1].requires_grad_(True)

    def load_optimizer(self):
        saved = self.saved_optimizer = copy.deepcopy(self.optimizer.state_dict())
        for state in saved["state"].values():
            for value in state.values():
                value += 2.0
        self.optimizer.load_state_dict(saved)

    def load_model(self):
        saved = copy.deepcopy(self.model.state_dict())
        for value in saved.values():
            value += 0.25
        self.model.load_state_dict(saved)

    def load_scaler(self):
        saved = amp.state_dict()
        for state in saved.values():
            state["unskipped"] += 1
        amp.load_state_dict(saved)

    def go_on(self, interrupted):
        """Clear the gradients, as loops do; and do what a script cannot go on without."""
        if interrupted == "initialize" and not self.is_initialized:
            self.initialize()
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def result(self):
        """What has been trained, and how amp goes on, by name."""
        grouped = {id(p): (i, p) for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        with amp.float32_params(self.optimizer) if self.is_initialized else nullcontext():
            exact = [p.detach().clone() for p in self.model.w]
        found = {}
        for k, param in enumerate(self.model.w):
            state = {n: v for n, v in self.optimizer.state.get(param, {}).items() if n != "master_param"}
            shown = {"param": param, "value": exact[k], **state}
            group = grouped.get(id(param), (None,))[0]
            # Five digits: the last bit of a norm over several arenas depends on what was fused together, and an action
            # that was interrupted may have fused what it would not have without.
            digits = [
                (name, t.dtype, [f"{v:.5g}" for v in values([t])[0].flatten().tolist()]) for name, t in shown.items()
            ]
            found[f"w[{k}]"] = str((group, digits))
            if group is not None:
                found[f"grad of w[{k}]"] = str(param.grad)
        self.model(vector(*X))
        found["dtypes"] = str((*self.model.dtypes, torch.mm(*[torch.ones(1, 1, device=DEVICE)] * 2).dtype))
        found["inner"] = self.inner_dtype()
        found["scaler"] = str(amp.state_dict())
        found["skips"] = str(amp.last_step(self.optimizer).skipped_steps)
        found["grad mode"] = str(torch.is_grad_enabled())
        return found

    def inner_dtype(self):
        try:
            return str(self.model.inner(torch.ones(1, 1, device=DEVICE)).dtype)
        except RuntimeError as error:
            return str(error)


def after_shutdown(program):
    program.model(vector(*X).to(program.model.w[0].dtype))
    hooks = [len(m._forward_pre_hooks) + len(m._state_dict_hooks) for m in program.model.modules()]
    return {
        "autocast": str(torch.is_autocast_enabled(DEVICE.type)),
        "cache": str(torch.is_autocast_cache_enabled()),
        "patched": str([getattr(owner, name) is f for (owner, name), f in zip(PATCHABLE, ORIGINALS, strict=True)]),
        "dtypes then": str(program.model.dtypes),
        "hooks": str(hooks),
    }


ORIGINALS = [getattr(owner, name) for owner, name in PATCHABLE]


def run(level, kind, *, cut=(-1, 0), interrupt=None, within=None):
    """What comes of a program.

    Args:
        level: Of amp.
        kind: Of optimizer.
        cut: The index of an action, and how many of its parts are run.
        interrupt: Raises KeyboardInterrupt somewhere.
        within: In this part alone; None: in any.

    Returns:
        The action that was interrupted and its part, -1 and 0 without an interrupt, and the results.
    """
    program = Program(level, kind)
    at = (-1, 0)

    def interrupted(part):
        return nullcontext() if interrupt is None or within not in (None, part) else interrupt

    try:
        for i, parts in enumerate(Program.ACTIONS):
            for j, part in enumerate(parts):
                if (i, j) == cut:
                    program.go_on(part)
                    break
                ended = False
                with interrupted(part):
                    getattr(program, part)()
                    ended = True
                if not ended:
                    at = (i, j)
                    program.go_on(part)
                    break
        found = program.result()
        amp.shutdown()
        return at, {**found, **after_shutdown(program)}
    finally:
        amp.shutdown()
        torch.set_autocast_enabled(DEVICE.type, False)
        torch.set_autocast_cache_enabled(True)
        torch.set_grad_enabled(True)


@functools.cache
def reference(level, kind, *cut):
    return run(level, kind, cut=cut)[1]


def assert_old_or_new(level, kind, n, caplog, within=None, files=()):
    """A program that is interrupted in the ``n``-th call.

    In the middle of an update a parameter may be neither, which is logged.
    """
    caplog.clear()
    (i, j), found = run(level, kind, interrupt=(interrupt := Interrupt(n, *files)), within=within)
    right = [reference(level, kind, -1, 0)]
    part = Program.ACTIONS[i][j]
    if part != "initialize":  # which is completed
        # The action has not been taken at all (a step may be what moves the scale of its block), or all but this part.
        right += [reference(level, kind, i, 0), reference(level, kind, i, j)]
        right[0] = reference(level, kind, i, j + 1) if j + 1 < len(Program.ACTIONS[i]) else right[0]
    at = f"{part}, interrupted at {interrupt.at}"
    # A model is loaded parameter by parameter, the low bits of each last, and an optimizer's values before its state.
    if part in ("load_model", "load_optimizer") or (part == "step" and "this step cannot be repeated" in caplog.text):
        differing = {name for name, value in found.items() if value not in [one[name] for one in right]}
        assert differing <= {f"w[{k}]" for k in range(4)}, at
    else:
        assert found in right, at


def assert_anywhere(level, kind, count, caplog, within=None, files=()):
    """In ``count`` calls, of these files of the package, or of any."""
    run(level, kind, interrupt=(interrupt := Interrupt(NEVER, *files)), within=within)
    assert interrupt.count, "there was nothing to interrupt"
    calls = range(1, interrupt.count + 1)
    for n in random.Random(" ".join(map(str, (level, kind, within, *files)))).sample(calls, min(count, len(calls))):
        assert_old_or_new(level, kind, n, caplog, within, files)


@pytest.mark.parametrize(("level", "kind"), [("O1", "torch"), ("O2", "fused"), ("O2", "fuse_unscale")])
def test_goes_on_as_if_taken_or_not(level, kind, caplog):
    assert_anywhere(level, kind, 5, caplog)


# Parts that an interrupt anywhere hits rarely.
@pytest.mark.parametrize("part", ["initialize", "add_group", "load_optimizer", "load_model"])
def test_every_part_is_taken_or_not(part, caplog):
    assert_anywhere("O2", "fused", 5, caplog, part)


# Files of which the same holds: what fuses, opens a block, casts.
FILES = (
    *(("O2", "fused", "fused_params.py"), ("O2", "combine_grad", "flat_buffer.py"), ("O2", "torch", "block.py")),
    *(("O2", "torch", "optimizer_state.py"), ("O2", "torch", "forward_cast.py"), ("O1", "torch", "casting.py")),
)


@pytest.mark.parametrize(("level", "kind", "file"), FILES)
def test_every_part_is_taken_or_not_in_a_file(level, kind, file, caplog):
    assert_anywhere(level, kind, 4, caplog, files=(file,))


def test_an_interrupted_step_keeps_the_low_bits_of_float32_values():
    """An interrupt of ``Float32Masters``: the values are those before the step, or after it."""
    before, step, found = 1.0 + 2.0**-14, 2.0**-16, []
    while not found or found[-1] is not None:
        model = Weights(before)
        optimizer = torch.optim.SGD(model.parameters(), lr=step)
        amp.initialize(model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
        with amp.scale_loss(model(torch.ones(3, device=DEVICE)), optimizer) as scaled_loss:
            scaled_loss.backward()
        with Interrupt(len(found) + 1, "float32_masters.py") as interrupt:
            optimizer.step()
        assert set(model.state_dict()["w.0"].tolist()) in ({before}, {before - step}), interrupt.at
        found.append(interrupt.at)
        amp.shutdown()
    assert any(at is not None and at[1] == "stepping" for at in found)


def test_one_optimizer_steps_a_model_that_is_initialized_again():
    """After an interrupt of the second ``initialize``: either the first, or the second, which has retired it."""
    found = []
    while not found or found[-1][0] is not None:
        model = Weights(10.0)
        first, second = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
        amp.initialize(model, first, opt_level="O2", loss_scale=64.0, verbosity=0)
        with Interrupt(len(found) + 1, "optimizer_state.py") as interrupt:
            amp.initialize(model, second, opt_level="O2", loss_scale=64.0, verbosity=0)
        taken = hasattr(second, "_amp_state")
        stepping = second if taken else first
        with amp.scale_loss(model(vector(*X)), stepping) as scaled_loss:
            scaled_loss.backward()
        stepping.step()
        if taken:
            with pytest.raises(RuntimeError, match="no model has any more"):
                first.step()
        found.append((interrupt.at, first._amp_state.masters.retired == taken, values(model.w)[0].tolist()))
        amp.shutdown()
    assert len(found) > 5
    assert [one for one in found if one[1:] != (True, [10.0 - x for x in X])] == []


@pytest.mark.parametrize("apart", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_restored_model_is_restored_completely(apart):
    """An interrupt of ``shutdown``, wherever a model becomes float32; the next ``shutdown`` completes it."""
    found = []
    while not found or found[-1][0] is not None:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1)).to(DEVICE)
        amp.initialize(model, opt_level="O2", verbosity=0)
        with Interrupt(
            apart * len(found) + 1, "float32_copies.py", "forward_cast.py", "submodule_cast.py"
        ) as interrupt:
            amp.shutdown()
        amp.shutdown()
        own = [sorted({"forward", "__reduce_ex__"} & vars(m).keys()) for m in model.modules()]
        hooks = [len(m._forward_pre_hooks) + len(m._state_dict_hooks) for m in model.modules()]
        found.append((interrupt.at, own, hooks, next(model.parameters()).dtype))
    assert len(found) > 20 / apart
    assert [one for one in found if one[1:] != ([[], []], [0, 0], torch.float32)] == []


class StopsAfter(torch.optim.SGD):
    """Its first step raises ``error`` when all parameters have been updated."""

    error = None

    def step(self, closure=None):
        super().step(closure)
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def stop_after_an_update(level, error):
    """A model and its optimizer, whose step of gradients X has ended with ``error``."""
    model = Weights(100.0)
    optimizer = StopsAfter(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    with amp.scale_loss(model(vector(*X)), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.error = error
    with pytest.raises(type(error)):
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
def test_no_gradient_is_stepped_twice_after_an_interrupt(level):
    model, optimizer = stop_after_an_update(level, KeyboardInterrupt())
    assert [p.grad for p in model.w] == [None]
    optimizer.step()
    assert [one.tolist() for one in values(model.w)] == [[100.0 - x for x in X]]
    amp.shutdown()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("of a hook")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("level", WITH_MASTERS)
def test_parameters_are_those_of_an_update_after_which_the_step_has_failed(level, error):
    model, _ = stop_after_an_update(level, error)
    assert [one.tolist() for one in values([*model.w, *model.state_dict().values()])[:2]] == [
        [100.0 - x for x in X]
    ] * 2
    amp.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["initialize", "clip", "load_scaler"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_part_is_taken_or_not_anywhere(level, part, caplog):
    assert_anywhere(level, "torch", 12, caplog, part)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "kind"), on_one_device(itertools.product(LEVELS, KINDS_AND_ADAM)))
def test_goes_on_anywhere(level, kind, caplog):
    assert_anywhere(level, kind, 6, caplog)
