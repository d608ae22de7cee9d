# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Traces gradients that are not finite back to the causes: the kind of each fault, and the remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from apex_npu.debug.text import name_of
from apex_npu.debug.watching.calls import Call, Leaf, Located, traced

# The kinds in the order in which causes are shown. A loss scale that is too large may hide others, so it comes last.
Kind = Literal[
    "data",
    "weights",
    "constant",
    "overflow",
    "underflow",
    "math",
    "gradient",
    "accumulation",
    "ranks",
    "written",
    "unknown",
    "stale",
    "scale",
]
ORDER: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Finding(Located):
    """One cause of a skipped step; ``dtype`` and ``shape`` are those of the tensor that is not finite.

    Attributes:
        kind: The kind of fault; docs/debug.md lists the kinds.
        forward_operator: In backward, the operator of forward whose gradient is computed.
        node: In backward, the name of autograd's node.
        tensor: The name of the tensor that was already not finite, or of the parameter whose gradient is accumulated.
        true_value: The largest magnitude of the result in float64; None if it is not known.
        limit: The largest number of ``dtype``.
        inputs: The largest magnitude of each input.
        ranges: The smallest and the largest element of each input.
        fits_scale: In backward, the largest power of two that keeps the result finite as a loss scale.
        path: The operators from the cause to the loss, or to a gradient.
        why: The cause in a sentence.
        advice: The remedy.
    """

    kind: Kind
    forward_operator: str | None = None
    node: str | None = None
    tensor: str | None = None
    true_value: float | None = None
    limit: float | None = None
    inputs: tuple[tuple[str, float], ...] = ()
    ranges: tuple[tuple[str, float, float], ...] = ()
    fits_scale: float | None = None
    path: tuple[str, ...] = ()
    why: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Scale:
    """The loss scale of a block."""

    value: float
    dynamic: bool


_DIVIDE = "divide each loss by the number of backward passes that are accumulated"
DIVIDE_LOSSES = f"{_DIVIDE}, or use O1, whose gradients are float32, or O5"
# Pairs of ``why`` and ``advice``.
SENTENCES: dict[Kind, tuple[str, str]] = {
    "weights": (
        "{name} held inf or nan before the iteration began",
        "look at the step that wrote it: a learning rate that is too large, a checkpoint that holds it already, an "
        "initialization; continue from an earlier checkpoint",
    ),
    "data": (
        "{name} held inf or nan already",
        "check the batch with isfinite() where it is loaded, and the code that prepares it",
    ),
    "stale": (
        "the gradient of {name} was not finite before this {reader}",
        "these are the gradients of the block before, whose table has the cause; if an optimizer has stepped "
        "since, zero_grad() is missing",
    ),
    "constant": (
        "the code uses inf or nan here, and it reaches the loss or a gradient",
        "use a large finite number instead, such as torch.finfo(dtype).min in a mask (the softmax of a row that is all "
        "masked is nan), or keep it out of what the loss depends on",
    ),
    "written": (
        "the gradient was finite when backward ended, and was changed in the block after it",
        "look at the code of the block after backward(), which sees gradients multiplied with the loss scale: do that "
        "after the block",
    ),
    "ranks": (
        "this process has sent finite values and received values that are not finite: another process has overflowed",
        "look at the tables of the other processes",
    ),
}


def find_causes(targets: Sequence[Call], scale: Scale) -> list[Finding]:
    """Return the causes why the results of ``targets`` are not finite, the most informative cause first."""
    reached = traced(targets)
    ends = [call for call in reached if call.leaves or not call.causes]
    found: dict[Any, tuple[int, Finding]] = {}
    for call in ends:
        forward = None if call.forward is None else call.forward.operator
        known = {**call.described(), "forward_operator": forward, "node": call.node, "path": _path(call, reached)}
        findings = [_of_leaf(leaf, call.phase, known) for leaf in call.leaves] or [_of_call(call, known, scale)]
        for finding in findings:
            key = identity_of(finding)
            if key not in found or call.index < found[key][0]:
                found[key] = (call.index, finding)
    return [f for _, f in sorted(found.values(), key=lambda item: (ORDER.index(item[1].kind), item[0]))]


def identity_of(finding: Finding) -> Any:
    """Return a key that is equal for findings of the same cause."""
    if finding.kind == "stale":  # if one gradient is, most are
        return finding.kind
    if finding.kind in ("data", "weights"):
        return finding.kind, finding.tensor
    return finding.kind, finding.phase, finding.module, finding.operator, finding.file, finding.line


def _path(call: Call, reached: dict[Call, Call | None]) -> tuple[str, ...]:
    operators = []
    step: Call | None = call
    while step is not None:
        operators.append(step.operator.rpartition(":")[2])
        step = reached[step]
    return tuple(operators)


def without_operator(kind: Kind, phase: str, of: Tensor, tensor: str | None, why: str, advice: str) -> Finding:
    """Return a cause without a known operator: ``of`` is not finite, and is named ``tensor``."""
    found: dict[str, Any] = {"kind": kind, "phase": phase, "module": None, "operator": "none", "tensor": tensor}
    return Finding(**found, dtype=name_of(of.dtype), shape=tuple(of.shape), why=why, advice=advice)


