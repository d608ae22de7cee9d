# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What follows from an op's declaration: its schema, its overloads, and how little a call of it costs."""

import inspect
import sys

import pytest
import torch
from kernel_cases import ADAM, operands_for

from apex_npu import ops
from apex_npu.ops import cpu, dispatch, elementwise, segmented

RULES = (*elementwise.RULES, *segmented.RULES)

# Of saved programs. Arguments may get defaults, and more may follow that have one; nothing else may change.
SAVED = (
    "adadelta_(Tensor(a!) param, Tensor grad, Tensor(b!) square_avg, Tensor(c!) acc_delta, "
    "*, float lr, float rho, float eps, float weight_decay, bool maximize, Tensor? grad_scale=None) "
    "-> ()",
    "adagrad_(Tensor(a!) param, Tensor grad, Tensor(b!) square_sum, *, float lr, float "
    "eps, float weight_decay, bool decoupled, bool maximize, Tensor? grad_scale=None) -> ()",
    "adam_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? max_exp_avg_sq, "
    "*, float lr, float beta1, float beta2, float eps, float weight_decay, bool "
    "decoupled, bool maximize, int step, bool bias_correction=True, Tensor? grad_scale=None) -> ()",
    "lamb_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    "Tensor(d!) direction, Tensor starts, Tensor lengths, Tensor? ids, *, float lr, float beta1, float beta2, "
    "float beta3, float eps, int step, bool bias_correction, float l2, float decay, bool adapt, float "
    "max_weight_norm, bool maximize, Tensor? grad_scale=None) -> ()",
    "norm(Tensor x) -> Tensor",
    "norm.check(Tensor x, Tensor(a!) found_inf) -> Tensor",
    "norm.clip(Tensor x, Tensor(a!) coefficient, float max_norm) -> Tensor",
    "rmsprop_(Tensor(a!) param, Tensor grad, Tensor(b!) square_avg, Tensor(c!)? grad_avg, Tensor(d!)? "
    "momentum_buffer, *, float lr, float alpha, float eps, float weight_decay, float "
    "momentum, bool eps_inside_sqrt, bool decoupled, bool lr_in_momentum, bool maximize, Tensor? grad_scale=None) "
    "-> ()",
    "segment_add_(Tensor(a!) x, Tensor y, Tensor factors, Tensor starts, Tensor lengths, Tensor? ids) -> ()",
    "segment_dot(Tensor a, Tensor b, Tensor starts, Tensor lengths, Tensor? ids) -> Tensor",
    "sgd_(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, *, float lr, float "
    "momentum, float dampening, float weight_decay, bool nesterov, bool maximize, int step, bool decoupled=False, "
    "Tensor? grad_scale=None) -> ()",
)


def registered(schema):
    packet = getattr(torch.ops.apex_npu, schema.name.removeprefix("apex_npu::"))
    return getattr(packet, schema.overload_name or "default")._schema


@pytest.mark.parametrize("saved", SAVED, ids=lambda saved: saved.partition("(")[0])
def test_saved_programs_find_the_arguments_that_they_pass(saved):
    schema = torch._C.parse_schema(f"apex_npu::{saved}")
    now = registered(schema)
    assert now.is_backward_compatible_with(schema)
    assert [(a.name, str(a.type), a.kwarg_only) for a in now.arguments] == [
        (a.name, str(a.type), a.kwarg_only) for a in schema.arguments
    ]
    assert [a.alias_info and a.alias_info.is_write for a in now.arguments] == [
        a.alias_info and a.alias_info.is_write for a in schema.arguments
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_has_an_overload_for_what_only_the_device_knows(rule):
    (saved,) = (s for s in SAVED if s.startswith(rule.name))
    names = ["lr_tensor", *(["step_tensor"] if "int step" in saved else []), "found_inf"]
    more = "".join(f", Tensor? {name}=None" for name in names)
    own, on_device = str(rule.overload._schema), str(rule.on_device._schema)
    assert on_device == own.replace("_(", "_.on_device(", 1).replace(") -> ()", f"{more}) -> ()")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_declared_function_shows_its_signature_and_docstring(rule):
    assert list(inspect.signature(rule).parameters)[:2] == ["param", "grad"]
    assert rule.__doc__.startswith("One step of ")
    assert rule.__name__ == rule.name


def test_an_op_is_declared_by_its_signature_and_its_body():
    def body(x: dispatch.Mutated, y: torch.Tensor | None = None, *, times: float = 2.0, flip: bool) -> None:
        x.mul_(-times if flip else times)

    declared = dispatch.op("declared_in_a_test_", fake=lambda *operands, **options: None)(body)
    assert str(declared.overload._schema) == (
        "apex_npu::declared_in_a_test_(Tensor(a!) x, Tensor? y=None, *, float times=2., bool flip) -> ()"
    )
    x = torch.ones(3)
    declared(x, flip=True)
    assert x.tolist() == [-2.0] * 3
    torch.library.opcheck(declared.overload, (torch.ones(3),), {"flip": False})


@pytest.mark.skipif(not cpu.available, reason="without the extension kernels are in Python, too")
@pytest.mark.parametrize("found_inf", [None, torch.zeros(1)])
def test_calls_in_python(found_inf):
    """One of the rule and one of torch's overload before the kernel; the check of the flag is a kernel in Python."""
    param, *others = operands_for("adam_", (1, 1, 0), 64)
    ops.adam_(param, *others, **ADAM, found_inf=found_inf)
    frames = []
    sys.setprofile(lambda frame, event, argument: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        ops.adam_(param, *others, **ADAM, found_inf=found_inf)
    finally:
        sys.setprofile(None)
    assert frames == ["__call__", "__call__", *(["on_device", "default", "__call__"] if found_inf is not None else [])]
