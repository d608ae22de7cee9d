# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""States in fewer bytes over many steps, beside float32 state: what docs/memory.md says of them."""

from __future__ import annotations

import math

import pytest
import torch
from devices import DEVICE
from torch import nn

from apex_npu import optimizers
from apex_npu.optimizers.memory_choices import memory_choices

NUMEL = 512
# Of the elements of a block all but 16 are small, where a pattern has small ones.
SMALL = torch.arange(NUMEL) % 8 != 0


def beside(ratio):
    """Gradients of which small ones are ``ratio`` times smaller than others of their block."""
    return lambda step, share, noise: (noise + 0.3) * torch.where(SMALL, 1 / ratio, 1.0)


def bursts(step, share, noise):
    return torch.where((torch.arange(NUMEL) * 7 + step) % 97 == 0, 100 * noise, 0.0)


def spike(step, share, noise):
    return torch.where(torch.arange(NUMEL) % 128 == (0 if step % 50 == 20 else -1), 1e4, noise)


# The gradient of a step, given its number, its share of all steps, and standard normal numbers.
PATTERNS = {
    "even": beside(1.0),
    "30 times": beside(30.0),
    "100 times": beside(100.0),
    "1000 times": beside(1e3),
    "100,000 times": beside(1e5),
    "steady": lambda step, share, noise: torch.logspace(0, -6, NUMEL)[torch.arange(NUMEL) * 37 % NUMEL],
    "half of them zeros": lambda step, share, noise: noise * (torch.arange(NUMEL) % 2),
    "bursts": bursts,
    "spike": spike,
    "fading": lambda step, share, noise: (noise + 0.3) * math.exp(-14 * share),
    "small ones rise": lambda step, share, noise: (noise + 0.3) * torch.where(SMALL, math.exp(14 * share - 14), 1.0),
    "tiny": lambda step, share, noise: (noise + 0.3) * 1e-13,
}
RULES = {
    "Adam": (optimizers.NpuFusedAdam, {}),
    "Adam, amsgrad": (optimizers.NpuFusedAdam, {"amsgrad": True}),
    "Adam, β near 1": (optimizers.NpuFusedAdam, {"betas": (0.99, 0.99999)}),
    "Adam, tiny eps": (optimizers.NpuFusedAdam, {"eps": 1e-30}),
    "AdamW": (optimizers.NpuFusedAdamW, {"weight_decay": 0.01}),
    "FusedAdam": (optimizers.FusedAdam, {}),
    "BertAdam": (optimizers.NpuFusedBertAdam, {"max_grad_norm": 1.0}),
    "LAMB": (optimizers.NpuFusedLamb, {}),
    "FusedLAMB": (optimizers.FusedLAMB, {"max_grad_norm": 0.0}),
    "AdamP": (optimizers.NpuFusedAdamP, {"nesterov": True, "weight_decay": 0.01}),
    "SGD": (optimizers.NpuFusedSGD, {"momentum": 0.9}),
    "SGD, nesterov": (optimizers.NpuFusedSGD, {"momentum": 0.99, "nesterov": True}),
    "SGD, dampening": (optimizers.NpuFusedSGD, {"momentum": 0.9, "dampening": 0.9}),
    "RMSprop": (optimizers.NpuFusedRMSprop, {}),
    "RMSprop, tiny eps": (optimizers.NpuFusedRMSprop, {"momentum": 0.9, "eps": 1e-30}),
    "RMSpropTF": (optimizers.NpuFusedRMSpropTF, {"momentum": 0.9}),
    "RMSpropTF, centered": (optimizers.NpuFusedRMSpropTF, {"momentum": 0.9, "centered": True}),
    "Adadelta": (optimizers.NpuFusedAdadelta, {}),
    "Adagrad": (optimizers.FusedAdagrad, {}),
    "NovoGrad": (optimizers.FusedNovoGrad, {}),
    "Muon": (optimizers.NpuFusedMuon, {}),
}


def formats_of(rule):
    names = RULES[rule][0].encodable_states
    one = [{name: "int8"} for name in names if len(names) > 1]
    others = [{**dict.fromkeys(names, "int8"), name: torch.bfloat16} for name in names if len(names) > 1]
    return [torch.bfloat16, "int8", *one, *others]


PRODUCT = [
    pytest.param(rule, state_dtype, id=f"{rule}, {state_dtype}") for rule in RULES for state_dtype in formats_of(rule)
]


