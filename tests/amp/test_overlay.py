# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which function runs in which precision at O1.

Expected dtypes are written out here, not read from the package's tables; expected values are computed by plain torch,
outside the casts, from explicitly cast arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, needs
from torch import Tensor, exp, mm, nn, var
from torch.nn.functional import gelu, layer_norm

from apex_npu.amp.policy import OPT_LEVELS, Policy
from apex_npu.autocast import autocast_ops
from apex_npu.autocast.casting import CastHandle

O1 = OPT_LEVELS["O1"]
HALF, FLOAT, DOUBLE = torch.float16, torch.float32, torch.float64


def enable_casts(policy: Policy, device_types: tuple[str, ...]) -> CastHandle:
    handle = CastHandle(device_types)
    handle.enable(policy)
    return handle


@pytest.fixture(params=["Python"] if autocast_ops.extension is None else ["C++", "Python"])
def casts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CastHandle]:
    """O1's casts, with kernels of either kind."""
    if request.param == "Python":
        monkeypatch.setattr(autocast_ops, "extension", None)
    handle = enable_casts(O1, (DEVICE.type,))
    yield handle
    handle.undo()


def positive(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    # Exact in half, and inside every function's domain, so that explicit casts lose nothing.
    return (torch.rand(*shape).mul(8).round() / 16 + 0.25).to(DEVICE, dtype)


# ----------------------------------------------------------------------------------------------------- Apex's table
# name -> call with positive tensors of one dtype; m and n are 4 x 4, v has 4 elements, b is 2 x 4 x 4.


def arguments(dtype: torch.dtype) -> SimpleNamespace:
    torch.manual_seed(0)
    return SimpleNamespace(
        m=positive(4, 4, dtype=dtype),
        n=positive(4, 4, dtype=dtype),
        v=positive(4, dtype=dtype),
        b=positive(2, 4, 4, dtype=dtype),
        image=positive(1, 2, 6, 6, dtype=dtype),
        volume=positive(1, 2, 6, 6, 6, dtype=dtype),
        grid=positive(1, 3, 3, 2, dtype=dtype),
        classes=torch.tensor([0, 1, 2, 3], device=DEVICE),
        signs=torch.tensor([1, -1, 1, -1]).to(DEVICE, dtype),
    )


HALF_CALLS: dict[str, Callable[[Any], Tensor]] = {
    "conv1d": lambda a: F.conv1d(a.b, positive(3, 4, 2)),
    "conv2d": lambda a: F.conv2d(a.image, positive(3, 2, 2, 2)),
    "conv3d": lambda a: F.conv3d(a.volume, positive(3, 2, 2, 2, 2)),
    "conv_transpose1d": lambda a: F.conv_transpose1d(a.b, positive(4, 3, 2)),
    "conv_transpose2d": lambda a: F.conv_transpose2d(a.image, positive(2, 3, 2, 2)),
    "conv_transpose3d": lambda a: F.conv_transpose3d(a.volume, positive(2, 3, 2, 2, 2)),
    "conv_tbc": lambda a: torch.conv_tbc(a.b, positive(2, 4, 3), positive(3)),
    "linear": lambda a: F.linear(a.m, a.n, a.v),
    "prelu": lambda a: F.prelu(a.m, a.v),
    "addmm": lambda a: torch.addmm(a.m, a.m, a.n),
    "addmv": lambda a: torch.addmv(a.v, a.m, a.v),
    "addr": lambda a: torch.addr(a.m, a.v, a.v),
    "matmul": lambda a: torch.matmul(a.m, a.n),
    "mm": lambda a: torch.mm(a.m, a.n),
    "mv": lambda a: torch.mv(a.m, a.v),
    "addbmm": lambda a: torch.addbmm(a.m, a.b, a.b),
    "baddbmm": lambda a: torch.baddbmm(a.b, a.b, a.b),
    "bmm": lambda a: torch.bmm(a.b, a.b),
    "@": lambda a: a.m @ a.n,
    "Tensor.addmm": lambda a: a.m.addmm(a.m, a.n),
    "Tensor.addmv": lambda a: a.v.addmv(a.m, a.v),
    "Tensor.addr": lambda a: a.m.addr(a.v, a.v),
    "Tensor.matmul": lambda a: a.m.matmul(a.v),
    "Tensor.mm": lambda a: a.m.mm(a.n),
    "Tensor.mv": lambda a: a.m.mv(a.v),
    "Tensor.bmm": lambda a: a.b.bmm(a.b),
    "einsum": lambda a: torch.einsum("ij,jk->ik", a.m, a.n),
    "scaled_dot_product_attention": lambda a: F.scaled_dot_product_attention(a.b, a.b, a.b),
    "from torch import mm": lambda a: mm(a.m, a.n),
}

POINTWISE = [
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log"),
    *("log10", "log2", "reciprocal", "rsqrt", "sinh", "tan"),
]
FLOAT_CALLS: dict[str, Callable[[Any], Tensor]] = {
    **{name: lambda a, name=name: getattr(torch, name)(a.m) for name in POINTWISE},
    **{f"Tensor.{name}": lambda a, name=name: getattr(a.m, name)() for name in POINTWISE},
    "pow": lambda a: torch.pow(a.m, 2),
    "pow(tensor, tensor)": lambda a: torch.pow(a.m, a.n),
    "pow(number, tensor)": lambda a: torch.pow(2.0, a.m),
    "Tensor.pow": lambda a: a.m.pow(3),
    "**": lambda a: a.m**2,
    "** of a number": lambda a: 2.0**a.m,
    "cumprod": lambda a: torch.cumprod(a.m, 0),
    "cumsum": lambda a: torch.cumsum(a.m, 0),
    "Tensor.cumsum": lambda a: a.m.cumsum(1),
    "dist": lambda a: torch.dist(a.m, a.n),
    "norm": lambda a: torch.norm(a.m),
    "norm of a dim": lambda a: torch.norm(a.m, 2, 1),
    "norm, fro": lambda a: torch.norm(a.m, p="fro"),
    "norm, nuc": lambda a: torch.norm(a.m, p="nuc"),
    "Tensor.norm": lambda a: a.m.norm(1, dim=0),
    "prod": lambda a: torch.prod(a.m),
    "prod of a dim": lambda a: torch.prod(a.m, 0),
    "sum": lambda a: torch.sum(a.m),
    "sum of a dim": lambda a: torch.sum(a.m, 0),
    "Tensor.sum": lambda a: a.m.sum(dim=(0, 1)),
    "std": lambda a: torch.std(a.m),
    "std of a dim": lambda a: torch.std(a.m, 0),
    "std, unbiased": lambda a: torch.std(a.m, 0, unbiased=False),
    "Tensor.std": lambda a: a.m.std(dim=1, correction=0),
    "var": lambda a: torch.var(a.m),
    "var of a dim": lambda a: a.m.var(0, keepdim=True),
    "renorm": lambda a: torch.renorm(a.m, 2, 0, 1.0),
    "Tensor.cpu": lambda a: a.m.cpu(),
    "interpolate, nearest": lambda a: F.interpolate(a.image, scale_factor=2),
    "interpolate, bilinear": lambda a: F.interpolate(a.image, size=(3, 3), mode="bilinear", align_corners=False),
    "interpolate, area": lambda a: F.interpolate(a.image, size=(3, 3), mode="area"),
    "Upsample": lambda a: nn.Upsample(scale_factor=2)(a.image),
    "grid_sample": lambda a: F.grid_sample(a.image, a.grid, align_corners=False),
    "softplus": lambda a: F.softplus(a.m),
    "softmin": lambda a: F.softmin(a.m, 1),
    "log_softmax": lambda a: F.log_softmax(a.m, 1),
    "softmax": lambda a: F.softmax(a.m, 1),
    "gelu": lambda a: F.gelu(a.m),
    "gelu, tanh": lambda a: F.gelu(a.m, approximate="tanh"),
    "layer_norm": lambda a: F.layer_norm(a.m, (4,), positive(4), positive(4)),
    "group_norm": lambda a: F.group_norm(a.image, 2, positive(2), positive(2)),
    "local_response_norm": lambda a: F.local_response_norm(a.image, 2),
    "normalize": lambda a: F.normalize(a.m),
    "cosine_similarity": lambda a: F.cosine_similarity(a.m, a.n),
    "poisson_nll_loss": lambda a: F.poisson_nll_loss(a.m, a.n),
    "cosine_embedding_loss": lambda a: F.cosine_embedding_loss(a.m, a.n, a.signs),
    "cross_entropy": lambda a: F.cross_entropy(a.m, a.classes),
    "cross_entropy, probabilities": lambda a: F.cross_entropy(a.m, a.n),
    "cross_entropy, smoothed": lambda a: F.cross_entropy(a.m, a.classes, label_smoothing=0.1),
    "hinge_embedding_loss": lambda a: F.hinge_embedding_loss(a.v, a.signs),
    "kl_div": lambda a: F.kl_div(a.m, a.n, reduction="sum"),
    "l1_loss": lambda a: F.l1_loss(a.m, a.n),
    "mse_loss": lambda a: F.mse_loss(a.m, a.n),
    "margin_ranking_loss": lambda a: F.margin_ranking_loss(a.v, a.m[0], a.signs),
    "multilabel_margin_loss": lambda a: F.multilabel_margin_loss(a.m, a.classes.expand(4, 4)),
    "multilabel_soft_margin_loss": lambda a: F.multilabel_soft_margin_loss(a.m, a.n),
    "multi_margin_loss": lambda a: F.multi_margin_loss(a.m, a.classes),
    "nll_loss": lambda a: F.nll_loss(a.m, a.classes),
    "binary_cross_entropy_with_logits": lambda a: F.binary_cross_entropy_with_logits(a.m, a.n),
    "smooth_l1_loss": lambda a: F.smooth_l1_loss(a.m, a.n),
    "soft_margin_loss": lambda a: F.soft_margin_loss(a.v, a.signs),
    "triplet_margin_loss": lambda a: F.triplet_margin_loss(a.m, a.n, a.m.flip(0)),
    "ctc_loss": lambda a: F.ctc_loss(a.b.log(), torch.tensor([[1, 2]] * 4, device=DEVICE), (2,) * 4, (1,) * 4),
    "from torch import exp": lambda a: exp(a.m),
    "from torch import var": lambda a: var(a.m),
    "from torch.nn.functional import gelu": lambda a: gelu(a.m),
    "from torch.nn.functional import layer_norm": lambda a: layer_norm(a.m, (4,)),
}

PROMOTE_CALLS: dict[str, Callable[[Any, Any], Tensor]] = {
    **{
        name: lambda a, b, name=name: getattr(torch, name)(a.m, b.n)
        for name in ["atan2", "add", "div", "mul", "eq", "ge", "gt", "le", "lt", "ne"]
    },
    **{f"Tensor.{name}": lambda a, b, name=name: getattr(a.m, name)(b.n) for name in ["add", "mul", "div", "eq", "lt"]},
    "addcdiv": lambda a, b: torch.addcdiv(a.m, b.m, b.n),
    "addcmul": lambda a, b: torch.addcmul(a.m, b.m, a.n),
    "cross": lambda a, b: torch.cross(a.b[:, :3], b.b[:, :3], dim=1),
    "Tensor.cross": lambda a, b: a.m[:3].cross(b.n[:3], dim=0),
    "bilinear": lambda a, b: F.bilinear(a.m, b.n, a.b.repeat(2, 1, 1), b.v),
    "dot": lambda a, b: torch.dot(a.v, b.v),
    "vdot": lambda a, b: torch.vdot(a.v, b.v),
    "Tensor.dot": lambda a, b: a.v.dot(b.v),
    "+": lambda a, b: a.m + b.n,
    "-": lambda a, b: a.m - b.n,
    "*": lambda a, b: a.m * b.n,
    "/": lambda a, b: a.m / b.n,
    "<": lambda a, b: a.m < b.n,
    "==": lambda a, b: a.m == b.m,
    "cat": lambda a, b: torch.cat([a.m, b.n]),
    "cat, by keyword": lambda a, b: torch.cat(tensors=(a.m, b.n)),
    "stack": lambda a, b: torch.stack([a.m, b.n]),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("name", HALF_CALLS)
def test_half_functions(casts: CastHandle, name: str, dtype: torch.dtype) -> None:
    result = HALF_CALLS[name](arguments(dtype))
    with casts.disabled():
        expected = HALF_CALLS[name](arguments(FLOAT))
    assert result.dtype == HALF
    torch.testing.assert_close(result, expected.half(), rtol=4e-3, atol=1e-3)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("name", FLOAT_CALLS)
def test_float_functions(casts: CastHandle, name: str, dtype: torch.dtype) -> None:
    result = FLOAT_CALLS[name](arguments(dtype))
    with casts.disabled():
        expected = FLOAT_CALLS[name](arguments(FLOAT))
    assert result.dtype == FLOAT
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)  # computed in float, not rounded to half


@pytest.mark.pairwise
@pytest.mark.parametrize(("first", "second"), [(HALF, FLOAT), (FLOAT, HALF), (HALF, HALF)], ids=str)
@pytest.mark.parametrize("name", PROMOTE_CALLS)
def test_promoting_functions(casts: CastHandle, name: str, first: torch.dtype, second: torch.dtype) -> None:
    result = PROMOTE_CALLS[name](arguments(first), arguments(second))
    widest = FLOAT if FLOAT in (first, second) else HALF
    expected = PROMOTE_CALLS[name](arguments(widest), arguments(widest))
    assert result.dtype in (widest, torch.bool)
    torch.testing.assert_close(result, expected)


def test_equal_compares_across_dtypes(casts: CastHandle) -> None:
    assert torch.equal(arguments(HALF).m, arguments(FLOAT).m)


UNDOCUMENTED = {
    name: needs("undocumented_dtypes") for name in ("layer_norm", "std", "mse_loss", "mm", "mv", "linear", "einsum")
}


def doubles(*names: str) -> list[Any]:
    """Cases of functions that are called with float64."""
    return [pytest.param(name, marks=UNDOCUMENTED.get(name, ())) for name in names]


@pytest.mark.parametrize("name", doubles("exp", "sum", "softmax", "layer_norm", "std", "mse_loss"))
def test_double_stays_double_in_float_functions(casts: CastHandle, name: str) -> None:
    double = arguments(DOUBLE)
    result = F.layer_norm(double.m, (4,)) if name == "layer_norm" else FLOAT_CALLS[name](double)
    assert result.dtype == DOUBLE


@pytest.mark.parametrize("name", doubles("mm", "mv", "addr", "linear", "einsum"))
def test_double_stays_double_in_half_functions(casts: CastHandle, name: str) -> None:
    assert HALF_CALLS[name](arguments(DOUBLE)).dtype == DOUBLE


def test_integers_are_left_alone(casts: CastHandle) -> None:
    integers = torch.arange(6, device=DEVICE)
    assert integers.sum().dtype == torch.int64
    assert integers.cpu().dtype == torch.int64
    assert torch.equal(integers**2, torch.tensor([0, 1, 4, 9, 16, 25], device=DEVICE))


def test_an_explicit_dtype_wins(casts: CastHandle) -> None:
    half = arguments(HALF).m
    assert half.sum(dtype=DOUBLE).dtype == DOUBLE
    assert F.softmax(half, 1, dtype=DOUBLE).dtype == DOUBLE
    assert torch.linalg.vector_norm(half, dtype=HALF).dtype == HALF


def test_operators_that_call_in_place_ones_inside_are_not_refused(casts: CastHandle) -> None:
    half = arguments(HALF).m
    torch.testing.assert_close(torch.logsumexp(half, 0).float(), torch.logsumexp(half.float(), 0), rtol=2e-3, atol=1e-3)


def test_vmap_reaches_the_overlay(casts: CastHandle) -> None:
    result = torch.vmap(torch.exp)(arguments(HALF).m)
    assert result.dtype == FLOAT
    torch.testing.assert_close(result, torch.exp(arguments(FLOAT).m))


# --------------------------------------------------------------------------------------------------- in place, banned

INPLACE = [f"{name}_" for name in POINTWISE if name != "erfinv"]
INPLACE_ARGUMENTS = {"pow_": (2,), "cumprod_": (0,), "cumsum_": (0,), "renorm_": (2, 0, 1.0)}


@pytest.mark.parametrize("name", [*INPLACE, "erfinv_", *INPLACE_ARGUMENTS])
def test_inplace_methods_refuse_half(casts: CastHandle, name: str) -> None:
    call = INPLACE_ARGUMENTS.get(name, ())
    with pytest.raises(NotImplementedError, match=rf"Cannot call in-place method {name} on fp16 Tensors\."):
        getattr(arguments(HALF).m, name)(*call)
    tensor = arguments(FLOAT).m
    assert getattr(tensor, name)(*call) is tensor
    with casts.disabled():
        assert getattr(arguments(HALF).m, name)(*call).dtype == HALF


@pytest.mark.parametrize("name", INPLACE)
def test_inplace_functions_refuse_half(casts: CastHandle, name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"Cannot call in-place function {name} with fp16 arguments\."):
        getattr(torch, name)(arguments(HALF).m)
    assert getattr(torch, name)(arguments(FLOAT).m).dtype == FLOAT


MATCHING: dict[str, Callable[[Any, Any], Tensor]] = {
    "addmm_": lambda a, b: a.m.addmm_(b.m, b.n),
    "addmv_": lambda a, b: a.v.addmv_(b.m, b.v),
    "addr_": lambda a, b: a.m.addr_(b.v, b.v),
    "addbmm_": lambda a, b: a.m.addbmm_(b.b, b.b),
    "baddbmm_": lambda a, b: a.b.baddbmm_(b.b, b.b),
    "addcdiv_": lambda a, b: a.m.addcdiv_(b.m, b.n),
    "addcmul_": lambda a, b: a.m.addcmul_(b.m, b.n),
    "atan2_": lambda a, b: a.m.atan2_(b.n),
    "add_": lambda a, b: a.m.add_(b.n),
    "div_": lambda a, b: a.m.div_(b.n),
    "mul_": lambda a, b: a.m.mul_(b.n),
    "lt_": lambda a, b: a.m.lt_(b.n),
}


@pytest.mark.parametrize(("own", "other"), [(HALF, FLOAT), (FLOAT, HALF)], ids=str)
@pytest.mark.parametrize("name", MATCHING)
def test_inplace_methods_match_self(casts: CastHandle, name: str, own: torch.dtype, other: torch.dtype) -> None:
    result = MATCHING[name](arguments(own), arguments(other))
    with casts.disabled():
        expected = MATCHING[name](arguments(FLOAT), arguments(FLOAT))
    assert result.dtype == own
    torch.testing.assert_close(result.float(), expected, rtol=4e-3, atol=1e-3)


@needs("mixed_operands")
def test_inplace_methods_do_not_round_to_integers(casts: CastHandle) -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        torch.ones(4, 4, dtype=torch.int64, device=DEVICE).addmm_(arguments(FLOAT).m, arguments(FLOAT).n)


def test_ipow_rebinds_half_to_float(casts: CastHandle) -> None:
    tensor = original = arguments(HALF).m
    tensor **= 2
    assert tensor.dtype == FLOAT
    assert original.dtype == HALF
    tensor = original = arguments(FLOAT).m
    tensor **= 2
    assert tensor is original


def test_binary_cross_entropy_is_banned_for_half_only(casts: CastHandle) -> None:
    half, full = arguments(HALF), arguments(FLOAT)
    for call in (F.binary_cross_entropy, nn.BCELoss()):
        with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
            call(half.m, half.n)
        with pytest.raises(NotImplementedError, match="disable_casts"):
            call(full.m, half.n)
        result = call(full.m, full.n)
        assert result.dtype == FLOAT
    with casts.disabled():
        torch.testing.assert_close(result, F.binary_cross_entropy(full.m, full.n))
    assert torch.is_autocast_enabled(DEVICE.type)


def test_binary_cross_entropy_in_float_where_it_is_allowed() -> None:
    handle = enable_casts(replace(O1, allow_banned=True), (DEVICE.type,))
    try:
        half, full = arguments(HALF), arguments(FLOAT)
        for first, second in ((half.m, half.n), (full.m, half.n), (half.m, full.n), (full.m, full.n)):
            result = F.binary_cross_entropy(first, second)
            with handle.disabled():
                torch.testing.assert_close(result, F.binary_cross_entropy(full.m, full.n), rtol=1e-6, atol=1e-6)
        assert nn.BCELoss()(input=half.m, target=half.n).dtype == FLOAT
    finally:
        handle.undo()


@pytest.mark.skipif(autocast_ops.extension is None, reason="the C++ extension is not built")
def test_a_table_with_an_unknown_policy_is_refused_whole() -> None:
    before = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    with pytest.raises(ValueError, match="policy must be half, float, promote or match_self, got quarter"):
        autocast_ops.extension.Overlay("cpu", [("exp", "float"), ("log", "quarter")])  # type: ignore[union-attr]
    assert torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU") == before
