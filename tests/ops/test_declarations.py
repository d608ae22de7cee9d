# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What follows from an op's declaration, and how little a call of it costs."""

import inspect
import sys

import pytest
import torch
from kernel_cases import ADAM, operands_for

from apex_npu import ops
from apex_npu._extension import extension
from apex_npu.ops import dispatch, elementwise

RULES = (*elementwise.RULES, ops.lamb_)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_declared_function_shows_its_signature_and_docstring(rule):
    assert list(inspect.signature(rule).parameters)[:2] == ["param", "grad"]
    assert rule.__doc__.startswith("One step of ")
    assert rule.__name__ == rule.name


def test_a_call_takes_the_kernel_of_the_device_or_the_body():
    @dispatch.Op
    def scaled(x: torch.Tensor, *, times: float = 2.0) -> torch.Tensor:
        return x * times

    x = torch.ones(3, requires_grad=True)
    assert scaled(x).tolist() == [2.0] * 3
    assert not scaled(x).requires_grad
    scaled.kernels["meta"] = lambda x, *, times=2.0: times
    assert scaled(x.to("meta"), times=3.0) == 3.0
    assert scaled(x, times=3.0).tolist() == [3.0] * 3


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_wrong_numbers_are_found_before_a_call_is_made(rule):
    with pytest.raises((TypeError, ValueError)):
        rule.bind(torch.zeros(3), torch.zeros(3), lr="fast")


@pytest.mark.skipif(extension is None, reason="without the extension kernels are in Python, too")
@pytest.mark.parametrize("found_inf", [None, torch.zeros(1)])
def test_calls_in_python(found_inf):
    """Of the rule, and of the kernel that calls C++."""
    param, *others = operands_for("adam_", (1, 1, 0), 64)
    frames = []
    sys.setprofile(lambda frame, event, argument: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        ops.adam_(param, *others, **ADAM, found_inf=found_inf)
    finally:
        sys.setprofile(None)
    assert frames == ["__call__", "bind", "step"]


def test_profilers_show_a_call_of_the_reference():
    param, *others = operands_for("adam_", (1, 1, 0), 64)
    with torch.profiler.profile() as profile:
        ops.adam_.reference(param, *others, **ADAM)
    assert [event.count for event in profile.key_averages() if event.key == "apex_npu::adam_"] == [1]
