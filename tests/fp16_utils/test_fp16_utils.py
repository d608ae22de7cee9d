# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models in float16 with manually kept masters, against float32 torch."""

import copy
import io

import pytest
import torch
from devices import DEVICE
from lockstep import assert_equal_params
from torch import nn

from apex_npu import amp, fp16_utils, optimizers
from apex_npu.fp16_utils import FP16_Optimizer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.plain_norm = nn.BatchNorm1d(16, affine=False)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(torch.relu(self.norm(x.float()).to(x.dtype)))


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return fp16_utils.convert_network(Net().to(DEVICE), dtype)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 6, generator=generator).to(DEVICE), torch.randn(32, 3, generator=generator).to(DEVICE)


def loss_of(model, step):
    x, y = batch(step)
    return nn.functional.mse_loss(model(x.to(model.first.weight.dtype)).float(), y)


# ------------------------------------------------------------------------------------------------------------- models


def test_only_affine_batch_norms_stay_in_float32():
    model = net(torch.float16)
    assert {name for name, t in model.state_dict().items() if t.dtype == torch.float32} == {
        "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
    }  # fmt: skip
    assert model.plain_norm.running_mean.dtype == model.plain_norm.running_var.dtype == torch.float16
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_convert_module_leaves_children_alone_and_casts_gradients():
    model = nn.Sequential(nn.Linear(2, 2)).to(DEVICE)
    model.own = nn.Parameter(torch.ones(2, device=DEVICE))
    model.own.grad = torch.full((2,), 0.5, device=DEVICE)
    identity = model.own
    fp16_utils.convert_module(model, torch.float16)
    assert model.own is identity
    assert (model.own.dtype, model.own.grad.dtype, model[0].weight.dtype) == (
        torch.float16, torch.float16, torch.float32,
    )  # fmt: skip
    assert model.own.grad.tolist() == [0.5, 0.5]


def test_network_to_half_casts_its_input_and_keeps_batch_norm():
    model = fp16_utils.network_to_half(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(DEVICE))
    assert isinstance(model[0], fp16_utils.tofp16)
    assert model[1][0].weight.dtype == torch.float16
    assert model[1][1].weight.dtype == torch.float32
    assert model(torch.randn(2, 3, 8, 8, device=DEVICE)).dtype == torch.float16


def test_bn_convert_float_goes_all_the_way_down():
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))).half()
    assert fp16_utils.BN_convert_float(model) is model
    affine, plain, linear = model[0]
    assert affine.weight.dtype == affine.running_var.dtype == torch.float32
    assert plain.running_var.dtype == linear.weight.dtype == torch.float16


def test_fp16_model_gives_half_out():
    model = fp16_utils.FP16Model(nn.Linear(4, 4).to(DEVICE))
    x = torch.randn(2, 4, device=DEVICE)
    assert torch.equal(model(x), model.network(x.half()))
    assert model(x).dtype == torch.float16


# ------------------------------------------------------------------------------------------------------------ masters


@pytest.mark.parametrize("flat", [False, True])
def test_manually_kept_masters_train_like_float32(flat):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(DEVICE)
    reference = copy.deepcopy(model)
    model.half()
    model_params, master_params = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert len(master_params) == (1 if flat else 4)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in master_params)
    optimizer = torch.optim.SGD(master_params, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        x, y = batch(step)
        model.zero_grad()
        (nn.functional.mse_loss(model(x.half()).float(), y) * 64).backward()
        fp16_utils.model_grads_to_master_grads(model_params, master_params, flat_master=flat)
        for p in master_params:
            p.grad /= 64
        optimizer.step()
        fp16_utils.master_params_to_model_params(model_params, master_params, flat_master=flat)
        plain.zero_grad()
        nn.functional.mse_loss(reference(x), y).backward()
        plain.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        # Twenty steps with float16 products.
        torch.testing.assert_close(p.float(), q, rtol=1e-2, atol=5e-3)


def test_master_gradients_are_none_or_zero_where_the_model_has_none():
    model = nn.Linear(2, 2).half()
    params, masters = fp16_utils.prep_param_lists(model)
    model.bias.grad = torch.ones(2, dtype=torch.float16)
    fp16_utils.model_grads_to_master_grads(params, masters)
    assert masters[0].grad is None
    assert masters[1].grad.tolist() == [1.0, 1.0]
    params, (flat,) = fp16_utils.prep_param_lists(model, flat_master=True)
    fp16_utils.model_grads_to_master_grads(params, [flat], flat_master=True)
    assert flat.grad.tolist() == [0, 0, 0, 0, 1, 1]


def test_gradients_of_masters_are_never_the_models_own():
    model = nn.Linear(2, 2)
    params, masters = fp16_utils.prep_param_lists(model)
    model.weight.grad = torch.ones(2, 2)
    fp16_utils.model_grads_to_master_grads(params, masters)
    masters[0].grad.mul_(5)
    assert model.weight.grad[0, 0] == 1


def test_a_flat_master_of_one_parameter_has_memory_of_its_own():
    model = nn.Linear(2, 2, bias=False)
    _, (flat,) = fp16_utils.prep_param_lists(model, flat_master=True)
    assert flat.data_ptr() != model.weight.data_ptr()


def test_a_flat_master_needs_one_dtype():
    with pytest.raises(TypeError, match=r"got torch\.float16, torch\.float32"):
        fp16_utils.prep_param_lists(net(torch.float16), flat_master=True)


def test_small_helpers():
    assert fp16_utils.to_python_float(torch.tensor(2.5)) == 2.5
    assert fp16_utils.to_python_float([2.5]) == 2.5
    assert fp16_utils.clip_grad_norm is nn.utils.clip_grad_norm_


# ------------------------------------------------------------------------------------------------------- loss scalers


def test_the_dynamic_scaler_follows_its_rule():
    scaler = fp16_utils.DynamicLossScaler(init_scale=2.0**4, scale_window=3)
    seen = []
    for overflow in [True, False, False, False, True, True, True, True, True, False]:
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    # Overflows at iterations 0 and 4 to 8; iteration 3 is three after the first.
    assert seen == [8, 8, 8, 16, 8, 4, 2, 1, 1, 1]
    assert fp16_utils.DynamicLossScaler().loss_scale == 2**32


def test_scalers_see_overflow_and_scale_the_backward():
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    dynamic, static = fp16_utils.DynamicLossScaler(init_scale=8.0), fp16_utils.LossScaler(8.0)
    dynamic.backward(p.sum())
    assert p.grad.tolist() == [8.0, 8.0]
    assert not dynamic.has_overflow([p])
    # Finite, though their sum is not.
    p.grad = torch.tensor([3e38, 3e38])
    assert not dynamic.has_overflow([p])
    p.grad[0] = float("nan")
    assert dynamic.has_overflow([p])
    assert not static.has_overflow([p])
    static.update_scale(True)
    assert static.loss_scale == 8.0
    assert static.scale_gradient(None, (torch.ones(1),), None)[0] == 8.0


# ------------------------------------------------------------------------------------------------------ FP16_Optimizer

MAKERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "NpuFusedSGD": lambda params: optimizers.NpuFusedSGD(params, lr=0.05, momentum=0.9),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=1e-2, adam_w_mode=False),
}


