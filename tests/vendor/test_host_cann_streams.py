# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Streams, events, graphs and failures of the host CANN."""

from __future__ import annotations

import os
import time
from typing import Any

import host_cann
import pytest
import torch

MODE = os.environ.get("HOST_CANN_MODE") or "lazy"
NEEDS_LAZY = pytest.mark.skipif(MODE != "lazy", reason=f"HOST_CANN_MODE={MODE}: work is done before it is waited for")
NEEDS_A_QUEUE = pytest.mark.skipif(MODE == "blocking", reason="HOST_CANN_MODE=blocking: work is done in the call")


@NEEDS_LAZY
def test_a_missing_wait_is_found(npu: torch.device) -> None:
    """Work on another stream has not been done when nothing waits for it, however long the host does."""
    side = torch.npu.Stream()
    x = torch.ones(5_000_000, device=npu)
    torch.npu.synchronize()
    torch.npu.empty_cache()
    with torch.npu.stream(side):
        y = x * 2
    time.sleep(0.05)
    without = y[:3].clone().cpu()
    torch.npu.current_stream().wait_stream(side)
    assert without.isnan().all()
    assert y[:3].clone().cpu().tolist() == [2, 2, 2]


@NEEDS_LAZY
def test_events(npu: torch.device) -> None:
    side = torch.npu.Stream()
    begun, ended = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    x = torch.ones(1000, device=npu)
    torch.npu.synchronize()
    with torch.npu.stream(side):
        begun.record()
        y = x + 1
        ended.record()
    assert not ended.query()
    torch.npu.current_stream().wait_event(ended)
    assert (y + 1).sum().item() == 3000
    assert ended.query()
    assert begun.elapsed_time(ended) >= 0


def test_who_asks_in_a_loop_waits(npu: torch.device) -> None:
    done = torch.npu.Event()
    torch.ones(10, device=npu)
    done.record()
    assert any(done.query() for _ in range(10))


def test_graphs(npu: torch.device) -> None:
    x, y = torch.ones(4, device=npu), torch.zeros(4, device=npu)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y.copy_(x * 3)
    assert y.sum().item() == 0  # what is captured is not done
    for value in (1.0, 2.0):
        x.fill_(value)
        with host_cann.count() as counted:
            graph.replay()
        assert counted.launches == 1
        assert y.tolist() == [3 * value] * 4


@pytest.mark.parametrize("when", ["call", "launch"])
def test_an_operator_fails_at_once(npu: torch.device, when: str) -> None:
    x = torch.ones(3, device=npu)
    host_cann.fail_after(1, "aclnnMul", when=when)
    y = x * 2
    with pytest.raises(RuntimeError):
        x.mul(3)
    assert y.tolist() == [2, 2, 2]
    assert (x * 4).tolist() == [4, 4, 4]


def test_an_operator_fails_when_it_runs(npu: torch.device) -> None:
    x = torch.ones(3, device=npu)
    torch.npu.synchronize()
    host_cann.fail_after(0, "aclnnMul", when="run")
    y = x * 2
    z = y + 1  # what follows on the stream is not done
    with pytest.raises(RuntimeError):
        torch.npu.synchronize()
    torch.npu.synchronize()  # and the host gets the error once
    assert z.shape == (3,)
    assert (x * 4).tolist() == [4, 4, 4]


def test_what_waits_for_a_failure_fails(npu: torch.device) -> None:
    side = torch.npu.Stream()
    x = torch.ones(3, device=npu)
    torch.npu.synchronize()
    host_cann.fail_after(0, "aclnnMul", when="run")
    with torch.npu.stream(side):
        x * 2
    torch.npu.current_stream().wait_stream(side)
    with pytest.raises(RuntimeError):
        torch.npu.current_stream().synchronize()
    with pytest.raises(RuntimeError):
        side.synchronize()
    # It is over: what comes later waits for the stream as before.
    with torch.npu.stream(side):
        y = x * 2
    torch.npu.current_stream().wait_stream(side)
    assert (y + 1).tolist() == [3, 3, 3]


@NEEDS_A_QUEUE
def test_a_stuck_operator_ends_in_a_timeout(npu: torch.device) -> None:
    x = torch.ones(3, device=npu)
    torch.npu.synchronize()
    host_cann.hang_after(0, "aclnnMul", seconds=0.3)
    x * 2
    begun = time.monotonic()
    with pytest.raises(RuntimeError):
        torch.npu.synchronize()
    assert time.monotonic() - begun >= 0.3
    assert (x * 4).tolist() == [4, 4, 4]


def test_what_was_asked_for_can_be_taken_back(npu: torch.device) -> None:
    host_cann.fail_after(0)
    host_cann.fail_after(-1)
    assert torch.ones(2, device=npu).mul(2).tolist() == [2, 2]


def test_failures_that_make_no_sense_are_refused(npu: torch.device) -> None:
    with pytest.raises(ValueError, match="'later'"):
        host_cann.fail_after(0, when="later")
    with pytest.raises(ValueError, match="'aclrtMalloc'"):
        host_cann.fail_after(0, "aclrtMalloc", when="run")


@pytest.mark.parametrize("mode", ["background", "blocking"])
def test_other_modes_compute_the_same(run_script: Any, mode: str) -> None:
    code = """
import torch
torch.manual_seed(0)
layer = torch.nn.Linear(4, 4)
x = torch.randn(3, 4)
expected = layer(x).sum().item()
print(abs(layer.npu()(x.npu()).sum().item() - expected) < 1e-5)
"""
    done = run_script(code, HOST_CANN_MODE=mode)
    assert done.stdout.split() == ["True"], done.stderr
