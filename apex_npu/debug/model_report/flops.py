# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The floating point operations of an operator, by torch's formulas and those that torch lacks."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

# Namespaces in which the name tells whether an operator computes products; operators of others may compute anything.
_KNOWN = ("aten", "prims", "npu", "apex_npu")
_COLLECTIVES = re.compile(r"_?c10d")
_PRODUCTS = re.compile(
    r"attention|(?:rnn|lstm|gru)(?!\w*(?:_cell|flatten))|mm(?:_|$)|matmul|(?:mv|dot)_?$|conv(?!ert)"
    r"|(?:^|_|tri)linear(?:_|$)|linalg_(?!vector_norm|_powsum|cross)|cholesky|triangular_solve|(?:^|_)fft_|(?:^|_)cdist"
)


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


def _vectors(left: Sequence[int], *rest: Any, **_: Any) -> int:
    return 2 * math.prod(left)


def _matmul(left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    """Return 2 · (elements of the result) · (length of a sum)."""
    batch: tuple[int, ...] = torch.broadcast_shapes(tuple(left[:-2]), tuple(right[:-2]))
    columns = right[-1] if len(right) > 1 else 1
    return int(2 * math.prod(batch) * math.prod(left[-2:]) * columns)


def _matmul_backward(grad: Any, left: Sequence[int], right: Sequence[int], mask: Sequence[bool], **_: Any) -> int:
    return _matmul(left, right) * sum(mask)


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
    **dict.fromkeys(("mv", "dot", "vdot"), _vectors),
    "addmv": lambda added, matrix, vector, **_: 2 * math.prod(matrix),
    "matmul": _matmul,  # these two are composed of others, except in torch_npu
    "matmul_backward": _matmul_backward,
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), _rnn),
    **dict.fromkeys(("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward"), _rnn_backward),
}
