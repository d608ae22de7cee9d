# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Each op: registered soundly, its kernels equal the reference, the reference equals float64 arithmetic by the book."""

import pytest
import torch

from apex_npu import ops
from apex_npu.ops import reference

SGD = {
    "lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01, "nesterov": False, "maximize": False,
    "first": False,
}  # fmt: skip
ADAM = {
    "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "decoupled": False, "maximize": False,
    "step": 3,
}  # fmt: skip


def buffers(count, numel=100_003, dtype=torch.float32, state_dtype=None):
    generator = torch.Generator().manual_seed(0)
    param, grad, *states = (torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(count))
    return [param.to(dtype), grad.to(dtype), *(s.abs().to(state_dtype or dtype) for s in states)]


def run(op, args, options):
    args = [None if a is None else a.clone() for a in args]
    op(*args, **options)
    return args


@pytest.mark.parametrize("change", [{}, {"nesterov": True, "dampening": 0.0}, {"first": True}, {"maximize": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sgd_by_the_book(change, dtype):
    options = {**SGD, **change}
    args = buffers(3, dtype=dtype, state_dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    p, g, b = (t.double() for t in args)
    g = (-g if options["maximize"] else g) + options["weight_decay"] * p
    b = g if options["first"] else options["momentum"] * b + (1 - options["dampening"]) * g
    expected = p - options["lr"] * (g + options["momentum"] * b if options["nesterov"] else b)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}.get(dtype, torch.finfo(dtype).eps)
    for op in (ops.sgd_, reference.sgd_):
        param, _, buffer = run(op, args, options)
        torch.testing.assert_close(param.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(buffer.double(), b, rtol=max(tolerance, 1e-6), atol=1e-6)


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
    for op in (ops.adam_, reference.adam_):
        param, _, exp_avg, exp_avg_sq, _ = run(op, args if amsgrad else [*args[:4], None], o)
        torch.testing.assert_close(param.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(exp_avg.double(), m, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(exp_avg_sq.double(), v, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 41 * 123])
def test_any_length(numel):
    args = buffers(4, numel=numel)
    fused, expected = run(ops.adam_, [*args, None], ADAM), run(reference.adam_, [*args, None], ADAM)
    torch.testing.assert_close(fused[0], expected[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("momentum_buffer", [True, False])
def test_opcheck_sgd(momentum_buffer):
    param, grad, buffer = buffers(3, numel=40)
    torch.library.opcheck(torch.ops.apex_npu.sgd_.default, (param, grad, buffer if momentum_buffer else None), SGD)


@pytest.mark.parametrize("amsgrad", [True, False])
def test_opcheck_adam(amsgrad):
    *args, v_max = buffers(5, numel=40)
    torch.library.opcheck(torch.ops.apex_npu.adam_.default, (*args, v_max if amsgrad else None), ADAM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "options", "states"), [("sgd_", SGD, 1), ("adam_", ADAM, 2)])
def test_grad_scale_divides_the_gradient_first(name, options, states, dtype):
    """float16 gradients of 1e-7 times 2¹⁰, which float16 itself could not be divided back into."""
    args = buffers(2 + states, dtype=dtype, state_dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    args += [None] * (name == "adam_")
    true = args[1].double() * 1e-7
    scaled = (true * 2.0**10).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exact = scaled.double() / 2.0**10
    for op in (getattr(ops, name), getattr(reference, name)):
        param, grad, *state = run(op, [args[0], scaled, *args[2:]], {**options, "grad_scale": torch.tensor([2.0**10])})
        wanted, _, *wanted_state = run(op, [args[0].to(wide), exact.to(wide), *args[2:]], options)
        torch.testing.assert_close(param.to(wide), wanted, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)
        torch.testing.assert_close(grad.double(), exact.to(dtype).double(), rtol=1e-6, atol=torch.finfo(dtype).tiny)
        for got, want in zip(state, wanted_state, strict=True):
            if got is not None:
                torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=1e-12)
