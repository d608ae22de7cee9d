# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``check_operators``: repeats each operator of an iteration in float64 on the host, on its own inputs."""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from apex_npu.backends._torch_private import tree_map
from apex_npu.debug.text import first_line, fitted, name_of, where_of
from apex_npu.debug.watching.calls import Call, Located
from apex_npu.debug.watching.opening import WatchingContext
from apex_npu.debug.watching.operators import Execution, followed, tensors_in
from apex_npu.debug.watching.second_opinion import call_on_host, copied, widen
from apex_npu.debug.watching.stream import Consumer
from apex_npu.debug.watching.trail import saturating

# The CPU's own kernel is called for errors above the first number, in units of the coarsest dtype's eps. An operator is
# blamed for an error above the second, in multiples of the error that this kernel or the dtype explains.
_USUAL, _TIMES = 4.0, 8.0
# The results of these are sums of products of their inputs, or are linear in such sums. So are those of the operators
# in torch's FLOP registry.
_SUMS = {
    *("sum", "nansum", "mean", "cumsum", "trace", "dot", "vdot", "inner", "mv", "addmv", "addr", "linear"),
    *("index_add", "index_add_", "scatter_add", "scatter_add_", "embedding_dense_backward"),
    *("native_batch_norm", "cudnn_batch_norm"),  # the means
    *("native_batch_norm_backward", "native_layer_norm_backward", "native_group_norm_backward"),
    "cudnn_batch_norm_backward",
}
_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class OperatorError(Located):
    """The error of the results of one call against those in float64; ``dtype`` and ``shape``: of the worst result.

    Attributes:
        error: The norm of the difference over the norm of the result, in units of ``eps``. If terms of a sum cancel,
            the divisor is at least the norm of the sums of their magnitudes, times float32's eps over ``eps``.
        eps: The eps of the coarsest dtype among inputs and results.
        host_error: The ``error`` of the CPU's own kernel in the same dtypes; None if it was not called.
    """

    error: float
    eps: float
    host_error: float | None = None

    @property
    def is_blamed(self) -> bool:
        """True if the error is larger than the dtype, or the CPU's kernel in the same dtypes, explains."""
        return self.host_error is not None and self.error > _TIMES * max(1.0, self.host_error)

    def __str__(self) -> str:
        place = f"  {self.place}  {self.source}" if self.place else ""
        return f"{self.phase}  {where_of(self.module)}  {self.operator}  {self.dtype} {list(self.shape)}{place}"


class CheckedOperators:
    """The result of ``check_operators``.

    Attributes:
        checked: The number of operator calls that were compared.
        left_out: The reasons why other calls were not compared, with the number of calls.
        errors: The errors of the calls that were compared, largest first.
    """

    def __init__(self) -> None:
        """Create an empty result."""
        self.checked = 0
        self.left_out: Counter[str] = Counter()
        self.errors: list[OperatorError] = []

    @property
    def blamed(self) -> list[OperatorError]:
        """The calls whose results differ by more than rounding explains."""
        return [error for error in self.errors if error.is_blamed]

    def __str__(self) -> str:
        left = "".join(f"; {count} not: {why}" for why, count in self.left_out.most_common())
        lines = [f"{self.checked} operators were compared with float64 on the host{left}"]
        blamed = self.blamed
        for one in blamed[:_SHOWN]:
            lines += [
                str(one),
                f"    its error, relative to the norm, is {one.error:.3g} eps of its coarsest dtype ({one.eps:.3g}); "
                f"that of the CPU's kernel in the same dtypes is {one.host_error:.3g}",
            ]
        if len(blamed) > _SHOWN:
            lines.append(f"and {len(blamed) - _SHOWN} more")
        if blamed:
            lines.append(
                "do: compute these in float32 (amp.register_float_function, amp.disable_casts()) to see whether "
                "the dtype is the cause; compare the device with the CPU on such inputs; then report the operator "
                "to the device's vendor"
            )
        others = [one for one in self.errors if not one.is_blamed]
        if others:
            lines.append(f"the largest error of the others: {others[0].error:.3g} eps, {others[0]}")
        if not blamed and self.checked:
            lines.append("no operator differs by more than rounding explains")
        return fitted("\n".join(lines))


