# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What scripts get wrong around a ``scale_loss`` block: named, where it was silent or ruined the weights."""

import contextlib
import copy
import gc
import warnings

import pytest
import torch
from devices import DEVICE
from small_programs import KINDS, LEVELS, WITH_MASTERS, backward, values
from torch import nn

from apex_npu import amp, optimizers

pytestmark = [pytest.mark.host, pytest.mark.filterwarnings("error::RuntimeWarning")]

X = torch.ones(1, 3, device=DEVICE)
SGD, FUSED = torch.optim.SGD, optimizers.NpuFusedSGD


def start(level, cls=FUSED, count=1, **options):
    """``count`` models, each with an optimizer, and a loss that reaches all of them."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 3).to(DEVICE) for _ in range(count)]
    stepped = [cls(model.parameters(), lr=0.5) for model in models]
    models, stepped = amp.initialize(models, stepped, opt_level=level, verbosity=0, **options)

    def loss(last=count):
        x = X
        for model in models[:last]:
            x = model(x.to(next(model.parameters()).dtype))
        return x.float().square().mean()

    return models, stepped, loss


def train(loss, *stepped):
    backward(loss(), list(stepped))
    for optimizer in stepped:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("cls", [SGD, FUSED])
@pytest.mark.parametrize(
    ("level", "options"), [("O1", {}), ("O2", {}), ("O2", {"loss_scale": 128.0}), ("O1", {"fuse_unscale": True})]
)
def test_backward_on_the_loss_itself(level, options, cls):
    (model,), (optimizer,), loss = start(level, cls, **options)
    values = [p.detach().clone() for p in model.parameters()]
    for retain in (False, True):
        unscaled = loss()
        with pytest.raises(RuntimeError, match="called on the loss itself"), amp.scale_loss(unscaled, optimizer):
            unscaled.backward(retain_graph=retain)
        assert all(p.grad is None for p in amp.master_params(optimizer))
    assert all(map(torch.equal, model.parameters(), values))
    train(loss, optimizer)
    assert not any(map(torch.equal, model.parameters(), values))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("use", ["no backward", "sum", "autograd.grad", "scaled twice", "kept graph", "constant"])
def test_other_uses_of_a_block_pass(level, use):
    (model,), (optimizer,), loss = start(level)
    with amp.scale_loss(loss(), optimizer) as scaled_loss:
        if use == "sum":
            (scaled_loss + 0.0 * scaled_loss).backward()
        elif use == "autograd.grad":
            grads = torch.autograd.grad(scaled_loss, list(model.parameters()))
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad
        elif use == "kept graph":
            scaled_loss.backward(retain_graph=True)
    if use == "scaled twice":
        scaler, unscaled = amp.AmpScaler(optimizer), loss()
        scaler.scale(unscaled)
        scaler.scale(unscaled).backward()
        scaler.unscale_(optimizer)
    if use == "constant":
        with pytest.warns(RuntimeWarning, match="does not require grad"), amp.scale_loss(loss().detach(), optimizer):
            pass
    assert (model.weight.grad is None) == (use in ("no backward", "constant"))


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_], ids=lambda clip: clip.__name__)
@pytest.mark.parametrize("of", ["model", "optimizer"])
@pytest.mark.parametrize("cls", [SGD, FUSED])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_clipping_inside_of_a_block_is_refused(level, cls, of, clip):
    """At O5 it would clip without what earlier blocks have left, which the end of the block adds."""
    (model,), (optimizer,), loss = start(level, cls, loss_scale="dynamic")
    params = model.parameters() if of == "model" else amp.master_params(optimizer)
    with amp.scale_loss(loss(), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match=rf"torch.nn.utils.{clip.__name__} was called inside scale_loss"):
            clip(params, 1.0)
    optimizer.zero_grad()
    backward(loss(), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match=r"loss scale 65536.0: the last scale_loss had delay_unscale=True"):
        clip(amp.master_params(optimizer), 1.0)


def test_clipping_what_is_not_scaled_passes():
    (model,), (optimizer,), loss = start("O0")
    with amp.scale_loss(loss(), optimizer) as scaled_loss:
        scaled_loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    for p in amp.master_params(optimizer):
        assert p.grad.abs().max().item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("cls", [SGD, FUSED])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_that_names_another_optimizer(level, cls):
    models, (first, second), loss = start(level, cls, count=2)
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}, but the loss reaches none .* those of {cls.__name__}:"):
        amp.scale_loss(loss(last=1), second).__enter__()
    # One of two: what the other has is scaled.
    values = [p.detach().clone() for p in models[1].parameters()]
    backward(loss(), first)
    first.step()
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}.step\(\) .* a block that was given {cls.__name__} alone"):
        second.step()
    assert all(map(torch.equal, models[1].parameters(), values))
    for optimizer in (first, second):
        optimizer.zero_grad()
    train(loss, first, second)
    assert not any(map(torch.equal, models[1].parameters(), values))


@pytest.mark.parametrize("cls", [SGD, FUSED])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_that_names_an_optimizer_that_has_stepped(level, cls):
    """As in a GAN whose discriminator steps first, and whose generator's block names the discriminator's optimizer."""
    models, (generators, discriminators), loss = start(level, cls, count=2)
    values = [p.detach().clone() for p in models[0].parameters()]
    made = models[0](X).detach()
    backward(models[1](made.to(models[1].weight.dtype)).float().sum(), discriminators)
    discriminators.step()
    with pytest.raises(RuntimeError, match="the loss reaches none of its parameters"):
        backward(loss(last=1), discriminators)
    backward(loss(), discriminators)
    with pytest.raises(RuntimeError, match=rf"a block that was given {cls.__name__} alone also reaches"):
        generators.step()
    assert all(map(torch.equal, models[0].parameters(), values))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_never_steps_costs_the_blocks_of_others_little(level, monkeypatch):
    """Its model is trained in a later phase. Parameters of no optimizer are as the inputs of a gradient penalty."""
    _, (first, _), loss = start(level, count=2)
    free = torch.ones((), requires_grad=True, device=DEVICE)
    train(lambda: loss(last=1) * free, first)

    def search():
        raise AssertionError("a block has searched all objects of the process")

    monkeypatch.setattr(gc, "get_objects", search)
    train(lambda: loss(last=1) * free, first)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_never_steps_changes_no_gradients(level):
    """As one of a copy that is kept: amp does for the others what it does without it."""
    results = []
    for keeps in (False, True):
        models, (first, second), loss = start(level, count=2)
        kept = copy.deepcopy((models, [first, second])) if keeps else None
        train(lambda: loss(last=1), first)  # noqa: B023
        train(lambda: models[1](X.to(models[1].weight.dtype)).float().sum(), second)  # noqa: B023
        backward(loss(last=1), first)
        first.step()
        backward(loss(), second)
        results.append([p.grad for model in models for p in model.parameters()])
        del kept
        amp.shutdown()
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_a_block_that_reaches_an_optimizer_that_has_not_stepped(level):
    """The other optimizer keeps no gradients that are multiplied by the loss scale."""
    models, (first, second), loss = start(level, count=2)
    train(lambda: loss(last=1), first)
    with contextlib.suppress(KeyError), amp.scale_loss(loss(), first) as scaled_loss:
        scaled_loss.backward()
        raise KeyError
    assert all(p.grad is None for p in models[1].parameters())
    with pytest.raises(RuntimeError, match="the loss reaches none of its parameters"):
        backward(models[1](X.to(models[1].weight.dtype)).float().sum(), first)
    assert all(p.grad is None for p in models[1].parameters())
    first.zero_grad()
    train(loss, first, second)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_through_a_model_that_has_blocks_of_its_own(level):
    """As a generator's, which reaches the discriminator."""
    _, (first, second), loss = start(level, count=2)
    for _ in range(3):
        first.zero_grad()
        train(loss, first)
        second.zero_grad()
        train(loss, second)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_the_block_of_another_optimizer_has_left_are_no_part_of_a_step(level):
    """They are multiplied by the loss scale of another block."""
    _, (first, second), loss = start(level, count=2)
    results = []
    for clear in (True, False):
        second.zero_grad()
        backward(loss(), second)
        if clear:
            first.zero_grad()
        backward(loss(last=1), first)
        said = r"blocks of other optimizers have given .* its step ignores them"
        with contextlib.nullcontext() if clear else pytest.warns(RuntimeWarning, match=said):
            results.append([p.grad.clone() for p in amp.master_params(first)])
        first.zero_grad()
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("cls", [SGD, FUSED])
@pytest.mark.parametrize("warms_up", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_that_reaches_gradients_that_wait_for_their_step(level, warms_up, cls):
    """16-bit parameters keep the gradients of their own block; for float32 ones, blocks and steps are refused."""
    models, (first, second), loss = start(level, cls, count=2, loss_scale=8.0)
    if warms_up:  # the first losses of the second optimizer do not reach the parameters of the first
        train(lambda: loss(last=1), first)
        train(lambda: models[1](X.to(models[1].weight.dtype)).float().sum(), second)
    backward(loss(last=1), first)
    before = [p.grad.clone() for p in models[0].parameters()]
    values = [p.detach().clone() for p in models[0].parameters()]
    backward(loss(), second)
    if level in WITH_MASTERS:
        assert all(torch.equal(p.grad, grad) for p, grad in zip(models[0].parameters(), before, strict=True))
        first.step()
        for p, value, grad in zip(models[0].parameters(), values, before, strict=True):
            torch.testing.assert_close(p.detach().float(), value.float() - 0.5 * grad, rtol=2**-7, atol=2**-8)
    else:
        with pytest.raises(RuntimeError, match="alone also reaches"):
            first.step()
        with pytest.raises(RuntimeError, match="alone also reaches"):
            backward(loss(last=1), first)
        assert all(map(torch.equal, models[0].parameters(), values))
        first.zero_grad()
        backward(loss(last=1), first)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(models[0].parameters(), before, strict=True))
    second.step()


