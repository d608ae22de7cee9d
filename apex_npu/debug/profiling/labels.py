# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Labels``: the ranges that show in profilers what amp does in a step: ``amp.forward``, ``amp.wait`` and so on.

Most functions open a range of their own while a profiler is on (``labelled`` in ``_torch_private.py``). The ranges here
are those of the parts of a block, and of the forward of models, for which an ordinary step has no function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.profiler import record_function

from apex_npu.amp.inspect import settings
from apex_npu.backends._torch_private import ranges, torch_profiler
from apex_npu.debug.watching.opening import is_of_amp
from apex_npu.debug.watching.places import ModuleStack


class LabelledBlock:
    """A block with three ranges: for its work before backward, for backward, and for its work afterwards."""

    def __init__(self, block: Any) -> None:
        self._block, self._backward = block, ExitStack()
        self.scale: float = block.scale

    def begin(self, scaled_loss: Tensor) -> Tensor:
        with record_function("amp.scale_up"):
            self._block.begin(scaled_loss)
        self._backward.enter_context(record_function("amp.backward"))
        return scaled_loss

    def end(self) -> None:
        self._backward.close()
        with record_function("amp.unscale_and_check"):
            self._block.end()

    def abandon(self, error: BaseException) -> None:
        self._backward.close()
        self._block.abandon(error)


class Labels:
    """The ranges of blocks and forwards, from its creation until it is closed."""

    around = LabelledBlock  # what scale_loss makes of its block

    def __init__(self) -> None:
        """Open ranges from now on."""
        self._open = ModuleStack()
        self._hooks = [
            torch_module.register_module_forward_pre_hook(self.enter_module),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def close_unless_used(self) -> None:
        """Stop opening ranges, unless a profiler is on or ``profiler_ranges`` is open."""
        if settings.labels is self and not ranges.kept and not torch_profiler._is_profiler_enabled:
            settings.labels = None
            for hook in self._hooks:
                hook.remove()

    # ---- forward ---------------------------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Open a range if the forward of ``module`` is that of an amp model."""
        if torch.compiler.is_compiling():
            return
        if not self._open.calls and not ranges.kept and not torch_profiler._is_profiler_enabled:
            self.close_unless_used()  # a profiler has ended, and no block has followed
            return
        if is_of_amp(module):  # a model may be part of another
            label = None if self._open.calls else record_function("amp.forward")
            if label is not None:
                label.__enter__()
            self._open.push(module, label)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        label = self._open.pop(module)
        if label is not None:
            label.__exit__(None, None, None)


def follow_profiler() -> None:
    """Open ranges if a profiler is on, and close them if not; ``scale_loss`` calls this when that has changed."""
    if settings.labels is not None:
        settings.labels.close_unless_used()
    elif torch_profiler._is_profiler_enabled:
        settings.labels = Labels()


@contextmanager
def profiler_ranges() -> Iterator[None]:
    """Open the ranges of amp in this context, for profilers other than torch's.

    ``torch.profiler`` and ``torch.autograd.profiler.emit_nvtx`` need no such context: the first ``scale_loss`` block
    that runs under one of them opens the ranges. torch_npu's profiler does not expose whether it is on.

    Example::

        >>> with amp.debug.profiler_ranges():
        ...     output = model(input)
    """
    labels = settings.labels = settings.labels or Labels()
    ranges.kept += 1
    try:
        yield
    finally:
        ranges.kept -= 1
        labels.close_unless_used()