@pytest.mark.parametrize("options", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_it_trains_like_manually_kept_masters(maker, options):
    model, reference = net(torch.float16), net(torch.float16)
    optimizer = FP16_Optimizer(MAKERS[maker](model.parameters()), verbose=False, **options)
    params, masters = fp16_utils.prep_param_lists(reference)
    plain = MAKERS["SGD" if "SGD" in maker else "Adam"](masters)
    stepped = optimizer.param_groups[0]["params"]
    for step in range(10):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step))
        reference.zero_grad()
        (loss_of(reference, step) * optimizer.loss_scale).backward()
        fp16_utils.model_grads_to_master_grads(params, masters)
        eps = torch.finfo(torch.float16).eps
        for p, q in zip(stepped, masters, strict=True):
            q.grad /= optimizer.loss_scale
            torch.testing.assert_close(p.grad, q.grad, rtol=eps, atol=eps * q.grad.abs().max().item())
            # A bias before a batch norm has rounding for a gradient, which Adam makes a step as large as any.
            q.grad.copy_(p.grad)
        optimizer.step()
        plain.step()
        assert_equal_params(stepped, masters, 8 * torch.finfo(torch.float32).eps)  # what one step can round
        with torch.no_grad():
            torch._foreach_copy_(masters, stepped)
        fp16_utils.master_params_to_model_params(params, masters)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("clear", ["optimizer", "optimizer to None", "model"])
@pytest.mark.parametrize("delayed", [False, True])
def test_losses_add_up_however_gradients_are_cleared(delayed, clear):
    model, together = net(torch.float16), net(torch.float16)
    optimizers_ = [FP16_Optimizer(MAKERS["SGD"](m.parameters()), 64.0, verbose=False) for m in (model, together)]
    model.norm.eval()
    together.norm.eval()
    for step in range(4):
        for m, optimizer in zip((model, together), optimizers_, strict=True):
            if clear == "model":
                m.zero_grad()
            else:
                optimizer.zero_grad(set_grads_to_None=clear == "optimizer to None")
        for part in range(2):
            optimizers_[0].backward(loss_of(model, 10 * step + part), update_master_grads=not delayed)
        if delayed:
            optimizers_[0].update_master_grads()
        optimizers_[1].backward(loss_of(together, 10 * step) + loss_of(together, 10 * step + 1))
        for a, b in zip(*(optimizer.param_groups[0]["params"] for optimizer in optimizers_), strict=True):
            # Delayed, the sum is taken in float16.
            torch.testing.assert_close(a.grad, b.grad, rtol=5e-3, atol=5e-4)
        for optimizer in optimizers_:
            optimizer.step()
        # Both continue from the same values, so that gradients differ by their own rounding alone.
        together.load_state_dict(model.state_dict())
        with torch.no_grad():
            torch._foreach_copy_(*(optimizer.param_groups[0]["params"] for optimizer in reversed(optimizers_)))


