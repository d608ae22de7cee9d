# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Copies of a model in float32 on which a level is tried: of sizes and dtypes alone, or of all its values."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from apex_npu.amp.float32_copies import float32_copy
from apex_npu.backends._torch_private import fake_modes, tree_map


class _EqualMasters(TorchFunctionMode):
    """What fake masters and weights are compared for is their values, which they do not have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func is torch.equal else func(*args, **(kwargs or {}))


@contextmanager
def fake_copy(model: nn.Module, batch: Any) -> Iterator[tuple[nn.Module, Any]]:
    """A copy of ``model`` and of ``batch`` without values; what is computed in the block has none either."""
    fake, copying = fake_modes()
    with fake:
        with copying, _EqualMasters():
            made = float32_copy(model, allow_rounded=True)
        yield made, tree_map(lambda value: fake.from_tensor(value) if isinstance(value, Tensor) else value, batch)


@contextmanager
def real_copy(model: nn.Module, batch: Any) -> Iterator[tuple[nn.Module, Any]]:
    """A deep copy of ``model``, and of the tensors of ``batch``, which forward may write."""

    def copied(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    yield float32_copy(model, allow_rounded=True), tree_map(copied, batch)


@contextmanager
def same_random_numbers(device_types: list[str]) -> Iterator[None]:
    """Generators of torch, Python and NumPy are after the block as they were before."""
    with ExitStack() as stack:
        for device_type in dict.fromkeys(t for t in device_types if t not in ("cpu", "meta")):
            stack.enter_context(torch.random.fork_rng(device_type=device_type))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(random.setstate, random.getstate())
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        yield
