# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Muon beside torch.optim.Muon, its groups of AdamW, and unusual matrices.

The rule itself is in test_fused_optimizers.py, among all others: in float32, against singular values in float64.
"""

import copy
import inspect
import io
import math

import lockstep
import pytest
import reference_optimizers as reference
import torch
from devices import DEVICE, SIMULATOR, needs_counts
from torch import nn

from apex_npu.ops import aten_fused, newton_schulz
from apex_npu.optimizers import NpuFusedAdamW, NpuFusedMuon

torch_muon = pytest.importorskip("torch.optim._muon", reason="torch.optim has Muon from 2.9 on")

# Several of each shape, wide and tall, one that is never batched on a CPU, a row and a column.
SHAPES = [(24, 24), (24, 24), (24, 72), (72, 24), (24, 72), (96, 24), (96, 24), (300, 260), (1, 7), (7, 1)]
# torch.optim has it from 2.14 on.
UNCLAMPED = {"adjust_lr_fn": "spectral_unclamped"}
in_torch = pytest.mark.skipif(
    "spectral_unclamped" not in inspect.getsource(torch_muon._adjust_lr), reason="this torch.optim.Muon lacks it"
)
VARIANTS = [
    {},
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"adjust_lr_fn": "original", "momentum": 0.5, "weight_decay": 0.0},
    {"ns_steps": 3, "ns_coefficients": (3.0, -3.2, 1.2), "eps": 1e-3},
    {"ns_steps": 0},
    pytest.param(UNCLAMPED, marks=in_torch),
    {"lr": torch.tensor(0.01)},
]
variants = pytest.mark.parametrize("options", VARIANTS, ids=str)
# How far bfloat16 takes five iterations from the exact polynomial, whose results have elements of up to 1: its rounding
# of 2⁻⁸ is multiplied by up to 3.4445 in each of them while singular values are small. Of half
# the results, torch.optim's and ours were up to 0.010 and 0.013 away, over 60 matrices of each shape of the test of the
# polynomial (of 6 x 6, up to 0.025 and 0.034); two such results may part by twice the bound.
BFLOAT16 = 0.03


def params(shapes=SHAPES, dtype=torch.float32, seed=0):
    return lockstep.make_params(shapes, dtype, seed)


def give(step, *lists):
    for given in lists:
        lockstep.set_grads(given, 100 + step)


@pytest.fixture
def float32_products(monkeypatch):
    """Both compute in float32 what they compute in bfloat16 otherwise."""
    monkeypatch.setattr(newton_schulz, "product_dtype", lambda device: torch.float32)
    # torch's function takes the gradient to bfloat16 by its method of that name.
    rule = torch_muon._zeropower_via_newtonschulz

    class Wide(torch.Tensor):
        def bfloat16(self):
            return self.as_subclass(torch.Tensor).clone()

    def without_the_cast(grad, *args):
        return rule(grad.as_subclass(Wide), *args)

    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", without_the_cast)


@variants
def test_one_step_of_torchs_in_float32(options, float32_products):
    ours, theirs = params(), params()
    optimizers = NpuFusedMuon(ours, **options), torch.optim.Muon(theirs, **options)
    give(0, ours, theirs)
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        assert (p - q).abs().max() <= 1e-6 * q.abs().max()
        states = [optimizer.state[x]["momentum_buffer"] for optimizer, x in zip(optimizers, (p, q), strict=True)]
        torch.testing.assert_close(*states, rtol=1e-6, atol=1e-6)


@variants
def test_20_steps_of_torchs(options):
    """In bfloat16: each step from the same parameters, so that its own difference is what is compared."""
    assert newton_schulz.product_dtype(DEVICE) == torch.bfloat16
    ours, theirs = params(), params()
    optimizers = NpuFusedMuon(ours, **options), torch.optim.Muon(theirs, **options)
    lr = float(optimizers[0].param_groups[0]["lr"])
    for step in range(20):
        give(step, ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            ratio = torch_muon._adjust_lr(lr, options.get("adjust_lr_fn"), p.shape)
            assert (p - q).abs().max() <= 2 * BFLOAT16 * ratio
            p.data.copy_(q)
    for p, q in zip(ours, theirs, strict=True):
        states = [optimizer.state[x]["momentum_buffer"] for optimizer, x in zip(optimizers, (p, q), strict=True)]
        torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 24), (24, 72), (72, 24), (300, 260), (4, 24, 72), (4, 72, 24)], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, BFLOAT16)])
def test_iterations_apply_the_polynomial_to_singular_values(shape, dtype, bound):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options = {"coefficients": (3.4445, -4.775, 2.0315), "steps": 5, "eps": 1e-7}
    found = newton_schulz.newton_schulz(x.to(DEVICE, dtype), factor=0.5, **options)
    expected = [0.5 * reference.orthogonalized(each, *options.values()) for each in x.view(-1, *shape[-2:])]
    assert (found.cpu().double().view(-1, *shape[-2:]) - torch.stack(expected)).abs().max() <= bound


@pytest.mark.parametrize("use_muon", [True, "auto"])
def test_without_a_clamp_wide_matrices_take_smaller_steps(use_muon, float32_products):
    """sqrt(rows / columns) times the orthogonalized matrix, in place of sqrt(max(1, rows / columns)) times."""
    given = [params(), params()]
    give(0, *given)
    for found, options in zip(given, ({}, UNCLAMPED), strict=True):
        for p in found:
            nn.init.zeros_(p)  # what is left is the step, unrounded
        NpuFusedMuon(found, lr=0.1, use_muon=use_muon, **options).step()
    for clamped, unclamped in zip(*given, strict=True):
        rows, columns = clamped.shape
        torch.testing.assert_close(unclamped, clamped * min(1.0, rows / columns) ** 0.5)


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw", pytest.param("spectral_unclamped", marks=in_torch)])
def test_state_dicts_are_exchanged_with_torch(adjust_lr_fn, float32_products):
    ours, theirs = params(), params()
    options = {"lr": 0.02, "adjust_lr_fn": adjust_lr_fn}
    optimizers = NpuFusedMuon(ours, **options), torch.optim.Muon(theirs, **options)
    for step in range(6):
        give(step, ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
        if step in (1, 3):  # each goes on from the other's, which differs from its own in nothing but rounding
            saved = [io.BytesIO() for _ in optimizers]
            for optimizer, file in zip(optimizers, saved, strict=True):
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
            for optimizer, file in zip(optimizers, reversed(saved), strict=True):
                optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert [list(entry) for entry in optimizers[0].state_dict()["state"].values()] == [["momentum_buffer"]] * len(ours)
    for p, q in zip(ours, theirs, strict=True):
        assert (p - q).abs().max() <= 1e-5 * q.abs().max()


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("nbytes", [4, 2])
def test_stacks_and_fused_matrices_are_batches_of_matrices(adjust_lr_fn, nbytes, float32_products):
    """Experts (3-D), and those that have rows of several matrices (``split``): as each matrix by itself."""
    shapes = [(3, 8, 12), (3, 12, 8), (18, 5), (2, 18, 5), (0, 18, 5), (18, 0)]
    splits = [None, None, (12, 2, 4), [12, 2, 4], (12, 2, 4), (12, 2, 4)]
    dtype = {4: torch.float32, 2: torch.bfloat16}[nbytes]
    given, alone = params(shapes, dtype), []
    for p, split in zip(given, splits, strict=True):
        matrices = p.detach().view(-1, *p.shape[-2:]).unbind() if p.numel() else []
        alone.append([nn.Parameter(part.clone()) for m in matrices for part in m.split(split or p.size(-2))])
    optimizers = [
        NpuFusedMuon(
            [{"params": [p], "split": s} for p, s in zip(given, splits, strict=True)], adjust_lr_fn=adjust_lr_fn
        ),
        NpuFusedMuon([part for parts in alone for part in parts], adjust_lr_fn=adjust_lr_fn),
    ]
    for step in range(3):
        give(step, given)
        for p, parts, split in zip(given, alone, splits, strict=True):
            matrices = p.grad.view(-1, *p.shape[-2:]).unbind() if p.numel() else []
            for part, grad in zip(parts, (g for m in matrices for g in m.split(split or p.size(-2))), strict=True):
                part.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, parts in zip(given, alone, strict=True):
        if parts:
            expected = torch.cat(list(parts)).view(p.shape)
            torch.testing.assert_close(p, expected, rtol=1e-5 if nbytes == 4 else 1e-2, atol=1e-6)


def test_stacks_of_transposed_matrices(float32_products):
    given = [params([(3, 8, 12)])[0] for _ in range(2)]
    given[1].data = given[1].data.mT.contiguous().mT
    for p in given:
        optimizer = NpuFusedMuon([p])
        give(0, [p])
        optimizer.step()
    torch.testing.assert_close(*given, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "stride", "split", "error", "said"),
    [
        ((8, 4), None, (4, 5), ValueError, r"split=\(4, 5\) has 9 rows in all, but a parameter of shape \(8, 4\)"),
        ((8, 4), None, (), ValueError, r"split must have at least one number of rows, and each must be >= 1, got \(\)"),
        ((8, 4), None, (8, 0), ValueError, r"each must be >= 1, got \(8, 0\)"),
        ((8, 4), None, 8, TypeError, "split must be None or the numbers of rows of matrices, a tuple of ints, got 8"),
        ((8, 4), None, (8.0,), TypeError, r"got \(8\.0,\)"),
        ((8, 4), (1, 8), (4, 4), ValueError, r"strides \(1, 8\): Muon supports .* with split only contiguous"),
        ((3, 8, 4), (1, 12, 3), None, ValueError, r"strides \(1, 12, 3\): Muon supports contiguous stacks of matrices"),
    ],
)
def test_what_cannot_be_divided_is_refused(shape, stride, split, error, said):
    p = params([shape])[0]
    if stride is not None:
        p.data = p.data.flatten().as_strided(shape, stride)
    optimizer = NpuFusedMuon(params([(4, 4)]))
    with pytest.raises(error, match=said):
        optimizer.add_param_group({"params": [p], "split": split})
    assert len(optimizer.param_groups) == 1


def test_a_split_stays_where_a_state_dict_has_none():
    """As torch's; another one is loaded as other options are, if it fits."""
    optimizer = NpuFusedMuon(params([(8, 4)]), split=(4, 4))
    give(0, optimizer.param_groups[0]["params"])
    optimizer.step()
    optimizer.load_state_dict(torch.optim.Muon(params([(8, 4)])).state_dict())
    assert optimizer.param_groups[0]["split"] == (4, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["split"] = (6, 2)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["split"] == (6, 2)
    for wrong, error in (((4, 5), ValueError), ("rows", TypeError)):
        saved["param_groups"][0]["split"] = wrong
        with pytest.raises(error, match="NpuFusedMuon: split"):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["split"] == (6, 2)


def test_a_split_that_changes_is_followed(float32_products):
    """In mid-run, as other options."""
    ends = []
    for split in (None, (4, 4)):
        given = params([(8, 4)])
        optimizer = NpuFusedMuon(given)
        give(0, given)
        optimizer.step()
        optimizer.param_groups[0]["split"] = split
        optimizer.step()
        ends.append(given[0])
    assert not torch.allclose(*ends)


def with_others():
    """Matrices, and what is no matrix."""
    return params([(8, 8), (5,), (8, 24), (2, 3, 3, 3), ()])


def test_groups_of_adamw_are_adamws():
    ours, theirs = with_others(), with_others()
    others = [p for p in ours if p.dim() != 2]
    optimizer = NpuFusedMuon(
        [
            {"params": [ours[0]]},
            {"params": others, "use_muon": False, "lr": 0.03, "betas": (0.8, 0.95)},
            {"params": [ours[2]], "use_muon": False},
        ],
        lr=0.02,
        weight_decay=0.3,
    )
    adamw = NpuFusedAdamW(
        [{"params": [p for p in theirs if p.dim() != 2], "lr": 0.03, "betas": (0.8, 0.95)}, {"params": [theirs[2]]}]
    )
    for step in range(5):
        give(step, ours, theirs)
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=0, atol=0)
    found, expected = optimizer.state_dict(), adamw.state_dict()
    for group, its in zip(found["param_groups"][1:], expected["param_groups"], strict=True):
        del group["params"], its["params"]
        assert group == {**its, "use_muon": False}
    assert list(found["param_groups"][0]) == list(NpuFusedMuon(params()).state_dict()["param_groups"][0])
    torch.testing.assert_close(list(found["state"].values())[1:], list(expected["state"].values()), rtol=0, atol=0)


