# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Operators of the host CANN, by way of the vendor's torch_npu, against the CPU's: values and gradients."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_cann
import pytest
import torch
import torch.nn.functional as F
from host_cann import installation
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Half precision: sums of products in another order, or in float32 in between, round differently.
TOLERANCES = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def normal(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def positive(*sizes: int) -> Tensor:
    return normal(*sizes).abs() + 0.5


def whole(*sizes: int, below: int = 4) -> Tensor:
    return torch.randint(below, sizes, generator=torch.Generator().manual_seed(1))


def outputs(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in outputs(part)]


def run(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """What the function returns, and the gradients of its inputs, where it has any."""
    results = outputs(function(*inputs))
    wanted = [x for x in inputs if x.requires_grad]
    ends = [y for y in results if y.requires_grad]
    if ends:
        # Not of a plain sum, whose gradient is 1 everywhere: of one weighted by position.
        weights = [torch.arange(1, y.numel() + 1).to(y).reshape(y.shape) / y.numel() for y in ends]
        results = [*results, *torch.autograd.grad(ends, wanted, weights, allow_unused=True, materialize_grads=True)]
    return results


def check(function: Callable[..., Any], inputs: tuple[Tensor, ...], dtype: torch.dtype = torch.float32) -> None:
    cast = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    on_cpu = run(function, [x.clone().requires_grad_(x.is_floating_point()) for x in cast])
    on_npu = run(function, [x.npu().requires_grad_(x.is_floating_point()) for x in cast])
    assert len(on_cpu) == len(on_npu)
    for expected, actual in zip(on_cpu, on_npu, strict=True):
        assert actual.device.type == "npu"
        tolerance = TOLERANCES[dtype] if expected.is_floating_point() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(actual.cpu(), expected, **tolerance, check_stride=False)


UNARY = [
    "abs",
    "neg",
    "sqrt:positive",
    "rsqrt:positive",
    "exp",
    "expm1",
    "log:positive",
    "log1p:positive",
    "log2:positive",
    "log10:positive",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "relu",
    "reciprocal:positive",
    "square",
    "floor",
    "ceil",
    "round",
    "trunc",
    "sign",
    "erf",
    "atan",
    "sinh",
    "cosh",
    "isfinite",
    "isnan",
    "logical_not",
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(npu: torch.device, name: str, dtype: torch.dtype) -> None:
    name, _, kind = name.partition(":")
    check(getattr(torch, name), ((positive if kind else normal)(3, 5),), dtype)


BINARY = [
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "atan2",
    "fmod",
    "remainder",
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(npu: torch.device, name: str, dtype: torch.dtype) -> None:
    check(getattr(torch, name), (normal(3, 5), positive(3, 5)), dtype)
    check(getattr(torch, name), (normal(3, 5), positive(5)), dtype)


def gelu(x: Tensor) -> Tensor:
    """As it is mostly called on the NPU, where torch_npu computes the formula of tanh whatever ``approximate`` is."""
    return F.gelu(x, approximate="none" if x.device.type == "npu" else "tanh")


def write_nothing(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    written = [x.clone() for _ in range(6)]
    written[0][index] = 5
    written[1][:, index] = 5
    written[2][index] = x[:0]
    written[3].index_put_((index,), torch.ones(1, dtype=x.dtype, device=x.device), accumulate=True)
    written[4][x > 100] = 5
    written[5][x > 100] = x[x > 100]
    return tuple(written)


EMPTY = torch.tensor([], dtype=torch.long)
NETWORK: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "addcmul": (lambda x, a, b: torch.addcmul(x, a, b, value=0.5), (normal(3, 4), normal(3, 4), normal(4))),
    "addcdiv": (lambda x, a, b: torch.addcdiv(x, a, b, value=0.5), (normal(3, 4), normal(3, 4), positive(3, 4))),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), (normal(3, 4), normal(3, 5)[:, :4])),
    "where": (lambda a, b: torch.where(a > b, a, b), (normal(3, 4), normal(4, 4)[:3])),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), (normal(4, 5),)),
    "sum": (lambda x: (x.sum(), x.sum(1), x.sum((0, 2), keepdim=True)), (normal(2, 3, 4),)),
    "mean": (lambda x: (x.mean(), x.mean(-1)), (normal(2, 3, 4),)),
    "var": (lambda x: (x.var(1), x.std(0, unbiased=False)), (normal(4, 5),)),
    "amax": (lambda x: (x.amax(1), x.amin(0)), (normal(4, 5),)),
    "max": (lambda x: tuple(x.max(1)), (normal(4, 5),)),
    "norm": (lambda x: (x.norm(), torch.linalg.vector_norm(x, 1, dim=1)), (normal(4, 5),)),
    "cumsum": (lambda x: x.cumsum(1), (normal(3, 4),)),
    "sort": (lambda x: tuple(x.sort(dim=1, descending=True)), (normal(3, 7),)),
    "topk": (lambda x: tuple(x.topk(3)), (normal(3, 7),)),
    "argmax": (lambda x: x.argmax(1), (normal(3, 7),)),
    "cat": (lambda a, b: torch.cat((a, b), 1), (normal(2, 3), normal(2, 4))),
    "stack": (lambda a, b: torch.stack((a, b), 1), (normal(2, 3), normal(3, 3)[:2])),
    "split": (lambda x: x.split([1, 3], 1), (normal(3, 4),)),
    "flip": (lambda x: x.flip(0), (normal(3, 4),)),
    "roll": (lambda x: x.roll(1, 0), (normal(3, 4),)),
    "tril": (lambda x: (x.tril(), x.triu(1)), (normal(4, 4),)),
    "pad": (lambda x: F.pad(x, (1, 2)), (normal(3, 4),)),
    "transposed": (lambda x: x.t() + 1, (normal(3, 4),)),
    "matmul": (torch.matmul, (normal(3, 4), normal(4, 5))),
    "bmm": (torch.bmm, (normal(2, 3, 4), normal(2, 4, 5))),
    "addmm": (lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2), (normal(3, 5), normal(3, 4), normal(4, 5))),
    "linear": (F.linear, (normal(3, 4), normal(5, 4), normal(5))),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), (normal(3, 4), normal(5, 4))),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        (normal(2, 3, 6, 6), normal(4, 3, 3, 3), normal(4)),
    ),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (normal(1, 3, 4, 4), normal(3, 2, 3, 3))),
    "conv1d": (F.conv1d, (normal(2, 3, 8), normal(4, 3, 3))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (normal(4, 6), normal(6), normal(6))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (normal(2, 4, 3, 3), normal(4), normal(4))),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (normal(4, 3, 2, 2), normal(3), normal(3)),
    ),
    "softmax": (lambda x: F.softmax(x, -1), (normal(3, 5),)),
    "log_softmax": (lambda x: F.log_softmax(x, 0), (normal(3, 5),)),
    "cross_entropy": (lambda x, y: F.cross_entropy(x, y), (normal(6, 4), whole(6))),
    "nll_loss": (lambda x, y: F.nll_loss(F.log_softmax(x, 1), y, ignore_index=1), (normal(6, 4), whole(6))),
    "mse_loss": (F.mse_loss, (normal(3, 4), positive(3, 4))),
    "l1_loss": (F.l1_loss, (normal(3, 4), positive(3, 4))),
    "smooth_l1_loss": (F.smooth_l1_loss, (normal(3, 4), positive(3, 4))),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.detach().sigmoid()), (normal(3, 4), positive(3, 4))),
    "bce_with_logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach().sigmoid()),
        (normal(3, 4), positive(3, 4)),
    ),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="batchmean"), (normal(3, 4), positive(3, 4))),
    "gelu": (gelu, (normal(3, 4),)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), (normal(3, 4),)),
    "silu": (F.silu, (normal(3, 4),)),
    "elu": (F.elu, (normal(3, 4),)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), (normal(3, 4),)),
    "softplus": (F.softplus, (normal(3, 4),)),
    "hardswish": (F.hardswish, (normal(3, 4),)),
    "mish": (F.mish, (normal(3, 4),)),
    "glu": (F.glu, (normal(3, 4),)),
    "prelu": (F.prelu, (normal(2, 3, 4), normal(3))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (normal(2, 3, 6, 6),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), (normal(2, 3, 6, 6),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (2, 2)), (normal(2, 3, 6, 6),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (normal(1, 2, 3, 3),)),
    "interpolate_bilinear_1.7": (
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        (normal(1, 2, 7, 7),),
    ),
    "interpolate_bilinear_0.6": (
        lambda x: F.interpolate(x, scale_factor=0.6, mode="bilinear"),
        (normal(1, 2, 7, 7),),
    ),
    "interpolate_nearest_1.7": (lambda x: F.interpolate(x, scale_factor=1.7), (normal(1, 2, 7, 7),)),
    "embedding": (lambda w, i: F.embedding(i, w), (normal(5, 3), whole(2, 4))),
    "gather": (lambda x, i: x.gather(1, i), (normal(3, 4), whole(3, 2))),
    "index": (lambda x, i: (x[i], x[:, i]), (normal(5, 5), whole(3))),
    "index_of_nothing": (lambda x, i: (x[i], x[:, i], x[x > 100], x[:, :, i]), (normal(4, 5, 3), EMPTY)),
    "index_put_of_nothing": (write_nothing, (normal(4, 5), EMPTY)),
    "index_put_of_nothing_in_integers": (write_nothing, (whole(4, 5), EMPTY)),
    "integer_on_the_host": (lambda x: torch.tensor(2**24 + 1, dtype=torch.int32) + x, (whole(3, 4).int(),)),
    "index_select": (lambda x, i: x.index_select(1, i), (normal(3, 5), whole(2))),
    "index_add": (lambda x, i, y: x.index_add(0, i, y), (normal(5, 3), torch.tensor([3, 0]), normal(2, 3))),
    "scatter_add": (lambda x, i, y: x.scatter_add(1, i, y), (normal(3, 5), whole(3, 2), normal(3, 2))),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -1.0), (normal(3, 4),)),
    "masked_select": (lambda x: x.masked_select(x > 0), (normal(3, 4),)),
    "embedding_bag_sum": (lambda w, i: F.embedding_bag(i, w, mode="sum"), (normal(5, 3), whole(2, 4))),
    "embedding_bag_mean": (lambda w, i: F.embedding_bag(i, w, mode="mean"), (normal(5, 3), whole(2, 4))),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NETWORK)