def _of_leaf(leaf: Leaf, phase: str, known: dict[str, Any]) -> Finding:
    why, advice = SENTENCES[leaf.kind]
    why = why.format(name=leaf.name, reader="backward" if phase == "backward" else "line")
    found: dict[str, Any] = {"dtype": name_of(leaf.dtype), "shape": leaf.shape, "tensor": leaf.name}
    return Finding(kind=leaf.kind, why=why, advice=advice, **found, **known)


def _of_call(call: Call, known: dict[str, Any], scale: Scale) -> Finding:
    limit = torch.finfo(call.dtype).max if call.dtype is not None and call.dtype.is_floating_point else None
    opinion = call.opinion
    true_value = None if opinion is None or math.isnan(opinion.largest) else opinion.largest
    fits = None
    if call.phase == "backward" and true_value and limit is not None and opinion is not None and opinion.is_finite:
        fits = 2.0 ** math.floor(math.log2(scale.value * limit / true_value))
    kind = _kind_of(call, fits, scale)
    why, advice = _why_and_advice(kind, call, scale, true_value, fits)
    return Finding(
        kind=kind,
        dtype=name_of(call.dtype),
        shape=call.shape,
        tensor=call.parameter,
        true_value=true_value,
        limit=limit,
        inputs=tuple((name, max(abs(low), abs(high))) for name, low, high in call.inputs),
        ranges=tuple(call.inputs),
        fits_scale=fits,
        why=why,
        advice=advice,
        **known,
    )


def _kind_of(call: Call, fits: float | None, scale: Scale) -> Kind:
    opinion = call.opinion
    if call.from_other_process:
        return "ranks"
    if call.phase == "block":
        return "written"
    if call.from_constant:
        return "constant"
    if opinion is None or opinion.reason:
        return "unknown"
    if not opinion.is_finite:
        return "math" if call.vanished is None else "underflow"
    if call.phase != "backward":
        return "overflow"
    if call.parameter is not None or (call.node or "").endswith("AccumulateGrad"):
        return "accumulation"
    return "scale" if scale.value > 1.0 and (fits is None or fits >= 1.0) else "gradient"


_MASKED = (
    "where torch.where leaves such elements out, their gradient is nan all the same, so replace the argument, too: "
    "torch.where(x > 0, f(torch.where(x > 0, x, 1.0)), 0.0)"
)
# A part of an operator's name, and the advice for it, such as a stable form.
_STABLE = (
    ("nll_loss", "no target counts, as all are ignore_index: leave out such batches, or divide a sum by a number that "
     "is at least 1, F.cross_entropy(..., reduction=\"sum\") / (target != ignore_index).sum().clamp(min=1)"),
    ("ctc_loss", "a target that is longer than its input has no alignment: zero_infinity=True, or leave it out"),
    ("xlogy", "targets of F.kl_div must not be negative; with log_target=True they are logarithms"),
    ("binary_cross_entropy", "targets must be between 0 and 1; F.binary_cross_entropy_with_logits is stable"),
    ("log_softmax", "logits that are inf or nan: look at what computes them"),
    ("log1p", "its argument must be larger than -1: clamp it"),
    ("log", "torch.log(x.clamp(min=eps)); of a softmax F.log_softmax or F.cross_entropy, of a sigmoid F.logsigmoid or "
     "F.binary_cross_entropy_with_logits"),
    ("rsqrt", f"torch.rsqrt(x.clamp(min=0) + eps); {_MASKED}"),
    ("sqrt", f"torch.sqrt(x.clamp(min=0) + eps), whose derivative is finite, too; {_MASKED}"),
    ("norm", "add eps inside of the root, torch.sqrt(x.square().sum() + eps): the derivative of a norm at 0 is not "
     "defined"),
    ("pow", f"x.clamp(min=eps) before a negative or fractional power, which is not finite at 0; {_MASKED}"),
    ("reciprocal", "1 / (x + eps), or x.clamp(min=eps)"),
    ("div", "a division by 0: add eps to the denominator, or clamp it"),
    ("exp", "subtract the maximum before exp, or use torch.logsumexp or softmax"),
    ("atan2", "its derivative at (0, 0) is not defined: add eps"),
    ("acos", "its derivative at ±1 is not finite: x.clamp(-1 + eps, 1 - eps)"),
    ("asin", "its derivative at ±1 is not finite: x.clamp(-1 + eps, 1 - eps)"),
    ("std", "the derivative at a variance of 0, or of one element, is not finite: torch.sqrt(x.var() + eps)"),
    ("var", "the variance of one element is 0 / 0: unbiased=False, or more elements"),
    ("mean", "the mean of no elements is 0 / 0: leave out empty batches"),
    ("softmax", "a row in which all logits are -inf: mask with a large negative number, or leave out such rows"),
)  # fmt: skip


