# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
import math

import pytest
import reference_optimizers as reference
import torch
from torch import nn

from apex_npu.optimizers import FusedLAMB, Lamb, NpuFusedBertAdam, NpuFusedLamb, WarmupLR
from apex_npu.optimizers.bert_adam import SCHEDULES


# Worked out manually.
@pytest.mark.parametrize(
    ("name", "x", "warmup", "expected"),
    [
        ("warmup_linear", 0.0, 0.1, 0.0),
        ("warmup_linear", 0.05, 0.1, 0.5),
        ("warmup_linear", 0.1, 0.1, 1.0),
        ("warmup_linear", 0.55, 0.1, 0.5),
        ("warmup_linear", 1.0, 0.1, 0.0),
        ("warmup_linear", 2.0, 0.1, 0.0),
        ("warmup_linear", 0.0, -1, 1.0),
        ("warmup_linear", 0.5, -1, 0.5),
        ("warmup_constant", 0.3, 0.1, 1.0),
        ("warmup_constant", 0.05, 0.1, 0.5),
        ("warmup_cosine", 0.5, 0.1, 0.5),
        ("warmup_cosine", 0.0, -1, 1.0),
        ("warmup_cosine", 1.7, 0.1, 0.0),
        ("warmup_poly", 0.75, 0.1, 0.5),
        ("warmup_poly", 1.5, 0.1, 0.0),
    ],
)
def test_schedules(name, x, warmup, expected):
    assert SCHEDULES[name](x, warmup) == pytest.approx(expected, abs=1e-12)


def test_warmup_lr_is_the_schedule_inside_bert_adam():
    results = []
    for inside in (True, False):
        param = nn.Parameter(torch.ones(3))
        schedule = {"schedule": "warmup_cosine", "t_total": 10, "warmup": 0.2}
        optimizer = NpuFusedBertAdam([param], lr=0.1, **(schedule if inside else {}))
        scheduler = None if inside else WarmupLR(optimizer, **schedule)
        for _ in range(12):
            param.grad = torch.tensor([1.0, -2.0, 0.5])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        results.append(param.detach().clone())
    torch.testing.assert_close(results[0], results[1])


def test_warmup_lr_arguments():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match=r"schedule must be one of warmup_cosine, .*, got 'linear'"):
        WarmupLR(optimizer, "linear", 10)
    with pytest.raises(ValueError, match="t_total must be > 0, got 0"):
        WarmupLR(optimizer, "warmup_linear", 0)


def test_bert_adam_tells_its_learning_rates():
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = NpuFusedBertAdam(params, lr=0.1, t_total=10, schedule="warmup_linear")
    params[0].grad = torch.ones(2)
    optimizer.step()
    assert optimizer.get_lr() == pytest.approx([0.09, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "lr": 1e-2}, {"adam": True, "betas": (0.5, 0.9)}])
def test_unfused_lamb(options, dtype):
    sets = []
    for cls in (Lamb, NpuFusedLamb, reference.Lamb):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in [(30, 20), (5,), ()]]
        params.append(nn.Parameter(torch.zeros(4, dtype=dtype)))  # a norm of 0
        optimizer = cls(params, **options)
        for step in range(20):
            for p in params:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.step()
        sets.append(params)
    tolerance = {torch.float32: 5e-6, torch.float64: 1e-12}.get(dtype, 3e-2)
    for unfused, fused, expected in zip(*sets, strict=True):
        torch.testing.assert_close(unfused, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(fused, expected, rtol=tolerance, atol=tolerance)


def test_unfused_lamb_shows_its_norms():
    param = nn.Parameter(torch.full((400,), 1.0))
    optimizer = Lamb([param])
    param.grad = torch.ones(400)
    optimizer.step()
    state = optimizer.state[param]
    assert state["weight_norm"].item() == 10.0  # 20, clipped
    assert state["trust_ratio"].item() == pytest.approx(10.0 / state["adam_norm"].item())
    assert math.isfinite(state["adam_norm"].item())


def _train_lamb(optimizer, params, steps):
    for step in steps:
        for p in params:
            generator = torch.Generator().manual_seed(step)
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype) * 1e-3
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("saved_by", [Lamb, NpuFusedLamb])
def test_unfused_lamb_loads_state_in_full_precision(saved_by, dtype):
    """Squares of gradients of 1e-3 are 0 in float16."""
    params = [nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in [(5, 3), ()]]
    first = saved_by(params, lr=1e-2)
    _train_lamb(first, params, range(3))
    resumed = [nn.Parameter(p.detach().clone()) for p in params]
    second = Lamb(resumed, lr=1e-2)
    second.load_state_dict(first.state_dict())
    for p, twin in zip(params, resumed, strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert second.state[twin][name].dtype == first.state[p][name].dtype
            assert torch.equal(second.state[twin][name], first.state[p][name])
            assert second.state[twin][name] is not first.state[p][name]
    unfused = Lamb(params, lr=1e-2)
    unfused.state.update({p: {k: v.clone() for k, v in state.items()} for p, state in first.state.items()})
    _train_lamb(unfused, params, range(3, 6))
    _train_lamb(second, resumed, range(3, 6))
    assert all(map(torch.equal, params, resumed))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_unfused_lamb_counts_in_float32_whatever_the_default_dtype(default):
    """bfloat16 counts no further than 256."""
    param = nn.Parameter(torch.ones(2))
    torch.set_default_dtype(default)
    try:
        optimizer = Lamb([param])
        _train_lamb(optimizer, [param], range(258))
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[param]["step"].dtype == torch.float32
    assert optimizer.state[param]["step"].item() == 258


def test_unfused_lamb_takes_complex_numbers_as_pairs():
    """As torch.optim does."""
    value, grad = torch.randn(2, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    param, pairs = nn.Parameter(value.clone()), nn.Parameter(torch.view_as_real(value).clone())
    first, second = Lamb([param], lr=0.1), Lamb([pairs], lr=0.1)
    for _ in range(3):
        param.grad, pairs.grad = grad.clone(), torch.view_as_real(grad).clone()
        first.step()
        second.step()
        first.load_state_dict(first.state_dict())
    assert torch.equal(torch.view_as_real(param.detach()), pairs.detach())
    assert torch.equal(first.state[param]["exp_avg_sq"], second.state[pairs]["exp_avg_sq"])


def test_unfused_lamb_refuses():
    with pytest.raises(ValueError, match="Invalid weight_decay value: -1"):
        Lamb([nn.Parameter(torch.ones(1))], weight_decay=-1)
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = Lamb(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradient, which Lamb does not support.*SparseAdam"):
        optimizer.step()


@pytest.mark.parametrize("cls", [NpuFusedLamb, Lamb, FusedLAMB])
def test_an_overflow_shows_in_the_whole_parameter(cls):
    """Its norm is NaN, so is the ratio; a ratio of 1 would hide it in one element."""
    param = nn.Parameter(torch.ones(4))
    optimizer = cls([param], lr=0.1)
    param.grad = torch.tensor([1.0, 1.0, float("inf"), 1.0])
    optimizer.step()
    assert param.isnan().all()