def follow(rule, options, patterns, steps, **formats):
    """The longest step of each element, and how far it has moved in all, for each of ``patterns``."""
    generator = torch.Generator().manual_seed(0)
    shape = (16, NUMEL // 16) if rule is optimizers.NpuFusedMuon else (NUMEL,)
    params = [nn.Parameter(torch.randn(NUMEL, generator=generator).view(shape).to(DEVICE)) for _ in patterns]
    lr = 1.0 if rule is optimizers.NpuFusedAdadelta else 1e-3
    optimizer = rule(params, lr=lr, **options, **formats)
    start = before = torch.stack([p.detach().flatten().cpu() for p in params])
    longest = torch.zeros_like(before)
    for step in range(steps):
        noise = torch.randn(NUMEL, generator=generator)
        for p, pattern in zip(params, patterns, strict=True):
            p.grad = pattern(step, step / steps, noise).view(shape).to(DEVICE)
        optimizer.step()
        now = torch.stack([p.detach().flatten().cpu() for p in params])
        longest, before = torch.maximum(longest, (now - before).abs()), now
    return longest, now - start


def root_mean_square(values):
    return float(values.double().square().mean().sqrt())


def check(rule, state_dtype, steps):
    cls, options = RULES[rule]
    names = list(PATTERNS)
    longest, moved = follow(cls, options, PATTERNS.values(), steps, state_dtype=state_dtype)
    wanted_longest, wanted = follow(cls, options, PATTERNS.values(), steps)
    assert wanted.isfinite().all()
    not_finite = [name for name, values in zip(names, moved, strict=True) if not values.isfinite().all()]
    assert not not_finite
    for name, *found in zip(names, longest, moved, wanted_longest, wanted, strict=True):
        step, way, wanted_step, wanted_way = found
        in_block = wanted_step.view(-1, 128).amax(1).repeat_interleave(128)
        assert (step <= 10 * in_block).all(), f"{name}: a step is {float((step / in_block).max()):.3g} times as long"
        ratio = root_mean_square(way[~SMALL]) / max(root_mean_square(wanted_way[~SMALL]), 1e-30)
        assert ratio == 0 == root_mean_square(wanted_way[~SMALL]) or 0.2 < ratio < 5, (
            f"{name}: {ratio:.3g} times as far"
        )
        # Second moments of small ones may be upper bounds.
        small = root_mean_square(way[SMALL])
        assert small <= 10 * root_mean_square(wanted_way[SMALL]) or small <= root_mean_square(wanted_way[~SMALL]) / 127


@pytest.mark.parametrize("rule", RULES)
def test_steps_in_8_bits_are_no_longer_and_no_weight_is_frozen(rule):
    check(rule, "int8", 100)


@pytest.mark.sweep
@pytest.mark.parametrize(("rule", "state_dtype"), PRODUCT)
def test_three_thousand_steps_of_each_format_are_those_of_float32(rule, state_dtype):
    check(rule, state_dtype, 3000)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "int8", {"square_avg": "int8"}, {"grad_avg": torch.bfloat16}])
@pytest.mark.parametrize("rule", [optimizers.NpuFusedRMSprop, optimizers.NpuFusedRMSpropTF])
def test_centered_rules_take_no_variance_of_rounded_moments(rule, state_dtype):
    def of_small_variance(step, share, noise):
        return 1 + 0.02 * noise

    options = {"centered": True, "alpha": 0.99}
    _, moved = follow(rule, options, [of_small_variance], 150, state_dtype=state_dtype)
    _, wanted = follow(rule, options, [of_small_variance], 150)
    torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=1e-5)


def test_centering_that_is_switched_on_later_goes_on_in_float32():
    params = [nn.Parameter(torch.ones(300, device=DEVICE)) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    options = {"lr": 1e-3, "alpha": 0.9, "momentum": 0.9}
    encoded = optimizers.NpuFusedRMSprop([params[0]], **options, state_dtype="int8")
    plain = optimizers.NpuFusedRMSprop([params[1]], **options)
    for step in range(150):
        grad = 1 + 0.02 * torch.randn(300, generator=generator)
        for p, optimizer in zip(params, (encoded, plain), strict=True):
            optimizer.param_groups[0]["centered"] = step >= 5
            p.grad = grad.to(DEVICE)
            optimizer.step()
    assert encoded.state[params[0]]["step"] == 150
    torch.testing.assert_close(params[0], params[1], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("state_dtype", ["int8", {"square_avg": "int8"}])
def test_adadelta_does_not_diverge(state_dtype):
    # As torch.optim.Adadelta moves them: each step is squared into a state by which the next one is multiplied.
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.zeros(NUMEL, device=DEVICE)) for _ in range(2)]
    pair = (
        optimizers.NpuFusedAdadelta([params[0]], lr=1.0, state_dtype=state_dtype),
        torch.optim.Adadelta([params[1]], lr=1.0),
    )
    for step in range(300):
        grad = PATTERNS["100 times"](step, 0, torch.randn(NUMEL, generator=generator)).to(DEVICE)
        for p, optimizer in zip(params, pair, strict=True):
            p.grad = grad.clone()
            optimizer.step()
    found, wanted = (p.detach().abs().cpu() for p in params)
    assert float(found[SMALL].max()) < 1.2 * float(wanted[SMALL].max())


INT8, UINT8, BFLOAT16 = torch.int8, torch.uint8, torch.bfloat16