def test_auto_makes_two_groups():
    named = [(f"layer.{i}", p) for i, p in enumerate(with_others())]
    optimizer = NpuFusedMuon([{"params": named, "use_muon": "auto", "weight_decay": 0.5, "tag": "x"}], lr=0.02)
    matrices, others = optimizer.param_groups
    assert matrices["param_names"] == ["layer.0", "layer.2"]
    assert others["param_names"] == ["layer.1", "layer.3", "layer.4"]
    assert [(group["use_muon"], group["lr"]) for group in (matrices, others)] == [(True, 0.02), (False, 1e-3)]
    assert [(group["weight_decay"], group["tag"]) for group in (matrices, others)] == [(0.5, "x")] * 2
    assert "momentum" not in others
    assert "betas" not in matrices
    (alone,) = NpuFusedMuon(params(), use_muon="auto").param_groups
    assert alone["use_muon"] is True
    (alone,) = NpuFusedMuon([{"params": params([(3,)])[0]}], use_muon="auto").param_groups
    assert alone["use_muon"] is False


def test_all_groups_are_adamws_by_default():
    found, expected = with_others(), with_others()
    optimizer, adamw = NpuFusedMuon(found, use_muon=False), torch.optim.AdamW(expected)
    for seed in range(3):
        for each, rule in ((found, optimizer), (expected, adamw)):
            give(seed, each)
            rule.step()
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_a_state_dict_of_the_other_rule_is_refused():
    optimizer = NpuFusedMuon(params())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="group 0 of this state dict is one of AdamW"):
        optimizer.load_state_dict(torch.optim.AdamW(params()).state_dict())
    assert optimizer.state_dict() == before


