# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ctrl-C in a first step, then the loop again: what is interrupted leaves the old state or the new one.

Each test interrupts a first step at every place of some files, one after the other, and takes three more steps.
"""

import functools

import pytest
import torch
from devices import DEVICE, needs
from interrupting import Interrupt
from small_programs import WITH_MASTERS, Weights, levels, start, train_step, values

from apex_npu import amp, optimizers

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # interrupts in generators' close()
    pytest.mark.filterwarnings("ignore:.*none of its parameters has a gradient:RuntimeWarning"),
]

DTYPES = {"O0": torch.float32, "O1": torch.float16, "O4": torch.bfloat16, "O2": torch.float16, "O5": torch.bfloat16}
FIRST, STEPS = 10.0, 3
OLD_OR_NEW = (FIRST - STEPS, FIRST - STEPS - 1)


class Net(Weights):
    """Notes what comes in, and what a product in its forward comes out as."""

    def forward(self, x):
        one = torch.ones(1, 1, dtype=x.dtype, device=DEVICE)
        self.dtypes = x.dtype, torch.mm(one, one).dtype
        return super().forward(x)


def bare(net):
    optimizer = optimizers.NpuFusedSGD([{"params": [w]} for w in net.w], lr=1.0)

    def step():
        net(torch.ones(3, device=DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


def under_amp(net, level, kind):
    _, optimizer = start(net, [{"params": [w]} for w in net.w], kind, level)
    return optimizer, lambda: train_step(net, optimizer, (1.0, 1.0, 1.0))


def outcome(level, kind, n, files):
    """Where it was interrupted, and what came of it: values of both groups and dtypes, or an exception."""
    net = Net(FIRST, FIRST)
    optimizer, step = bare(net) if level == "bare" else under_amp(net, level, kind)
    try:
        with Interrupt(n, *files) as interrupt:
            step()
        optimizer.zero_grad()
        net.zero_grad()
        for _ in range(STEPS):
            step()
        return interrupt.at, [v[0].item() for v in values(net.w)], net.dtypes
    except Exception as error:
        return interrupt.at, error, None
    finally:
        amp.shutdown()
        torch.set_autocast_enabled(DEVICE.type, False)
        torch.set_grad_enabled(True)


@functools.cache
def outcomes(level, kind, *files):
    found = []
    while not found or found[-1][0] is not None:
        found.append(outcome(level, kind, len(found) + 1, files))
    assert len(found) > 2, "there was nothing to interrupt"
    return found


def bad(level, kind, *files, what):
    return [(at, result) for at, result, _ in outcomes(level, kind, *files) if what(result)]


def has_others(found, *right):
    return isinstance(found, list) and not set(found) <= set(right)


# -------------------------------------------------------------------------------------------------- groups and buffers

by_group = pytest.mark.parametrize("level", ["bare", "O2"])
GROUPS = ("fused", "fused_params.py")


@by_group
def test_every_group_is_trained_and_none_twice(level):
    assert not bad(level, *GROUPS, what=lambda found: has_others(found, *OLD_OR_NEW))


@levels(("O1", "O2"))
def test_later_steps_find_whole_buffers(level):
    assert not bad(level, "combine_grad", "flat_buffer.py", what=lambda found: isinstance(found, Exception))


# --------------------------------------------------------------------------------------------------- blocks and casts


BLOCK = ("scale_loss.py", "block.py", "optimizer_state.py")


@levels(("O1", *WITH_MASTERS))
def test_later_blocks_open_on_old_or_new_values(level):
    right = set(OLD_OR_NEW)
    assert not bad(level, "torch", *BLOCK, what=lambda found: isinstance(found, Exception) or set(found) - right)


casting = levels(["O1", pytest.param("O4", marks=needs("autocast_to_bfloat16"))])


def wrong_dtypes(level, *files):
    inputs = torch.float32 if level in ("O1", "O4") else DTYPES[level]
    return [(at, dtypes) for at, _, dtypes in outcomes(level, "torch", *files) if dtypes != (inputs, DTYPES[level])]


@levels(WITH_MASTERS)
def test_inputs_are_cast(level):
    assert not wrong_dtypes(level, "forward_cast.py")


@casting
def test_functions_are_cast(level):
    assert not wrong_dtypes(level, "casting.py")


@casting
def test_functions_are_cast_after_an_interrupted_forward(level):
    assert not wrong_dtypes(level, "forward_cast.py")
