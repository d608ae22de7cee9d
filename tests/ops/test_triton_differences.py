# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Triton looks for rounded copies that differ: on a GPU, or interpreted on the CPU; torch rounds what is expected."""

import math
from types import SimpleNamespace

import pytest
import torch
from triton_interpreter import DEVICE, mend

from apex_npu.amp import uncounted_writes
from apex_npu.amp.uncounted_writes import UncountedWrites
from apex_npu.backends import HostFlag
from apex_npu.ops import note_differences

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
F16, BF16 = torch.float16, torch.bfloat16
WIDTH = 16
# Rounded up, down, to even, to a denormal number, to inf, and what is no number.
VALUES = [1.0, 1.0 + 2**-12, 1.0 + 2**-11, 1.0 + 3 * 2**-11, 2.0**-24, 1e-7, 1e-40, -0.0, 70000.0, math.inf, math.nan]


@pytest.fixture(autouse=True)
def _mended_interpreter(monkeypatch):
    mend(monkeypatch)


def finds(param, copy, lines=None, **where):
    flag = HostFlag(DEVICE)
    assert note_differences(param, copy, lines, flag.number, **{"width": WIDTH, **where})
    if DEVICE.type != "cpu":
        torch.cuda.synchronize()
    return flag.is_raised()


def buffers(dtype, numel):
    param = torch.tensor(VALUES).repeat(-(-numel // len(VALUES)))[:numel].to(DEVICE)
    return param, param.to(dtype)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("numel", [1, 40, 1024, 2500])
def test_an_element_that_is_not_rounded_so_is_found_wherever_it_is(dtype, numel):
    param, copy = buffers(dtype, numel)
    assert not finds(param, copy)
    for at in sorted({0, numel // 2, numel - 1}):
        other = copy.clone()
        value = float(other[at])
        other[at] = 0.5 if value != value or value == 0.0 else value * 0.5 if math.isfinite(value) else 0.0
        assert finds(param, other) is (value == value), value


def test_what_is_no_number_is_no_difference_and_hides_none():
    param, copy = buffers(F16, 64)
    copy[3] = math.nan
    assert not finds(param, copy)
    copy[4] = 7.0
    assert finds(param, copy)


@pytest.mark.parametrize("every", [1, 4, 5])
@pytest.mark.parametrize("width", [1, WIDTH])
def test_of_every_so_many_lines_one_is_looked_at(every, width):
    param = torch.ones(20 * WIDTH, device=DEVICE)
    copy = param.bfloat16()
    for at in range(0, 20 * WIDTH, 37):
        other = copy.clone()
        other[at] = -3.0
        found = [finds(param, other, width=width, first=first, every=every) for first in range(every)]
        assert found == [at // width % every == first for first in range(every)]


@pytest.mark.parametrize("every", [1, 4])
def test_lines_that_are_of_others_are_passed_over(every):
    param = torch.ones(20 * WIDTH, device=DEVICE)
    copy = param.half()
    lines = torch.ones(20, 1, dtype=F16, device=DEVICE)
    lines[5] = 0
    copy[5 * WIDTH + 2] = -3.0
    assert not any(finds(param, copy, lines, first=first, every=every) for first in range(every))
    copy[6 * WIDTH + 2] = -3.0
    assert [finds(param, copy, lines, first=first, every=every) for first in range(every)].count(True) == 1


def test_more_lines_than_there_are_is_no_launch():
    param, copy = buffers(F16, WIDTH)
    copy.fill_(-3.0)
    assert not finds(param, copy, first=1, every=4)


def test_amp_looks_in_one_launch_and_copies_nothing(monkeypatch):
    monkeypatch.setattr(uncounted_writes, "masks_writes", lambda device: True)
    monkeypatch.setattr(uncounted_writes, "WHOLE", 64)
    monkeypatch.setattr(uncounted_writes, "HostCopy", None)
    param = torch.arange(20 * WIDTH, dtype=torch.float32, device=DEVICE)
    group, buffer = SimpleNamespace(param_flat=param), SimpleNamespace(flat=param.half())
    looks = set()
    for line in range(20):
        buffer.flat[WIDTH * line] += 0.25
        watch = UncountedWrites()
        found = []
        for _ in range(5):
            watch.look_at_buffers([(group, buffer, None)])
            if DEVICE.type != "cpu":
                torch.cuda.synchronize()
            found.append(watch.found())
        assert found.count(True) == 1
        assert watch.is_found
        looks.add(found.index(True))
        buffer.flat.copy_(param)
    assert looks == {0, 1, 2, 3}
