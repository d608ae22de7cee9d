# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""For each op, a function of its declared name that returns its launches, or None if plain torch must run the op.

Numbers that depend only on hyper-parameters are computed here, in float64. If only the device has the
hyper-parameters, a launch of one program computes the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import partial
from types import SimpleNamespace as Arguments
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from apex_npu.ops import elementwise, segmented
from apex_npu.ops.dispatch import Op, Rule
from apex_npu.ops.grad_lists import Addresses, addresses_of, dense, is_grad_list, with_memory
from apex_npu.ops.reference import wide_dtype
from apex_npu.ops.triton_kernels import arithmetic, gather, rules, sums
from apex_npu.ops.triton_kernels.chunks import Chunks
from apex_npu.ops.triton_kernels.formats import Encoding
from apex_npu.ops.triton_kernels.launches import STORED, Launch, Plan, check_operands, kind

# Elements of a program: eight for each thread, two loads of 16 bytes for float32.
_BLOCK, _WARPS = 1024, 4
# The maximum number of programs of a norm. Each program writes one number.
_NORM_BLOCK, _NORM_PROGRAMS = 2048, 1024
# Chunks of a segment that are added together.
_SUM_BLOCK, _SUM_WARPS = 1024, 4
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
# For calls whose operands are not encoded.
_PLAIN = Encoding()


class _Numbers(NamedTuple):
    """The numbers that depend on a step's learning rate and count; ``arithmetic.py`` has their meaning.

    Attributes:
        on_device: The tensor from which kernels read the numbers, after ``launches``; None: the other attributes.
    """

    lr: float = 0.0
    step_size: float = 0.0
    correction1: float = 1.0
    root_correction2: float = 1.0
    kept: float = 1.0
    first: bool = False
    on_device: Tensor | None = None
    launches: tuple[Launch, ...] = ()

    @classmethod
    def of(cls, given: Arguments, *, betas: tuple[float, float] | None = None, decay: float = 0.0) -> _Numbers:
        """Compute the numbers of a step. Without ``betas`` there is no bias correction."""
        lr, step, found_inf = given.lr, getattr(given, "step", 0), given.found_inf
        if isinstance(lr, Tensor) or isinstance(step, Tensor) or found_inf is not None:
            on_device = given.param.new_empty(arithmetic.COUNT, dtype=torch.float64)
            lr_tensor, rate = (_beside(lr, given.param), 0.0) if isinstance(lr, Tensor) else (None, lr)
            step_tensor, count = (_beside(step, given.param), 0.0) if isinstance(step, Tensor) else (None, float(step))
            logs = [math.log(beta) if beta else -math.inf for beta in betas or (0.0, 0.0)]
            tensors = (on_device, lr_tensor, step_tensor, _beside(found_inf, given.param))
            args = (*tensors, rate, count, *logs, decay)
            launch = Launch(arithmetic.step_numbers, 1, args, {"CORRECTED": betas is not None}, 1)
            return cls(on_device=on_device, launches=(launch,))
        correction1, correction2 = (1 - betas[0] ** step, 1 - betas[1] ** step) if betas else (1.0, 1.0)
        return cls(
            lr=lr,
            step_size=lr / correction1,
            correction1=correction1,
            root_correction2=correction2**0.5,
            kept=1 - lr * decay,
            first=step == 1,
        )


def _planning(op: Op[..., Any]) -> Callable[[Callable[[Arguments], Plan | None]], Callable[..., Plan | None]]:
    """Pass the declared arguments of ``op`` by name to a plan, with two more.

    ``kept`` is a dict of launches that were planned for the same operands, or None. ``listed`` has the ``Addresses`` of
    listed gradients, in which case ``grad`` is None.
    """

    def decorate(plan: Callable[[Arguments], Plan | None]) -> Callable[..., Plan | None]:
        defaults = {**op.defaults, "kept": None}

        def bound(*operands: Tensor | None, **options: Any) -> Plan | None:
            given = dict(defaults)
            given.update(zip(op.operands, operands, strict=False))
            given.update(options)
            given["listed"] = None
            if is_grad_list(given["grad"]):
                given["listed"] = addresses_of(given["grad"])
                given["grad"] = None if given["listed"] else dense(given["grad"])
            return plan(Arguments(**given))

        return bound

    return decorate


