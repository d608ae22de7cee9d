# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Labels``: the ranges that show in profilers what amp does in a step: ``amp.forward``, ``amp.wait`` and so on.

An ordinary step has no trace of them. While a profiler is on, the functions of ``_LABELLED`` are replaced by ones that
open a range around them; a block detects the profiler by one comparison. So ranges cost nothing without a profiler,
and the functions of a step stay short. A context in each of them would cost a call in every step.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.profiler import record_function

from apex_npu.amp.inspect import settings
from apex_npu.backends._torch_private import torch_profiler
from apex_npu.backends.patching import Undo, patch_attribute
from apex_npu.debug.watching.opening import is_of_amp

# The module or class where a function is looked up, its name there, and its label. A function that several modules
# import is listed for each.
_LABELLED = (
    ("amp.amp_scaler", "any_raised", "amp.wait"),
    ("amp.block", "any_raised", "amp.wait"),
    ("amp.block", "read_and_clear_saturation", "amp.wait"),
    ("amp.fused_unscale", "any_raised", "amp.wait"),
    ("amp.overflow_check", "any_raised", "amp.wait"),
    ("amp.grad_sync", "agree_on_overflow", "amp.wait"),
    ("backends.host_copy:HostCopy", "__bool__", "amp.wait"),
    ("amp.optimizer_state:AmpOptimizerState", "skip_step", "amp.skip"),
    ("amp.amp_optimizer:AmpOptimizerMixin", "_clip_at_once", "amp.clip"),
    ("amp.pending_step:PendingStep", "clip", "amp.clip"),
    ("amp.clip_guard", "clip_by_torch", "amp.clip"),
    ("amp.float32_masters:Float32Masters", "end_step", "amp.copy_masters"),
    ("optimizers.combined_accessors:CombinedAccessors", "clip_optimizer_grad_norm_fused", "amp.clip"),
    ("optimizers.base:FusedOptimizer", "_fuse_again", "amp.fuse"),
    ("distributed.grad_reducer:GradReducer", "finish", "amp.all_reduce"),
    ("debug.watching.stream:Stream", "_look", "amp.watch"),
)
# Held while the one ``Labels`` is created or closed, as blocks of several threads may do this.
_lock = threading.Lock()


def _labelled(label: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return original(*args, **kwargs)

    return call


def _sending(original: Callable[..., Any]) -> Callable[..., Any]:
    def send(reducer: Any, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"amp.all_reduce[{reducer._next}]"):
            return original(reducer, *args, **kwargs)

    return send


def _opening(original: Callable[..., Any]) -> Callable[..., LabelledBlock]:
    return lambda *args: LabelledBlock(original(*args))


def _owner(path: str) -> Any:
    module, _, name = path.partition(":")
    found = importlib.import_module(f"apex_npu.{module}")
    return getattr(found, name) if name else found


class LabelledBlock:
    """A block with three ranges: for its work before backward, for backward, and for its work afterwards."""

    def __init__(self, block: Any) -> None:
        self._block = block
        self.scale: float = block.scale
        self._backward: record_function | None = None

    def begin(self) -> None:
        with record_function("amp.scale_up"):
            self._block.begin()
        self._backward = record_function("amp.backward")
        self._backward.__enter__()

    def multiplied(self, scaled_loss: Tensor) -> Tensor:
        found: Tensor = self._block.multiplied(scaled_loss)
        return found

    def end(self) -> None:
        self._end_backward()
        with record_function("amp.unscale_and_check"):
            self._block.end()

    def abandon(self, error: BaseException) -> None:
        self._end_backward()
        self._block.abandon(error)

    def _end_backward(self) -> None:
        backward, self._backward = self._backward, None
        if backward is not None:
            backward.__exit__(None, None, None)


class Labels:
    """The ranges, from their creation until they are closed.

    Attributes:
        kept: The number of open ``profiler_ranges``, which keep the ranges whether or not a profiler is on.
    """

    def __init__(self) -> None:
        """Open ranges from now on."""
        self.kept = 0
        self._undo = Undo()
        self._forward = threading.local()
        for path, name, label in _LABELLED:
            patch_attribute(self._undo, _owner(path), name, functools.partial(_labelled, label))
        patch_attribute(self._undo, _owner("distributed.grad_reducer:GradReducer"), "_send", _sending)
        patch_attribute(self._undo, _owner("amp.scale_loss"), "_open_block", _opening)
        for hook in (
            torch_module.register_module_forward_pre_hook(self.enter_module),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
        ):
            self._undo.callback(hook.remove)

    def close_unless_used(self) -> None:
        """Stop opening ranges, unless a profiler is on or ``profiler_ranges`` is open."""
        with _lock:
            if settings.labels is self and not self.kept and not torch_profiler._is_profiler_enabled:
                settings.labels = None
                self._undo.close()

    # ---- forward ---------------------------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Open a range if the forward of ``module`` is that of an amp model."""
        if torch.compiler.is_compiling():
            return
        open_ones = vars(self._forward).setdefault("open", [])
        if not open_ones and not self.kept and not torch_profiler._is_profiler_enabled:
            self.close_unless_used()  # a profiler has ended, and no block has followed
            return
        if not is_of_amp(module):
            return
        label = None if open_ones else record_function("amp.forward")  # a model may be part of another
        if label is not None:
            label.__enter__()
        open_ones.append((module, label))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        open_ones = vars(self._forward).get("open", [])
        if open_ones and open_ones[-1][0] is module:
            _, label = open_ones.pop()
            if label is not None:
                label.__exit__(None, None, None)


def follow_profiler() -> None:
    """Open ranges if a profiler is on, and close them if not; ``scale_loss`` calls this when that has changed."""
    with _lock:
        labels = settings.labels
        if labels is None and torch_profiler._is_profiler_enabled:
            settings.labels = Labels()
    if labels is not None:
        labels.close_unless_used()


@contextmanager
def profiler_ranges() -> Iterator[None]:
    """Open the ranges of amp in this context, for profilers other than torch's.

    ``torch.profiler`` and ``torch.autograd.profiler.emit_nvtx`` need no such context: the first ``scale_loss`` block
    that runs under one of them opens the ranges. torch_npu's profiler does not expose whether it is on.

    Example::

        >>> with amp.debug.profiler_ranges():
        ...     output = model(input)
    """
    with _lock:
        labels = settings.labels = settings.labels or Labels()
        labels.kept += 1
    try:
        yield
    finally:
        with _lock:
            labels.kept -= 1
        labels.close_unless_used()