@pytest.mark.parametrize("shape", [(3,), (), (2, 3, 3, 3)])
def test_only_matrices(shape):
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters whereas we found a parameter with size"):
        torch.optim.Muon(params([(2, 2), shape]))
    with pytest.raises(ValueError, match="NpuFusedMuon: Muon only supports 2D parameters"):
        NpuFusedMuon(params([(2, 2), shape]))
    optimizer = NpuFusedMuon(params())
    for group in ({}, {"use_muon": "auto", "eps": -1.0}):
        with pytest.raises(ValueError, match=r"2D parameters|epsilon"):
            optimizer.add_param_group({"params": params([(2, 2), shape]), **group})
        assert len(optimizer.param_groups) == 1
    optimizer = NpuFusedMuon(matrices := params([(4, 4)]))
    matrices[0].data = matrices[0].data.view(2, 2, 2, 2)
    give(0, matrices)
    with pytest.raises(ValueError, match="2D parameters"):
        optimizer.step()


def test_empty_zero_and_transposed_matrices(float32_products):
    ours, theirs = params([(0, 5), (4, 6), (8, 3), (5, 0)]), params([(4, 6), (8, 3)])
    for given in (ours[1:3], theirs):
        given[1].data = given[1].data.t().contiguous().t()
    optimizers = NpuFusedMuon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)
    for step in range(3):
        give(step, ours[1:3], theirs)
        ours[0].grad, ours[3].grad = torch.zeros_like(ours[0]), torch.zeros_like(ours[3])
        ours[1].grad.zero_()
        theirs[0].grad.zero_()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours[1:3], theirs, strict=True):
        assert (p - q).abs().max() <= 1e-6 * q.abs().max()
    torch.testing.assert_close(ours[1], 0.99**3 * params([(0, 5), (4, 6)])[1])  # decay alone


