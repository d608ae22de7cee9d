# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every op once: its schema, its shape-only twin for tracing, and which kernel runs where.

What they compute say ``elementwise.py`` and ``segmented.py``, which have a typed Python function for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from apex_npu.ops import aten_fused, cpu, cuda, npu, reference, reference_segments
from apex_npu.ops.calls import asking_host, taking_tensors

_library = torch.library.Library("apex_npu", "DEF")  # lives as long as the process

# The rules. Each has an overload for numbers that only the device knows, see calls.py.
_SCHEMAS = (
    "sgd_(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, Tensor(c!)? model_param, *, float lr, "
    "float momentum, float dampening, float weight_decay, bool nesterov, bool maximize, int step, "
    "bool decoupled=False, Tensor? grad_scale=None) -> ()",
    "adam_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? max_exp_avg_sq, "
    "Tensor(e!)? model_param, *, float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled, "
    "bool maximize, int step, bool bias_correction=True, Tensor? grad_scale=None) -> ()",
    "rmsprop_(Tensor(a!) param, Tensor grad, Tensor(b!) square_avg, Tensor(c!)? grad_avg, Tensor(d!)? momentum_buffer, "
    "Tensor(e!)? model_param, *, float lr, float alpha, float eps, float weight_decay, float momentum, "
    "bool eps_inside_sqrt, bool decoupled, bool lr_in_momentum, bool maximize, Tensor? grad_scale=None) -> ()",
    "adadelta_(Tensor(a!) param, Tensor grad, Tensor(b!) square_avg, Tensor(c!) acc_delta, Tensor(d!)? model_param, *, "
    "float lr, float rho, float eps, float weight_decay, bool maximize, Tensor? grad_scale=None) -> ()",
    "adagrad_(Tensor(a!) param, Tensor grad, Tensor(b!) square_sum, Tensor(c!)? model_param, *, float lr, float eps, "
    "float weight_decay, bool decoupled, bool maximize, Tensor? grad_scale=None) -> ()",
    "lamb_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? model_param, "
    "Tensor(e!) direction, Tensor starts, Tensor lengths, Tensor? ids, *, float lr, float beta1, float beta2, "
    "float beta3, float eps, int step, bool bias_correction, float l2, float decay, bool adapt, "
    "float max_weight_norm, bool maximize, Tensor? grad_scale=None) -> ()",
    "adamp_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? model_param, "
    "Tensor(e!) direction, Tensor starts, Tensor lengths, Tensor? ids, Tensor owner, Tensor row_limit, "
    "Tensor whole_limit, *, float lr, float beta1, float beta2, float eps, float weight_decay, float wd_ratio, "
    "bool nesterov, bool maximize, int step, Tensor? grad_scale=None) -> ()",
)
_library.define(
    "segment_add_(Tensor(a!) x, Tensor y, Tensor factors, Tensor starts, Tensor lengths, Tensor? ids) -> ()"
)
_library.define("segment_dot(Tensor a, Tensor b, Tensor starts, Tensor lengths, Tensor? ids) -> Tensor")
_library.define("norm(Tensor x) -> Tensor")
_library.define("norm.check(Tensor x, Tensor(a!) found_inf) -> Tensor")


for _schema in _SCHEMAS:
    _library.define(_schema)
    _tensors = ["lr_tensor", *(["step_tensor"] if " int step" in _schema else []), "found_inf"]
    _more = "".join(f", Tensor? {_name}=None" for _name in _tensors)
    _library.define(_schema.replace("_(", "_.on_device(", 1).replace(") -> ()", f"{_more}) -> ()"))


def _in_place_only(*args: object, **kwargs: object) -> None:
    """Shapes do not change and nothing is returned: all that tracing needs to know."""


# For each device a module that may have a kernel. Those of the extension are registered by cpu.py.
_KERNELS = {"CUDA": cuda, "PrivateUse1": npu}
if not cpu.available:
    _KERNELS["CPU"] = aten_fused


def _register(reference: ModuleType, names: Sequence[str]) -> None:
    """The reference for every device, and what is better where there is something better."""
    for name in names:
        _library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
        for key, kernels in _KERNELS.items():
            if hasattr(kernels, name):
                _library.impl(name, getattr(kernels, name), key)


def _register_on_device(reference: ModuleType, rule: str) -> None:
    name = f"{rule}.on_device"
    _library.impl(name, taking_tensors(getattr(reference, rule)), "CompositeExplicitAutograd")
    _library.impl(name, taking_tensors(getattr(cuda, rule)), "CUDA")
    _library.impl(name, asking_host(rule), "CPU")


_register(reference, ("sgd_", "adam_", "rmsprop_", "adadelta_", "adagrad_", "norm"))
_register(reference_segments, ("lamb_", "adamp_", "segment_dot", "segment_add_"))
for _schema in _SCHEMAS:
    _rule = _schema.partition("(")[0]
    _register_on_device(reference if hasattr(reference, _rule) else reference_segments, _rule)
    for _name in (_rule, f"{_rule}.on_device"):
        _library.impl(_name, _in_place_only, "Meta")
_library.impl("segment_add_", _in_place_only, "Meta")
_library.impl("segment_dot", lambda a, b, starts, lengths, ids: a.new_empty(starts.numel()), "Meta")
_library.impl("norm", lambda x: x.new_empty((), dtype=reference.wide_dtype(x.dtype)), "Meta")
_library.impl("norm.check", reference.checked_norm, "CompositeExplicitAutograd")
_library.impl("norm.check", cuda.checked_norm, "CUDA")
_library.impl("norm.check", lambda x, found_inf: torch.ops.apex_npu.norm.default(x), "Meta")
_cpu_kernels = cpu.register()  # lives as long as _library