def _why_and_advice(kind: Kind, call: Call, scale: Scale, value: float | None, fits: float | None) -> tuple[str, str]:
    """Return the sentences for ``call``, with ``value`` in float64, which the loss scale ``fits`` keeps finite."""
    settles = f"the scale will settle near {_power(fits)}" if fits else "the scale will settle"
    match kind:
        case "overflow":
            return _of_overflow(call, value)
        case "underflow":
            return _of_underflow(call)
        case "math":
            return _of_math(call)
        case "gradient":
            divided = f", even divided by the loss scale {scale.value:g}" if scale.value > 1.0 else ""
            wider = (
                "compute this operator in float32 (amp.register_float_function, amp.disable_casts()) or in bfloat16 "
                "(O4, O5); or "
                if _helps_wider(call, value, scale.value)
                else "no dtype of training holds it: "
            )
            return f"{_times(call, value)}{divided}", f"{wider}scale the loss down, as by a mean in place of a sum"
        case "accumulation":
            is_settled = fits is not None and fits >= 1.0 and scale.dynamic
            divide = DIVIDE_LOSSES if _helps_wider(call, value) else _DIVIDE
            return (
                f"both gradients are finite, their sum is not: {_times(call, value)}",
                f"nothing now: {settles}. For a larger one {divide}" if is_settled else divide,
            )
        case "scale":
            dynamic = 'use loss_scale="dynamic"' + (f", or at most {_power(fits)}" if fits else "")
            return (
                ("" if value is None else f"{_times(call, value)}; ")
                + f"without the loss scale {scale.value:g} it fits",
                f"nothing: {settles}" if scale.dynamic else dynamic,
            )
        case "unknown":
            reason = "it was not tried" if call.opinion is None else call.opinion.reason
            return (
                f"its inputs are finite, but its result is not; it could not be repeated in float64 ({reason})",
                "compute it in float32 to see whether the dtype is too small",
            )
        case _:
            return SENTENCES[kind]


def _times(call: Call, value: float | None) -> str:
    if value is None or call.dtype is None or not call.dtype.is_floating_point:
        return "the true value is finite"
    name, limit = name_of(call.dtype), torch.finfo(call.dtype).max
    if value <= limit:
        return f"the true value is {value:.3g}, which {name} holds: an intermediate value has overflowed"
    return f"the true value is {value:.3g}, {value / limit:.2g} times the largest {name}"


def _helps_wider(call: Call, value: float | None, scale: float = 1.0) -> bool:
    """Return whether float32 and bfloat16 hold ``value`` divided by ``scale``, a result that has overflowed."""
    return call.dtype == torch.float16 and (value is None or value / scale <= torch.finfo(torch.bfloat16).max)


def _of_overflow(call: Call, value: float | None) -> tuple[str, str]:
    why = f"{_times(call, value)}; no loss scale helps: it is in forward"
    if not _helps_wider(call, value):
        held = "it" if call.dtype == torch.float16 else f"more than {name_of(call.dtype)}"
        return why, f"no dtype of training holds {held}: scale the inputs down, or normalize them"
    if "_norm" in call.operator:
        advice = (
            "a row without variance is divided by the root of eps: an eps of 1e-5 or more keeps 1 / sqrt(eps) within "
            "float16; or keep this layer in float32"
        )
    elif call.operator == "aten::_to_copy":
        why = f"a cast: {why}"
        advice = (
            "at O1 put this line into amp.disable_casts(), or its function into amp.register_float_function; at O2 "
            "and O3 scale down what is passed to the model"
        )
    else:
        advice = (
            "cast the inputs of this line with .float(), at O1 within amp.disable_casts(), and bring the result below "
            "65504 before a float16 layer takes it"
        )
    return why, f"{advice}; or use bfloat16 (opt_level O4, O5), or scale its inputs down"


def _of_math(call: Call) -> tuple[str, str]:
    own = call.operator.rpartition(":")[2]
    forward = own if call.forward is None else call.forward.operator.rpartition(":")[2]
    of = f"the derivative of {forward}" if call.phase == "backward" else own
    why = f"{of} is not finite for these inputs in float64 either: no dtype and no loss scale helps"
    known = (advice for name in (forward, own) for key, advice in _STABLE if key in name)
    advice = next(known, "look for a division, root or logarithm at 0; eps or clamp keeps its argument away from it")
    return why, advice


def _of_underflow(call: Call) -> tuple[str, str]:
    assert call.vanished is not None
    what, rounding = call.vanished
    dtype = rounding.dtype
    assert dtype is not None
    name = name_of(dtype)
    where = rounding.operator + ("" if rounding.place is None else f" at {rounding.place}")
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return (
        f"an input is 0 because {what} is 0 in {name}, whose smallest number is {least:.2g}: see {where}",
        f"an eps that {name} holds, such as 1e-4, in the line that adds it or as eps= of its function; or cast the "
        "inputs of these lines with .float(), at O1 within amp.disable_casts(); or use bfloat16 (opt_level O4, O5)",
    )


def _power(value: float) -> str:
    return f"2^{round(math.log2(value))}"
