# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Private formats and saturation on the host CANN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

FRACTAL_NZ = 29


@pytest.fixture(autouse=True)
def _private_formats(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch_npu makes tensors in private formats only on request."""
    if "npu" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("npu")
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


@pytest.mark.parametrize("sizes", [(16, 16), (20, 24), (3, 5), (2, 17, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_tiles_and_back(npu: torch.device, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    import torch_npu

    x = torch.arange(torch.Size(sizes).numel()).reshape(sizes).to(dtype)
    tiled = torch_npu.npu_format_cast(x.npu(), FRACTAL_NZ)
    assert torch_npu.get_npu_format(tiled) == FRACTAL_NZ
    assert torch_npu.get_storage_size(tiled) % 256 == 0
    assert torch.equal(tiled.cpu(), x)
    assert torch.equal(torch_npu.npu_format_cast(tiled, 2).cpu(), x)


def tiled_pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    import torch_npu

    return torch_npu.npu_format_cast(a.npu(), FRACTAL_NZ), torch_npu.npu_format_cast(b.npu(), FRACTAL_NZ)


def test_operators_on_tiles(npu: torch.device) -> None:
    a, b = torch.randn(20, 24), torch.randn(20, 24)
    x, y = tiled_pair(a, b)
    for actual, expected in (
        (x + y, a + b),
        (torch.add(x, y, alpha=0.5), a + 0.5 * b),
        (x * y, a * b),
        (x - y, a - b),
        (torch.zeros_like(x), torch.zeros_like(a)),
        (torch.ones_like(x), torch.ones_like(a)),
        (x.mm(y.t()), a.mm(b.t())),
        (x.relu(), a.relu()),
    ):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_a_linear_layer_with_a_weight_in_tiles(npu: torch.device) -> None:
    import torch_npu

    layer, x = torch.nn.Linear(24, 20), torch.randn(4, 24)
    expected = layer(x)
    expected.sum().backward()
    moved = torch.nn.Linear(24, 20).npu()
    with torch.no_grad():
        moved.weight.data = torch_npu.npu_format_cast(layer.weight.detach().npu(), FRACTAL_NZ)
        moved.bias.copy_(layer.bias)
    actual = moved(x.npu())
    actual.sum().backward()
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert moved.weight.grad is not None
    torch.testing.assert_close(moved.weight.grad.cpu(), layer.weight.grad, rtol=1e-5, atol=1e-5)


def test_a_chip_that_saturates(run_script: Any) -> None:
    code = """
import host_cann, torch, torch_npu
assert host_cann.saturates() and not torch_npu.npu.utils.is_support_inf_nan()
torch_npu.npu.clear_npu_overflow_flag()
x = torch.full((4,), 300.0, dtype=torch.float16, device="npu")
assert (x * 2).tolist() == [600.0] * 4
assert not torch_npu.npu.get_npu_overflow_flag()
assert (x * x).tolist() == [65504.0] * 4, (x * x).tolist()
assert torch_npu.npu.get_npu_overflow_flag()
torch_npu.npu.clear_npu_overflow_flag()
assert not torch_npu.npu.get_npu_overflow_flag()
assert (x.float() * x.float()).tolist() == [90000.0] * 4
largest = torch.full((2,), torch.finfo(torch.float32).max, device="npu")
assert not torch_npu.npu.get_npu_overflow_flag()
assert torch.equal((largest * 2).cpu(), largest.cpu())
assert torch_npu.npu.get_npu_overflow_flag()
torch_npu.npu.clear_npu_overflow_flag()
assert torch.log(torch.full((2,), -1.0, device="npu")).tolist() == [0.0, 0.0]
assert torch_npu.npu.get_npu_overflow_flag()
weight = torch.randn(4, 3, 3, 3)
image = torch.randn(1, 3, 6, 6)
out = torch.nn.functional.conv2d(image.npu(), weight.npu())
torch.testing.assert_close(out.cpu(), torch.nn.functional.conv2d(image, weight), rtol=1e-3, atol=1e-3)
print("saturated")
"""
    done = run_script(code, HOST_CANN_SOC="Ascend910ProA", TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    assert "saturated" in done.stdout


def test_older_operators_of_a_chip_that_saturates(run_script: Any) -> None:
    code = """
import copy, host_cann, torch
from torch import nn
host_cann.install()

def same(a, b):
    torch.testing.assert_close(a.cpu(), b, rtol=2e-3, atol=2e-3)

def compare(module, x):
    # Values, gradients and running statistics, as on the CPU.
    module.zero_grad()
    there, inputs = copy.deepcopy(module).npu(), []
    for m, at in ((module, x), (there, x.npu())):
        inputs.append(at.detach().requires_grad_())
        out = m(inputs[-1])
        weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(at.device)
        (out * weights).sum().backward()
    same(there(inputs[1]).detach(), module(inputs[0]).detach())
    same(inputs[1].grad, inputs[0].grad)
    for p, q in zip(there.parameters(), module.parameters()):
        same(p.grad, q.grad)
    for p, q in zip(there.buffers(), module.buffers()):
        same(p, q)

torch.manual_seed(0)
for norm, sizes in ((nn.BatchNorm1d, (5, 3)), (nn.BatchNorm1d, (4, 3, 6)), (nn.BatchNorm2d, (4, 3, 5, 2)),
                    (nn.BatchNorm3d, (2, 3, 4, 2, 3))):
    for options in ({}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.5, "eps": 1e-2}):
        module = norm(3, **options)
        compare(module, torch.randn(sizes) * 3 + 1)
        if module.track_running_stats and norm is not nn.BatchNorm3d:
            compare(module.eval(), torch.randn(sizes))
compare(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), torch.randn(4, 6))
compare(nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=(1, 0)), torch.randn(2, 3, 5, 6))
compare(nn.AvgPool3d((2, 3, 2), stride=2, padding=1), torch.randn(2, 3, 6, 7, 5))
compare(nn.AvgPool3d(3, ceil_mode=True, count_include_pad=False), torch.randn(2, 3, 6, 7, 5))
x = torch.randn(3, 4, 5)
for got, want in ((x.npu().sum(), x.sum()), (x.npu().sum((0, 2)), x.sum((0, 2))),
                  (x.npu().sum(1, keepdim=True), x.sum(1, keepdim=True)), (x.npu().half().sum(1), x.half().sum(1))):
    same(got, want)
ends = torch.aminmax(x.npu(), out=tuple(torch.empty(2, device="npu")))
for got, want in zip((*ends, x.npu().amax((0, 2)), x.npu().amin(1, keepdim=True)),
                     (*x.aminmax(), x.amax((0, 2)), x.amin(1, keepdim=True))):
    assert torch.equal(got.cpu(), want)
assert (x > 0).npu().sum().item() == (x > 0).sum().item()
near = x + torch.tensor([0.0, 1e-3, 1e-7, 1.0, -1e-7])
assert torch.equal(torch.isclose(x.npu(), near.npu()).cpu(), torch.isclose(x, near))
assert not host_cann.missing_operators()["called"], host_cann.missing_operators()
print("as on the CPU")
"""
    done = run_script(code, HOST_CANN_SOC="Ascend910ProA", TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    assert "as on the CPU" in done.stdout


def test_a_chip_that_does_not(npu: torch.device) -> None:
    import host_cann

    assert not host_cann.saturates()
    x = torch.full((4,), 300.0, dtype=torch.float16, device=npu)
    assert (x * x).isinf().all()
