# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of all kinds step float32 values of 16-bit parameters; what scripts do to either counts."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from devices import DEVICE, SIMULATOR, needs_counts
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.amp import float32_masters

LEVELS = {"O2": torch.float16, "O5": torch.bfloat16}
KINDS = {
    "torch": (torch.optim.SGD, {}),
    "fused": (optimizers.NpuFusedSGD, {}),
    "float32": (optimizers.NpuFusedSGD, {"store_param_remainders": False}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
levels = pytest.mark.parametrize("level", LEVELS)


class Net(nn.Module):
    """Parameters of many sizes, an empty one and one without dimensions among them."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((4, 3), (), (0,), (1,), (70, 33))
        self.w = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes])
        self.to(DEVICE)

    def forward(self, x):
        return sum((p * x.to(p.dtype)).float().sum() for p in self.w)


def start(level, kind, lr=0.1, **options):
    model = Net()
    cls, own = KINDS[kind]
    optimizer = cls(model.parameters(), lr=lr)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, loss_scale=1024.0, **own, **options
    )
    return model, optimizer


def block(model, optimizer, x=1.0):
    with amp.scale_loss(model(torch.full((1,), x, device=DEVICE)), optimizer) as loss:
        loss.backward()


def values(model):
    return [value.clone() for value in model.state_dict().values()]


def assert_same(found, expected):
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=0)


@kinds
@levels
def test_steps_are_those_of_float32(level, kind):
    model, optimizer = start(level, kind, lr=1e-4)
    expected = [p.detach().clone() for p in Net().parameters()]
    for x in (1.0, 0.5, 2.0):
        optimizer.zero_grad()
        block(model, optimizer, x)
        optimizer.step()
        for value in expected:
            value.sub_(1e-4 * x * torch.ones_like(value))
    for value, wanted in zip(values(model), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=2e-7)
    assert all(p.dtype == LEVELS[level] for p in model.parameters())


@kinds
@levels
def test_parameters_keep_their_identity_hooks_and_aliases(level, kind):
    model, optimizer = start(level, kind)
    params, called = list(model.parameters()), []
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert listed == list(map(id, params))
    alias, version = params[0].detach(), params[0]._version
    params[0].register_hook(lambda grad: called.append(grad.dtype))
    block(model, optimizer)
    optimizer.step()
    assert called == [LEVELS[level]]
    assert params[0]._version > version
    if kind == "torch":
        assert alias.data_ptr() == params[0].data_ptr()
    assert torch.equal(alias, params[0])


@kinds
def test_state_is_float32_and_stays_when_loaded(kind):
    cls = torch.optim.Adam if kind == "torch" else optimizers.NpuFusedAdam
    model = Net()
    optimizer = cls(model.parameters(), lr=1e-3)
    options = {"verbosity": 0, "loss_scale": 1024.0, **KINDS[kind][1]}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", **options)
    block(model, optimizer, 1e-3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    again = optimizer.state_dict()["state"]
    for i, entry in saved["state"].items():
        assert entry["exp_avg_sq"].dtype == torch.float32
        assert torch.equal(again[i]["exp_avg_sq"], entry["exp_avg_sq"])
        assert not entry["exp_avg_sq"].numel() or entry["exp_avg_sq"].max() > 0


@kinds
@levels
def test_small_writes_in_a_loop_over_master_params_add_up(level, kind):
    model, optimizer = start(level, kind)
    expected = values(model)
    for _ in range(50):
        for p in amp.master_params(optimizer):
            assert p.dtype == torch.float32
            p.data.mul_(1 - 1e-5)
        for value in expected:
            value.mul_(1 - 1e-5)
    assert all(p.dtype == LEVELS[level] for p in model.parameters())
    for value, wanted in zip(values(model), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-7, atol=2e-9)


@kinds
@levels
def test_float32_params_can_be_nested(level, kind):
    model, optimizer = start(level, kind)
    expected = [value * 1.001 for value in values(model)]
    with torch.no_grad(), amp.float32_params(optimizer), amp.float32_params(optimizer):
        for p in model.parameters():
            p.mul_(1.001)
    for value, wanted in zip(values(model), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-7, atol=2e-9)


@kinds
@pytest.mark.parametrize("by", ["forward", "block", "step", "state_dict", "optimizer", "another loop"])
def test_a_loop_that_is_left_early_ends(kind, by):
    model, optimizer = start("O2", kind)
    block(model, optimizer)
    loop = amp.master_params(optimizer)
    first = next(loop)
    first.data.fill_(0.75)
    assert first.dtype == torch.float32
    if by == "forward":
        model(torch.ones(1, device=DEVICE))
    elif by == "block":
        loss = torch.ones((), device=DEVICE, requires_grad=True) * 1.0
        with amp.scale_loss(loss, optimizer):
            pass
    elif by == "step":
        before = first.data.clone()
        optimizer.step()
        torch.testing.assert_close(values(model)[0], before - 0.1, rtol=0, atol=1e-6)
    elif by == "state_dict":
        assert bool((model.state_dict()["w.0"] == 0.75).all())
    elif by == "optimizer":
        optimizer.state_dict()
    else:
        next(amp.master_params(optimizer))
        gc.collect()
    if by != "another loop":
        assert first.dtype == torch.float16


@kinds
def test_a_loop_that_an_exception_ends_keeps_its_writes(kind):
    model, optimizer = start("O2", kind)

    def fail():
        for p in amp.master_params(optimizer):
            p.data.fill_(0.3)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    model(torch.ones(1, device=DEVICE))
    assert next(model.parameters()).dtype == torch.float16
    assert bool((model.state_dict()["w.0"] == torch.tensor(0.3)).all())


@kinds
@levels
def test_float32_data_that_a_script_assigns_is_the_value(level, kind):
    model, optimizer = start(level, kind)
    expected = [value * 0.3 for value in values(model)]
    for p, value in zip(model.parameters(), values(model), strict=True):
        p.data = value * 0.3
    block(model, optimizer, 0.0)
    optimizer.step()
    assert all(p.dtype == LEVELS[level] for p in model.parameters())
    for value, wanted in zip(values(model), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=2e-7, atol=1e-10)


@kinds
@levels
def test_clamped_weights_are_trained(level, kind):
    """As in a Wasserstein GAN."""
    model, optimizer = start(level, kind, lr=2.0**-10)
    for _ in range(3):
        optimizer.zero_grad()
        block(model, optimizer)
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.5, 0.5)
    half = torch.finfo(LEVELS[level]).eps / 4  # of the last bit at 0.5: clamping leaves what rounds to 0.5 as it is
    assert all(bool((value.abs() <= 0.5 + half).all()) for value in values(model))


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation with a base optimizer over the same groups, as published."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        grads = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.to(torch.float32) for grad in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "old_p" in self.state[p]:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError


def test_sam_restores_its_weights_exactly():
    model = Net()
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=16.0)
    expected = values(model)
    for _ in range(3):
        block(model, optimizer)
        optimizer.first_step()
        block(model, optimizer)
        optimizer.second_step()
        for value in expected:
            value.sub_(1e-4 * torch.ones_like(value))
    for value, wanted in zip(values(model), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=2e-7)


@kinds
def test_two_optimizers_over_one_parameter(kind):
    model = Net()
    cls, own = KINDS[kind]
    both = [cls(model.parameters(), lr=2.0**-7) for _ in range(2)]
    model, both = amp.initialize(model, both, opt_level="O2", verbosity=0, loss_scale=1.0, **own)
    expected = values(model)
    for optimizer in both:
        optimizer.zero_grad()
        block(model, optimizer)
        optimizer.step()
        for value in expected:
            value.sub_(2.0**-7)
    bound = 2.0**-10 if kind == "fused" else 2e-7  # remainders of one optimizer end as the other steps
    for value, wanted in zip(values(model), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=bound)


@kinds
def test_a_cleared_state_keeps_the_float32_values(kind):
    if kind == "fused":
        pytest.skip("remainders are in the state")
    model, optimizer = start("O2", kind, lr=1e-4)
    block(model, optimizer)
    optimizer.step()
    expected = values(model)
    optimizer.state.clear()
    assert_same(values(model), expected)


@kinds
def test_gradients_of_another_optimizer_survive_a_block_that_reaches_it(kind):
    """As with the discriminator, which a generator's loss reaches."""
    models = [Net(), Net()]
    cls, own = KINDS[kind]
    both = [cls(model.parameters(), lr=2.0**-7) for model in models]
    models, both = amp.initialize(models, both, opt_level="O2", verbosity=0, loss_scale=1024.0, **own)
    x = torch.ones(1, device=DEVICE)
    for _ in range(2):
        both[1].zero_grad()
        block(models[1], both[1])
        before = [p.grad.clone() for p in models[1].parameters()]
        both[0].zero_grad()
        with amp.scale_loss(models[0](x) + models[1](x), both[0]) as loss:
            loss.backward()
        assert_same([p.grad for p in models[1].parameters()], before)
        for optimizer in both:
            optimizer.step()
    expected = [p.detach() - 2.0**-6 for p in Net().parameters()]
    for model in models:
        for value, wanted in zip(values(model), expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=2e-7)


# Other optimizers do not say whether a step that failed has updated something.
@needs_counts("stand_in_counts")
@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("kind", ["fused", "float32"])
@levels
def test_a_step_repeats_after_a_failed_launch_or_says_that_it_cannot(level, kind, fuse_unscale):
    """A script that goes on after the error must not train from parameters and float32 values that differ."""

    def trained(failing=None):
        model, optimizer = start(level, kind, lr=1e-4, fuse_unscale=fuse_unscale)
        said = None
        for step in range(3):
            optimizer.zero_grad()
            block(model, optimizer, 1.0 + step)
            if step == 1 and failing is not None:
                SIMULATOR.fail_after(failing)
                try:
                    optimizer.step()
                except RuntimeError as error:
                    said = str(error)
                finally:
                    SIMULATOR.fail_after(None)
                if said is None:
                    break
            optimizer.step()
        shown = [p.detach().float() for p in model.parameters()]
        return [*values(model), *shown], said

    expected, _ = trained()
    for launch in range(100):
        found, said = trained(launch)
        if said is None:
            return
        if "cannot be repeated" not in said:
            assert_same(found, expected)
    raise AssertionError("more than 100 launches a step")


def test_an_error_of_an_earlier_launch_in_the_rounding_says_that_the_step_cannot_be_repeated(monkeypatch):
    """torch_npu's queue raises it at any later call."""
    model, optimizer = start("O2", "torch")
    block(model, optimizer)

    def fail(*_):
        raise RuntimeError("The process exits for this inner error")

    monkeypatch.setattr(float32_masters, "_copy", fail)
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) has failed .* cannot be repeated.* start a new process"):
        optimizer.step()
    assert all(p.grad is None for p in model.parameters())
