# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What all tests share: the device, fixed seeds, and a check that nothing of torch stays patched."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from apex_npu import amp

# The tensors here are small: a second thread only waits, and on a busy machine it waits long.
torch.set_num_threads(1)

# Functions that amp patches at O1; each test must leave them as it found them.
_PATCHABLE = (
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.function.BackwardCFunction, "apply"),
    (torch.nn.functional, "interpolate"),
    (torch.nn.functional, "binary_cross_entropy"),
    (torch.Tensor, "cpu"),
    (torch.Tensor, "__ipow__"),
    (torch.nn.Module, "zero_grad"),
)


@pytest.fixture
def device() -> torch.device:
    """The device to test on; ``APEX_NPU_TEST_DEVICE`` chooses another than the CPU."""
    return torch.device(os.environ.get("APEX_NPU_TEST_DEVICE", "cpu"))


@pytest.fixture(autouse=True)
def _clean_slate() -> Iterator[None]:
    torch.manual_seed(0)
    before = [getattr(owner, name) for owner, name in _PATCHABLE]
    autocast_before = torch.is_autocast_enabled("cpu")
    yield
    amp.shutdown()
    assert torch.is_autocast_enabled("cpu") == autocast_before
    for (owner, name), original in zip(_PATCHABLE, before, strict=True):
        assert getattr(owner, name) is original, f"{owner.__name__}.{name} is still patched"
