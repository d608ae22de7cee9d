# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Modules against the CPU: those that are more than the operators of ``test_opinfo.py``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
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
