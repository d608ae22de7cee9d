# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""LSTM, GRU and their cells on the host CANN, with gradients, against the CPU's; and which operators compute them."""

from __future__ import annotations

import copy
from typing import Any

import host_cann
import pytest
import torch
from torch import Tensor

TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    # The CPU rounds each step's gates to half precision, the operators here only what they return.
    torch.float16: {"rtol": 1e-2, "atol": 5e-3},
}


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in flat(part)]


def run(module: torch.nn.Module, inputs: list[Tensor], device: str) -> list[Tensor]:
    module = copy.deepcopy(module).to(device)
    inputs = [x.to(device).requires_grad_() for x in inputs]
    state = inputs[1] if len(inputs) == 2 else tuple(inputs[1:])
    results = flat(module(inputs[0], state))
    # Not of a plain sum: every element counts by its place.
    ends = sum((y.float() * torch.linspace(0.5, 1, y.numel(), device=device).reshape(y.shape)).sum() for y in results)
    grads = torch.autograd.grad(ends, [*inputs, *module.parameters()])
    return [t.detach().cpu() for t in [*results, *grads]]


def check(module: torch.nn.Module, inputs: list[Tensor], dtype: torch.dtype) -> set[str]:
    module, inputs = module.to(dtype), [x.to(dtype) for x in inputs]
    expected = run(module, inputs, "cpu")
    with host_cann.count() as counted:
        actual = run(module, inputs, "npu")
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **TOLERANCES[dtype])
    return set(counted.by_op)


LAYERS = {
    "one": {},
    "two layers": {"num_layers": 2},
    "no bias": {"bias": False},
    "both directions": {"bidirectional": True},
    "batch first": {"batch_first": True},
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_layers(npu: torch.device, kind: type[torch.nn.Module], layers: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = LAYERS[layers]
    count = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    x = torch.randn((3, 5, 6) if options.get("batch_first") else (5, 3, 6))
    state = torch.randn(count, 3, 4)
    states = [state, torch.randn(count, 3, 4)] if kind is torch.nn.LSTM else [state]
    called = check(kind(6, 4, **options), [x, *states], dtype)
    if kind is torch.nn.GRU:
        assert {"aclnnGRU", "aclnnGRUBackward"} <= called
    elif layers in ("one", "batch first"):
        assert {"aclnnLSTM", "aclnnLstmBackward"} <= called
    else:  # torch_npu takes the older operator for other numbers of weights than four
        assert {"aclop DynamicRNN", "aclop DynamicRNNGrad"} <= called


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_cells(npu: torch.device, kind: type[torch.nn.Module], dtype: torch.dtype) -> None:
    states = [torch.randn(3, 4) for _ in range(2 if kind is torch.nn.LSTMCell else 1)]
    check(kind(6, 4), [torch.randn(3, 6), *states], dtype)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_the_older_operators(npu: torch.device, kind: type[torch.nn.Module]) -> None:
    """bfloat16, which the newer ones do not take, against float32 on the CPU: 8 bits of each number are left."""
    layer, x = kind(6, 4).bfloat16(), torch.randn(5, 3, 6).bfloat16()
    on_cpu, on_npu = copy.deepcopy(layer).float(), copy.deepcopy(layer).npu()
    expected = on_cpu(x.float())[0]
    expected.sum().backward()
    with host_cann.count() as counted:
        actual = on_npu(x.npu())[0]
        actual.sum().backward()
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=3e-2, atol=3e-2)
    for parameter, reference in zip(on_npu.parameters(), on_cpu.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu().float(), reference.grad, rtol=5e-2, atol=5e-2)
    name = "DynamicRNN" if kind is torch.nn.LSTM else "DynamicGRUV2"
    assert {f"aclop {name}", f"aclop {name}Grad"} <= set(counted.by_op)


def test_packed_sequences(npu: torch.device) -> None:
    """torch_npu pads a packed sequence to all rows: what is past a sequence's end is zero, its last state is kept."""
    torch.manual_seed(1)
    layer = torch.nn.LSTM(6, 4)
    x, lengths = torch.randn(5, 3, 6), torch.tensor([5, 3, 2])
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    y, (h, c) = layer(packed)
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(y)
    moved = copy.deepcopy(layer).npu()
    out, (h_npu, c_npu) = moved(torch.nn.utils.rnn.pack_padded_sequence(x.npu(), lengths))
    torch.testing.assert_close(h_npu.cpu(), h, **TOLERANCES[torch.float32])
    torch.testing.assert_close(c_npu.cpu(), c, **TOLERANCES[torch.float32])
    torch.testing.assert_close(out.data.reshape(5, 3, 4).cpu(), expected, **TOLERANCES[torch.float32])
