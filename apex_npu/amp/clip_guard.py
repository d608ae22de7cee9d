# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Notice torch's gradient clipping where it would do nothing, or the wrong thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch.nn.utils
from torch import Tensor

from apex_npu.amp.patched_functions import patch_attribute

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")


def watch_clipping(undo: ExitStack, look: Callable[[str, Iterable[Tensor]], None]) -> None:
    """Call ``look(name, parameters)`` before each of torch's clipping functions.

    A function that a script has imported by name before is out of reach.

    Args:
        undo: Takes the callbacks that put the functions back.
        look: Sees the parameters, and may warn.
    """

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # it may be a generator
            look(original.__name__, listed)
            return original(listed, *args, **kwargs)

        return clip

    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in _FUNCTIONS:
            patch_attribute(undo, owner, name, watched)
