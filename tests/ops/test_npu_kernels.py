# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which kernel an NPU gets, with stand-ins for those that torch_npu may bring; they have its signatures."""

import pytest
import torch

from apex_npu.ops import aten_fused, npu, reference

ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "maximize": False, "step": 3}


@pytest.fixture(autouse=True)
def forget_capabilities():
    npu.has_apply_adam_w.cache_clear()
    npu.has_aten_kernel.cache_clear()
    yield
    npu.has_apply_adam_w.cache_clear()
    npu.has_aten_kernel.cache_clear()


@pytest.fixture
def apply_adam_w():
    """torch_npu.npu_apply_adam_w, from its documented formula; yields the calls."""
    if hasattr(torch.ops.npu, "npu_apply_adam_w"):
        pytest.skip("torch_npu is here")
    calls = []

    def kernel(
        beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad, max_grad_norm, amsgrad, maximize,
        *, var, m, v,
    ):  # fmt: skip
        calls.append(var.numel())
        assert max_grad_norm is None
        assert not amsgrad
        g = -grad if maximize else grad
        var.mul_(1 - lr * weight_decay)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denom = (v / (1 - beta2_power * beta2)).sqrt_().add_(epsilon)
        var.addcdiv_(m, denom, value=-lr / (1 - beta1_power * beta1))
        return var, m, v

    library = torch.library.Library("npu", "FRAGMENT")
    library.define(
        "npu_apply_adam_w.out(Scalar beta1_power, Scalar beta2_power, Scalar lr, Scalar weight_decay, Scalar beta1, "
        "Scalar beta2, Scalar epsilon, Tensor grad, Tensor? max_grad_norm, bool? amsgrad, bool? maximize, *, "
        "Tensor(a!) var, Tensor(b!) m, Tensor(c!) v) -> (Tensor(a!), Tensor(b!), Tensor(c!))"
    )
    library.impl("npu_apply_adam_w.out", kernel, "CompositeExplicitAutograd")
    yield calls
    library._destroy()
    vars(torch.ops.npu).pop("npu_apply_adam_w", None)


def operands(dtype=torch.float32, count=4):
    generator = torch.Generator().manual_seed(0)
    param, grad, *states = (torch.randn(1_001, generator=generator) for _ in range(count))
    return [param.to(dtype), grad.to(dtype), *(s.abs() for s in states)]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_adam_in_one_call_of_the_fused_kernel(apply_adam_w, decoupled, maximize, bias_correction, scaled):
    options = {
        **ADAM, "decoupled": decoupled, "maximize": maximize, "bias_correction": bias_correction,
        "grad_scale": torch.tensor([8.0]) if scaled else None,
    }  # fmt: skip
    ours, theirs = operands(), operands()
    models = [torch.zeros(1_001, dtype=torch.float16) for _ in range(2)]
    npu.adam_(*ours, None, models[0], **options)
    reference.adam_(*theirs, None, models[1], **options)
    assert apply_adam_w == [1_001]
    for a, b in zip([*ours, models[0]], [*theirs, models[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours[1], operands()[1])  # the gradient


def test_what_the_fused_kernel_does_not_take(apply_adam_w, monkeypatch):
    taken = []
    monkeypatch.setattr(reference, "adam_", lambda *args, **options: taken.append(args[0].dtype))
    *args, v_max = operands(count=5)
    npu.adam_(*args, v_max, decoupled=True, **ADAM)
    npu.adam_(*operands(torch.bfloat16), None, decoupled=True, **ADAM)
    assert taken == [torch.float32, torch.bfloat16]
    assert apply_adam_w == []


@pytest.mark.parametrize("kernel", ["_fused_adamw_", "_fused_adam_", "_fused_sgd_", None])
def test_torchs_fused_optimizers_where_the_device_has_them(kernel, monkeypatch):
    taken = []
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: name == f"aten::{kernel}")
    for module in (aten_fused, reference):
        for name in ("adam_", "sgd_"):
            call = (module.__name__.rpartition(".")[2], name)
            monkeypatch.setattr(module, name, lambda *args, _call=call, **options: taken.append(_call))
    npu.adam_(*operands(), None, decoupled=True, **ADAM)
    npu.adam_(*operands(), None, decoupled=False, **ADAM)
    npu.sgd_(*operands(count=3), lr=0.1)
    expected = ["_fused_adamw_", "_fused_adam_", "_fused_sgd_"]
    assert [module for module, _ in taken] == ["aten_fused" if name == kernel else "reference" for name in expected]
    assert [name for _, name in taken] == ["adam_", "adam_", "sgd_"]
