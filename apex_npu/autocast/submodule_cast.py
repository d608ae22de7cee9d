# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Submodules of a cast model, called by themselves: ``model.encoder(x)`` takes what ``model(x)`` would have taken.

Inside the model's own forward nothing is cast a second time: there the author of the model decides.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from apex_npu.autocast.containers import cast_floating
from apex_npu.backends._torch_private import is_in_backward

# In place of a thread's identifier, which torch.compile cannot trace.
TRACED = -1


class Wrapper(Protocol):
    """What a hook requires of the model's wrapped forward."""

    # The dtype of inputs, or None where nothing is cast.
    input_dtype: torch.dtype | None
    # Threads that are inside it, one entry per call; TRACED where a call is being traced.
    running: list[int]

    def before_forward(self) -> None:
        """A submodule is about to be called by itself, and not by compiled code."""
        ...


class ModelRef:
    """The model that its submodules' hooks are of, which all share this object.

    A copy or a pickle of a submodule alone does not include the model. With the model an attribute of it is pickled
    that has this object, too, and tells it the model.

    Attributes:
        model: The model; None where it has not been pickled along.
        is_compiled: It is what torch.compile has made of a module.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """Refer to ``model``."""
        self.refer_to(model)

    def refer_to(self, model: nn.Module | None) -> None:
        """Refer to ``model`` from now on."""
        self.model = model
        # By name: importing torch._dynamo takes seconds, and a model that is being copied has no submodules yet.
        self.is_compiled = type(model).__name__ == "OptimizedModule"

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelRef:
        """Of a submodule that is copied without its model: that is not copied for it."""
        return ModelRef(memo.get(id(self.model), self.model))

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

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast the inputs, unless the model itself is running in this thread, or is no longer wrapped.

        Within backward the model is not running, yet what checkpointing calls there is the forward again.
        """
        # torch.compile cannot trace what reaches the module that it has made itself, whose forward is not traced.
        if torch.compiler.is_compiling() and self.of.is_compiled:
            return None
        model = self.of.model
        wrapper: Wrapper | None = None if model is None else model.__dict__.get("forward")
        dtype = getattr(wrapper, "input_dtype", None)
        if wrapper is None or dtype is None:
            return None
        if torch.compiler.is_compiling():
            # What a thread does cannot be asked while tracing, nor may what checkpointing calls write an attribute.
            if wrapper.running:
                return None
        else:
            if not is_in_backward():
                self.alone = threading.get_ident() not in wrapper.running
            if not self.alone:
                return None
            if not is_in_backward():
                wrapper.before_forward()
        return (
            tuple([cast_floating(value, dtype) for value in args]),
            {name: cast_floating(value, dtype) for name, value in kwargs.items()},
        )


def watch_submodules(model: nn.Module, of: ModelRef, dtype: torch.dtype) -> None:
    """Give every submodule that holds parameters of ``dtype`` a ``CastInputs``, if it has none of this model's.

    Args:
        model: Whose submodules are called by themselves.
        of: Refers to it, for all of them.
        dtype: What inputs are cast to.
    """
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
    return [key for key, hook in hooks if isinstance(hook, CastInputs) and hook.of.model is model]