def test_network(npu: torch.device, name: str, dtype: torch.dtype) -> None:
    function, inputs = NETWORK[name]
    check(function, inputs, dtype)


# What is added to a product, and the product's operands.
ADDED = {
    "linear": (lambda x, a, b: F.linear(a, b, x), (normal(5), normal(3, 4), normal(5, 4))),
    "addmm": (torch.addmm, (normal(3, 5), normal(3, 4), normal(4, 5))),
    "addmm_": (lambda x, a, b: x.clone().addmm_(a, b), (normal(3, 5), normal(3, 4), normal(4, 5))),
    "addmv": (torch.addmv, (normal(3), normal(3, 4), normal(4))),
    "baddbmm": (torch.baddbmm, (normal(2, 3, 5), normal(2, 3, 4), normal(2, 4, 5))),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_product_of_halves_may_be_float32(npu: torch.device, name: str, dtype: torch.dtype) -> None:
    """torch_npu gives the result the dtype of what is added, and CANN promotes the operands to it."""
    function, (added, *operands) = ADDED[name]
    halves = [operand.to(dtype) for operand in operands]
    found = function(added.npu(), *(half.npu() for half in halves))
    assert found.dtype == torch.float32
    expected = function(added.double(), *(half.double() for half in halves))
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_a_convolution_of_halves_takes_no_bias_in_float32(npu: torch.device) -> None:
    """A check of torch's own, before torch_npu is asked; the stand-in takes it."""
    x, weight, bias = normal(1, 2, 4, 4).half().npu(), normal(3, 2, 3, 3).half().npu(), normal(3).npu()
    with pytest.raises(RuntimeError, match=r"Input type .* and bias type .* should be the same"):
        F.conv2d(x, weight, bias)


def test_sizes_that_values_tell(npu: torch.device) -> None:
    x = whole(4, 5, below=3)
    torch.testing.assert_close(x.npu().nonzero().cpu(), x.nonzero())
    for actual, expected in zip(
        x.npu().unique(return_inverse=True, return_counts=True),
        x.unique(return_inverse=True, return_counts=True),
        strict=True,
    ):
        torch.testing.assert_close(actual.cpu(), expected)


def check_own(ours: Callable[..., Any], reference: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    """A function of torch_npu's own against one that is written with torch's."""
    expected = run(reference, [x.clone().requires_grad_() for x in inputs])
    actual = run(ours, [x.npu().requires_grad_() for x in inputs])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), e, **TOLERANCES[torch.float32])


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def fast_gelu(x: Tensor) -> Tensor:
    """The formula of torch_npu's documentation."""
    return x / (1 + torch.exp(-1.702 * x.abs())) * torch.exp(0.851 * (x - x.abs()))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