@_planning(elementwise.sgd_)
def sgd_(given: Arguments) -> Plan:
    """Plan ``apex_npu.ops.elementwise.sgd_``."""
    known = _Numbers.of(given, decay=given.weight_decay)
    decay, flags = _decay(given, known.kept)
    flags |= {"NESTEROV": given.nesterov, "FIRST": known.first}
    arguments = (known.lr, given.momentum, 1 - given.dampening, decay)
    return _elementwise(elementwise.sgd_, rules.sgd, given, known, arguments, flags)


@_planning(elementwise.adam_)
def adam_(given: Arguments) -> Plan:
    """Plan ``apex_npu.ops.elementwise.adam_``."""
    beta1, beta2 = given.beta1, given.beta2
    known = _Numbers.of(given, betas=(beta1, beta2) if given.bias_correction else None, decay=given.weight_decay)
    decay, flags = _decay(given, known.kept)
    arguments = (known.step_size, 1 - beta1, beta2, 1 - beta2, given.eps, decay, known.root_correction2)
    return _elementwise(elementwise.adam_, rules.adam, given, known, arguments, flags)


@_planning(elementwise.rmsprop_)
def rmsprop_(given: Arguments) -> Plan:
    """Plan ``apex_npu.ops.elementwise.rmsprop_``."""
    known = _Numbers.of(given)
    decay, flags = _decay(given, 1 - given.weight_decay)
    flags |= {"EPS_INSIDE_SQRT": given.eps_inside_sqrt, "LR_IN_MOMENTUM": given.lr_in_momentum}
    arguments = (known.lr, given.alpha, 1 - given.alpha, given.eps, decay, given.momentum)
    return _elementwise(elementwise.rmsprop_, rules.rmsprop, given, known, arguments, flags)


@_planning(elementwise.adadelta_)
def adadelta_(given: Arguments) -> Plan:
    """Plan ``apex_npu.ops.elementwise.adadelta_``."""
    known = _Numbers.of(given)
    arguments = (known.lr, given.rho, 1 - given.rho, given.eps, given.weight_decay)
    return _elementwise(elementwise.adadelta_, rules.adadelta, given, known, arguments, {"L2": given.weight_decay != 0})


@_planning(elementwise.adagrad_)
def adagrad_(given: Arguments) -> Plan:
    """Plan ``apex_npu.ops.elementwise.adagrad_``."""
    known = _Numbers.of(given, decay=given.weight_decay)
    decay, flags = _decay(given, known.kept)
    return _elementwise(elementwise.adagrad_, rules.adagrad, given, known, (known.lr, given.eps, decay), flags)


def norm(x: Tensor, found_inf: Tensor | None = None) -> Plan | None:
    """Plan ``apex_npu.ops.segmented.norm``; None for a check of float64, whose squares may overflow."""
    return None if x.dtype == torch.float64 and found_inf is not None else _norm(x, found_inf, None, 0.0)


def norm_to_clip(x: Tensor, max_norm: float) -> Plan:
    """Plan ``apex_npu.ops.segmented.norm_to_clip``."""
    coefficient = torch.empty((), dtype=wide_dtype(x.dtype), device=x.device)
    plan = _norm(x, None, coefficient, float(max_norm))
    return plan._replace(result=(plan.result, coefficient))


def _norm(x: Tensor, found_inf: Tensor | None, coefficient: Tensor | None, max_norm: float) -> Plan:
    squares, parts = _squares(x)
    result = parts.new_empty((), dtype=wide_dtype(x.dtype))
    args = (parts, result, found_inf, coefficient, parts.numel(), max_norm)
    constants = {"DTYPE": _dtype(x), "BLOCK": _NORM_PROGRAMS}
    key, listed = ("root", kind(found_inf), kind(coefficient)), addresses_of(x)
    root = _kept_launch(listed and listed.kept, key, args, lambda: Launch(sums.root_of_parts, 1, args, constants, 4))
    return Plan((squares, root), result)


