# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``amp.AmpScaler`` is scale_loss, called as GradScaler is; ``masters_of`` and ``will_skip``; wrapped optimizers."""

import contextlib
import copy
import gc
import math
import warnings

import pytest
import torch
from devices import DEVICE, needs
from small_programs import KINDS, Weights, assert_values, backward, start, values, vector
from torch import nn

from apex_npu import amp, optimizers

pytestmark = pytest.mark.host

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
DYNAMIC = {"loss_scale": "dynamic", "dynamic_init_scale": 64.0, "scale_window": 3}


class Wrapper:
    """As frameworks wrap an optimizer."""

    def __init__(self, optimizer, name="optimizer"):
        setattr(self, name, optimizer)


class Delegating(Wrapper):
    """Hands all attributes on."""

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


class OptimizerByName(torch.optim.Optimizer):
    """As accelerate wraps one: an Optimizer that has never been initialised as such."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    @property
    def defaults(self):
        return self.optimizer.defaults


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(DEVICE)


def batches(steps, micro, overflow_at):
    generator = torch.Generator().manual_seed(2)
    for i in range(steps * micro):
        x = torch.randn(4, 6, generator=generator).to(DEVICE)
        yield x * math.inf if i in overflow_at else x


def by_scale_loss(model, optimizer, x, **_):
    backward(model(x).square().mean(), optimizer)


def by_scaler(model, optimizer, x, scaler):
    scaler.scale(model(x).square().mean()).backward()


def train(model, optimizer, way, steps=6, micro=2, overflow_at=(), clip=None, scaler=None):
    """What there is to see after each step."""
    seen = []
    for i, x in enumerate(batches(steps, micro, overflow_at)):
        way(model, optimizer, x, scaler=scaler)
        if i % micro < micro - 1:
            continue
        if scaler is None:
            if clip:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip)
            optimizer.step()
        else:
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(amp.masters_of(model.parameters()), clip)
            scaler.step(optimizer)
            scaler.update()
        seen.append((values(model.parameters()), values(amp.master_params(optimizer)), amp.last_step(optimizer)))
        optimizer.zero_grad()
    return seen


def assert_same(ours, theirs):
    for (params, masters, report), (other_params, other_masters, other_report) in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, params, other_params))
        assert all(map(torch.equal, masters, other_masters))
        assert report == other_report


@pytest.mark.pairwise
@needs("inf")
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_it_is_scale_loss_bit_for_bit(level, kind, clip):
    options = {"level": level, "kind": kind, "lr": 0.1, "momentum": 0.9, **DYNAMIC}
    # After a block fuse_unscale leaves gradients scaled, and after unscale_ it does not.
    of_blocks = options | {"kind": "fused"} if clip and kind == "fuse_unscale" else options
    theirs = train(*start(network(), **of_blocks), by_scale_loss, overflow_at=(2, 7), clip=clip)
    state = amp.state_dict()
    amp.shutdown()
    model, optimizer = start(network(), **options)
    scaler = amp.AmpScaler(optimizer)
    assert_same(train(model, optimizer, by_scaler, overflow_at=(2, 7), clip=clip, scaler=scaler), theirs)
    assert scaler.state_dict() == state
    assert [report.applied for *_, report in theirs] == [True, False, True, False, True, True]


@needs("inf")
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_loop_for_grad_scaler_gives_what_grad_scaler_gives(level, micro):
    """In numbers that are exact in every dtype; the scales that the loop reads are GradScaler's, too."""
    inputs = [
        [1.0, 2.0, -4.0],
        [4.0, 1.0, 2.0],
        [math.inf, 1.0, 1.0],
        [1.0, 1.0, 0.5],
        [2.0, 2.0, 2.0],
        [1.0, 2.0, 3.0],
    ]

    def run(scaler, model, optimizer):
        seen = []
        for i, x in enumerate(inputs):
            scaler.scale(model(vector(*x))).backward()
            if i % micro < micro - 1:
                continue
            seen.append(scaler.get_scale())
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(amp.masters_of(model.parameters()), 3.5)
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            seen += [before, scaler.get_scale(), before > scaler.get_scale(), *values(model.parameters())]
            optimizer.zero_grad()
        return [*seen, scaler.get_scale()]

    plain = Weights(10.0, 20.0).cpu()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "DEVICE", torch.device("cpu"))
        patch.setitem(vector.__globals__, "DEVICE", torch.device("cpu"))
        expected = run(scaler, plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    model, optimizer = start(Weights(10.0, 20.0), level=level, kind="torch", **DYNAMIC | {"scale_window": 2})
    found = run(amp.AmpScaler(optimizer), model, optimizer)
    if micro == 2:  # a block of its own each: overflows, and steps without, are counted by micro-batches
        found, expected = [[x for x in seen if isinstance(x, torch.Tensor)] for seen in (found, expected)]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@needs("inf")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_what_stands_over_step_sees_that_it_is_skipped(level, kind):
    """accelerate, Lightning and schedules of users find out so."""
    model, optimizer = start(Weights(10.0), level=level, kind=kind, **DYNAMIC)
    scaler, calls, step = amp.AmpScaler(optimizer), [], optimizer.step
    optimizer.step = lambda *args: (calls.append(args), step(*args))[1]
    for expected, factor in ((0, math.inf), (1, 1.0)):
        scaler.scale(model(vector(1.0, 2.0, 4.0)) * factor).backward()
        assert scaler.step(optimizer) is None
        scaler.update()
        assert len(calls) == expected
        assert amp.last_step(optimizer).applied == bool(expected)
        optimizer.zero_grad()
    assert_values(model.parameters(), [9.0, 8.0, 6.0])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_losses_that_are_scaled_before_one_backward_share_a_scale(level):
    """The scale grows with each block, of which there is one."""
    model, optimizer = start(Weights(10.0), level=level, **DYNAMIC | {"scale_window": 1})
    scaler = amp.AmpScaler(optimizer)
    first, second = scaler.scale((model(vector(1.0, 2.0, 4.0)), model(vector(2.0, 2.0, 2.0))))
    third = scaler.scale(model(vector(1.0, 1.0, 1.0)))
    assert scaler.get_scale() == 64.0
    scaler.state_dict()
    (first + second + third).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_values(model.parameters(), [6.0, 5.0, 3.0])
    assert scaler.get_scale() == 128.0


def test_a_loss_in_half_precision_is_scaled_in_float32():
    _, optimizer = start(Weights(10.0), level="O2", loss_scale=2.0**17)
    scaler = amp.AmpScaler(optimizer)
    losses = [torch.ones((), device=DEVICE, dtype=torch.float16, requires_grad=True) for _ in range(2)]
    for scaled in map(scaler.scale, losses):
        assert scaled.dtype == torch.float32
        assert scaled.item() == 2.0**17


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_several_optimizers_some_of_them_frozen(level):
    """The generator's loss does not touch what the discriminator has been given, be it inf, while that is frozen."""
    both = nn.ModuleList([Weights(10.0), Weights(20.0)])
    steppers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in both]
    both, (first, second) = amp.initialize(both, steppers, opt_level=level, verbosity=0, **DYNAMIC)
    scaler = amp.AmpScaler([first, second])
    for p in amp.master_params(second):
        p.requires_grad_(False)
        p.grad = torch.full_like(p, 5.0)
    scaler.scale(both[0](vector(1.0, 2.0, 4.0))).backward()
    scaler.step(first)
    scaler.update()
    assert_values([p.grad for p in amp.master_params(second)], 5.0)
    assert_values(both.parameters(), [9.0, 8.0, 6.0], 20.0)


