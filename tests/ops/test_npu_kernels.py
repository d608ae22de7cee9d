# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Kernel selection on an NPU, with stubs for the kernels that torch_npu may have, of the same signatures."""

import logging

import pytest
import torch

from apex_npu.ops import adam_, aten_fused, npu, segmented, sgd_

ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "maximize": False, "step": 3}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}


@pytest.fixture(autouse=True)
def forget_decisions():
    npu.works.cache_clear()
    yield
    npu.works.cache_clear()


@pytest.fixture
def apply_adam_w():
    """torch_npu.npu_apply_adam_w, from its documented formula, in CANN's float32; yields the calls."""
    if hasattr(torch.ops.npu, "npu_apply_adam_w"):
        pytest.skip("torch_npu is here")
    calls = []

    def kernel(
        beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad, max_grad_norm, amsgrad, maximize,
        *, out,
    ):  # fmt: skip
        var, m, v = out
        calls.append(var.numel())
        assert max_grad_norm is None
        assert not amsgrad
        beta1, beta2 = torch.tensor([beta1, beta2], dtype=torch.float32)
        g = -grad if maximize else grad
        var.mul_(1 - lr * weight_decay)
        m.mul_(beta1).add_(g * (1 - beta1))
        v.mul_(beta2).add_(g * g * (1 - beta2))
        denom = (v / (1 - beta2_power * beta2)).sqrt_().add_(epsilon)
        var.sub_(lr / (1 - beta1_power * beta1) * m / denom)
        return var, m, v

    library = torch.library.Library("npu", "FRAGMENT")
    numbers = "Scalar beta1_power, Scalar beta2_power, Scalar lr, Scalar weight_decay, Scalar beta1, Scalar beta2, "
    others = "Scalar epsilon, Tensor grad, Tensor? max_grad_norm, bool? amsgrad, bool? maximize"
    library.define(f"npu_apply_adam_w({numbers}{others}) -> (Tensor, Tensor, Tensor)")
    library.define(f"npu_apply_adam_w.out({numbers}{others}, *, Tensor[] out) -> (Tensor, Tensor, Tensor)")
    library.impl("npu_apply_adam_w.out", kernel, "CompositeExplicitAutograd")
    assert npu.works("npu_apply_adam_w", torch.device("cpu"))  # the trial
    calls.clear()
    yield calls
    library._destroy()
    vars(torch.ops.npu).pop("npu_apply_adam_w", None)


def operands(dtype=torch.float32, count=4):
    generator = torch.Generator().manual_seed(0)
    param, grad, *states = (torch.randn(1_001, generator=generator) for _ in range(count))
    return [param.to(dtype), grad.to(dtype), *(s.abs() for s in states)]


def only(kernel, monkeypatch):
    monkeypatch.setattr(npu, "has_apply_adam_w", lambda: False)
    monkeypatch.setattr(npu, "has_aten_kernel", lambda name: name == kernel)


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.9, 0.999), (0.9, 0.9999)])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_adam_in_one_call_of_the_fused_kernel(apply_adam_w, decoupled, maximize, bias_correction, scaled, betas):
    options = {
        **ADAM, "decoupled": decoupled, "maximize": maximize, "bias_correction": bias_correction,
        "grad_scale": torch.tensor([8.0]) if scaled else None, "beta1": betas[0], "beta2": betas[1],
    }  # fmt: skip
    ours, theirs = operands(), operands()
    npu.adam_(*ours, None, **options)
    adam_.reference(*theirs, None, **options)
    assert apply_adam_w == [1_001]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours[1], operands()[1])  # the gradient