# By the name in torch_npu: its call, the reference, inputs.
OWN: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]] = {
    "npu_linear": (lambda f, *x: f(*x), F.linear, (normal(3, 4), normal(5, 4), normal(5))),
    "fast_gelu": (lambda f, x: f(x), fast_gelu, (normal(3, 4),)),
    "npu_bmmV2": (lambda f, a, b: f(a, b, []), torch.bmm, (normal(2, 3, 4), normal(2, 4, 5))),
    "npu_confusion_transpose": (
        lambda f, x: f(x, [0, 2, 1], [2, 12], True),
        lambda x: x.permute(0, 2, 1).reshape(2, 12),
        (normal(2, 3, 4),),
    ),
    "npu_rms_norm": (lambda f, x, w: f(x, w)[0], rms_norm, (normal(3, 4), normal(4))),
    "npu_swiglu": (lambda f, x: f(x), swiglu, (normal(3, 8),)),
    "npu_rotary_mul": (
        lambda f, *x: f(*x),
        rotary,
        (normal(2, 3, 4, 8), normal(1, 3, 1, 8), normal(1, 3, 2, 8)[:, :, :1]),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_functions_of_torch_npus_own(npu: torch.device, name: str) -> None:
    import torch_npu

    call, reference, inputs = OWN[name]
    check_own(lambda *x: call(getattr(torch_npu, name), *x), reference, inputs)


LISTS: dict[str, Callable[[list[Tensor], list[Tensor]], Any]] = {
    "add": lambda x, y: torch._foreach_add(x, y, alpha=0.5),
    "mul": torch._foreach_mul,
    "div": torch._foreach_div,
    "add_number": lambda x, y: torch._foreach_add(x, 1.5),
    "mul_numbers": lambda x, y: torch._foreach_mul(x, [2.0, 3.0, 4.0]),
    "sqrt": lambda x, y: torch._foreach_sqrt(y),
    "lerp": lambda x, y: torch._foreach_lerp(x, y, 0.25),
    "addcmul": lambda x, y: torch._foreach_addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch._foreach_addcdiv(x, x, y, value=0.5),
    "norm": lambda x, y: torch._foreach_norm(x),
    "maximum": torch._foreach_maximum,
    "add_numbers": lambda x, y: torch._foreach_add(x, [2.0, 3.0, 4.0]),
    "sub_number": lambda x, y: torch._foreach_sub(x, 1.5),
    "div_numbers": lambda x, y: torch._foreach_div(x, [2.0, 3.0, 4.0]),
    "pow_number": lambda x, y: torch._foreach_pow(y, 1.5),
    "maximum_number": lambda x, y: torch._foreach_maximum(x, 0.25),
    "minimum_numbers": lambda x, y: torch._foreach_minimum(x, [0.25, 0.5, -0.5]),
    "addcmul_tensor": lambda x, y: torch._foreach_addcmul(x, x, y, torch.tensor([2.0, 3.0, 4.0])),
    "addcdiv_tensor": lambda x, y: torch._foreach_addcdiv(x, x, y, torch.tensor([2.0, 3.0, 4.0])),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists(npu: torch.device, name: str) -> None:
    x, y = [normal(3, 4), normal(5), normal(2, 2)], [positive(3, 4), positive(5), positive(2, 2)]
    expected = LISTS[name](x, y)
    actual = LISTS[name]([t.npu() for t in x], [t.npu() for t in y])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), e, **TOLERANCES[torch.float32])


BEYOND_FLOAT = 2**24 + 1  # float32 does not have it
LISTS_OF_INTEGERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "add_number": lambda x: torch._foreach_add(x, 1),
    "add_numbers": lambda x: torch._foreach_add(x, [1, BEYOND_FLOAT]),
    "sub_number": lambda x: torch._foreach_sub(x, BEYOND_FLOAT),
    "mul_numbers": lambda x: torch._foreach_mul(x, [1, 3]),
    "maximum_number": lambda x: torch._foreach_maximum(x, BEYOND_FLOAT),
    "minimum_number": lambda x: torch._foreach_minimum(x, BEYOND_FLOAT),
    "maximum_numbers": lambda x: torch._foreach_maximum(x, [1, BEYOND_FLOAT]),
    "minimum_numbers": lambda x: torch._foreach_minimum(x, [BEYOND_FLOAT, 1]),
}