def in_turns(models, steppers, scaler):
    """Each optimizer clears its own gradients before it has some again; the first overflows twice, the second once."""
    for turn, overflows in zip((0, 1, 1, 0, 1, 0, 1, 0), (1, 0, 0, 1, 0, 0, 1, 0), strict=True):
        steppers[turn].zero_grad()
        scaler.scale(models[turn](vector(1.0, 2.0, 4.0)) * (math.inf if overflows else 1.0)).backward()
        scaler.step(steppers[turn])
        scaler.update()
        yield [*values([p for model in models for p in model.parameters()]), scaler.get_scale()]


@needs("inf")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_of_one_of_two_optimizers_costs_the_other_no_step(level, kind):
    """Its infinite gradients are still there in the blocks of the other."""
    cls, options = KINDS[kind]
    found = []
    for under_amp in (True, False):
        models = [Weights(10.0), Weights(64.0)]
        steppers = [(cls if under_amp else torch.optim.SGD)(model.parameters(), lr=1.0) for model in models]
        if under_amp:
            models, steppers = amp.initialize(
                models, steppers, opt_level=level, verbosity=0, **options, **DYNAMIC | {"scale_window": 1000}
            )
        scaler = amp.AmpScaler(steppers) if under_amp else torch.amp.GradScaler(DEVICE.type, init_scale=64.0)
        found.append(list(in_turns(models, steppers, scaler)))
    for ours, theirs in zip(*found, strict=True):
        assert all(map(torch.equal, ours[:-1], theirs[:-1]))
        assert ours[-1] == theirs[-1]