def test_what_the_fused_kernel_does_not_take(apply_adam_w, monkeypatch):
    taken = []
    monkeypatch.setattr(npu, "has_aten_kernel", lambda name: False)
    monkeypatch.setattr(adam_, "reference", lambda *args, **options: taken.append(args[0].dtype))
    *args, v_max = operands(count=5)
    npu.adam_(*args, v_max, decoupled=True, **ADAM)
    npu.adam_(*operands(torch.bfloat16), None, decoupled=True, **ADAM)
    npu.adam_(*operands(torch.float64), None, decoupled=True, **ADAM)
    npu.adam_(*(t[1:] for t in operands()), None, decoupled=True, **ADAM)  # views would be copied
    assert taken == [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    assert apply_adam_w == []


@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_by_torchs_fused_adamw(decoupled, maximize, amsgrad, monkeypatch):
    only("_fused_adamw_", monkeypatch)
    options = {**ADAM, "decoupled": decoupled, "maximize": maximize, "beta2": 0.5}  # 1 − beta2 is right in float32
    ours, theirs = ([t[1:] for t in operands(count=5 if amsgrad else 4)] for _ in range(2))
    with monkeypatch.context() as patch:
        npu.works("_fused_adamw_", torch.device("cpu"))  # the trial calls the reference
        patch.setattr(adam_, "reference", None)
        npu.adam_(*ours, *([] if amsgrad else [None]), **options)
    adam_.reference(*theirs, *([] if amsgrad else [None]), **options)
    # A unit of the last place of 2 to 4, from which an update may leave little.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2.5e-7)


@pytest.mark.parametrize("kernel", ["_fused_adamw_", "_fused_adam_", "_fused_sgd_", None])
def test_torchs_fused_optimizers_where_the_device_has_them(kernel, monkeypatch):
    only(kernel, monkeypatch)
    for name in npu._KERNELS:
        npu.works(name, torch.device("cpu"))  # trials call the references
    taken = []
    for owner, name in ((npu, "_fused_adamw"), (aten_fused, "sgd_"), (adam_, "reference"), (sgd_, "reference")):
        call = (owner.__name__.rpartition(".")[2], name)
        monkeypatch.setattr(owner, name, lambda *args, _call=call, **options: taken.append(_call))
    npu.adam_(*operands(), None, decoupled=True, **ADAM)
    npu.adam_(*operands(), None, decoupled=False, **ADAM)
    npu.sgd_(*operands(count=3), **SGD, step=2)
    adam = ("npu", "_fused_adamw") if kernel == "_fused_adamw_" else ("adam_", "reference")
    assert taken == [adam, adam, ("aten_fused", "sgd_") if kernel == "_fused_sgd_" else ("sgd_", "reference")]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_half_gradients_are_divided_in_float32(shape):
    param, grad = torch.zeros(4), torch.full((4,), 2.0**-10, dtype=torch.float16)
    options = {**SGD, "lr": 1.0, "momentum": 0.0, "step": 1}
    aten_fused.sgd_(param, grad, None, grad_scale=torch.full(shape, 2.0**16), **options)
    assert param.tolist() == [-(2.0**-26)] * 4


def test_sgd_without_momentum_is_the_references(monkeypatch):
    only("_fused_sgd_", monkeypatch)
    monkeypatch.setattr(aten_fused, "sgd_", None)
    param, grad = operands(count=2)
    expected = param - 0.1 * grad
    npu.sgd_(param, grad, None, **{**SGD, "momentum": 0.0}, step=1)
    torch.testing.assert_close(param, expected)


@pytest.mark.parametrize("failure", ["raises", "computes something else", "is not there"])
def test_the_reference_takes_over(failure, monkeypatch, caplog):
    only(None if failure == "is not there" else "_fused_sgd_", monkeypatch)

    def kernel(param, *args, **options):
        if failure == "raises":
            raise RuntimeError("aclnnFusedSgd is not in libopapi.so")
        param.zero_()

    monkeypatch.setattr(aten_fused, "sgd_", kernel)
    ours, theirs = operands(count=3), operands(count=3)
    with caplog.at_level(logging.INFO, "apex_npu"):
        for step in (1, 2):
            npu.sgd_(*ours, **SGD, step=step)
            sgd_.reference(*theirs, **SGD, step=step)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    (said,) = [r.getMessage() for r in caplog.records]
    assert "_fused_sgd_" in said
    assert "falling back to plain torch" in said
    because = {"raises": "not in libopapi.so", "computes something else": "its trial step gave", "is not there": ""}
    assert because[failure] in said


LAMB = {
    "lr": 0.01, "beta1": 0.9, "beta2": 0.999, "beta3": 1 - 0.9, "eps": 1e-6, "step": 3, "bias_correction": False,
    "l2": 0.0, "decay": 0.0, "adapt": True, "max_weight_norm": 10.0, "maximize": False,
}  # fmt: skip
# Parameters of 1 to 1,000 elements; the third of zeros, the fourth without a gradient or moments.
LENGTHS = torch.tensor([1, 1_000, 48, 33, 17])
STARTS = torch.tensor([0, 48, 1_120, 1_216, 1_312])
IN_LAMB = 1_392


def lamb_operands():
    """param, grad, exp_avg, exp_avg_sq in slots, and NaN in what a buffer has between them."""
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.full((IN_LAMB,), torch.nan) for _ in range(4)]
    for i, (start, length) in enumerate(zip(STARTS.tolist(), LENGTHS.tolist(), strict=True)):
        for k, buffer in enumerate(buffers):
            zero = (i, k) == (2, 0) or (i == 3 and k > 0)
            values = torch.randn(length, generator=generator)
            buffer[start : start + length] = 0.0 if zero else values.abs() if k == 3 else values
    return buffers


