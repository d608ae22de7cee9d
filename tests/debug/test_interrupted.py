# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""An interrupt at each operator of an iteration that is watched, and no memory at each that measures."""

import pytest
import torch
from debug import planted
from debug.test_check_operators import is_own
from debug.test_watching import hooks_of_torch
from devices import needs
from torch.utils._python_dispatch import TorchDispatchMode

from apex_npu import amp

FAULT = next(fault for fault in planted.FAULTS if fault.name == "squared")


class FailAt(TorchDispatchMode):
    """Raises at one operator: of the iteration, or of those that measure it."""

    def __init__(self, error=None, at=-1, *, own=False):
        super().__init__()
        self.error, self.at, self.own, self.seen = error, at, own, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_own() is self.own:
            self.seen += 1
            if self.seen - 1 == self.at:
                raise self.error
        return func(*args, **(kwargs or {}))


def watched(level, mode=None, **options):
    """What an iteration leaves, within ``mode``, and what was found."""
    torch.manual_seed(0)
    model, optimizer, _ = planted.set_up(FAULT, level, torch.optim.SGD, dynamic_init_scale=4.0)
    before, found = hooks_of_torch(), None
    try:
        with mode or FailAt(), amp.debug.find_overflow(model, **options) as found:
            planted.iterate(FAULT, model, optimizer)
    finally:
        assert hooks_of_torch() == before
        assert not amp.session.current().observers
        optimizer.zero_grad()
        planted.iterate(FAULT, model, optimizer)  # trains on
        assert amp.last_step(optimizer).skipped
        left = [p.detach().clone() for p in model.parameters()], torch.get_rng_state(), amp.state_dict()
        amp.shutdown()
    return left, found


def count(level, own, **options):
    mode = FailAt(own=own)
    watched(level, mode, **options)
    return mode.seen


@needs("inf", "errors_at_the_call")
@pytest.mark.parametrize("options", [{}, {"replay": True}], ids=["watched", "replayed"])
@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O2"])
def test_an_interrupt_at_each_operator(level, options):
    for at in range(0, count(level, own=False, **options), 4 if level == "O2" else 1):
        with pytest.raises(KeyboardInterrupt):
            watched(level, FailAt(KeyboardInterrupt(), at), **options)


@needs("inf", "errors_at_the_call")
@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O2"])
def test_no_memory_for_each_operator_that_measures(level):
    (params, rng, states), _ = watched(level)
    operators = count(level, own=True)
    assert operators > 20
    for at in range(0, operators, 4 if level == "O2" else 1):
        (params_too, rng_too, states_too), found = watched(level, FailAt(torch.OutOfMemoryError("none"), at, own=True))
        assert all(map(torch.equal, params, params_too))
        assert torch.equal(rng, rng_too)
        assert states == states_too
        assert str(found)
