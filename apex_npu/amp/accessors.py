# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where a package above amp adds attributes to the optimizers that amp has adopted; ``apex_npu.compat.amp`` does.

An accessor is an ordinary property or method, written in a class of that package and put here once, for all optimizers.
"""

from __future__ import annotations

from torch.optim import Optimizer


class OptimizerAccessors(Optimizer):
    """A base of what amp puts before an optimizer's class; it has what ``add_accessors`` was given, nothing else."""


def add_accessors(accessors: type) -> None:
    """Give adopted optimizers the attributes of a class, those adopted before included.

    Args:
        accessors: Its own attributes count, inherited ones do not. An optimizer's own class comes after them, amp's
            methods before them.
    """
    for name, value in vars(accessors).items():
        if not (name.startswith("__") and name.endswith("__")):
            setattr(OptimizerAccessors, name, value)
