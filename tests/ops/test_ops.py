# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Each op: its kernels equal the reference, the reference equals float64 arithmetic by the book."""

import kernel_cases
import pytest
import torch
from devices import DEVICE
from kernel_cases import ADAM, SGD

from apex_npu import ops
from apex_npu._extension import extension
from apex_npu.ops import aten_fused


def buffers(count, numel=100_003, dtype=torch.float32, state_dtype=None):
    generator = torch.Generator().manual_seed(0)
    param, grad, *states = (torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(count))
    return [param.to(dtype), grad.to(dtype), *(s.abs().to(state_dtype or dtype) for s in states)]


def run(op, args, options):
    args = [None if a is None else a.clone() for a in args]
    op(*args, **options)
    return args


@pytest.mark.parametrize(
    "change", [{}, {"nesterov": True, "dampening": 0.0}, {"nesterov": True}, {"step": 1}, {"maximize": True}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sgd_by_the_book(change, dtype):
    options = {**SGD, **change}
    args = buffers(3, dtype=dtype, state_dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    p, g, b = (t.double() for t in args)
    g = (-g if options["maximize"] else g) + options["weight_decay"] * p
    b = g if options["step"] == 1 else options["momentum"] * b + (1 - options["dampening"]) * g
    ahead = (1 - options["dampening"]) * g + options["momentum"] * b
    expected = p - options["lr"] * (ahead if options["nesterov"] else b)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}.get(dtype, torch.finfo(dtype).eps)
    for op in (ops.sgd_, ops.sgd_.reference):
        param, _, buffer = run(op, args, options)
        torch.testing.assert_close(param.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(buffer.double(), b, rtol=max(tolerance, 1e-6), atol=1e-6)


@pytest.mark.pairwise
@pytest.mark.parametrize("change", [{}, {"decoupled": True}, {"maximize": True, "weight_decay": 0.0}, {"step": 1}])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_adam_by_the_book(change, amsgrad, dtype):
    o = {**ADAM, **change}
    args = buffers(5, dtype=dtype, state_dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    p, g, m, v, v_max = (t.double() for t in args)
    g = -g if o["maximize"] else g
    if o["decoupled"]:
        p = p - o["lr"] * o["weight_decay"] * p
    else:
        g = g + o["weight_decay"] * p
    m = o["beta1"] * m + (1 - o["beta1"]) * g
    v = o["beta2"] * v + (1 - o["beta2"]) * g * g
    v_hat = torch.maximum(v, v_max) if amsgrad else v
    denom = v_hat.sqrt() / (1 - o["beta2"] ** o["step"]) ** 0.5 + o["eps"]
    expected = p - o["lr"] / (1 - o["beta1"] ** o["step"]) * m / denom
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-13}.get(dtype, torch.finfo(dtype).eps)
    for op in (ops.adam_, ops.adam_.reference):
        param, _, exp_avg, exp_avg_sq, _ = run(op, args if amsgrad else [*args[:4], None], o)
        torch.testing.assert_close(param.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(exp_avg.double(), m, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(exp_avg_sq.double(), v, rtol=1e-5, atol=1e-6)


# For each rule its options, and how many states it has.
RULES = {name: (options, states) for name, options, states in kernel_cases.RULES}
NUMEL = 5_000


def segments_for(dtype, device="cpu"):
    """Segment arguments of the rules that have any: two parameters, and padding."""
    direction = torch.empty(NUMEL, dtype=dtype, device=device)
    return [direction, *ops.Segments.of([0, 2_600], [2_500, 2_300], NUMEL, direction.device)]


def apply(name, operands, **options):
    """One step on copies of ``operands``, and what they are then, without the gradient, which must be what it was."""
    copies = [None if t is None else t.clone() for t in operands]
    more = segments_for(copies[2].dtype, copies[2].device) if name == "lamb_" else []
    getattr(ops, name)(*copies, *more, **{**RULES[name][0], **options})
    torch.testing.assert_close(copies[1], operands[1], rtol=0, atol=0)
    return [copies[0], *copies[2:]]


def operands_of(name, dtype):
    operands = buffers(2 + RULES[name][1], NUMEL, dtype, torch.float32 if dtype.itemsize == 2 else dtype)
    if name == "rmsprop_":
        operands[3].mul_(0.1).clamp_max_(operands[2].sqrt())  # a mean, whose square is no larger than the mean square
        operands[2].add_(0.1)
    return operands


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RULES)
def test_grad_scale_divides_what_is_not_written(name, dtype):
    """float16 gradients of 1e-7 times 2¹⁰, which float16 itself could not be divided back into."""
    param, grad, *states = operands_of(name, dtype)
    scaled = (grad.double() * 1e-7 * 2.0**10).to(dtype)
    wide = states[0].dtype
    got = apply(name, [param, scaled, *states], grad_scale=torch.tensor([2.0**10]))
    want = apply(name, [param.to(wide), scaled.to(wide) / 2.0**10, *states])
    torch.testing.assert_close(got[0].to(wide), want[0], rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)
    for state, wanted in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(state.double(), wanted.double(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_gradients_of_low_precision_beside_float32_parameters(name, dtype):
    param, grad, *states = operands_of(name, torch.float32)
    low = grad.to(dtype)
    for got, want in zip(apply(name, [param, low, *states]), apply(name, [param, low.float(), *states]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(extension is not None, reason="the extension has kernels, which are called one by one")
@pytest.mark.parametrize("name", ["sgd_", "adam_"])
def test_one_call_for_neighbours_is_what_a_call_for_each_is(name):
    rule = getattr(ops, name)

    def calls(*changes):
        operands = operands_of(name, torch.float32)
        spans = (slice(0, 1000), slice(1000, 1017), slice(1017, NUMEL))
        options = [
            {**RULES[name][0], "dampening": 0.0, **o} if name == "sgd_" else {**RULES[name][0], **o} for o in changes
        ]
        return operands, [rule.bind(*(t[span] for t in operands), **o) for span, o in zip(spans, options, strict=True)]

    expected, one_by_one = calls({}, {}, {"lr": 0.2})
    for op, operands, options in one_by_one:
        op(*operands, **options)
    got, alike = calls({}, {}, {"lr": 0.2})
    found = aten_fused.joined(alike)
    assert [count for count, _ in found] == [2, 1]
    for _, (op, operands, options) in found:
        op(*operands, **options)
    assert all(map(torch.equal, got, expected))
    for other in ({"found_inf": torch.zeros(1)}, {"grad_scale": torch.ones(1)}, {"lr": 0.5}):
        assert [count for count, _ in aten_fused.joined(calls({}, other, {})[1])] == [1, 1, 1]


@pytest.mark.parametrize("found_inf", [0.0, 2.0])
@pytest.mark.parametrize("name", ["sgd_", "adam_"])
def test_torchs_own_kernels_take_tensors_of_any_dtype_and_any_flag(name, found_inf):
    options = {**RULES[name][0], **({"dampening": 0.0} if name == "sgd_" else {})}
    before = operands_of(name, torch.float32)
    want, got = (run(lambda *args, **kwargs: None, before, {}) for _ in range(2))
    getattr(ops, name).reference(*want, **options)
    tensors = {"lr": torch.tensor(options["lr"], dtype=torch.float64), "step": torch.tensor(float(options["step"]))}
    getattr(aten_fused, name)(*got, **{**options, **tensors}, found_inf=torch.tensor([found_inf]))
    for now, then, wanted in zip(got, before, want, strict=True):
        torch.testing.assert_close(now, then if found_inf else wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("found_inf", [None, 0.0, 2.0])
@pytest.mark.parametrize("name", RULES)
def test_numbers_that_are_tensors(name, found_inf):
    """On a CPU the op reads their values; elsewhere they are used as tensors."""
    before = operands_of(name, torch.float32)
    numbers = {"lr": 0.125, **({} if name in ("rmsprop_", "adadelta_", "adagrad_") else {"step": 2})}
    tensors = {number: torch.tensor([float(value)], device=DEVICE) for number, value in numbers.items()}
    if found_inf is not None:
        tensors["found_inf"] = torch.tensor(found_inf, device=DEVICE)
    want = apply(name, before, **numbers)
    got = apply(name, [t.to(DEVICE) for t in before], **tensors)
    inside = torch.ones(NUMEL, dtype=torch.bool)
    inside[2_500:2_600] = inside[4_900:] = name != "lamb_"
    for now, then, wanted in zip(got, [before[0], *before[2:]], want, strict=True):
        torch.testing.assert_close(now.cpu()[inside], (then if found_inf else wanted)[inside], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_of_large_tiny_and_odd_values(dtype):
    for x in (torch.full((300,), 1e30), torch.full((300,), 1e-30), torch.randn(1_000_003), torch.zeros(0)):
        x = x.to(dtype)
        # Without the extension sums of 2¹⁶ elements are taken in float32.
        torch.testing.assert_close(ops.norm(x), torch.linalg.vector_norm(x.double()).float(), rtol=3e-7, atol=0)
    for bad in (torch.inf, torch.nan):
        for place in (0, 500, 1_000):
            x = torch.randn(1_001).to(dtype)
            x[place] = bad
            assert not ops.norm(x).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norm_looks_for_elements_that_are_not_finite(dtype):
    largest = torch.finfo(dtype).max
    for numel in (0, 1, 15, 17, 70_001):
        x = torch.full((numel,), largest, device=DEVICE, dtype=dtype)
        found_inf = torch.zeros(1, device=DEVICE)
        assert torch.equal(ops.norm(x, found_inf), ops.norm(x))  # which may overflow
        assert found_inf.item() == 0.0
        for bad in (torch.inf, -torch.inf, torch.nan) if numel else ():
            for place in (0, numel // 2, numel - 1):
                x = torch.zeros(numel, device=DEVICE, dtype=dtype)
                x[place] = bad
                found_inf.zero_()
                ops.norm(x, found_inf)
                assert found_inf.item() == 1.0
                ops.norm(torch.zeros_like(x), found_inf)  # what another has found stays
                assert found_inf.item() == 1.0


@pytest.mark.parametrize("max_norm", [0.5, 1e4, torch.inf])
def test_norm_and_what_clips_to_it(max_norm):
    for x in (torch.randn(5_001, device=DEVICE), torch.full((3,), torch.inf, device=DEVICE)):
        norm, coefficient = ops.segmented.norm_to_clip(x, max_norm)
        clipped = torch.nn.Parameter(torch.zeros_like(x))
        clipped.grad = torch.ones_like(x)  # multiplied by the coefficient alone
        torch.nn.utils.clip_grads_with_norm_([clipped], max_norm, norm)
        torch.testing.assert_close(norm, ops.norm(x), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(coefficient, clipped.grad[0], rtol=0, atol=0, equal_nan=True)
