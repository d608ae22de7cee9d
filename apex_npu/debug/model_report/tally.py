# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Tally``: counts the FLOPs, casts and bytes of the operators that are called in its context.

FLOPs are counted by torch's formulas, and those that torch lacks.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from apex_npu.debug.watching.calls import Call
from apex_npu.debug.watching.operators import Execution, tensors_in
from apex_npu.debug.watching.stream import Consumer

# These operators take only sizes and a dtype from a tensor, or only move the data that they read.
_NO_FUNCTIONS = {
    *("clone", "_unsafe_view", "ones_like", "zeros_like", "full_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full"),
}
_CASTS = ("aten::_to_copy", "aten::copy_")
# Namespaces in which the name tells whether an operator computes products; operators of others may compute anything.
_KNOWN = ("aten", "prims", "npu", "apex_npu")
_COLLECTIVES = re.compile(r"_?c10d")
_PRODUCTS = re.compile(
    r"attention|(?:rnn|lstm|gru)(?!\w*(?:_cell|flatten))|mm(?:_|$)|matmul|(?:mv|dot)_?$|conv(?!ert)"
    r"|(?:^|_|tri)linear(?:_|$)|linalg_(?!vector_norm|_powsum|cross)|cholesky|triangular_solve|(?:^|_)fft_|(?:^|_)cdist"
)


@dataclass(frozen=True)
class Function:
    """An operator that a module calls.

    Attributes:
        module: The name of the module. Empty for the model itself; None outside the model, as in the loss function.
        operator: The operator without namespace and overload, such as "addmm".
        dtype: The dtype of the results.
        phase: "forward", or "backward" for the derivative of an operator that the module has called.
    """

    module: str | None
    operator: str
    dtype: torch.dtype
    phase: str


@dataclass
class Tally:
    """The totals of an iteration's operators; bytes are those of the tensors that they read and write.

    Attributes:
        calls: The number of calls of each function.
        flops: The FLOPs of each function.
        uncounted: The names of operators whose FLOPs have no formula, without "aten::".
        bytes_moved: The bytes that all operators read and write, casts included.
        casts: The number of casts for each (from, to), both floating dtypes.
        cast_bytes: The bytes that casts read and write, for each (from, to).
        cast_weights: The names of the parameters that are cast.
        saved: The bytes that forward keeps for backward, for each dtype, without parameters and inputs.
    """

    calls: Counter[Function] = field(default_factory=Counter)
    flops: Counter[Function] = field(default_factory=Counter)
    uncounted: dict[str, None] = field(default_factory=dict)
    bytes_moved: int = 0
    casts: Counter[tuple[torch.dtype, torch.dtype]] = field(default_factory=Counter)
    cast_bytes: Counter[tuple[torch.dtype, torch.dtype]] = field(default_factory=Counter)
    cast_weights: dict[str, None] = field(default_factory=dict)
    saved: Counter[torch.dtype] = field(default_factory=Counter)

    @contextmanager
    def counting(self, model: nn.Module, given: list[Tensor]) -> Iterator[None]:
        """Count the operators that are called in the block; ``given`` are the model's inputs."""
        stream = _Counting(self, model).stream
        stream.attach()
        try:
            with _saving(self.saved, [*model.parameters(), *model.buffers(), *given]):
                yield
        finally:
            stream.detach()
        if stream.not_measured:
            raise RuntimeError(
                f"the bytes that an operator reads and writes could not be counted: {next(iter(stream.not_measured))}"
            )

    def flops_in(self, dtype: torch.dtype) -> int:
        """Return the FLOPs of all functions in one dtype."""
        return sum(n for function, n in self.flops.items() if function.dtype == dtype)


@contextmanager
def _saving(saved: Counter[torch.dtype], known: list[Tensor]) -> Iterator[None]:
    """Count in ``saved`` the bytes that autograd saves in the block, without the memory of the tensors ``known``."""
    seen: dict[int, Any] = {t.untyped_storage()._cdata: t for t in known if t.layout == torch.strided}

    # The node that saves a tensor keeps the returned tensor, which must not refer to a node. Otherwise a node that
    # saves its own output would form a cycle that Python's garbage collector does not find.
    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen[storage._cdata] = storage  # kept alive, so that no other gets its address
                saved[tensor.dtype] += storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


