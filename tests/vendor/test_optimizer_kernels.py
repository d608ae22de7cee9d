# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""CANN's fused optimizers as the vendor's torch_npu calls them: which are taken, what they cost, what they compute."""

import copy
import logging
import os

import host_cann
import lockstep
import pytest
import torch
from devices import needs
from lockstep import set_grads

from apex_npu.ops import adam_, npu, reference
from apex_npu.optimizers import (
    FusedAdam,
    NpuFusedAdam,
    NpuFusedAdamP,
    NpuFusedAdamW,
    NpuFusedBertAdam,
    NpuFusedLamb,
    NpuFusedMuon,
    NpuFusedSGD,
)

DEVICE = torch.device("npu:0")
SHAPES = [(41, 12), (17,), (5, 3, 2)]
ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}


# Then operators are checked by the queue, and its first error ends all work of the process.
raises_at_the_call = pytest.mark.skipif(os.environ.get("TASK_QUEUE_ENABLE") == "2", reason="errors come later")


@pytest.fixture
def forgotten():
    """Decisions of the process are made again, and once more for what comes after."""
    npu.works.cache_clear()
    yield
    npu.works.cache_clear()


def make_params(device):
    return lockstep.make_params(SHAPES, device=device)


def counted_step(cls, absent=(), **options):
    """The second step of a fused optimizer, counted; the first makes its buffers and decides on kernels."""
    params = make_params(DEVICE)
    optimizer = cls(params, lr=0.01, **options)
    for seed in range(2):
        set_grads(params, seed, without=absent)
        with host_cann.count() as counted:
            optimizer.step()
    return counted


GATHERED = {"aclnnCat": 1}
CORRECTED = {"aclnnInplaceAddcmul": 1}
WHOLE = {**GATHERED, **CORRECTED, "aclop ApplyAdamW": 1}
# The direction; what shares a row of 16 elements with a parameter, the norms of rows and of parameters; the step.
LAMB = {
    **WHOLE,
    **{"aclnnInplaceZero": 2, "aclnnInplaceIndexFill": 2, "aclnnLinalgVectorNorm": 2, "aclnnInplacePowTensorScalar": 1},
    **{"aclnnScatterAdd": 1, "aclnnReduceSum": 1, "aclnnInplaceSqrt": 1, "aclnnInplaceClampMax": 1},
    **{"aclnnInplaceDiv": 1, "aclnnEqScalar": 1, "aclnnAny": 1, "aclnnInplaceMaskedFillScalar": 1},
    **{"aclnnIndex": 1, "aclnnInplaceAddcmul": 2},
}
ON_VIEWS = {**GATHERED, **CORRECTED, "aclnnSubs": 1, "aclnnApplyAdamWV2": 1}


@pytest.mark.parametrize(
    ("cls", "options", "launches"),
    [
        (NpuFusedAdam, {}, WHOLE),
        (NpuFusedAdam, {"weight_decay": 0.1}, {**WHOLE, "aclnnAdd": 1}),
        (NpuFusedAdam, {"amsgrad": True}, ON_VIEWS),
        (NpuFusedAdam, {"amsgrad": True, "weight_decay": 0.1}, {**ON_VIEWS, "aclnnAdd": 1}),
        (NpuFusedAdamW, {}, WHOLE),
        (NpuFusedAdamW, {"amsgrad": True}, ON_VIEWS),
        (NpuFusedBertAdam, {}, WHOLE),
        (NpuFusedLamb, {}, LAMB),
        (FusedAdam, {}, WHOLE),
        pytest.param(NpuFusedSGD, {"momentum": 0.9}, {**GATHERED, "aclnnFusedSgd": 1}, marks=needs("fused_sgd")),
        (NpuFusedSGD, {}, {**GATHERED, "aclnnInplaceAdd": 1}),
    ],
)
def test_what_a_step_launches(cls, options, launches):
    counted = counted_step(cls, **options)
    assert dict(counted.by_op) == launches
    assert counted.syncs == 0
    assert not counted.copies


