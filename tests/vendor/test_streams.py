# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fused memory that another stream still reads is not given away, by the vendor's own allocator.

On the host CANN work is done when something waits for it and no sooner, so what is given away too early is always seen.
"""

import gc

import pytest
import torch
from devices import needs_extension
from torch import nn

from apex_npu.fusion import is_slot
from apex_npu.optimizers import NpuFusedSGD

NUMEL = 100_000


def make_fused():
    param = nn.Parameter(torch.full((NUMEL,), 3.0, device="npu"))
    optimizer = NpuFusedSGD([param], lr=0.0, momentum=0.9)
    param.grad = torch.full_like(param, 3.0)
    optimizer.step()
    return param, optimizer


def allocate_again():
    """So much that all memory which is free is taken, that of a buffer for ``NUMEL`` elements included."""
    gc.collect()
    return [torch.full((NUMEL,), 7.0, device="npu") for _ in range(40)]


def in_order(*streams):
    """Have them do their work, one after the other: the first has read too late if the last has written too early."""
    for stream in streams:
        stream.synchronize()


@pytest.mark.parametrize("what", ["parameter", "view of it", "state", "flat buffer"])
def test_record_stream_keeps_memory_until_that_stream_has_read_it(what):
    param, optimizer = make_fused()
    tensors = {
        "parameter": param.detach(),
        "view of it": param.detach().view(10, -1),
        "state": optimizer.state[param]["momentum_buffer"],
        "flat buffer": optimizer.get_optimizer_combined_params()[0][:NUMEL],
    }
    tensor = tensors.pop(what)
    tensors.clear()
    reader = torch.npu.Stream()
    reader.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(reader):
        copy = tensor * 1.0
    tensor.record_stream(reader)
    del tensor, param, optimizer
    new = allocate_again()
    in_order(torch.npu.current_stream(), reader)
    assert copy.unique().tolist() == [3.0]
    assert all(t.unique().tolist() == [7.0] for t in new)


def test_memory_that_no_other_stream_reads_is_free_at_once():
    param, optimizer = make_fused()
    optimizer.step()
    allocated = torch.npu.memory_allocated()
    del param, optimizer
    gc.collect()
    assert torch.npu.memory_allocated() <= allocated - 3 * 4 * NUMEL


@needs_extension
def test_parameters_that_are_fused_on_another_stream_keep_their_values():
    param = nn.Parameter(torch.full((NUMEL,), 3.0, device="npu"))
    grad = torch.zeros_like(param)
    optimizer = NpuFusedSGD([param], lr=0.0, momentum=0.9)
    stepping = torch.npu.Stream()
    stepping.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stepping):
        param.grad = grad
        optimizer.step()
    assert is_slot(param)
    new = allocate_again()  # the parameter's former memory, whose values are still to be copied
    in_order(torch.npu.current_stream(), stepping)
    assert param.unique().tolist() == [3.0]
    assert all(t.unique().tolist() == [7.0] for t in new)


@needs_extension
def test_buffers_that_were_made_on_another_stream_are_kept_for_the_default_one():
    stepping = torch.npu.Stream()
    with torch.npu.stream(stepping):
        param, optimizer = make_fused()
    torch.npu.current_stream().wait_stream(stepping)
    copy = param.detach() * 1.0
    del param, optimizer
    with torch.npu.stream(stepping):
        new = allocate_again()
    in_order(stepping, torch.npu.current_stream())
    assert copy.unique().tolist() == [3.0]
    assert all(t.unique().tolist() == [7.0] for t in new)
