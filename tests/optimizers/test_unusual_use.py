# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Unusual, but allowed: each scenario ends as with torch.optim."""

import copy

import pytest
import torch
from devices import DEVICE, needs, needs_extension
from lockstep import assert_equal_params, make_params, set_grads
from optimizer_specs import SPECS
from torch import nn

from apex_npu.optimizers import NpuFusedAdam, NpuFusedSGD

pytestmark = pytest.mark.device

OPTIONS = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.5},
}
SHAPES = [(5, 4), (), (0,), (3,)]


def scenario(run):
    """A test that calls ``run(make, params)`` with both optimizers, and compares what has become of the parameters."""

    @pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.in_torch], ids=str)
    def test(spec):
        options, ends = OPTIONS.get(spec.reference.__name__, {}), []
        for cls in (spec.cls, spec.reference):
            params = make_params(SHAPES)
            more = run(lambda p, cls=cls, **changes: cls(p, **{**options, **changes}), params)
            ends.append([*params, *(more or ())])
        assert_equal_params(*ends, 2e-6, floor=0.5)  # sums of numbers that large

    return test


def step(params, optimizer, numbers):
    for number in numbers:
        set_grads(params, number)
        optimizer.step()


@scenario
def test_a_pre_hook_that_adds_a_group(make, params):
    optimizer = make(params[:2])

    def add(optimizer, *_):
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": params[2:], "lr": 0.02})

    optimizer.register_step_pre_hook(add)
    step(params, optimizer, range(5))


@scenario
def test_a_closure_that_adds_a_group(make, params):
    optimizer = make(params[:2])

    def closure():
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": params[2:], "lr": 0.02})
        for p in params:
            p.grad = p.detach() * 2
        return 0.0

    for _ in range(5):
        optimizer.step(closure)


@scenario
def test_the_learning_rate_is_a_tensor(make, params):
    for shape in ((), (1,)):
        lr = torch.full(shape, 0.01, device=DEVICE)
        optimizer = make(params, lr=lr)
        if type(optimizer).__module__.startswith("torch."):  # some releases of which take one of shape () alone
            optimizer.param_groups[0]["lr"] = lr.view(())
        for i in range(5):
            step(params, optimizer, [i])
            lr.mul_(0.8)


@scenario
def test_hyper_parameters_are_tensors(make, params):
    optimizer = make(params)
    group = optimizer.param_groups[0]
    group["weight_decay"] = torch.tensor(0.1)
    if "foreach" in group:
        group["foreach"] = False  # torch takes no tensors there
    if "betas" in group:
        group["betas"] = (torch.tensor(0.8), torch.tensor(0.9))
    step(params, optimizer, range(5))


@scenario
def test_gradients_that_share_memory(make, params):
    """Expanded from one number, one tensor for two parameters, and the parameter itself."""
    optimizer = make(params)
    for i in range(5):
        for p in params:
            p.grad = torch.full((), 0.3 + i, device=DEVICE).expand(p.shape)
        params[1].grad = params[1].detach()
        optimizer.step()


@scenario
def test_gradients_with_other_strides(make, params):
    optimizer = make(params)
    for _ in range(5):
        for p in params:
            p.grad = None
        params[0].grad = torch.arange(20.0, device=DEVICE).view(4, 5).t()
        optimizer.step()


@scenario
def test_state_that_was_there_before_the_first_step(make, params):
    others = [nn.Parameter(p.detach().clone()) for p in params]
    source = make(others)
    step(others, source, range(3))
    optimizer = make(params)
    for p, q in zip(params, others, strict=True):
        p.data.copy_(q)
        optimizer.state[p] = copy.deepcopy(source.state[q])
    step(params, optimizer, range(3, 6))


@scenario
def test_entries_of_state_that_are_looked_at_or_taken_away(make, params):
    optimizer = make(params)
    assert [dict(optimizer.state[p]) for p in params] == [{}] * 4  # which makes them
    step(params, optimizer, range(3))
    del optimizer.state[params[0]]
    step(params, optimizer, range(3, 5))
    optimizer.state[params[3]] = {}
    step(params, optimizer, range(5, 8))


@scenario
def test_a_users_own_state_is_kept_saved_and_loaded(make, params):
    optimizer = make(params)
    step(params, optimizer, range(3))
    for p in params:
        optimizer.state[p]["mine"] = torch.ones(2)
    optimizer.state["all"] = {"epoch": 3}
    step(params, optimizer, range(3, 6))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(params, optimizer, range(6, 9))
    assert optimizer.state[params[0]]["mine"].tolist() == [1, 1]
    assert optimizer.state["all"] == {"epoch": 3}


