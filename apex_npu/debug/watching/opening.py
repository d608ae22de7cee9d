# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The base class of the contexts that watch operators, and its checks on entry."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from apex_npu.amp.inspect import models
from apex_npu.backends import is_capturing
from apex_npu.debug.watching.stream import Stream


def inside_of(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers of DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        compiled = dict(model.named_children()).get("_orig_mod")
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif isinstance(compiled, nn.Module):
            model = compiled
        else:
            return model


def is_of_amp(module: nn.Module) -> bool:
    """Return whether ``module`` is a model that was passed to ``amp.initialize``, or wraps one."""
    inner = inside_of(module)
    return any(inside_of(model) is inner for model in models())


class WatchingContext:
    """A context that watches the operators of an iteration, by itself or in the steps of a script.

    Attributes:
        stream: The stream that reports the operators; None if the context is not open.
    """

    stream: Stream | None = None

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Store ``models``; if there are none, the context watches the models of amp.

        Raises:
            TypeError: One of ``models`` is not a module.
        """
        caller = type(self).__name__
        for model in models:
            if not isinstance(model, nn.Module):
                raise TypeError(f"{caller}: models must be torch.nn.Module objects, got {type(model).__name__}")
        self._models = models

    def models_to_watch(self) -> list[nn.Module]:
        """Return the models to watch.

        Raises:
            ValueError: There is no model, or another context watches already.
            RuntimeError: A CUDA graph is being captured.
        """
        caller = type(self).__name__
        if is_capturing():
            raise RuntimeError(
                f"{caller} was entered while a CUDA graph is captured, and the host cannot read what its operators "
                "compute: run one iteration without a graph"
            )
        if Stream.is_open():
            raise ValueError("check_operators, find_overflow or record is open already: leave it first")
        found = list(self._models) or models()
        if not found:
            raise ValueError(f"{caller} needs a model: pass it, or call amp.initialize first")
        return found