@pytest.mark.parametrize("beta2", [0.5, 0.95])
def test_a_beta_whose_complement_is_right_in_float32_takes_no_launch_more(beta2):
    counted = counted_step(NpuFusedAdamW, betas=(0.9, beta2))
    assert dict(counted.by_op) == {**GATHERED, "aclop ApplyAdamW": 1}


@pytest.mark.parametrize("cls", [NpuFusedAdam, NpuFusedAdamW])
def test_part_of_a_buffer_is_not_copied(cls):
    # The second of three has no gradient: two runs, both views of the buffers, and one list of gradients copied there.
    counted = counted_step(cls, absent=(1,))
    of_each_run = {op: 2 * calls for op, calls in ON_VIEWS.items() if op not in GATHERED}
    assert dict(counted.by_op) == {"aclnnForeachCopy": 1, **of_each_run}
    assert counted.syncs == 0
    whole = counted_step(cls)
    assert counted.bytes < whole.bytes


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_chunks_of_a_large_buffer_are_not_copied(monkeypatch, weight_decay, scaled):
    monkeypatch.setattr(reference, "_CHUNK_NUMEL_ACCELERATOR", 256)
    there = [torch.rand(1024).to(DEVICE) for _ in range(4)]
    options = {**ADAM, "weight_decay": weight_decay, "decoupled": False, "maximize": False, "step": 2}
    options["grad_scale"] = torch.full((1,), 8.0, device=DEVICE) if scaled else None
    npu.adam_(*there, None, **options)
    before = [t.cpu() for t in there]
    with host_cann.count() as counted:
        npu.adam_(*there, None, **options)
    in_chunks = bool(weight_decay or scaled)
    assert counted.by_op["aclnnApplyAdamWV2"] == (4 if in_chunks else 0)
    assert counted.by_op["aclop ApplyAdamW"] == (0 if in_chunks else 1)
    assert counted.by_op["aclnnInplaceCopy"] == 0
    options["grad_scale"] = torch.full((1,), 8.0) if scaled else None
    adam_.reference(*before, None, **options)
    torch.testing.assert_close([t.cpu() for t in there], before, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("norm_type", [1, 2, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_clipping_by_the_vendors_name_is_the_vendors(max_norm, norm_type):
    import torch_npu

    ours, theirs = make_params(DEVICE), make_params(DEVICE)
    norms = []
    for cls, params in ((NpuFusedSGD, ours), (torch_npu.optim.NpuFusedSGD, theirs)):
        set_grads(params, 1)
        norms.append(cls(params, lr=0.1, momentum=0.9).clip_grad_norm_fused_(max_norm, norm_type).cpu())
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad.cpu(), rtol=1e-5, atol=1e-6)


def test_adamp_does_not_wait():
    counted = counted_step(NpuFusedAdamP)
    assert counted.syncs == 0
    assert not counted.copies


def test_muon_multiplies_equal_matrices_together():
    """Three products in each of five iterations, of each of three shapes; nothing else depends on their number."""
    counts = []
    for repeats in (2, 20):
        shapes = [(8, 8), (8, 24), (24, 8)] * repeats
        params = [torch.nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in shapes]
        optimizer = NpuFusedMuon(params, lr=0.01)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            with host_cann.count() as counted:
                optimizer.step()
        counts.append((counted.launches, counted.by_op["aclnnBatchMatMul"] + counted.by_op["aclnnBaddbmm"]))
        assert counted.syncs == 0
    assert counts[0] == counts[1] == (counts[0][0], 45)


STEPS = 12


def operands(dtype, device, count, *, part):
    generator = torch.Generator().manual_seed(5)
    # Small parameters, so that rounding them is little beside the steps.
    found = [torch.rand(1_000, generator=generator) * 1e-3] + [torch.zeros(1_000) for _ in range(count - 1)]
    found = [t.to(device, dtype) if device.type == "cpu" else t.to(device) for t in found]
    return [t[1:] if part else t for t in found]


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.9999), (0.99, 0.95), (0.999, 0.99), (0.0, 0.5)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decoupled": False, "weight_decay": 0.1},
        {"decoupled": True, "weight_decay": 0.1, "maximize": True},
        {"decoupled": False, "weight_decay": 0.1, "maximize": True},
        {"bias_correction": False},
        {"amsgrad": True},
        {"scale": 8.0},
    ],
)
def test_adam_within_rounding_of_the_rule_in_float64(options, betas, part):
    rule = {**ADAM, "beta1": betas[0], "beta2": betas[1], "maximize": False, **options}
    amsgrad, scale = rule.pop("amsgrad", False), rule.pop("scale", None)
    cpu = torch.device("cpu")
    count = 4 if amsgrad else 3
    ours, exact = operands(torch.float32, DEVICE, count, part=part), operands(torch.float64, cpu, count, part=part)
    start = exact[0].clone()
    generator = torch.Generator().manual_seed(6)
    for step in range(1, STEPS + 1):
        grad = torch.randn(ours[0].numel(), generator=generator)
        for (p, *states), g, s in (
            (ours, grad.to(DEVICE), None if scale is None else torch.full((1,), scale, device=DEVICE)),
            (exact, grad.double(), None if scale is None else torch.full((1,), scale)),
        ):
            kernel = npu.adam_ if p is ours[0] else adam_.reference
            kernel(p, g, *states[:2], states[2] if amsgrad else None, step=step, grad_scale=s, **rule)
    errors = [(a.cpu().double() - b).abs() for a, b in zip(ours, exact, strict=True)]
    moved = (exact[0] - start).abs().max()
    assert errors[0].max() < 1e-6 * moved
    assert errors[1].max() < 1e-6 * exact[1].abs().max()
    for error, second in zip(errors[2:], exact[2:], strict=True):  # also AMSGrad's largest
        assert (error / second).max() < 1e-6


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [(NpuFusedAdam, torch.optim.Adam), (NpuFusedAdamW, torch.optim.AdamW)])
def test_a_checkpoint_goes_to_torch_and_back(ours, theirs, amsgrad):
    options = {"lr": 0.01, "weight_decay": 0.1, "amsgrad": amsgrad}
    there, here = make_params(DEVICE), make_params("cpu")
    optimizer, expected = ours(there, **options), theirs(here, **options, foreach=False)
    for seed in range(9):
        set_grads(there, seed)
        set_grads(here, seed)
        optimizer.step()
        expected.step()
        if seed == 3:
            saved, other = copy.deepcopy([optimizer.state_dict(), expected.state_dict()])
            for index, state in other["state"].items():
                for name, value in state.items():
                    # First moments are sums of numbers of either sign, of size 1.
                    atol = 1e-7 if name == "exp_avg" else 0.0
                    torch.testing.assert_close(saved["state"][index][name].cpu(), value, rtol=1e-6, atol=atol)
            optimizer.load_state_dict(other)
            expected.load_state_dict(saved)
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}])
def test_sgd_like_torchs(options):
    there, here = make_params(DEVICE), make_params("cpu")
    optimizer, expected = NpuFusedSGD(there, lr=0.1, **options), torch.optim.SGD(here, lr=0.1, **options)
    for seed in range(5):
        for params in (there, here):
            set_grads(params, seed, without=[1] if seed == 2 else [])
        optimizer.step()
        expected.step()
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-6, atol=1e-6)


