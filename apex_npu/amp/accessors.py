# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is put between amp's methods and the own ones of the optimizers that amp has adopted, for all of them at once.

A package above amp adds attributes, as ``apex_npu.compat.amp`` does: ordinary properties and methods of a class of its
own. A session with O1's casts adds a ``step``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from apex_npu.autocast.casting import CastHandle
from apex_npu.backends.patching import Undo, patch_attribute


class OptimizerAccessors(Optimizer):
    """A base of what amp puts before an optimizer's class; it has what the functions below put there, nothing else."""


def add_accessors(accessors: type) -> None:
    """Give adopted optimizers the attributes of a class, those adopted before included.

    Args:
        accessors: Its own attributes count, inherited ones do not. An optimizer's own class comes after them, amp's
            methods before them.
    """
    for name, value in vars(accessors).items():
        if not (name.startswith("__") and name.endswith("__")):
            setattr(OptimizerAccessors, name, value)


def step_without(casts: CastHandle, undo: Undo) -> None:
    """Have the own steps of adopted optimizers run with ``casts`` off, closures that amp has evaluated before aside.

    Args:
        casts: Those of O1, which are on in this thread.
        undo: Takes the callback that takes this back.
    """

    def without_casts(_: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: OptimizerAccessors, *args: Any, **kwargs: Any) -> Any:
            with casts.disabled():
                return super(OptimizerAccessors, self).step(*args, **kwargs)

        return step

    patch_attribute(undo, OptimizerAccessors, "step", without_casts)