class _Counting(Consumer):
    """A consumer that counts the operators of ``stream`` in ``tally``."""

    def __init__(self, tally: Tally, model: nn.Module) -> None:
        super().__init__([model])
        self._tally = tally

    def saw(self, call: Call, ran: Execution) -> None:
        operator, results = ran.operator, list(tensors_in(ran.returned))
        if not results:
            return
        operands = [t for _, value in ran.operands() for t in tensors_in(value)]
        moved = sum(t.numel() * t.element_size() for t in {id(t): t for t in (*operands, *results)}.values())
        self._tally.bytes_moved += moved
        if operator.name in _CASTS and operands:
            source, cast = operands[-1], (operands[-1].dtype, results[0].dtype)
            if cast[0] != cast[1] and all(dtype.is_floating_point for dtype in cast):
                self._tally.casts[cast] += 1
                self._tally.cast_bytes[cast] += moved
                if (name := self.names.of_tensor(source)) is not None:
                    self._tally.cast_weights[name] = None
            return
        floating = [t for t in (*results, *operands) if t.dtype.is_floating_point or t.dtype.is_complex]
        if (
            floating
            and operator.plain not in _NO_FUNCTIONS
            and any(t.dtype.is_floating_point for _, t in ran.tensors_read())
        ):
            # Recomputation within backward counts as forward of its module; a loss function belongs to no module.
            phase = "backward" if call.phase == "backward" else "forward"
            module = None if call.module is None or call.module.startswith("(") else call.module
            function = Function(module, operator.plain, floating[0].dtype, phase)
            self._tally.calls[function] += 1
            flops = flops_of(ran.func, *ran.given, ran.returned)
            if flops is None:
                self._tally.uncounted[operator.name.removeprefix("aten::")] = None
            elif flops:
                self._tally.flops[function] += flops


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Return the FLOPs of a call of ``func``, an ``OpOverload``; None if it may compute products and has no formula."""
    name = func.overloadpacket.__name__
    for same in (name, name.removesuffix("_")):
        packet = getattr(getattr(torch.ops, func.namespace), same, None)
        formula = flop_registry.get(packet) or _formulas().get(packet)
        if formula is not None:
            return int(formula(*args, **kwargs, out_val=result))
    if func.namespace in _KNOWN:
        return None if _PRODUCTS.search(name) else 0
    return 0 if _COLLECTIVES.match(func.namespace) else None


@functools.cache
def _formulas() -> dict[Any, Callable[..., Any]]:
    """Return the formulas of torch, and those that torch lacks."""
    aten = torch.ops.aten
    own = {getattr(aten, name): formula for name, formula in _OWN.items()}
    known = FlopCounterMode(display=False, custom_mapping=own).flop_registry
    for direction in ("", "_backward"):  # the CPU's attention has the same first arguments as the others
        flash = "_scaled_dot_product_flash_attention"
        known[getattr(aten, f"{flash}_for_cpu{direction}")] = known[getattr(aten, flash + direction)]
    return known


def _matmul(left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    """Return 2 · (elements of the result) · (length of a sum)."""
    batch: tuple[int, ...] = torch.broadcast_shapes(tuple(left[:-2]), tuple(right[:-2]))
    columns = right[-1] if len(right) > 1 else 1
    return int(2 * math.prod(batch) * math.prod(left[-2:]) * columns)


def _rnn(input: Sequence[int], *args: Any, **_: Any) -> int:
    """Return 2 · steps · batch · (elements of all matrices), as each multiplies the input or the hidden state."""
    weights = args[0] if args[0] and not isinstance(args[0][0], int) else args[:4]
    return int(2 * math.prod(input[:-1]) * sum(math.prod(w) for w in weights if len(w) == 2))


def _rnn_backward(input: Sequence[int], *args: Any, **_: Any) -> int:
    """Return the FLOPs of the gradients of the inputs, and of those of the weights if these are requested."""
    masks = [a for a in args if isinstance(a, (list, tuple)) and len(a) == 4 and all(isinstance(m, bool) for m in a)]
    return _rnn(input, *args) * (2 if not masks or masks[-1][3] else 1)


# The formulas receive shapes instead of tensors.
_OWN: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("mv", "dot", "vdot"), lambda left, right, **_: 2 * math.prod(left)),
    "addmv": lambda added, matrix, vector, **_: 2 * math.prod(matrix),
    "matmul": _matmul,  # these two are composed of others, except in torch_npu
    "matmul_backward": lambda grad, left, right, mask, **_: _matmul(left, right) * sum(mask),
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), _rnn),
    **dict.fromkeys(("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward"), _rnn_backward),
}
