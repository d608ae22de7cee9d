# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of kernels: for each op, those of the devices that have one. Elsewhere the body of its declaration runs."""

from __future__ import annotations

from apex_npu.ops import aten_fused, cpu, cuda, npu
from apex_npu.ops.elementwise import RULES, adam_, sgd_
from apex_npu.ops.segmented import lamb_, norm, norm_to_clip, segment_add_, segment_dot

for _op in (*RULES, lamb_, segment_dot, segment_add_, norm, norm_to_clip):
    _op.kernels["cuda"] = cuda.Kernel(_op)
sgd_.kernels["cuda"] = cuda.Kernel(sgd_, sgd_.decoding(aten_fused.sgd_))
adam_.kernels["cuda"] = cuda.Kernel(adam_, adam_.decoding(aten_fused.adam_))

if cpu.available:
    for _rule in (*RULES, lamb_):
        _rule.kernels["cpu"] = cpu.rule_kernel(_rule)
    for _sums in (segment_dot, segment_add_):
        _sums.kernels["cpu"] = cpu.segments_kernel(_sums)
    norm.kernels["cpu"] = cpu.norm
else:
    for _rule in (*RULES, lamb_):
        _rule.kernels["cpu"] = cpu.torch_kernel(_rule, _rule.reference)
    sgd_.kernels["cpu"] = cpu.torch_kernel(sgd_, sgd_.decoding(aten_fused.sgd_))
    adam_.kernels["cpu"] = cpu.torch_kernel(adam_, adam_.decoding(aten_fused.adam_))

sgd_.kernels["npu"] = npu.kernel(sgd_, npu.sgd_)
adam_.kernels["npu"] = npu.kernel(adam_, npu.adam_)
lamb_.kernels["npu"] = npu.kernel(lamb_, npu.lamb_)
