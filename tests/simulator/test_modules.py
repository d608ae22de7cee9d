# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Modules against the CPU: those that are more than the operators of ``test_opinfo.py``, and training with them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import npu_simulator
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The CPU fuses recurrent cells and attention differently.
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-2, "atol": 1e-2},
    torch.bfloat16: {"rtol": 5e-2, "atol": 5e-2},
}


def normal(*size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*size)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "rnn": (lambda: nn.RNN(5, 7, 2, batch_first=True), normal(3, 4, 5)),
    "lstm": (lambda: nn.LSTM(5, 7, 2, bidirectional=True), normal(3, 4, 5)),
    "lstm, no bias": (lambda: nn.LSTM(5, 7, bias=False), normal(3, 4, 5)),
    "lstm, projection": (lambda: nn.LSTM(5, 7, proj_size=3), normal(3, 4, 5)),
    "gru": (lambda: nn.GRU(5, 7, 2, bidirectional=True), normal(3, 4, 5)),
    "gru, no bias": (lambda: nn.GRU(5, 7, bias=False), normal(3, 4, 5)),
    "lstm_cell": (lambda: nn.LSTMCell(5, 7), normal(3, 5)),
    "gru_cell": (lambda: nn.GRUCell(5, 7), normal(3, 5)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), normal(3, 2, 8)),
}


def first(output: object) -> Tensor:
    while isinstance(output, tuple):
        output = output[0]
    assert isinstance(output, Tensor)
    return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str, dtype: torch.dtype) -> None:
    make, make_input = MODULES[name]
    module, x = make().to(dtype), make_input().to(dtype)
    results = []
    for device in ("cpu", "npu"):
        m, leaf = copy.deepcopy(module).to(device), x.clone().to(device).requires_grad_()
        y = first(m(leaf))
        y.float().square().sum().backward()
        tensors = [y, leaf.grad, *(p.grad for p in m.parameters()), *m.buffers()]
        assert all(t is not None and t.device.type == device for t in tensors)
        results.append([t.detach().cpu() for t in tensors if t is not None])
    torch.testing.assert_close(results[1], results[0], **CLOSE[dtype])


def test_sparse_gradients() -> None:
    index, results = torch.tensor([1, 3, 1]), []
    module = nn.Embedding(5, 2, sparse=True)
    for device in ("cpu", "npu"):
        m = copy.deepcopy(module).to(device)
        optimizer = torch.optim.SparseAdam(m.parameters())
        m(index.to(device)).sum().backward()
        assert m.weight.grad is not None
        assert m.weight.grad.is_sparse
        assert m.weight.grad.device.type == device
        optimizer.step()
        results.append(m.weight.detach().cpu())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_packed_sequences() -> None:
    module, x = nn.LSTM(5, 7), torch.randn(4, 3, 5)
    moved = copy.deepcopy(module).npu()
    want, _ = module(nn.utils.rnn.pack_padded_sequence(x, [4, 3, 2]))
    got, _ = moved(nn.utils.rnn.pack_padded_sequence(x.npu(), [4, 3, 2]))
    assert got.is_npu
    torch.testing.assert_close(got.data.cpu(), want.data)
    assert nn.utils.rnn.pack_padded_sequence(x, [4, 3, 2]).npu().is_npu
    torch.testing.assert_close(
        nn.utils.rnn.pad_packed_sequence(got)[0].cpu(), nn.utils.rnn.pad_packed_sequence(want)[0]
    )


def test_channels_last() -> None:
    x = torch.randn(2, 4, 7, 7).to(memory_format=torch.channels_last)
    module = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    moved = copy.deepcopy(module).npu()
    y = moved(x.npu())
    assert x.npu().is_contiguous(memory_format=torch.channels_last)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y.cpu(), module(x), rtol=0, atol=0)


def test_moving_keeps_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for move in (lambda: module.npu(), lambda: module.npu(1), lambda: module.cpu(), lambda: module.to("npu:0")):
        move()
        assert all(p is q for p, q in zip(module.parameters(), parameters, strict=True))
    assert all(t.is_npu for t in (*module.parameters(), *module.buffers()))
    before = module[0].weight.detach().clone()
    module(torch.randn(5, 3).npu()).square().sum().backward()
    optimizer.step()  # was made before the move
    assert not torch.equal(module[0].weight, before)


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.skip = nn.Conv2d(inner, outer, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.skip(x))


def resnet(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def losses(device: str, optimizer: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, **options: object) -> list:
    model = resnet(4).to(device)
    step = optimizer(model.parameters(), **options)
    generator, result = torch.Generator().manual_seed(1), []
    for _ in range(4):
        x = torch.randn(4, 3, 12, 12, generator=generator).to(device)
        y = torch.randint(0, 10, (4,), generator=generator).to(device)
        step.zero_grad()
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        step.step()
        result.append(loss.item())
    return result


@pytest.mark.parametrize("fused_foreach", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1, "foreach": True}),
        (torch.optim.SGD, {"lr": 0.1, "fused": True}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {"capturable": True}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_resnet_trains_as_on_cpu(
    optimizer: type[torch.optim.Optimizer], options: dict[str, object], fused_foreach: bool
) -> None:
    npu_simulator.configure(fused_foreach=fused_foreach)
    cpu_options = {name: value for name, value in options.items() if name != "capturable"}
    got = losses("npu", optimizer, torch.float32, **options)
    want = losses("cpu", optimizer, torch.float32, **cpu_options)
    assert got[0] == want[0]  # the same kernels
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # foreach adds up in another order than the loop
    assert want[-1] != want[0]


def test_plain_sgd_is_bit_identical() -> None:
    options = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    assert losses("npu", torch.optim.SGD, torch.float32, **options) == losses(
        "cpu", torch.optim.SGD, torch.float32, **options
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_resnet_under_autocast(dtype: torch.dtype) -> None:
    # torch's cast lists for the CPU are shorter than those for other devices: close, not equal.
    got = losses("npu", torch.optim.SGD, dtype, lr=0.1)
    want = losses("cpu", torch.optim.SGD, torch.float32, lr=0.1)
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)
