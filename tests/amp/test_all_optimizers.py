# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every fused optimizer under amp: steps on the very gradients that amp leaves, and random programs."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from covering import by_turns
from devices import DEVICE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lockstep import assert_equal_params
from optimizer_specs import CASE_IDS, CASES, SPECS
from small_programs import OddShapes, initialize
from torch import nn

from apex_npu import amp


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), OddShapes(), nn.ReLU(), nn.Linear(9, 3)).to(DEVICE)


def loss_of(model, step):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return model(x).square().mean()


@pytest.mark.filterwarnings("error::RuntimeWarning")  # what a rule writes is no write of a script
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_steps_by_its_rule_on_what_amp_leaves(spec, level):
    kwargs = {"lr": 0.01, **spec.variants[-1]}
    model = make_model()
    model, optimizer = initialize(model, spec.cls(model.parameters(), **kwargs), level, loss_scale=128.0)
    params = list(model.parameters())

    def float32_values():
        shown = model.state_dict()
        return [shown[name] for name, _ in model.named_parameters()]

    twins = [nn.Parameter(value.float().clone()) for value in float32_values()]
    reference = spec.reference(twins, **kwargs)
    for step in range(6):
        optimizer.zero_grad(set_to_none=True)
        with amp.scale_loss(loss_of(model, step), optimizer) as scaled_loss:
            scaled_loss.backward()
        for p, q in zip(params, twins, strict=True):
            q.grad = p.grad.float()
            if level == "O3":  # there each step starts from a rounded parameter
                q.data.copy_(p.detach())
        optimizer.step()
        reference.step()
    rounding = torch.finfo(torch.float16).eps if level == "O3" else 2 * spec.tolerance
    for p, value, q in zip(params, float32_values(), twins, strict=True):
        assert p.numel() == 0 or (value.float() - q).abs().max() <= rounding * q.abs().max()
        assert torch.equal(value.to(p.dtype), p)


class Wide(nn.Module):
    """Parameters that threads share, and some that one thread has; their gradients are the numbers in ``grads``."""

    def __init__(self):
        super().__init__()
        shapes = [(7,), (200, 301), (33_001,), (3, 5)]
        self.weights = nn.ParameterList([torch.linspace(-1, 1, math.prod(shape)).view(shape) for shape in shapes])
        self.grads = [torch.linspace(1, -2, math.prod(shape)).view(shape) for shape in shapes]

    def forward(self):
        return sum((p * g.to(p.dtype)).sum() for p, g in zip(self.weights, self.grads, strict=True))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="threads are those of the CPU")
@pytest.mark.parametrize(
    ("spec", "level", "fold"),
    by_turns(
        [spec for spec in SPECS if "Muon" not in str(spec)],  # torch's products
        [("O0", True), ("O2", False), ("O5", True)],
    ),
)
def test_the_bits_of_iterations_do_not_depend_on_threads(spec, level, fold):
    found = []
    threads = torch.get_num_threads()
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        try:
            model = Wide()
            optimizer = spec.cls(model.parameters(), **{"lr": 0.01, **spec.variants[-1]})
            options = {"opt_level": level, "loss_scale": "dynamic", "dynamic_init_scale": 64.0, "verbosity": 0}
            model, optimizer = amp.initialize(model, optimizer, fuse_unscale=fold, **options)
            for _ in range(2):
                with amp.scale_loss(model(), optimizer) as scaled_loss:
                    scaled_loss.backward()
                norm = optimizer.clip_optimizer_grad_norm_fused(1.0)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.set_num_threads(threads)
        states = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
        found.append([torch.as_tensor(norm), *model.parameters(), *model.state_dict().values(), *states])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


