# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What contexts that watch operators require before they are entered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from apex_npu.amp.inspect import models
from apex_npu.backends import is_capturing
from apex_npu.debug.watching.stream import Stream


def inside_of(model: nn.Module) -> nn.Module:
    """The model that DistributedDataParallel, DataParallel and torch.compile hold."""
    while True:
        compiled = vars(model).get("_modules", {}).get("_orig_mod")
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif isinstance(compiled, nn.Module):
            model = compiled
        else:
            return model


def is_of_amp(module: nn.Module) -> bool:
    """Whether ``module`` is, or holds, a model that was passed to ``amp.initialize``."""
    inner = inside_of(module)
    return any(inside_of(model) is inner for model in models())


class WatchingContext:
    """A context that watches the operators of an iteration, by itself or in the steps of a script.

    Attributes:
        stream: What sees the operators; None: it is not open.
    """

    stream: Stream | None = None

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Of ``models``; of those of amp where there are none.

        Raises:
            TypeError: One of ``models`` is no module.
        """
        self._name = type(self).__name__
        for model in models:
            if not isinstance(model, nn.Module):
                raise TypeError(f"{self._name} takes models, torch.nn.Module, got {type(model).__name__}")
        self._models = models

    def __enter__(self) -> Any:
        """Begin."""
        raise NotImplementedError

    def models_to_watch(self, open_already: str | None = None) -> list[nn.Module]:
        """The models; ``open_already`` is the text of the error where another context watches.

        Raises:
            ValueError: There is no model; or another context watches.
            RuntimeError: A CUDA graph is being captured.
        """
        caller = self._name
        if is_capturing():
            raise RuntimeError(
                f"{caller} was entered while a CUDA graph is captured: the host cannot look at what its operators "
                "compute. Run one iteration without a graph"
            )
        if Stream.is_open():
            others = [name for name in ("check_operators", "find_overflow", "record") if name != caller]
            raise ValueError(open_already or f"{caller}, {others[0]} or {others[1]} is open already: leave that before")
        found = list(self._models) or models()
        if not found:
            raise ValueError(f"{caller} needs a model: pass it, or call amp.initialize first")
        return found