def _squares(x: Tensor) -> tuple[Launch, Tensor]:
    """Return the launch that adds up the squares of ``x`` in parts, and the parts, float64."""
    listed = addresses_of(x)
    if listed is None:
        x = with_memory(x)
        check_operands("norm", x=x)
        programs = min(_NORM_PROGRAMS, max(1, -(-x.numel() // _NORM_BLOCK)))
        parts = x.new_empty(programs, dtype=torch.float64)
        return Launch(sums.square_parts, programs, (x, parts, x.numel(), programs), {"BLOCK": _NORM_BLOCK}, 8), parts
    chunks = _chunks_of(listed, x)
    count = chunks.begins.numel()
    programs = min(_NORM_PROGRAMS, count)
    parts = torch.empty(programs, dtype=torch.float64, device=x.device)
    args = (parts, _listing(listed, chunks), count, programs)

    def make() -> Launch:
        return _over_chunks(gather.listed_square_parts, chunks, args, {})._replace(programs=programs)

    return _kept_launch(listed.kept, ("squares", listed.narrow), args, make), parts


def segment_dot(a: Tensor, b: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None) -> Plan | None:
    """Plan ``apex_npu.ops.segmented.segment_dot``."""
    if ids is not None:
        return None
    a, b = with_memory(a), with_memory(b)
    check_operands("segment_dot", a=a, b=b)
    chunks = Chunks.of(starts, lengths, a)
    parts = a.new_empty(chunks.begins.numel(), dtype=torch.float64)
    result = a.new_empty(starts.numel())
    first = _over_chunks(sums.dot_parts, chunks, (a, b, parts, chunks.begins, chunks.ends), {})
    return Plan((first, _over_segments(sums.segment_sums, result.numel(), (parts, result, chunks.firsts), {})), result)


def segment_add_(
    x: Tensor, y: Tensor, factors: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor | None
) -> Plan | None:
    """Plan ``apex_npu.ops.segmented.segment_add_``."""
    if ids is not None:
        return None
    check_operands("segment_add_", x=x, y=y)
    chunks = Chunks.of(starts, lengths, x)
    args = (x, y, factors, chunks.begins, chunks.ends, chunks.owners)
    return Plan((_over_chunks(sums.segment_add, chunks, args, {"DTYPE": _dtype(x)}),))


@_planning(segmented.lamb_)
def lamb_(given: Arguments) -> Plan | None:
    """Plan ``apex_npu.ops.segmented.lamb_``."""
    if given.ids is not None:
        return None
    op, param = segmented.lamb_, given.param
    _check(op, given)
    chunks = Chunks.of(given.starts, given.lengths, param, given.encoding and given.encoding.places.table)
    count, dtype = chunks.begins.numel(), {"DTYPE": _dtype(param)}
    encoding, step, rounding = _encoding(op, given, chunks)
    parts = param.new_empty(2 * count, dtype=torch.float64)
    beta1, beta2, beta3 = given.beta1, given.beta2, given.beta3
    flags = {"ADAPT": given.adapt, "AVERAGE": beta3 == 1 - beta1, "L2": given.l2 != 0, "DECAY": given.decay != 0}
    flags |= {"MAXIMIZE": given.maximize}
    known = _Numbers.of(given, betas=(beta1, beta2) if given.bias_correction else None)
    *moments, direction = _buffers(op, given).values()
    scale = _beside(given.grad_scale, param)
    operands = (*moments, scale, known.on_device, encoding, direction, parts, chunks.begins, chunks.ends, count, step)
    arguments = (known.lr, beta1, beta3, beta2, 1 - beta2, given.eps, known.correction1, known.root_correction2)
    decays = (given.l2, given.decay)
    launches = [
        *known.launches,
        _over_chunks(rules.lamb_directions, chunks, (*operands, *arguments, *decays), flags | dtype | rounding),
    ]
    if given.adapt:
        ratios = direction.new_empty(given.starts.numel())
        finish = (parts, ratios, chunks.firsts, count, given.max_weight_norm)
        where = (chunks.begins, chunks.ends, chunks.owners)
        move = (param, direction, ratios, known.on_device, encoding, *where, step, known.lr)
        launches.append(_over_segments(rules.lamb_ratios, ratios.numel(), finish, dtype))
        launches.append(_over_chunks(rules.lamb_step, chunks, move, dtype | rounding))
    return Plan(tuple(launches))


def scale_listed(grads: Tensor, factor: float | Tensor, found_inf: Tensor | None) -> Plan | None:
    """Plan to multiply listed gradients in place; None if their dtypes differ or they have no addresses.

    Args:
        grads: The operand. With a factor of 1.0 nothing is written, and gradients may have a narrower dtype.
        factor: A number, or a tensor of one number on their device.
        found_inf: The argument of ``take_addressed``; with a factor of 1.0 not None.
    """
    listed = addresses_of(grads)
    if listed is None:
        return None
    chunks = _chunks_of(listed, grads)
    tensor, number = (factor, 1.0) if isinstance(factor, Tensor) else (None, float(factor))
    if tensor is None and number == 1.0:
        looked_at = (found_inf, _listing(listed, chunks))
        check = partial(_over_chunks, gather.check_listed, chunks, looked_at, {"DTYPE": _dtype(grads)})
        return Plan((_kept_launch(listed.kept, ("check", listed.narrow, kind(found_inf)), looked_at, check),))
    if listed.narrow is not None:
        return None
    args = (chunks.rows, listed.on_device, found_inf, tensor, number)
    constants = {"SOURCE": _TYPES[grads.dtype], "DTYPE": _dtype(grads)}
    key = ("scale", kind(found_inf), kind(tensor))
    make = partial(_over_chunks, gather.scale_listed, chunks, args, constants)
    return Plan((_kept_launch(listed.kept, key, args, make),))


def take_addressed(
    flat: Tensor,
    chunks: Tensor,
    addresses: Tensor,
    dtype: torch.dtype,
    inv_scale: float,
    found_inf: Tensor | None,
    size: int,
    aligned: bool,
    kept: dict[Any, Any] | None = None,
) -> Plan:
    """Plan to copy gradients into slots.

    Args:
        flat: The buffer with the slots.
        chunks: int64, a row for each program: its first element in ``flat``, one past its last, and the slot.
        addresses: int64, one for each slot: the address of ``flat`` if the gradient were in its slot; 0: no gradient.
        dtype: The dtype of the gradients.
        inv_scale: The factor of the gradients.
        found_inf: float32, one element; set to 1 if a gradient is not finite. None: do not check.
        size: The maximum number of elements in a chunk.
        aligned: The attribute of ``Chunks``.
        kept: A dict that keeps launches for the same ``flat``, ``size`` and ``aligned``.
    """
    constants = {
        "SOURCE": _TYPES[dtype],
        "SCALED": inv_scale != 1.0,
        "DTYPE": _dtype(flat),
        "ALIGNED": aligned,
        "BLOCK": size,
    }
    args, programs = (flat, chunks, addresses, found_inf, float(inv_scale)), chunks.shape[0]
    key = (programs, dtype, inv_scale != 1.0, kind(found_inf))
    make = partial(Launch, gather.take_addressed, programs, args, constants, max(1, size // 256))
    return Plan((_kept_launch(kept, key, args, make),))


def _kept_launch(
    kept: dict[Any, Any] | None, key: Hashable, args: tuple[Any, ...], make: Callable[[], Launch]
) -> Launch:
    """Return the launch of ``make`` with ``args``. It is planned once for each ``key``, which identifies the kernel."""
    before: Launch | None = kept.get(key) if kept is not None else None
    launch = make() if before is None else before.again(args)
    if kept is not None and (before is None or before.compiled is None):
        kept[key] = launch._replace(args=())  # later calls have other arguments
    return launch


def _chunks_of(listed: Addresses, like: Tensor) -> Chunks:
    """Return the chunks of the slots of ``listed`` gradients, for an operand like ``like``."""
    chunks: Chunks | None = listed.kept.get("chunks")
    if chunks is None:
        chunks = listed.kept["chunks"] = Chunks.of(listed.begins, listed.lengths, like)
    return chunks


def _decay(given: Arguments, kept: float) -> tuple[float, dict[str, Any]]:
    """Return the number that ``load_decayed`` reads, and its meaning."""
    decays, decoupled = given.weight_decay != 0, given.decoupled
    return kept if decoupled else given.weight_decay, {
        "L2": decays and not decoupled,
        "DECOUPLED": decays and decoupled,
    }


def _elementwise(
    op: Rule[...],
    kernel: Any,
    given: Arguments,
    known: _Numbers,
    arguments: tuple[float, ...],
    flags: dict[str, Any],
) -> Plan:
    scale, param, listed = _beside(given.grad_scale, given.param), given.param, given.listed
    chunks = None if given.encoding is None else Chunks.of_params(given.encoding.places.table, param)
    if chunks is None and listed is not None:
        chunks = _chunks_of(listed, param)
    encoding, step, rounding = _encoding(op, given, chunks)
    operands = _buffers(op, given).values()
    args = (*operands, scale, known.on_device, encoding, param.numel(), step, *arguments)

    def make() -> Launch:
        _check(op, given)
        constants = {**flags, "MAXIMIZE": given.maximize, "DTYPE": _dtype(param), **rounding}
        if chunks is not None:
            return _over_chunks(kernel, chunks, args, constants)
        constants |= {"ALIGNED": False, "BLOCK": _BLOCK}
        return Launch(kernel, -(-param.numel() // _BLOCK), args, constants, _WARPS)

    # These and the operands determine the kernel.
    of_grads = listed is not None, listed and listed.narrow
    key = (*flags.values(), given.maximize, kind(scale), kind(known.on_device), *of_grads)
    return Plan((*known.launches, _kept_launch(given.kept, key, args, make)))


def _encoding(op: Rule[...], given: Arguments, chunks: Chunks | None) -> tuple[Encoding, float, dict[str, Any]]:
    """Return the encoding that kernels of ``chunks`` read, the number of the step, and how parameters are rounded."""
    encoded, encoding = given.encoding, _PLAIN
    if chunks is not None and given.listed is not None:
        encoding = _listing(given.listed, chunks)
    if encoded is None or chunks is None:
        return encoding, 0.0, {"STOCHASTIC": False}
    on_device = isinstance(encoded.step, Tensor)
    count = _beside(encoded.step, given.param) if on_device else None
    scales = tuple(None if getattr(given, name) is None else encoded.scales.get(name) for name in op.states)
    encoding = encoding._replace(places=chunks.places, step=count, remainder=encoded.remainder, scales=scales)
    return encoding, 0.0 if on_device else float(encoded.step), {"STOCHASTIC": encoded.stochastic_param}


def _listing(listed: Addresses, chunks: Chunks) -> Encoding:
    """Return the encoding of listed gradients, for kernels of ``chunks`` of ``listed.begins``."""
    key = "encoding", listed.narrow
    encoding: Encoding | None = listed.kept.get(key)
    if encoding is None or encoding.addresses is not listed.on_device:
        at, narrow = listed.on_device, None if listed.narrow is None else listed.on_device.view(listed.narrow)
        encoding = Encoding(rows=chunks.rows, addresses=at, wide=at.view(listed.wide), narrow=narrow)
        listed.kept[key] = encoding
    return encoding


def _buffers(op: Op[..., Any], given: Arguments) -> dict[str, Any]:
    """Return the operands of one length, by name."""
    names = op.operands[: op.operands.index("starts")] if "starts" in op.operands else op.operands
    return {name: getattr(given, name) for name in names}


def _check(op: Op[..., Any], given: Arguments) -> None:
    """Check the operands of one length; a list of gradients has the length of its slots."""
    if given.encoding is None:
        check_operands(op.name, **_buffers(op, given))
    else:
        check_operands(op.name, STORED, **_buffers(op, given), remainder=given.encoding.remainder)


def _beside(number: Tensor | None, param: Tensor) -> Tensor | None:
    """Return ``number`` on the device of ``param``, where kernels can read it."""
    return None if number is None else number.to(param.device)


def _over_chunks(kernel: Any, chunks: Chunks, args: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
    warps = max(1, chunks.size // 256)
    return Launch(
        kernel, chunks.begins.numel(), args, {**constants, "ALIGNED": chunks.aligned, "BLOCK": chunks.size}, warps
    )


def _over_segments(kernel: Any, count: int, args: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
    return Launch(kernel, count, args, {**constants, "BLOCK": _SUM_BLOCK}, _SUM_WARPS)


def _dtype(param: Tensor) -> Any:
    return tl.float64 if param.dtype == torch.float64 else tl.float32
