# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every fused optimizer under amp: steps on the very gradients that amp leaves, and random programs."""

import math
import warnings

import pytest
import torch
from devices import DEVICE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optimizer_specs import SPECS
from torch import nn

from apex_npu import amp


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 3)).to(DEVICE)


def loss_of(model, step):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return model(x).square().mean()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_steps_by_its_rule_on_what_amp_leaves(spec, level):
    kwargs = {"lr": 0.01, **spec.variants[-1]}
    model = make_model()
    model, optimizer = amp.initialize(
        model, spec.cls(model.parameters(), **kwargs), opt_level=level, loss_scale=128.0, verbosity=0
    )
    stepped = list(amp.master_params(optimizer))
    twins = [nn.Parameter(p.detach().float().clone()) for p in stepped]
    reference = spec.reference(twins, **kwargs)
    for step in range(6):
        optimizer.zero_grad(set_to_none=True)
        with amp.scale_loss(loss_of(model, step), optimizer) as scaled_loss:
            scaled_loss.backward()
        for p, q in zip(stepped, twins, strict=True):
            q.grad = p.grad.float()
            if level == "O3":  # there each step starts from a rounded parameter
                q.data.copy_(p.detach())
        optimizer.step()
        reference.step()
    rounding = torch.finfo(torch.float16).eps if level == "O3" else 2 * spec.tolerance
    for p, q in zip(stepped, twins, strict=True):
        assert (p.detach().float() - q).abs().max() <= rounding * q.abs().max()
    for p, model_param in zip(stepped, model.parameters(), strict=True):
        assert torch.equal(p.detach().to(model_param.dtype), model_param)


ACTIONS = st.sampled_from(
    [
        *["step"] * 3,
        *["backward"] * 2,
        "delayed backward",
        "inf",
        "exception",
        "optimizer.zero_grad",
        "model.zero_grad",
        "zeros",
        "freeze",
        "unfreeze",
        "clip",
        "reload",
        "second loss",
        "scheduler",
    ]
)


class Machine:
    """One pair under amp, and what may be done to it."""

    def __init__(self, cls, level, combine_grad, **kwargs):
        self.model = make_model()
        optimizer = cls(self.model.parameters(), **kwargs)
        self.decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer = amp.initialize(
            self.model,
            optimizer,
            opt_level=level,
            combine_grad=combine_grad,
            loss_scale="dynamic",
            dynamic_init_scale=2.0**6,
            num_losses=2,
            verbosity=0,
        )
        self.number = 0

    def run(self, action):
        getattr(self, action.replace(" ", "_").replace(".", "_"))()

    def backward(self, loss_id=0, **options):
        self.number += 1
        loss = loss_of(self.model, self.number)
        with amp.scale_loss(loss, self.optimizer, loss_id=loss_id, **options) as scaled_loss:
            scaled_loss.backward()

    def second_loss(self):
        self.backward(loss_id=1)

    def delayed_backward(self):
        self.backward(delay_unscale=True)
        self.backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def inf(self):
        with amp.scale_loss(loss_of(self.model, self.number), self.optimizer) as scaled_loss:
            scaled_loss.backward()
            self.model[3].bias.grad[0] = math.inf
        self.optimizer.step()
        self.optimizer.zero_grad()

    def exception(self):
        with (
            pytest.raises(ZeroDivisionError),
            amp.scale_loss(loss_of(self.model, self.number), self.optimizer),
        ):
            raise ZeroDivisionError

    def optimizer_zero_grad(self):
        self.optimizer.zero_grad()

    def model_zero_grad(self):
        self.model.zero_grad()

    def zeros(self):
        self.optimizer.zero_grad(set_to_none=False)

    def freeze(self):
        self.model[0].weight.requires_grad_(False)
        self.model.zero_grad()
        self.optimizer.zero_grad()

    def unfreeze(self):
        self.model[0].weight.requires_grad_(True)

    def clip(self):
        nn.utils.clip_grad_norm_(list(amp.master_params(self.optimizer)), 0.1)

    def reload(self):
        self.model.load_state_dict(self.model.state_dict())
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        amp.load_state_dict(amp.state_dict())

    def scheduler(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a program may begin with it
            self.decay.step()


IN_TORCH = [spec for spec in SPECS if spec.in_torch]


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("spec", IN_TORCH, ids=str)
@settings(derandomize=True, deadline=None, database=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(program=st.lists(ACTIONS, min_size=3, max_size=15))
def test_random_programs(spec, level, program):
    """Fused with combined gradients against torch's optimizer without: the same masters, the same scales."""
    kwargs = {"lr": 0.01, **spec.variants[-1]}
    ends = []
    for cls, combine_grad in ((spec.cls, True), (spec.reference, None)):
        machine = Machine(cls, level, combine_grad, **kwargs)
        for action in program:
            machine.run(action)
        ends.append(([p.detach() for p in amp.master_params(machine.optimizer)], amp.state_dict()))
        amp.shutdown()
    assert ends[0][1] == ends[1][1]
    for p, q in zip(ends[0][0], ends[1][0], strict=True):
        assert (p - q).abs().max() <= 4 * spec.tolerance * max(1e-2, q.abs().max().item())
