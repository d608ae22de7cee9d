# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's ``set_state_dict``, given an optimizer with masters: refused by name, before anything changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from apex_npu.autocast.monkey_patches import patch_attribute
from apex_npu.autocast.undo import Undo

CHECKPOINTS = "torch.distributed.checkpoint.state_dict"


def watch_checkpoints(undo: Undo) -> None:
    """Have the functions of ``CHECKPOINTS``, if it has been imported, look at each optimizer that they are given.

    Args:
        undo: Takes the callback that puts torch's function back.
    """

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_optim_state(optim: Any, *args: Any, **kwargs: Any) -> Any:
            check = getattr(optim, "_check_named_by_model", None)
            if check is not None:
                check()
            return original(optim, *args, **kwargs)

        return init_optim_state

    module = sys.modules.get(CHECKPOINTS)
    if module is not None:
        patch_attribute(undo, module, "_init_optim_state", checked)