def test_adamp_like_the_reference_where_rows_are_projected():
    # Of the first some rows have a gradient across them, which is projected; of the others none.
    params = [torch.nn.Parameter(t) for t in (torch.ones(6, 8), torch.randn(4, 4), torch.randn(7))]
    there = [torch.nn.Parameter(p.detach().to(DEVICE)) for p in params]
    optimizers = [NpuFusedAdamP(ps, lr=0.01, weight_decay=0.1) for ps in (there, params)]
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for a, b in zip(there, params, strict=True):
            grad = torch.randn(b.shape, generator=generator)
            if b.dim() == 2 and len(b) == 6:
                grad[:3] -= grad[:3].mean(1, keepdim=True)
            a.grad, b.grad = grad.to(DEVICE), grad
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(there, params, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("cls", [NpuFusedAdamW, pytest.param(NpuFusedSGD, marks=needs("fused_sgd"))])
def test_a_kernel_that_computes_something_else_is_not_taken(cls, forgotten, monkeypatch, caplog):
    def wrong(param, *operands, **options):
        param.zero_()

    name = "npu_apply_adam_w" if cls is NpuFusedAdamW else "_fused_sgd_"
    kernels = {name: (npu._KERNELS[name][0], wrong, npu._KERNELS[name][2])}
    if cls is NpuFusedAdamW:
        kernels["_fused_adamw_"] = (npu._KERNELS["_fused_adamw_"][0], wrong, npu._KERNELS["_fused_adamw_"][2])
    monkeypatch.setattr(npu, "_KERNELS", kernels)
    with caplog.at_level(logging.WARNING, "apex_npu"):
        counted = counted_step(cls, **({"momentum": 0.9} if cls is NpuFusedSGD else {}))
    assert not {"aclop ApplyAdamW", "aclnnApplyAdamWV2", "aclnnFusedSgd"} & counted.by_op.keys()
    assert f"{name} on npu:0: falling back to plain torch" in caplog.text
    assert "its trial step gave" in caplog.text
    assert caplog.text.count(name) == 1  # one decision for all steps


@needs("fused_sgd")
@raises_at_the_call
def test_a_kernel_that_raises_is_not_taken(forgotten, monkeypatch, caplog):
    params = make_params(DEVICE)
    optimizer = NpuFusedSGD(params, lr=0.1, momentum=0.9)
    set_grads(params, 0)
    host_cann.fail_after(0, "aclnnFusedSgd", 161001)
    with caplog.at_level(logging.WARNING, "apex_npu"):
        optimizer.step()
    assert "_fused_sgd_ on npu:0: falling back to plain torch" in caplog.text
    set_grads(params, 0)
    with host_cann.count() as counted:
        optimizer.step()
    assert "aclnnFusedSgd" not in counted.by_op


def test_chips_before_the_910b_take_none_of_what_aten_names(forgotten, monkeypatch):
    monkeypatch.setattr("torch_npu.npu.utils.get_soc_version", lambda: 104)
    counted = counted_step(NpuFusedAdam, amsgrad=True)
    assert "aclnnApplyAdamWV2" not in counted.by_op
    assert counted.syncs == 0
    assert "aclnnFusedSgd" not in counted_step(NpuFusedSGD, momentum=0.9).by_op
    assert "aclop ApplyAdamW" in counted_step(NpuFusedAdam).by_op


def test_a_decision_is_made_once(forgotten, monkeypatch):
    trials = []
    has_kernel, trial, expected = npu._KERNELS["npu_apply_adam_w"]

    def watched(*tensors):
        trials.append(tensors[0].device)
        trial(*tensors)

    monkeypatch.setitem(npu._KERNELS, "npu_apply_adam_w", (has_kernel, watched, expected))
    counted_step(NpuFusedAdam)
    counted_step(NpuFusedAdamW)
    assert trials == [DEVICE]


@needs("fused_sgd")
def test_defaults_of_the_script_do_not_matter(forgotten):
    params = make_params(DEVICE)
    set_grads(params, 0)
    optimizer = NpuFusedAdamW(params, lr=0.01, amsgrad=True)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("npu"):
            optimizer.step()
            assert npu.works("npu_apply_adam_w", DEVICE)
            assert npu.works("_fused_adamw_", DEVICE)
            assert npu.works("_fused_sgd_", DEVICE)
    finally:
        torch.set_default_dtype(torch.float32)


@raises_at_the_call
def test_a_step_that_fails_leaves_the_moments_as_they_were():
    params = make_params(DEVICE)
    optimizer = NpuFusedAdamW(params, lr=0.01, amsgrad=True, betas=(0.999, 0.9999))
    for seed in range(2):
        set_grads(params, seed)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    host_cann.fail_after(0, "aclnnApplyAdamWV2", 161001)
    with pytest.raises(RuntimeError, match="aclnnApplyAdamWV2"):
        optimizer.step()
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(value, before[index][name], rtol=2e-7, atol=1e-9)
