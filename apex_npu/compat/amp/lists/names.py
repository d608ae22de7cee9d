# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Names of functions, taken from the tables of operators."""

from __future__ import annotations

from typing import Any

from apex_npu.autocast import cast_lists
from apex_npu.compat.amp.locked_list import LockedList

_EDITS = (
    "amp's lists are read-only. To cast a function differently, call amp.register_half_function, "
    "register_float_function or register_promote_function with its module and name before amp.initialize"
)
# torch promotes these itself, so no table of this package has them.
_PROMOTED = [
    "add", "addcdiv", "addcmul", "atan2", "bilinear", "cross", "div", "dot",
    "eq", "equal", "ge", "gt", "le", "lt", "mul", "ne",
]  # fmt: skip
_SEQUENCES = ["cat", "stack"]
# These are made of listed operators and follow them.
_COMPOSED = ["cross_entropy", "normalize", "softmin"]
_OPERATORS = {
    "__matmul__": "matmul", "__pow__": "pow", "__rpow__": "pow", "__ipow__": "pow",
    **{f"__{kind}{name}__": name for name in ("add", "div", "mul") for kind in ("", "i", "r")},
    "__truediv__": "div", "__itruediv__": "div", "__rtruediv__": "div",
    "__sub__": "add", "__isub__": "add", "__rsub__": "add",
    **{f"__{name}__": name for name in ("eq", "ge", "gt", "le", "lt", "ne")},
}  # fmt: skip


def cast_list(owner: Any, kind: str) -> LockedList:
    """Return the names in ``owner`` that are cast in one way.

    Args:
        owner: A module or class, such as ``torch.nn.functional``.
        kind: "half" or "float" for functions that run in that precision, "promote" for functions that run in the widest
            type of their arguments, "sequence" for functions of a list of tensors that do so.
    """
    listed = {
        "half": cast_lists.HALF_OPS,
        "float": (*cast_lists.FLOAT_OPS, *cast_lists.FLOAT_FUNCTIONS, *_COMPOSED),
        "promote": _PROMOTED,
        "sequence": _SEQUENCES,
    }[kind]
    names = {op.partition(".")[0] for op in listed}
    names |= {"grid_sample"} if "grid_sampler" in names else set()
    # Every object has operators, modules included; only those of tensors are meant.
    operators = {name for name, of in _OPERATORS.items() if of in names and isinstance(owner, type)}
    return LockedList(sorted(operators | {name for name in names if callable(getattr(owner, name, None))}), _EDITS)
