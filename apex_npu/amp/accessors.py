# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Attributes that other packages add to all adopted optimizers.

``apex_npu.compat.amp`` adds the properties and methods of a class. A session with O1's casts adds a ``step``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from apex_npu.autocast.casting import CastHandle
from apex_npu.backends.patching import patch_attribute


class OptimizerAccessors(Optimizer):
    """A base class of ``AmpOptimizerMixin``. The functions below set its attributes."""


def add_accessors(accessors: type) -> None:
    """Add the attributes of a class to all adopted optimizers, including those adopted earlier.

    Args:
        accessors: The class; inherited attributes are not added. Its attributes take precedence over the optimizer's
            own class, and amp's methods over its attributes.
    """
    for name, value in vars(accessors).items():
        if not (name.startswith("__") and name.endswith("__")):
            setattr(OptimizerAccessors, name, value)


def step_without(casts: CastHandle, undo: ExitStack) -> None:
    """Disable ``casts`` in the own ``step`` of adopted optimizers. amp evaluates closures before that, with casts on.

    Args:
        casts: The casts of O1, which are on in this thread.
        undo: Receives the callback that undoes the change.
    """

    def without_casts(_: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: OptimizerAccessors, *args: Any, **kwargs: Any) -> Any:
            with casts.disabled():
                return super(OptimizerAccessors, self).step(*args, **kwargs)

        return step

    patch_attribute(undo, OptimizerAccessors, "step", without_casts)
