# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's gradient clipping under amp: noticed where it would do the wrong thing, done in one pass where it can be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.utils
from torch import Tensor

from apex_npu.backends.patching import Undo

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")


def watch_clipping(
    undo: Undo,
    look: Callable[[str, list[Tensor]], None],
    clip_of: Callable[[list[Tensor]], Callable[..., Tensor] | None],
) -> None:
    """Stand between scripts and torch's clipping functions, also those that a script has imported by name before.

    Args:
        undo: Takes the callbacks that put the functions back.
        look: Called with a function's name and its parameters before torch clips them; may warn, or raise.
        clip_of: What clips the norm of these instead, in one pass and to the same values; None: leave it to torch.
    """

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        name = original.__name__

        def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # it may be a generator
            # ``foreach`` selects one of torch's implementations.
            asked = len(args) > 3 or kwargs.get("foreach") is not None
            clip_at_once = None if asked or name != "clip_grad_norm_" else clip_of(listed)
            if clip_at_once is None:
                look(f"torch.nn.utils.{name}", listed)
                return clip_by_torch(original, listed, *args, **kwargs)
            kwargs.pop("foreach", None)
            return clip_at_once(*args, **kwargs)

        return clip

    for name in _FUNCTIONS:
        # torch wraps each into no_grad: what the wrapper calls is replaced, and every name of the wrapper stays.
        for cell in getattr(torch.nn.utils.clip_grad, name).__closure__ or ():
            original = cell.cell_contents
            if getattr(original, "__name__", None) != name:
                continue  # of another wrapper
            undo.callback(setattr, cell, "cell_contents", original)
            cell.cell_contents = functools.wraps(original)(watched(original))


def clip_by_torch(original: Callable[..., Any], params: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call ``original``, a function of torch that clips; here, since profilers show it as a range."""
    return original(params, *args, **kwargs)
