# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Device memory of the host CANN: poisoned, inaccessible to the host, limited, and released."""

from __future__ import annotations

import gc
import signal
from typing import Any

import host_cann
import pytest
import torch


def test_fresh_memory_is_poisoned(npu: torch.device) -> None:
    torch.npu.empty_cache()
    assert torch.empty(7_000_000, device=npu)[-1].isnan()
    assert torch.empty(3_000_000, device=npu, dtype=torch.int64)[-1].item() == -1


def test_the_host_cannot_read_device_memory(run_script: Any) -> None:
    code = """
import ctypes, torch
x = torch.ones(4, device="npu")
assert x.tolist() == [1, 1, 1, 1]
ctypes.string_at(x.data_ptr(), 4)
"""
    assert run_script(code).returncode == -signal.SIGSEGV


def test_what_is_dropped_is_in_use_no_longer(npu: torch.device) -> None:
    gc.collect()
    torch.npu.empty_cache()
    before, used = host_cann.live_storages(), host_cann.memory().used
    layer = torch.nn.Linear(50, 50).npu()
    layer(torch.ones(4, 50, device=npu)).sum().backward()
    assert host_cann.live_storages() >= before + 4
    del layer
    gc.collect()
    torch.npu.empty_cache()
    assert host_cann.live_storages() == before
    assert host_cann.memory().used == used


def test_a_limit_is_an_out_of_memory_error(npu: torch.device) -> None:
    total = host_cann.memory().total
    with host_cann.memory_limit(64 << 20):
        torch.empty(32 << 20, dtype=torch.uint8, device=npu)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(128 << 20, dtype=torch.uint8, device=npu)
        assert torch.ones(3, device=npu).sum().item() == 3
    assert host_cann.memory().total == total
    torch.empty(128 << 20, dtype=torch.uint8, device=npu)


def test_allocations_fail_after_some(npu: torch.device) -> None:
    sizes = [200 << 20, 201 << 20]
    with host_cann.out_of_memory_after(1):
        kept = torch.empty(sizes[0], dtype=torch.uint8, device=npu)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(sizes[1], dtype=torch.uint8, device=npu)
    assert torch.empty(sizes[1], dtype=torch.uint8, device=npu).numel() == kept.numel() + (1 << 20)


def test_operands_have_to_be_on_one_device(npu: torch.device) -> None:
    one, other = torch.ones(3, device="npu:0"), torch.ones(3, device="npu:1")
    with pytest.raises(RuntimeError):
        torch.add(one, other)