class Net(nn.Module):
    """With a weight that two layers share, a branch that is not always taken, and room for a layer that comes later."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.branch = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.grown = nn.Identity()

    def forward(self, x, branch=False):
        x = self.second(torch.relu(self.norm(self.first(x))))
        return self.grown(self.head(x + self.branch(x) if branch else x))


ACTIONS = st.sampled_from(
    [
        *(*["step"] * 3, *["step with branch"] * 2, *["backward"] * 2, "delayed backward", "inf", "exception"),
        *("optimizer.zero_grad", "model.zero_grad", "zeros", "freeze", "unfreeze", "clip", "reload", "second loss"),
        *("scheduler", "grow", "deepcopy", "pickle"),
    ]
)


class Machine:
    """One pair under amp, and what may be done to it."""

    def __init__(self, cls, level, combine_grad, **kwargs):
        torch.manual_seed(0)
        self.model = Net().to(DEVICE)
        optimizer = cls(self.model.parameters(), **kwargs)
        self.decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer = initialize(
            self.model,
            optimizer,
            level,
            combine_grad=combine_grad,
            loss_scale="dynamic",
            dynamic_init_scale=2.0**6,
            num_losses=2,
        )
        self.number = 0

    def run(self, action):
        getattr(self, action.replace(" ", "_").replace(".", "_"))()

    def params(self):
        return list(self.model.parameters())

    def loss(self, **options):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(self.number)).to(DEVICE)
        return self.model(x, **options).float().square().mean()

    def backward(self, loss_id=0, branch=False, **options):
        self.number += 1
        with amp.scale_loss(self.loss(branch=branch), self.optimizer, loss_id=loss_id, **options) as scaled_loss:
            scaled_loss.backward()

    def second_loss(self):
        self.backward(loss_id=1)

    def delayed_backward(self):
        self.backward(delay_unscale=True)
        self.backward()

    def step(self, **options):
        self.backward(**options)
        self.optimizer.step()
        self.optimizer_zero_grad()

    def step_with_branch(self):
        self.step(branch=True)

    def inf(self):
        with amp.scale_loss(self.loss(), self.optimizer) as scaled_loss:
            scaled_loss.backward()
            self.model.head.bias.grad[0] = math.inf
        self.optimizer.step()
        self.optimizer_zero_grad()

    def exception(self):
        with pytest.raises(ZeroDivisionError), amp.scale_loss(self.loss(), self.optimizer):
            raise ZeroDivisionError

    def optimizer_zero_grad(self):
        self.optimizer.zero_grad(set_to_none=True)  # NVIDIA's SGD has another default

    def model_zero_grad(self):
        self.model.zero_grad()

    def zeros(self):
        self.optimizer.zero_grad(set_to_none=False)

    def freeze(self):
        self.model.first.weight.requires_grad_(False)
        self.model.zero_grad()
        self.optimizer_zero_grad()

    def unfreeze(self):
        self.model.first.weight.requires_grad_(True)

    def clip(self):
        nn.utils.clip_grad_norm_(list(amp.master_params(self.optimizer)), 0.1)

    def reload(self):
        shown = self.model.state_dict()
        # A module that was added later shows 16-bit values, which would replace the float32 ones.
        self.model.load_state_dict({k: v for k, v in shown.items() if not k.startswith("grown.")}, strict=False)
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        amp.load_state_dict(amp.state_dict())

    def scheduler(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a program may begin with it
            self.decay.step()

    def grow(self):
        if isinstance(self.model.grown, nn.Identity):
            torch.manual_seed(1)
            self.model.grown = nn.Linear(3, 3).to(DEVICE, self.model.head.weight.dtype)
            self.optimizer.add_param_group({"params": self.model.grown.parameters(), "lr": 0.02})
            self.decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def deepcopy(self):
        self.model, self.optimizer, self.decay = copy.deepcopy((self.model, self.optimizer, self.decay))

    def pickle(self):
        file = io.BytesIO()
        pickle.dump((self.model, self.optimizer), file)
        file.seek(0)
        self.model, self.optimizer = pickle.load(file)
        self.decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)


def check(spec, kwargs, level, program):
    """Fused with combined gradients against the reference without: the same parameters, the same scales.

    One after the other, as there is one amp. The reference starts every action from our parameters: rounding then does
    not come back magnified through the gradients, while states and scales have to be right all along.
    """
    kwargs = {"lr": 0.01, **kwargs}
    course = []
    machine = Machine(spec.cls, level, True, **kwargs)
    for action in program:
        machine.run(action)
        with amp.float32_params(machine.optimizer):
            course.append(([p.detach().clone() for p in machine.params()], amp.state_dict()))
    amp.shutdown()
    machine = Machine(spec.reference_for(torch.float16), level, None, **kwargs)
    for action, (params, scales) in zip(program, course, strict=True):
        machine.run(action)
        with amp.float32_params(machine.optimizer), torch.no_grad():
            assert_equal_params(params, machine.params(), 2 * spec.tolerance, floor=1e-2)
            torch._foreach_copy_(machine.params(), params)
        assert amp.state_dict() == scales
    amp.shutdown()


RANDOM = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(("spec", "level"), by_turns(SPECS, [("O0",), ("O1",), ("O2",), ("O3",)], of=2))
@settings(RANDOM, max_examples=2)
@given(program=st.lists(ACTIONS, min_size=3, max_size=15))
def test_random_programs(spec, level, program):
    check(spec, spec.variants[-1], level, program)


@pytest.mark.sweep
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize(("spec", "kwargs"), CASES, ids=CASE_IDS)
@settings(RANDOM, max_examples=12 if DEVICE.type == "cpu" else 4)  # amp's part of a step is the same on all devices
@given(program=st.lists(ACTIONS, min_size=5, max_size=30))
def test_long_random_programs(spec, kwargs, level, program):
    check(spec, kwargs, level, program)
