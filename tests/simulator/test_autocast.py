# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch.autocast("npu"): which operators run in which type."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOW = (torch.float16, torch.bfloat16)

# Some of each of torch's lists, which the device takes as they are: one function casts for all of a list.
LOWER: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x, x[0]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "lstm": lambda x: nn.LSTM(3, 4).npu()(x[:, None])[0],
}
FP32: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "softmax": lambda x: x.softmax(0),
    "sum": torch.sum,
    "norm": lambda x: x.norm(),
    "norm p": lambda x: x.norm(p=3),
    "norm dim": lambda x: x.norm(2, 0),
    "norm keepdim": lambda x: x.norm(p=2, dim=(0, 1), keepdim=True),
}
WIDEST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "index_put": lambda x, y: x.index_put((torch.tensor([0], device="npu"),), y[:1]),
}


def sample() -> Tensor:
    return torch.rand(3, 3, device="npu") + 0.1


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("op", LOWER.values(), ids=LOWER.keys())
def test_lower_precision(op: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    with torch.autocast("npu", dtype=dtype):
        y = op(sample())
    assert y.dtype == dtype


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("op", FP32.values(), ids=FP32.keys())
def test_fp32(op: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = sample().to(dtype)
    with torch.autocast("npu", dtype=dtype):
        y = op(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.cpu(), op(x.cpu().float()))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("op", WIDEST.values(), ids=WIDEST.keys())
def test_widest(op: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    x, low = sample(), sample().to(dtype)
    with torch.autocast("npu", dtype=dtype):
        assert op(x, low).dtype == torch.float32
        assert op(low, x).dtype == torch.float32
        assert op(low, low).dtype == dtype


def test_values_are_those_of_explicit_casts() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5)
    with torch.autocast("npu", dtype=torch.float16):
        y = F.linear(x.npu(), w.npu())
    torch.testing.assert_close(y.cpu(), F.linear(x.half(), w.half()), rtol=0, atol=0)


def test_what_is_left_alone() -> None:
    with torch.autocast("npu", dtype=torch.float16):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32  # on the CPU
        assert (sample() + sample().half()).dtype == torch.float32
        assert F.relu(sample()).dtype == torch.float32
        assert sample().double().mm(sample().double()).dtype == torch.float64
        assert torch.mm(sample().half(), sample().half(), out=sample().half()).dtype == torch.float16
        assert sample().sum(dtype=torch.float64).dtype == torch.float64
        with torch.autocast("npu", enabled=False):
            assert torch.mm(sample(), sample()).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.mm(sample(), sample()).dtype == torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(sample(), sample()).dtype == torch.float32


def test_state() -> None:
    assert torch.get_autocast_dtype("npu") == torch.float16
    assert not torch.is_autocast_enabled("npu")
    with torch.npu.amp.autocast():
        assert torch.is_autocast_enabled("npu")
        assert torch.npu.is_autocast_enabled()
        assert not torch.is_autocast_enabled("cpu")
    with torch.npu.amp.autocast(dtype=torch.bfloat16):
        assert torch.mm(sample(), sample()).dtype == torch.bfloat16


def test_gradients_and_weight_cache() -> None:
    w = sample().requires_grad_()
    with torch.autocast("npu", dtype=torch.float16):
        loss = (sample() @ w).sum() + (sample() @ w).sum()
    assert loss.dtype == torch.float32
    loss.backward()
    assert w.grad is not None
    assert w.grad.dtype == torch.float32


def test_unsafe_loss_is_refused() -> None:
    with torch.autocast("npu"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(sample().sigmoid(), sample().sigmoid())


@pytest.mark.parametrize("make", [lambda: torch.amp.GradScaler("npu"), lambda: torch.npu.amp.GradScaler()])
def test_grad_scaler(make: Callable[[], torch.amp.GradScaler]) -> None:
    scaler, w = make(), nn.Parameter(torch.ones(3, device="npu"))
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler.scale((w * 2).sum()).backward()
    scaler.unscale_(optimizer)
    assert w.grad is not None
    assert w.grad.tolist() == [2, 2, 2]
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(w.detach().cpu(), torch.full((3,), 0.8))
    optimizer.zero_grad()
    scaler.scale((w * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(w.detach().cpu(), torch.full((3,), 0.8))  # skipped
    assert scaler.get_scale() == 2.0**15