def test_an_optimizer_that_amp_does_not_know():
    _, (optimizer,), loss = start("O1")
    head = nn.Linear(1, 1).to(DEVICE)
    unknown = SGD(head.parameters(), lr=0.1)
    other = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=0.1)  # of nothing that the loss reaches
    with (
        pytest.warns(RuntimeWarning, match="SGD was not passed to amp.initialize, but steps parameters whose") as said,
        amp.scale_loss(head(loss().reshape(1, 1)).sum(), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
    assert len(said) == 1
    assert len(unknown.param_groups) == len(other.param_groups) == 1


# What guards around blocks and steps must let through: each a program of two models, of which one reads the other's
# output, and of their optimizers. ``block`` is amp.scale_loss, or backward alone; ``step`` calls the optimizer's.


def in_turns_stepped_twice(block, step, loss, models, first, second):
    for optimizer in (first, first, second, second, first):
        optimizer.zero_grad()
        block(loss(2), optimizer)
        step(optimizer)
        step(optimizer)


def second_without_a_block(block, step, loss, models, first, second):
    block(loss(2), first)
    step(first)
    second.zero_grad()
    loss(2).backward()
    step(second)


def each_cleared_through_its_model(block, step, loss, models, first, second):
    for _ in range(2):
        for optimizer, other, others_model in ((second, first, models[0]), (first, second, models[1])):
            block(loss(2), optimizer)
            others_model.zero_grad()
            step(other)
            step(optimizer)
            optimizer.zero_grad()


def second_frozen_in_blocks_of_the_first(block, step, loss, models, first, second):
    for _ in range(2):
        models[1].requires_grad_(False)
        first.zero_grad()
        block(loss(2), first)
        models[1].requires_grad_(True)
        step(first)
        step(second)
        second.zero_grad()
        block(loss(2), second)
        step(second)


def both_after_one_alone(block, step, loss, models, first, second):
    block(loss(2), first)
    first.zero_grad()
    second.zero_grad()
    for _ in range(2):
        block(loss(2), [first, second])
        step(first)
        step(second)
        step(second)


def a_block_inside_of_another(block, step, loss, models, first, second):
    def train_second():
        block(loss(2, detach=True), second)
        clip = getattr(second, "clip_optimizer_grad_norm_fused", None)  # which optimizers under amp have
        clip(0.5) if clip else nn.utils.clip_grad_norm_(models[1].parameters(), 0.5)
        step(second)

    for _ in range(2):
        block(loss(1), first, train_second)
        step(first)
        first.zero_grad()
        second.zero_grad()


def gradients_kept_and_added_to(block, step, loss, models, first, second):
    for _ in range(3):  # the first is cleared once only
        block(loss(1), first)
        step(first)
        second.zero_grad()
        block(loss(2, detach=True), second)
        step(second)


def after_an_exception(block, step, loss, models, first, second):
    with contextlib.suppress(ZeroDivisionError):
        block(loss(2), first, lambda: 1 / 0)
    first.zero_grad()
    second.zero_grad()
    block(loss(2), second)
    step(second)


PROGRAMS = [
    in_turns_stepped_twice,
    second_without_a_block,
    each_cleared_through_its_model,
    second_frozen_in_blocks_of_the_first,
    both_after_one_alone,
    a_block_inside_of_another,
    gradients_kept_and_added_to,
    after_an_exception,
]


def outcome(program, cls, level=None, **options):
    torch.manual_seed(0)
    models = [nn.Linear(3, 3).to(DEVICE) for _ in range(2)]
    stepped = [cls(model.parameters(), lr=0.1, momentum=0.5) for model in models]
    if level is not None:
        models, stepped = amp.initialize(models, stepped, opt_level=level, verbosity=0, **options)

    def loss(last, detach=False):
        output = models[0](X)
        if last == 2:
            output = models[1]((output.detach() if detach else output).to(models[1].weight.dtype))
        return (output.float() - 1.0).square().mean()

    def block(of, optimizer, inside=lambda: None):
        with contextlib.nullcontext(of) if level is None else amp.scale_loss(of, optimizer) as scaled_loss:
            inside()
            scaled_loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program(block, lambda optimizer: optimizer.step(), loss, models, *stepped)
    found = values(p for model in models for p in model.parameters())
    amp.shutdown()
    return found


@pytest.mark.pairwise
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_that_guards_let_through(program, kind, level):
    cls, options = KINDS[kind]
    found = outcome(program, cls, level, loss_scale=128.0, **options)
    want = outcome(program, SGD)
    torch.testing.assert_close(found, want, rtol=0.0, atol={"O0": 1e-6, "O1": 2e-3, "O2": 2e-3}.get(level, 1e-2))
