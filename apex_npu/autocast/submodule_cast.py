# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Submodules of a cast model, called by themselves: ``model.encoder(x)`` takes what ``model(x)`` would have taken.

Inside the model's own forward nothing is cast a second time: there the author of the model decides.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from apex_npu.autocast.containers import cast_floating
from apex_npu.backends._torch_private import is_in_backward


class Wrapper(Protocol):
    """What a hook requires of the model's wrapped forward."""

    # The dtype of inputs, or None where nothing is cast.
    input_dtype: torch.dtype | None
    # Threads that are inside it, one entry per call.
    running: list[int]


class ModelRef:
    """Weakly, the model that its own attributes and its submodules' hooks are of: none of them keeps it alive.

    Copies and pickles of a submodule alone do not include its model. With the model one attribute of it is copied that
    refers to it strongly, and calls ``refer_to`` for all that share this object.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """``model``: None until ``refer_to`` is called."""
        self._model = None if model is None else weakref.ref(model)

    def __call__(self) -> nn.Module | None:
        """The model, or None where it is gone, or was not pickled."""
        return None if self._model is None else self._model()

    def refer_to(self, model: nn.Module) -> None:
        """From now on this is the model."""
        self._model = weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelRef:
        """Of a submodule that is copied without its model: that is not copied for it."""
        model = self()
        return ModelRef(model if model is None else memo.get(id(model), model))

    def __reduce__(self) -> Any:
        """Without the model."""
        return ModelRef, ()


class CastInputs:
    """Forward pre-hook of a submodule; that of a submodule's copy is of the model's copy.

    Attributes:
        of: The model with the wrapped forward.
        alone: The last forward has called the submodule by itself.
    """

    def __init__(self, of: ModelRef) -> None:
        """Made by ``watch_submodules``."""
        self.of = of
        self.alone = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``; that of an earlier version has the model."""
        self.of = state["of"] if "of" in state else ModelRef(state["model"])
        self.alone = state["alone"]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast the inputs, unless the model itself is running in this thread, or is no longer wrapped.

        Within backward the model is not running, yet what checkpointing calls there is the forward again.
        """
        # A compiled graph starts at the model; what a thread does elsewhere cannot be asked while tracing.
        if torch.compiler.is_compiling():
            return None
        model = self.of()
        wrapper: Wrapper | None = None if model is None else model.__dict__.get("forward")
        dtype = getattr(wrapper, "input_dtype", None)
        if wrapper is None or dtype is None:
            return None
        if not is_in_backward():
            self.alone = threading.get_ident() not in wrapper.running
        if not self.alone:
            return None
        return (
            tuple([cast_floating(value, dtype) for value in args]),
            {name: cast_floating(value, dtype) for name, value in kwargs.items()},
        )


def watch_submodules(of: ModelRef, dtype: torch.dtype) -> None:
    """Give every submodule that holds parameters of ``dtype`` a ``CastInputs``, if it has none of this model's."""
    model = of()
    assert model is not None
    for module in _submodules(model):
        if type(module) is nn.Sequential:
            continue  # it only hands its input on
        if any(p.dtype == dtype for p in module.parameters()) and not _own_hooks(module, model):
            module.register_forward_pre_hook(CastInputs(of), with_kwargs=True)


def unwatch_submodules(model: nn.Module) -> None:
    """Take them off again."""
    for module in model.modules():
        _remove(module, _own_hooks(module, model))


def unwatch(module: nn.Module) -> None:
    """Take those of any model off ``module``, without its submodules."""
    _remove(module, [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, CastInputs)])


def _submodules(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        # A hook anywhere in such a layer would switch off its fused path for inference; scripted ones take none.
        if not isinstance(child, (nn.TransformerEncoderLayer, torch.jit.ScriptModule)):
            yield child
            yield from _submodules(child)


def _remove(module: nn.Module, keys: list[int]) -> None:
    for key in keys:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def _own_hooks(module: nn.Module, model: nn.Module) -> list[int]:
    hooks = module._forward_pre_hooks.items()
    return [key for key, hook in hooks if isinstance(hook, CastInputs) and hook.of() is model]