def in_slots(buffer):
    ends = (STARTS + LENGTHS).tolist()
    return torch.cat([buffer[start:end] for start, end in zip(STARTS.tolist(), ends, strict=True)])


def step_lamb(lamb_, operands, options):
    param, grad, exp_avg, exp_avg_sq = operands
    direction = torch.full_like(exp_avg, torch.nan)
    lamb_(param, grad, exp_avg, exp_avg_sq, direction, STARTS, LENGTHS, None, **options)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"decay": 0.1},
        {"maximize": True, "decay": 0.1},
        {"bias_correction": True, "max_weight_norm": float("inf")},
        {"eps": 1e-3, "grad_scale": torch.tensor([8.0])},
        {"beta1": 0.5, "beta3": 0.5, "beta2": 0.9999, "lr": 1.0},
    ],
)
def test_lamb_by_the_fused_kernel_of_adam_and_rows(apply_adam_w, changed):
    options = {**LAMB, **changed}
    ours, exact = lamb_operands(), [buffer.double() for buffer in lamb_operands()]
    step_lamb(npu.lamb_, ours, options)
    step_lamb(segmented.lamb_.reference, exact, options)
    assert apply_adam_w == [IN_LAMB]
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(in_slots(a).double(), in_slots(b), rtol=2e-6, atol=1e-6)
    assert torch.equal(in_slots(ours[1]), in_slots(lamb_operands()[1]))


def test_an_overflow_in_lamb_stays_with_its_parameter(apply_adam_w):
    operands = lamb_operands()
    operands[1][48] = torch.inf
    step_lamb(npu.lamb_, operands, LAMB)
    bad = [bool(operands[0][s : s + n].isnan().any()) for s, n in zip(STARTS.tolist(), LENGTHS.tolist(), strict=True)]
    assert bad == [False, True, False, False, False]
    # Once the values are finite again, the padding between them is, too.
    good = lamb_operands()
    for now, then in zip(operands, good, strict=True):
        for start, length in zip(STARTS.tolist(), LENGTHS.tolist(), strict=True):
            now[start : start + length] = then[start : start + length]
    step_lamb(npu.lamb_, operands, LAMB)
    step_lamb(npu.lamb_, good, LAMB)
    assert torch.equal(in_slots(operands[0]), in_slots(good[0]))
    assert in_slots(good[0]).isfinite().all()


@pytest.mark.parametrize(
    "changed", [{"l2": 0.1}, {"beta3": 1.0}, {"adapt": False}, {"unaligned": True}, {"part": True}, {"half": True}]
)
def test_what_lamb_leaves_to_the_reference(apply_adam_w, monkeypatch, changed):
    monkeypatch.setattr(npu, "has_aten_kernel", lambda name: False)
    options = {**LAMB, **{name: value for name, value in changed.items() if name in LAMB}}
    operands, expected = lamb_operands(), lamb_operands()
    segments = (STARTS, LENGTHS, None)
    if "unaligned" in changed:
        segments = (STARTS + 1, LENGTHS, None)
    if "half" in changed:
        operands, expected = ([b[0].half(), b[1].half(), *b[2:]] for b in (operands, expected))
    if "part" in changed:
        operands, expected = ([torch.cat([b, b])[IN_LAMB:] for b in those] for those in (operands, expected))
    for lamb_, those in ((npu.lamb_, operands), (segmented.lamb_.reference, expected)):
        lamb_(*those, torch.zeros(IN_LAMB), *segments, **options)
    assert apply_adam_w == []
    for a, b in zip(operands, expected, strict=True):
        torch.testing.assert_close(in_slots(a), in_slots(b), rtol=0, atol=0, equal_nan=True)
