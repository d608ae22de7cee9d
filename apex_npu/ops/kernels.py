# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Registers the kernels of each device; an op without one for a device runs the body of its declaration there."""

from __future__ import annotations

from apex_npu.ops import aten_fused, cpu, cuda, elementwise, npu, segmented
from apex_npu.ops.dispatch import Rule

for _op, _kernel in cuda.KERNELS.items():
    _op.implement(_kernel, "CUDA")
    if isinstance(_op, Rule):
        _op.implement(_op.device_scalars(_kernel), "CUDA", "on_device")

if cpu.available:
    _cpu_kernels = cpu.register()  # keeps the kernels registered
    for _rule in (*elementwise.RULES, *segmented.RULES):
        _rule.joins_on = ("cpu",)
else:
    elementwise.sgd_.implement(aten_fused.sgd_, "CPU")
    elementwise.adam_.implement(aten_fused.adam_, "CPU")
    for _rule, _runs in ((elementwise.sgd_, aten_fused.sgd_runs), (elementwise.adam_, aten_fused.adam_runs)):
        _rule.implement(_runs, "CPU", "runs")
        _rule.joins_on = ("cpu",)

elementwise.sgd_.implement(npu.sgd_, "PrivateUse1")
elementwise.adam_.implement(npu.adam_, "PrivateUse1")
segmented.lamb_.implement(npu.lamb_, "PrivateUse1")

for _rule in (*elementwise.RULES, *segmented.RULES):
    _rule.implement(_rule.host_scalars(), "CPU", "on_device")