class OwnScaler(torch.amp.GradScaler):
    """As torch_npu has one."""


@pytest.mark.pairwise
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, OwnScaler])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_grad_scaler_beside_amp_is_told_of_this(level, kind, unscale, scaler_class):
    """It trains right, but torch refuses to unscale float16 gradients."""
    model, optimizer = start(Weights(10.0), level=level, kind=kind)
    scaler = scaler_class(DEVICE.type, init_scale=64.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        supports = getattr(optimizer, "_step_supports_amp_scaling", False)  # as frameworks ask
    scaler.scale(model(vector(1.0, 2.0, 4.0)).float()).backward()
    if level == "O2":
        with (
            pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"),
            contextlib.nullcontext() if unscale else pytest.warns(RuntimeWarning, match=r"use .*AmpScaler"),
        ):
            scaler.unscale_(optimizer) if unscale else scaler.step(optimizer)
        assert_values(model.parameters(), 10.0)
        return
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.warns(RuntimeWarning, match=r"GradScaler.*use scaler = amp.AmpScaler\(optimizer\)"):
        scaler.step(optimizer)
    assert_values(model.parameters(), [9.0, 8.0, 6.0])
    assert getattr(copy.deepcopy(optimizer), "_step_supports_amp_scaling", False) == supports
    amp.shutdown()
    if level == "O5":
        return  # shutdown has retired the optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        scaler.update()
        scaler.step(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_masters_of(level):
    model, optimizer = start(Weights(10.0, 20.0), level=level)
    other = Weights(1.0)
    params = [*model.parameters(), *other.parameters()]
    assert all(map(lambda a, b: a is b, amp.masters_of(iter(params)), params))
    assert amp.masters_of(params[0])[0] is params[0]
    backward(model(vector(1.0, 2.0, 4.0)), optimizer)
    assert_values([p.grad for p in amp.masters_of(model.parameters())], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0])
    model.zero_grad()
    assert [p.grad for p in amp.masters_of(model.parameters())] == [None, None]
    amp.shutdown()
    assert all(map(lambda a, b: a is b, amp.masters_of(params), params))


@needs("inf")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_will_skip_knows_what_the_step_does(level, kind):
    model, optimizer = start(Weights(10.0), level=level, kind=kind, **DYNAMIC)
    assert not amp.will_skip(optimizer)
    for factor in (1.0, math.inf, 1.0):
        backward(model(vector(1.0, 2.0, 4.0)) * factor, optimizer)
        skips = amp.will_skip(optimizer)
        optimizer.step()
        assert amp.last_step(optimizer).skipped == skips == math.isinf(factor)
        optimizer.zero_grad()
        assert not amp.will_skip(optimizer)
    with amp.scale_loss(model(vector(1.0, 2.0, 4.0)), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match=r"inside of amp.scale_loss, which decides when it ends.*unscale_\(\)"):
            amp.will_skip(optimizer)
    with pytest.raises(RuntimeError, match=r"SGD was not passed to amp.initialize"):
        amp.will_skip(torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "wrap",
    [
        Wrapper,
        Delegating,
        OptimizerByName,
        lambda optimizer: Wrapper(optimizer, "_optimizer"),
        lambda optimizer: Wrapper(Wrapper(optimizer, "opt")),
    ],
    ids=["optimizer", "delegating", "an Optimizer by name", "_optimizer", "opt, twice"],
)
def test_wrapped_optimizers(wrap, level, kind):
    model, optimizer = start(Weights(10.0), level=level, kind=kind, **DYNAMIC)
    wrapper = wrap(optimizer)
    fuses = kind == "fuse_unscale"
    if fuses:  # what a wrapper does to gradients would meet scaled ones
        with pytest.raises(RuntimeError, match="wraps NpuFusedSGD"):
            backward(model(vector(1.0, 2.0, 4.0)), wrapper)
    for given in (optimizer, [optimizer]) if fuses else (wrapper, [wrapper]):
        backward(model(vector(1.0, 2.0, 4.0)), given)
        assert not amp.will_skip(wrapper)
        assert len(list(amp.master_params(wrapper))) == 1
        optimizer.step()
        assert amp.last_step(wrapper).applied
        optimizer.zero_grad()
    assert str(amp.checkpoint_view(wrapper).state_dict()) == str(optimizer.state_dict())
    scaler = amp.AmpScaler(wrapper)
    scaler.scale(model(vector(1.0, 2.0, 4.0))).backward()
    scaler.step(wrapper)
    assert_values(model.parameters(), [7.0, 4.0, -2.0])


def test_wrappers_of_what_was_not_initialized_are_named():
    model, _ = start(Weights(10.0))
    stranger = OptimizerByName(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(RuntimeError, match=r"OptimizerByName was not passed to amp.initialize"):
        backward(model(vector(1.0, 2.0, 4.0)), stranger)
    with pytest.raises(RuntimeError, match=r"OptimizerByName was not passed to amp.initialize before amp.AmpScaler"):
        amp.AmpScaler(stranger)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_wrapper_is_refused_before_anything_has_changed(level):
    model = Weights(10.0)
    wrapper = OptimizerByName(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(RuntimeError, match=r"OptimizerByName, which only wraps an optimizer: pass its \.optimizer"):
        amp.initialize(model, wrapper, opt_level=level, verbosity=0)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert type(wrapper) is OptimizerByName


def test_state_dicts():
    model, optimizer = start(Weights(10.0), **DYNAMIC)
    scaler = amp.AmpScaler(optimizer)
    by_scaler(model, optimizer, vector(1.0, 2.0, 4.0), scaler)
    state = scaler.state_dict()
    assert state == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1}}
    scaler.update(16)
    assert scaler.get_scale() == 16.0
    with pytest.raises(ValueError, match=r"positive and finite, got 0.0"):
        scaler.update(0)
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    scaler.load_state_dict(theirs)
    assert scaler.get_scale() == 8.0


def test_bad_input():
    model, optimizer = start(Weights(10.0), kind="fuse_unscale", **DYNAMIC)
    scaler = amp.AmpScaler(optimizer)
    loss = model(vector(1.0, 2.0, 4.0))
    with pytest.raises(TypeError, match=r"AmpScaler.scale takes a loss, or a list of them, got float"):
        scaler.scale(1.0)
    with pytest.raises(IndexError, match=r"raise num_losses"):
        amp.AmpScaler(optimizer, loss_id=1)
    scaler.scale(loss).backward()
    with pytest.raises(RuntimeError, match=r"AmpScaler.step takes no closure"):
        scaler.step(optimizer, lambda: loss)
    with pytest.raises(RuntimeError, match=r"AmpScaler.step takes no closure"):
        scaler.step(optimizer, closure=lambda: loss)
    scaler.step(optimizer, None)
    assert_values(model.parameters(), [9.0, 8.0, 6.0])
    amp.shutdown()
    with pytest.raises(RuntimeError, match=r"amp.AmpScaler was called, but amp has not been initialized"):
        amp.AmpScaler(optimizer)
    model = Weights(10.0)
    model, optimizer = amp.initialize(model, torch.optim.LBFGS(model.parameters()), opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match=r"LBFGS needs a closure"):
        amp.AmpScaler(optimizer)


def test_disabled_it_passes_everything_through():
    model = Weights(10.0)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, enabled=False)
    scaler = amp.AmpScaler(optimizer)
    assert not scaler.is_enabled()
    loss = model(vector(1.0, 2.0, 4.0))
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    assert not amp.will_skip(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    assert_values(model.parameters(), [9.0, 8.0, 6.0])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scaler_that_is_dropped_leaves_gradients_as_they_were(level):
    model, optimizer = start(Weights(10.0), level=level, **DYNAMIC)
    backward(model(vector(1.0, 2.0, 4.0)), optimizer)
    scaler = amp.AmpScaler(optimizer)
    scaler.scale(model(vector(1.0, 2.0, 4.0)))
    del scaler
    gc.collect()
    optimizer.step()
    assert_values(model.parameters(), [9.0, 8.0, 6.0])


def test_copies_of_a_model_are_made_while_a_block_is_open():
    model, optimizer = start(Weights(10.0), **DYNAMIC)
    scaler = amp.AmpScaler(optimizer)
    scaler.scale(model(vector(1.0, 2.0, 4.0))).backward()
    assert_values(copy.deepcopy(model).parameters(), 10.0)
    scaler.step(optimizer)
    assert_values(model.parameters(), [9.0, 8.0, 6.0])