@pytest.mark.parametrize(
    ("rule", "options", "asked", "kept"),
    [
        ("Adam", {}, "int8", {"exp_avg": INT8, "exp_avg_sq": UINT8, "max_exp_avg_sq": UINT8}),
        ("Adam", {}, {"exp_avg": "int8"}, {"exp_avg": BFLOAT16}),
        ("Adam", {}, {"exp_avg": "int8", "exp_avg_sq": BFLOAT16}, {"exp_avg": BFLOAT16, "exp_avg_sq": BFLOAT16}),
        ("FusedAdam", {"eps": 1e-15}, "int8", {"exp_avg": BFLOAT16, "exp_avg_sq": BFLOAT16}),
        ("NovoGrad", {}, "int8", {"exp_avg": INT8}),
        ("RMSprop", {"centered": True}, "int8", {"momentum_buffer": INT8}),
        ("RMSprop", {"centered": True}, torch.bfloat16, {"momentum_buffer": BFLOAT16}),
        ("Adadelta", {}, "int8", {"square_avg": BFLOAT16, "acc_delta": BFLOAT16}),
        ("Adadelta", {}, {"square_avg": "int8"}, {"square_avg": BFLOAT16}),
    ],
)
def test_what_is_too_narrow_for_a_rule_is_kept_in_more_bytes(rule, options, asked, kept):
    cls, _ = RULES[rule]
    param = nn.Parameter(torch.zeros(300, device=DEVICE))
    optimizer = cls([param], state_dtype=asked, **options)
    assert optimizer.state_dtype == kept
    param.grad = torch.ones_like(param)
    optimizer.step()
    shown = {name: getattr(view, "stored_dtype", None) for name, view in optimizer.state[param].items()}
    assert {name: dtype for name, dtype in shown.items() if dtype is not None} == {
        name: dtype for name, dtype in kept.items() if name in shown
    }


@pytest.mark.parametrize(
    ("rule", "name", "before", "after"),
    [
        ("Adam", "eps", (1e-8, 1e-8), (1e-14, 1e-14)),
        ("Adam", "eps", (1e-8, 1e-8), (1e-8, 1e-14)),
        ("Adam", "eps", (1e-14, 1e-8), (1e-8, 1e-8)),
        ("Adam", "eps", (1e-14, 1e-8), (1e-14, 0.0)),
        ("Adam, amsgrad", "eps", (1e-8, 1e-14), (1e-14, 1e-8)),
        ("BertAdam", "e", (1e-14, 1e-6), (1e-6, 1e-6)),
        ("LAMB", "eps", (1e-6, 1e-6), (1e-14, 1e-6)),
        ("RMSprop", "centered", (True, False), (False, False)),
        ("RMSprop", "centered", (False, False), (True, True)),
    ],
)
def test_formats_follow_changes_of_groups(rule, name, before, after):
    cls, options = RULES[rule]
    generator = torch.Generator().manual_seed(0)
    weights, *grads = (torch.randn(2, 300, generator=generator).to(DEVICE) for _ in range(3))

    def make(values):
        params = [nn.Parameter(weight.clone()) for weight in weights]
        groups = [{"params": [p], name: value} for p, value in zip(params, values, strict=True)]
        return cls(groups, **{"lr": 1e-3, **options, "state_dtype": "int8"}), params

    def step(optimizer, params, grads):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()
        for group, p in zip(optimizer.param_groups, params, strict=True):
            for state in {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg"} & optimizer.state[p].keys():
                shown = getattr(optimizer.state[p][state], "stored_dtype", torch.float32)
                assert shown == (torch.float32 if group.get("centered") else optimizer.state_dtype[state])

    optimizer, params = make(before)
    step(optimizer, params, grads[0])
    for group, value in zip(optimizer.param_groups, after, strict=True):
        group[name] = value
    other, copies = make(after)  # has these values from the start
    other.load_state_dict(optimizer.state_dict())
    for p, copied in zip(params, copies, strict=True):
        copied.data.copy_(p.data)
    step(optimizer, params, grads[1])
    step(other, copies, grads[1])
    assert all(map(torch.equal, params, copies))
    optimizer.load_state_dict(other.state_dict(encoded=True))
    other.load_state_dict(optimizer.state_dict(encoded=True))


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ("Adam", {}, [8, 8, 8, 4, 2.0625, 2.0625, 8, 8, 4, 0]),
        ("Adadelta", {}, [8, 8, 8, 4, 8, 8, 4, 0]),
        ("RMSprop", {"centered": True}, [8, 8, 8, 8, 8, 8, 0]),
        ("RMSprop", {"centered": True, "momentum": 0.9}, [12, 12, 12, 10, 9.03125, 9.03125, 12, 12, 10, 0]),
    ],
)
def test_tables_of_memory_count_what_is_kept(rule, options, expected):
    optimizer = RULES[rule][0]([nn.Parameter(torch.zeros(1))], **options)
    assert [choice.state for choice in memory_choices(optimizer)] == expected


def test_tables_of_memory_count_what_a_small_eps_of_any_group_costs():
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "eps": eps} for eps in (1e-8, 1e-14)]
    choices = memory_choices(optimizers.NpuFusedAdam(groups, state_dtype="int8"))
    assert [choice.state for choice in choices] == [8, 8, 8, 4, 8, 8, 4, 0]