@scenario
def test_hooks_on_state_dicts(make, params):
    optimizer = make(params)
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state_dict: {key: value for key, value in state_dict.items() if key != "extra"}
    )
    step(params, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    step(params, optimizer, range(3, 5))
    optimizer.load_state_dict(saved)
    step(params, optimizer, range(5, 8))


@scenario
def test_a_state_dict_from_before_the_first_step(make, params):
    optimizer = make(params)
    saved = copy.deepcopy(optimizer.state_dict())
    step(params, optimizer, range(3))
    optimizer.load_state_dict(saved)
    step(params, optimizer, range(3, 6))


@scenario
def test_a_state_dict_that_was_not_copied(make, params):
    """It shows the live state, as torch's does."""
    optimizer = make(params)
    step(params, optimizer, range(3))
    shown = optimizer.state_dict()
    step(params, optimizer, range(3, 6))
    optimizer.load_state_dict(shown)
    step(params, optimizer, range(6, 9))


@scenario
def test_two_optimizers_with_parameters_in_common(make, params):
    first, second = make(params[:3]), make(params[1:])
    for i in range(5):
        step(params, first, [i])
        second.step()


@scenario
def test_many_groups_and_empty_ones(make, params):
    more = [nn.Parameter(torch.full((2,), float(i), device=DEVICE)) for i in range(30)]
    groups = [{"params": [p], "lr": 0.001 * (i + 1)} for i, p in enumerate(more)]
    optimizer = make([*groups, {"params": []}, {"params": params}])
    step([*params, *more], optimizer, range(3))
    optimizer.param_groups[0]["params"].clear()
    step([*params, *more], optimizer, range(3, 5))
    return more


@scenario
def test_a_shallow_copy(make, params):
    optimizer = make(params)
    step(params, optimizer, range(3))
    twin = copy.copy(optimizer)
    step(params, twin, range(3, 6))
    step(params, optimizer, range(6, 9))


@needs("channels_last")
@scenario
def test_a_module_changes_its_memory_format(make, unused):
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(DEVICE)
    x = torch.randn(2, 3, 6, 6).to(DEVICE)
    optimizer = make(model.parameters())
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        model.to(memory_format=memory_format)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return model.parameters()


def test_a_gradient_of_another_dtype_is_refused_before_anything_moves():
    param, other = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2))
    if not hasattr(param, "grad_dtype"):
        pytest.skip("this torch knows gradients of the parameter's dtype only")
    param.grad_dtype = torch.float32
    param.grad, other.grad = torch.ones(3), torch.ones(2)
    optimizer = NpuFusedAdam([other, param])
    with pytest.raises(RuntimeError, match=r"of shape \(3,\) is torch.bfloat16 and has a gradient in torch.float32"):
        optimizer.step()
    assert other.tolist() == [1, 1]
    assert not optimizer.state


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_another_default_device(spec):
    """What an optimizer makes for itself is where its parameters are, or on the host."""
    ends = []
    for default in (torch.device("meta"), DEVICE):
        params, grads = make_params(SHAPES), make_params(SHAPES, seed=1)
        with default:
            optimizer = spec.cls(params, **spec.variants[0])
            for _ in range(3):
                for p, g in zip(params, grads, strict=True):
                    p.grad = g.detach().clone()
                optimizer.step()
        ends.append(params)
    for p, q in zip(*ends, strict=True):
        assert torch.equal(p, q)


@needs_extension
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float64, marks=needs("float64"))], ids=str)
def test_gradients_are_cleared_in_the_dtype_that_they_have_after_their_buffer_was_shown(dtype, set_to_none):
    ends = []
    for cls in (NpuFusedSGD, torch.optim.SGD):
        params = [nn.Parameter(torch.linspace(-1, 1, n, device=DEVICE)) for n in (5, 17)]
        optimizer = cls(params, lr=0.5)
        for p in params:
            p.grad = torch.full_like(p, 0.25)
        if cls is NpuFusedSGD:
            assert [grad.dtype for grad in optimizer.get_optimizer_combined_grads()] == [torch.float32]
        optimizer.step()
        for p in params:  # as module.to(dtype) does
            grad, p.grad = p.grad, None
            p.data = p.data.to(dtype)
            p.grad = grad.to(dtype)
        optimizer.zero_grad(set_to_none=set_to_none)
        assert {None if p.grad is None else p.grad.dtype for p in params} == {None if set_to_none else dtype}
        for p in params:
            p.square().sum().backward()
        optimizer.step()
        ends.append(params)
    for p, q in zip(*ends, strict=True):
        assert torch.equal(p, q)