class Check(Consumer):
    """A consumer that compares the results of operators with those in float64."""

    reads = True

    def __init__(self, models: Sequence[nn.Module], seconds: float) -> None:
        """Create a check of ``models``, for which the host computes for about ``seconds``."""
        super().__init__(models)
        self.found = CheckedOperators()
        self._seconds = self._left = seconds

    def saw(self, call: Call, ran: Execution) -> None:
        if ran.operator.makes_tensor:
            return
        results = ran.results()
        compared = [(i, local) for i, t in enumerate(results) if (local := followed(t)) is not None]
        why = self._why_not(ran, results, bool(compared))
        begin = time.perf_counter()
        if not why:
            try:
                self._compare(call, ran, compared)
            except NotImplementedError:
                why = f"{call.operator}: the host has no kernel for it"
            except (RuntimeError, TypeError, ValueError, MemoryError) as error:
                why = f"{call.operator}: {textwrap.shorten(first_line(error), 100, placeholder=' …')}"
        if why:
            self.found.left_out[why] += 1
        self._left -= time.perf_counter() - begin

    def _why_not(self, ran: Execution, results: Sequence[Tensor], are_read: bool) -> str:
        if not are_read:
            if any(t.dtype.is_floating_point or t.dtype.is_complex for t in results if t.numel()):
                return "sparse, nested, or of another class of tensors"
            return "integers or truth values" if any(t.numel() for t in results) else "without a result"
        if ran.is_random:
            return "random"
        if ran.operator.is_collective:
            return "of several processes"
        return f"no time left of seconds={self._seconds:g}" if self._left <= 0.0 else ""

    def _compare(self, call: Call, ran: Execution, compared: Sequence[tuple[int, Tensor]]) -> None:
        exact = call_on_host(ran, ran.before)
        dtypes = {t.dtype for _, v in ran.operands() for t in tensors_in(v)} | {t.dtype for _, t in compared}
        eps = max(torch.finfo(d).eps for d in dtypes if d.is_floating_point or d.is_complex)
        error, i = max((_error(exact[k], result) / eps, k) for k, result in compared)
        self.found.checked += 1
        host_error = None
        if error > _USUAL:
            terms = _magnitudes(ran)
            finest = torch.finfo(torch.float32).eps
            # The smallest divisor of the error: kernels sum half-precision numbers in float32.
            floors = {k: float(terms[k].norm()) * min(finest / eps, 1.0) if terms else 0.0 for k, _ in compared}
            error, i = max((_error(exact[k], result, floors[k]) / eps, k) for k, result in compared)
            host = call_on_host(ran, ran.before, copied)
            host_error = max(_error(exact[k], host[k], floors[k]) / eps for k, _ in compared)
        result = dict(compared)[i]
        self.found.errors.append(
            OperatorError(
                **call.described(),
                dtype=name_of(result.dtype),
                shape=tuple(result.shape),
                error=error,
                eps=eps,
                host_error=host_error,
            )
        )


def _magnitudes(ran: Execution) -> list[Tensor]:
    """Repeat a sum, or a sum of products, on its inputs' magnitudes in float64; return [] for other operators."""
    if ran.operator.plain not in _SUMS and ran.func.overloadpacket not in flop_registry:
        return []

    def magnitude(value: Any) -> Any:
        if isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex):
            wide = widen(value)
            return wide.abs().to(wide.dtype)
        return value

    args, kwargs = tree_map(magnitude, ran.before)
    named = {name: abs(value) if name in ("alpha", "beta") else value for name, value in kwargs.items()}
    return [t.abs() for t in call_on_host(ran, (args, named))]


def _error(exact: Tensor, result: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference, minus the spacing of subnormals, over that of ``exact`` or ``floor``."""
    wide = widen(exact.dtype)
    got, true = result.detach().cpu().to(wide), exact.detach().to(wide)
    info = torch.finfo(result.dtype)
    # Values beyond the range of the dtype are not the operator's fault, and inf or nan in both is not a fault.
    held = true.isfinite() & (true.abs() <= info.max * (1 - info.eps))
    if bool((held & ~got.isfinite()).any()):
        return math.inf
    zero = torch.zeros((), dtype=wide)
    got, true = torch.where(held, got, zero), torch.where(held, true, zero)
    spacing = info.smallest_normal * info.eps
    difference = float((got - true).abs().norm()) - spacing * math.sqrt(true.numel())
    norm = max(float(true.abs().norm()), floor)
    if difference <= 0.0:
        return 0.0
    return difference / norm if norm > 0.0 else math.inf


class check_operators(WatchingContext):
    """A context that compares each operator of an iteration with float64, on the operator's own inputs.

    It calls every operator of forward and backward again in float64 on the host. So errors do not add up over
    operators, and no second machine or file is needed. An operator is blamed if its error is more than 8 times what the
    coarsest of its dtypes explains, and more than 8 times that of the CPU's own kernel in the same dtypes. The results
    of the iteration do not change. It takes several times as long.

    Args:
        models: The models whose modules are named; by default those passed to ``amp.initialize``.
        seconds: The time that the host may compute; operators after it are counted, and not compared.

    Returns:
        From ``with``: a ``CheckedOperators`` with ``blamed``, ``errors``, ``checked`` and ``left_out``; print it.

    Raises:
        TypeError: One of ``models`` is not a module.
        ValueError: ``seconds`` is not positive; no model is given, and amp has none; or another such context,
            ``find_overflow`` or ``record`` is open.
        RuntimeError: A CUDA graph is being captured; or the device saturates.

    Example::

        >>> model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1")
        >>> with amp.debug.check_operators(model) as checked:
        ...     with amp.scale_loss(model(input).square().mean(), optimizer) as scaled_loss:
        ...         scaled_loss.backward()
        >>> checked.blamed
        []
    """

    def __init__(self, *models: nn.Module, seconds: float = 60.0) -> None:
        """Check the arguments."""
        super().__init__(models)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ValueError(f"seconds, the time that the host may compute, must be positive, got {seconds!r}")
        self._seconds = float(seconds)

    def __enter__(self) -> CheckedOperators:
        models = self.models_to_watch()
        if saturating(models):
            raise RuntimeError(
                "check_operators does not support devices that saturate, such as this one, because a saturated "
                "result looks like a wrong one: use find_overflow instead"
            )
        self._check = Check(models, self._seconds)
        self.stream = self._check.stream
        self.stream.attach()
        return self._check.found

    def __exit__(self, *raised: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Stop watching; do nothing if it has stopped already."""
        stream, self.stream = self.stream, None
        if stream is not None:
            is_complete, found = stream.detach(), self._check.found
            found.errors.sort(key=lambda one: (one.is_blamed, one.error), reverse=True)
            found.left_out.update(stream.not_measured)
            if not is_complete:
                found.left_out["all after an outer dispatch mode was left"] += 1