@pytest.mark.parametrize("name", LISTS_OF_INTEGERS)
def test_lists_of_integers(npu: torch.device, name: str) -> None:
    x = [torch.tensor([BEYOND_FLOAT, BEYOND_FLOAT + 2, -3], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)]
    for actual, expected in zip(LISTS_OF_INTEGERS[name]([t.npu() for t in x]), LISTS_OF_INTEGERS[name](x), strict=True):
        assert actual.cpu().tolist() == expected.tolist()


def test_random_numbers(npu: torch.device) -> None:
    torch.npu.manual_seed(3)
    first = torch.randn(10000, device=npu)
    torch.npu.manual_seed(3)
    assert torch.equal(torch.randn(10000, device=npu), first)
    assert not torch.equal(torch.randn(10000, device=npu), first)
    assert abs(first.mean().item()) < 0.05
    assert abs(first.std().item() - 1) < 0.05
    dropped = F.dropout(torch.ones(10000, device=npu), 0.25)
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert abs((dropped == 0).float().mean().item() - 0.25) < 0.03


# max_grad_norm, global_grad_norm, step_size and adam_mode of BERT's Adam, and by how much the gradient is clipped.
BERT_ADAM = {
    "clipped": (0.5, 2.0, None, 0, 0.25),
    "below the limit": (3.0, 2.0, None, 0, 1.0),
    "without a limit": (-1.0, 2.0, None, 0, 1.0),
    "mbart": (0.5, 2.0, 0.02, 1, 1.0),
}