def test_a_nan_stays_in_its_matrix():
    """As torch's does: without a loss scale nothing looks for it."""
    ours, theirs = params(), params()
    optimizers = NpuFusedMuon(ours), torch.optim.Muon(theirs)
    give(0, ours, theirs)
    for given in (ours, theirs):
        given[1].grad[3, 4] = math.nan
    for optimizer in optimizers:
        optimizer.step()
    assert [bool(p.isnan().all()) for p in ours] == [i == 1 for i in range(len(ours))]
    assert [bool(p.isnan().any()) for p in ours] == [bool(q.isnan().any()) for q in theirs]


def test_float32_where_there_are_no_bfloat16_products(monkeypatch):
    newton_schulz.product_dtype.cache_clear()
    multiply = torch.bmm

    def refusing(a, b, **options):
        if a.dtype == torch.bfloat16:
            raise RuntimeError("bmm: bfloat16 is not supported")
        return multiply(a, b, **options)

    monkeypatch.setattr(torch, "bmm", refusing)
    try:
        assert newton_schulz.product_dtype(DEVICE) == torch.float32
        ours, theirs = params([(6, 6)] * 3), params([(6, 6)] * 3)
        optimizers = NpuFusedMuon(ours), reference.Muon(theirs)
        for step in range(3):
            give(step, ours, theirs)
            for optimizer in optimizers:
                optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            assert (p - q).abs().max() <= 5e-6 * q.abs().max()
    finally:
        newton_schulz.product_dtype.cache_clear()


@needs_counts("stand_in_counts")
@pytest.mark.parametrize("nesterov", [True, False])
def test_launches_do_not_depend_on_the_number_of_equal_matrices(nesterov):
    counts = []
    for repeats in (2, 20):
        given = params([(8, 8), (8, 24), (24, 8)] * repeats)
        optimizer = NpuFusedMuon(given, nesterov=nesterov)
        for step in range(3):
            give(step, given)
            with SIMULATOR.count() as n:
                optimizer.step()
            for p in given:
                p.grad = None
        products = sum(number for name, number in n.by_op.items() if "mm" in name)
        counts.append((n.launches, products))
        assert n.syncs == 0
    assert counts[0] == counts[1]
    assert counts[0][1] == 3 * 5 * 3


def test_without_momentum_the_buffer_is_the_gradient():
    """Where there are no kernels of our own: torch's knows no buffer without momentum."""
    options = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": True, "maximize": False, "step": 2}
    param, buffer = torch.ones(3), torch.full((3,), 5.0)
    aten_fused.sgd_(param, torch.tensor([0.5, -1.0, 2.0]), buffer, lr=0.5, **options)
    assert param.tolist() == [0.75, 1.5, 0.0]
    assert buffer.tolist() == [0.5, -1.0, 2.0]
