# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The fused optimizers by the names of their classes, as training frameworks configure them."""

from __future__ import annotations

from apex_npu import optimizers


def optimizer_classes() -> dict[str, type[optimizers.FusedOptimizer]]:
    """All fused optimizers, by the names of their classes."""
    named = {name: getattr(optimizers, name) for name in optimizers.__all__}
    return {
        name: cls
        for name, cls in named.items()
        if isinstance(cls, type) and issubclass(cls, optimizers.FusedOptimizer) and cls is not optimizers.FusedOptimizer
    }


def optimizer_class(name: str) -> type[optimizers.FusedOptimizer]:
    """The fused optimizer of this name.

    Raises:
        ValueError: There is none; the text lists those that there are.
    """
    known = optimizer_classes()
    if name not in known:
        raise ValueError(f"apex_npu.optimizers has no optimizer {name!r}; there are {', '.join(sorted(known))}")
    return known[name]