def test_an_overflow_skips_the_step_once(capsys):
    model = net(torch.float16)
    optimizer = FP16_Optimizer(MAKERS["SGD"](model.parameters()), dynamic_loss_scale=True, verbose=False)
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 0) * float("inf"))
    optimizer.backward(loss_of(model, 1))  # finite itself; the sum is not
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert "Gradient overflow.  Skipping step, reducing loss scale to 32768.0" in capsys.readouterr().out
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    for step in range(2):
        optimizer.backward(loss_of(model, step))  # without zero_grad: the inf must not be there any more
    assert not optimizer.overflow
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not torch.equal(model.last.weight, before["last.weight"])


def test_clipping_acts_on_the_masters():
    model = net(torch.float16)
    optimizer = FP16_Optimizer(MAKERS["SGD"](model.parameters()), 128.0, verbose=False)
    optimizer.backward(loss_of(model, 0))
    grads = [g for group in optimizer.inspect_master_grad_data() for g in group if g is not None]
    norm = torch.stack([g.double().norm() for g in grads]).norm()
    torch.testing.assert_close(
        optimizer.clip_master_grads(norm.item() / 4).double().cpu(), norm.cpu(), rtol=1e-5, atol=0
    )
    clipped = [g for group in optimizer.inspect_master_grad_data() for g in group if g is not None]
    torch.testing.assert_close(
        torch.stack([g.norm() for g in clipped]).norm().item(), norm.item() / 4, rtol=1e-4, atol=0
    )


def test_a_closure_is_called_until_it_does_not_overflow():
    model = net(torch.float16)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True, verbose=False)
    factors = iter([float("inf"), float("inf"), 1.0])

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        optimizer.backward(loss * next(factors))
        return loss

    before = model.last.weight.clone()
    assert torch.isfinite(optimizer.step(closure))
    assert optimizer.loss_scale == 2.0**14
    assert not torch.equal(model.last.weight, before)
    model.last.bias.data.fill_(float("nan"))
    factors = iter([1.0] * 100)
    with (
        pytest.warns(RuntimeWarning, match=r"has fallen to 0\.5"),
        pytest.raises(RuntimeError, match="even with a loss scale of"),
    ):
        optimizer.step(closure)


def test_lbfgs_sees_the_loss_where_its_masters_are():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).to(DEVICE).half()
    optimizer = FP16_Optimizer(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10), 16.0, verbose=False)
    x, _ = batch(0)
    y = x[:, :3].sum(1, keepdim=True)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[:, :3].half()).float(), y)
        optimizer.backward(loss)
        return loss

    first = closure().item()
    for _ in range(5):
        optimizer.step(closure)
    assert closure().item() < 1e-3 * first


def test_a_checkpoint_resumes_bit_for_bit():
    model = net(torch.float16)
    optimizer = FP16_Optimizer(MAKERS["Adam"](model.parameters()), dynamic_loss_scale=True, verbose=False)

    def train(steps):
        for step in steps:
            optimizer.zero_grad()
            optimizer.backward(loss_of(model, step))
            optimizer.step()

    train(range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(range(4, 8))
    expected = {name: value.clone() for name, value in model.state_dict().items()}

    file.seek(0)
    checkpoint = torch.load(file, weights_only=False)
    assert set(checkpoint["optimizer"]) == {
        "loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step", "optimizer_state_dict",
        "fp32_from_fp16",
    }  # fmt: skip
    model = net(torch.float16)
    optimizer = FP16_Optimizer(MAKERS["Adam"](model.parameters()), dynamic_loss_scale=True, verbose=False)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(range(4, 8))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    other = FP16_Optimizer(MAKERS["Adam"](nn.Linear(2, 2).to(DEVICE).half().parameters()), verbose=False)
    with pytest.raises(ValueError, match=r"4 masters, this optimizer 2"):
        other.load_state_dict(checkpoint["optimizer"])


def test_what_it_passes_on_and_what_it_refuses(capsys):
    model = net(torch.float16)
    inner = MAKERS["SGD"](model.parameters())
    optimizer = FP16_Optimizer(inner)
    assert "FP16_Optimizer processing param group 0:" in capsys.readouterr().out
    optimizer.loss_scale = 32.0
    assert optimizer.loss_scaler.loss_scale() == optimizer.loss_scale == 32.0
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert [len(optimizer.all_fp16_params), len(optimizer.all_fp32_from_fp32_params)] == [4, 2]
    with pytest.raises(RuntimeError, match=r"serialized using state_dict\(\)"):
        copy.copy(optimizer)
    with pytest.raises(RuntimeError, match="instance of FP16_Optimizer"):
        amp.initialize(nn.Linear(2, 2).to(DEVICE), optimizer, opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match="instance of FP16_Optimizer"):
        amp.initialize(nn.Linear(2, 2).to(DEVICE), [optimizer], opt_level="O1", verbosity=0)
    with pytest.raises(TypeError, match="must be a torch optimizer, got list"):
        FP16_Optimizer([])
    double = torch.optim.SGD([nn.Parameter(torch.zeros(2, dtype=torch.float64))], lr=0.1)
    with pytest.raises(TypeError, match=r"shape \(2,\) in torch\.float64"):
        FP16_Optimizer(double)
