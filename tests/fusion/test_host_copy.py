# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``HostCopy``: an asynchronous copy of a number to the host."""

import pytest
import torch
from devices import DEVICE, SIMULATOR, needs_counts

from apex_npu.backends import HostCopy

pytestmark = pytest.mark.device


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_what_is_read_is_what_the_number_was_then(value):
    number = torch.full((1,), value, device=DEVICE)
    copy = HostCopy(number)
    number.fill_(1.0 - value)
    assert bool(copy) is bool(value)
    assert bool(copy) is bool(value)  # again


@pytest.mark.skipif(DEVICE.type == "cpu", reason="has no module of its own")
def test_a_device_without_events_is_asked_when_the_host_is(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    number = torch.ones(1, device=DEVICE)
    copy = HostCopy(number)
    number.zero_()
    assert bool(copy)


@needs_counts()
def test_the_first_read_waits_and_the_second_does_not():
    number = torch.ones(1, device=DEVICE)
    with SIMULATOR.count() as n:
        copy = HostCopy(number)
    assert (n.launches, n.d2h, n.syncs) == (0, 1, 0)
    with SIMULATOR.count() as n:
        bool(copy), bool(copy)
    assert (n.launches, n.d2h, n.syncs) == (0, 0, 1)