@pytest.mark.parametrize("case", BERT_ADAM)
def test_berts_adam(npu: torch.device, case: str) -> None:
    import torch_npu

    max_norm, norm, step_size, mode, clipped = BERT_ADAM[case]
    p, m, grad, v = normal(40), normal(41)[:40], normal(42)[:40], positive(40)
    outputs = tuple(x.npu() for x in (p, m, v))
    torch_npu.npu_bert_apply_adam(0.1, 0.9, 0.99, 1e-3, grad.npu(), max_norm, norm, 0.05, step_size, mode, out=outputs)
    p, m, v, g = p.double(), m.double(), v.double(), clipped * grad.double()
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    p = p - (step_size or 0.1) * m / (v.sqrt() + 1e-3) - 0.1 * 0.05 * p
    for actual, expected in zip(outputs, (p, m, v), strict=True):
        torch.testing.assert_close(actual.cpu(), expected.float(), rtol=1e-5, atol=1e-6)


def test_functions_of_labels(npu: torch.device) -> None:
    import torch_npu

    logits, labels = normal(6, 4), F.one_hot(whole(6), 4).float()
    x = logits.npu().requires_grad_()
    loss = torch_npu.npu_softmax_cross_entropy_with_logits(x, labels.npu())
    loss.sum().backward()
    torch.testing.assert_close(loss.cpu(), -(labels * logits.log_softmax(1)).sum(1))
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), logits.softmax(1) - labels)
    torch.testing.assert_close(torch_npu.npu_one_hot(whole(5).npu(), depth=4).cpu(), F.one_hot(whole(5), 4).float())
    torch.testing.assert_close(F.one_hot(whole(5).npu(), 4).cpu(), F.one_hot(whole(5), 4))


@pytest.mark.parametrize("name", ["_npu_dropout", "_dropout_with_byte_mask"])
def test_masks_of_dropout(npu: torch.device, name: str) -> None:
    import torch_npu

    x = torch.ones(1000, device=npu, requires_grad=True)
    out, mask = getattr(torch_npu, name)(x, 0.25)
    out.sum().backward()
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert abs((out == 0).float().mean().item() - 0.25) < 0.1
    assert mask.dtype == torch.uint8
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), out.detach().cpu())  # of ones, both are the mask divided by what is kept


def attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
    """By its equation, in float64, of [batch, heads, length, width]; each key head serves as many query heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weights = (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1)
    return (weights if kept is None else weights * kept) @ v


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_causal_attention(npu: torch.device, dtype: torch.dtype, p: float) -> None:
    """Values are a unit matrix: what is left of the weights shows which of them dropout has kept."""
    q, k = (x.to(npu, dtype).requires_grad_() for x in (normal(2, 4, 16, 16), normal(4, 2, 16, 16).view(2, 4, 16, 16)))
    v = torch.eye(16).to(npu, dtype).expand(2, 4, 16, 16)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
    weight = normal(2, 4, 16, 16)
    gradients = torch.autograd.grad(out, (q, k), weight.to(npu, dtype))
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
    kept = (out.detach().cpu() != 0).double() / (1 - p)
    wide = [x.detach().cpu().double().requires_grad_() for x in (q, k)]
    expected = attention(*wide, v.cpu().double(), hidden, kept)
    expected_gradients = torch.autograd.grad(expected, wide, weight.to(dtype).double())
    for actual, value in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        torch.testing.assert_close(actual.cpu().double(), value, **TOLERANCES[dtype])
    if p:
        dropped = (kept == 0).double().masked_fill(hidden, 0).sum() / (~hidden).sum() / 8
        assert abs(dropped.item() - p) < 0.1


# The axes of a tensor [batch, heads, length, width] in each layout, and back.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "BNSD": (lambda x: x, lambda x: x),
    "BSND": (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "BSH": (lambda x: x.transpose(1, 2).flatten(2), lambda x: x.unflatten(2, (-1, 8)).transpose(1, 2)),
    "SBH": (lambda x: x.permute(2, 0, 1, 3).flatten(2), lambda x: x.unflatten(2, (-1, 8)).permute(1, 2, 0, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_of_groups_of_heads(npu: torch.device, layout: str) -> None:
    import torch_npu

    laid_out, back = LAYOUTS[layout]
    wide = [normal(2, heads, 16, 8).double().requires_grad_() for heads in (4, 2, 2)]
    given = [laid_out(x.detach().float()).contiguous().npu().requires_grad_() for x in wide]
    out = torch_npu.npu_fusion_attention(*given, 4, layout, scale=8**-0.5)[0]
    weight = normal(2, 4, 16, 8)
    gradients = torch.autograd.grad(out, given, laid_out(weight).contiguous().npu())
    expected = attention(*wide)
    for actual, value in zip(
        (out, *gradients), (expected, *torch.autograd.grad(expected, wide, weight.double())), strict=True
    ):
        torch.testing.assert_close(back(actual.cpu().double()), value, **TOLERANCES[torch.float32])


def test_an_operator_that_is_missing_fails_by_name(npu: torch.device) -> None:
    import torch_npu

    with pytest.raises(RuntimeError, match="aclnnGeGluV3"):
        torch_npu.npu_geglu(normal(3, 4).npu())
    assert "aclnnGeGluV3" in host_cann.missing_operators()["sought"]
    with pytest.raises(RuntimeError, match="StrideAdd"):
        torch_npu.npu_stride_add(normal(1, 32, 2, 2).npu(), normal(1, 32, 2, 2).npu(), 0, 0, 1)
    assert "aclop StrideAdd" in host_cann.missing_operators()["called"]


def test_an_argument_of_another_kind_is_refused(npu: torch.device) -> None:
    """As by a version of torch_npu whose operator has other parameters: here a number in place of a tensor."""
    torch.ones(1, device=npu)
    torch.npu.synchronize()
    calls = installation.operators()
    calls.aclCreateScalar.restype = ctypes.c_void_p
    number = ctypes.c_void_p(calls.aclCreateScalar(ctypes.byref(ctypes.c_float(1)), 0))
    size, plan = ctypes.c_uint64(), ctypes.c_void_p()
    assert calls.aclnnAbsGetWorkspaceSize(number, None, ctypes.byref(size), ctypes.byref(plan)) == 0
    assert calls.aclnnAbs(None, size, plan, None) == 0
    with pytest.raises(RuntimeError, match="aclnnAbs: an argument is of another kind than the parameter"):
        torch.npu.synchronize()


def test_dtypes_beyond_the_documentation_are_refused(run_script: Any) -> None:
    code = """
import torch
assert torch.ones(3).npu().sqrt().tolist() == [1, 1, 1]
x = torch.ones(3, dtype=torch.float64).npu()
b = torch.ones(3, dtype=torch.bfloat16).npu()
assert b.erf().cpu().dtype == b.floor().cpu().dtype == torch.bfloat16
i = torch.ones(3, dtype=torch.int8).npu()
for name, call in {"lerp": lambda: torch._foreach_lerp_([x], [x], 0.5), "sign": lambda: i.sign()}.items():
    try:
        call()
        torch.npu.synchronize()
    except RuntimeError as error:
        print("refused", name, error)
"""
    done = run_script(code, HOST_CANN_DTYPES="1", TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    assert "refused lerp" in done.stdout
    assert "refused sign" in done.stdout


def test_each_operator_has_documented_dtypes() -> None:
    library = Path(os.environ["ASCEND_HOME_PATH"], "libopapi.so")
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    operators = {name for name in names if f"{name}GetWorkspaceSize" in names}
    documented = {line.split()[0] for line in Path(installation.__file__).with_name("dtypes.txt").open()}
    assert len(operators) > 500
    assert operators <= documented
