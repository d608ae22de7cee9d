# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The floating point operations of an operator, by torch's formulas and those that torch lacks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

# The CPU's attention, for which torch has no formula: its first arguments are those of the others.
_SAME_AS = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}
# Namespaces in which a name tells whether there are products; operators of others may compute any.
_KNOWN = ("aten", "prims", "npu", "apex_npu")
_COLLECTIVES = re.compile(r"_?c10d")
_PRODUCTS = re.compile(
    r"attention|(?:rnn|lstm|gru)(?!\w*(?:_cell|flatten))|mm(?:_|$)|matmul|(?:mv|dot)_?$|conv(?!ert)"
    r"|(?:^|_|tri)linear(?:_|$)|linalg_(?!vector_norm|_powsum|cross)|cholesky|triangular_solve|(?:^|_)fft_|(?:^|_)cdist"
)


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """The FLOPs of a call of ``func``, an ``OpOverload``: 0 where it computes no product.

    Returns:
        None: It computes products, or may, and there is no formula for it.
    """
    name = func.overloadpacket.__name__
    for same in (name, name.removesuffix("_"), _SAME_AS.get(name)):
        packet = getattr(getattr(torch.ops, func.namespace), same, None) if same else None
        if packet in flop_registry:
            return int(flop_registry[packet](*args, **kwargs, out_val=result))
        if same in _FORMULAS and func.namespace == "aten":
            return _FORMULAS[same](*args)
    if func.namespace in _KNOWN:
        return None if _PRODUCTS.search(name) else 0
    return 0 if _COLLECTIVES.match(func.namespace) else None


def _vectors(left: Tensor, *rest: Any) -> int:
    return 2 * left.numel()


def _matmul(left: Tensor, right: Tensor) -> int:
    """2 · (elements of the result) · (length of a sum)."""
    rows = math.prod(left.shape[-2:])
    columns = right.shape[-1] if right.dim() > 1 else 1
    batch: tuple[int, ...] = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return 2 * math.prod(batch) * rows * columns


def _matmul_backward(grad: Tensor, left: Tensor, right: Tensor, mask: Sequence[bool]) -> int:
    return _matmul(left, right) * sum(mask)


def _rnn(input: Tensor, *args: Any) -> int:
    """2 · steps · batch · (elements of all matrices): each is multiplied by the input or the hidden state of each."""
    weights = args[0] if isinstance(args[0], (list, tuple)) else args[:4]
    matrices = sum(w.numel() for w in weights if w.dim() == 2)
    return 2 * (input.numel() // input.shape[-1]) * matrices if input.numel() else 0


def _rnn_backward(input: Tensor, *args: Any) -> int:
    """Of the inputs always, and of the weights where these are asked for."""
    masks = [a for a in args if isinstance(a, (list, tuple)) and len(a) == 4 and all(isinstance(m, bool) for m in a)]
    return _rnn(input, *args) * (2 if not masks or masks[-1][3] else 1)


_FORMULAS: dict[str, Callable[..., int]] = {
    "mv": _vectors,
    "addmv": lambda added, matrix, vector: 2 * matrix.numel(),
    "matmul": _matmul,  # these two are composed of others, but for torch_npu
    "matmul_backward": _matmul_backward,
    "dot": _vectors,
    "vdot": _vectors,
    "mkldnn_rnn_layer": _rnn,
    "mkldnn_rnn_layer_backward": _rnn_backward,
    "_cudnn_rnn": _rnn,
    "_cudnn_rnn_backward": _rnn_backward,
    "miopen_rnn": _rnn,
    "miopen_rnn_backward": _rnn_backward,
}
