# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Casts the inputs of submodules that are called directly: ``model.encoder(x)`` accepts the inputs of ``model(x)``.

Inside the model's own forward nothing is cast a second time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from apex_npu.autocast.containers import cast_inputs
from apex_npu.backends._torch_private import is_in_backward

# Replaces a thread's identifier, which torch.compile cannot trace.
TRACED = -1


def call_marked(threads: list[int], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``. Meanwhile ``threads`` has an entry for this thread; its append and remove are atomic."""
    if torch.compiler.is_compiling():
        threads.append(TRACED)
        try:
            return function(*args, **kwargs)
        finally:
            threads.pop()  # dynamo of torch 2.6 cannot trace list.remove
    thread_id = threading.get_ident()
    threads.append(thread_id)
    try:
        return function(*args, **kwargs)
    finally:
        threads.remove(thread_id)


def is_marked(threads: list[int]) -> bool:
    """Return whether this thread is inside ``call_marked``; in code that is being traced, whether any thread is."""
    return bool(threads) if torch.compiler.is_compiling() else threading.get_ident() in threads


class ModelRef:
    """A reference to the model, which the hooks of all its submodules share.

    A copy or a pickle of a submodule alone does not include the model. A pickle of the model also has this object in an
    attribute, which sets the model when it is loaded.

    Attributes:
        model: The model; None if it was not pickled together with this object.
        is_compiled: The model is a module made by torch.compile.
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
        """Return a reference to the copy of the model if it is also copied, else to the same model."""
        return ModelRef(memo.get(id(self.model), self.model))

    def __reduce__(self) -> Any:
        """Pickle the reference without the model."""
        return ModelRef, ()


class CastInputs:
    """A forward pre-hook of a submodule. The hook of a submodule's copy refers to the model's copy.

    Attributes:
        of: The reference to the model with the wrapped forward.
        alone: The last forward of the submodule was called directly.
    """

    def __init__(self, of: ModelRef) -> None:
        """Create a hook; only ``watch_submodules`` calls this."""
        self.of = of
        self.alone = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast the inputs, unless the model itself is running in this thread, or is no longer wrapped.

        In backward the model does not run, but checkpointing calls its forward again.
        """
        # torch.compile cannot trace code that reads the module that it has made, whose forward is not traced.
        if torch.compiler.is_compiling() and self.of.is_compiled:
            return None
        model = self.of.model
        wrapper: Any = None if model is None else model.__dict__.get("forward")  # a CastForward
        dtype = getattr(wrapper, "input_dtype", None)
        if dtype is None:
            return None
        alone = not is_marked(wrapper.running)
        if not torch.compiler.is_compiling():  # code that is called by checkpointing must not write attributes there
            if is_in_backward():
                alone = self.alone
            else:
                self.alone = alone
                if alone:
                    wrapper.ambient.before_forward()
        if not alone:
            return None
        return cast_inputs(args, kwargs, dtype)


def watch_submodules(model: nn.Module, of: ModelRef, dtype: torch.dtype) -> None:
    """Add a ``CastInputs`` for this model to every submodule with parameters of ``dtype``.

    Args:
        model: The model whose submodules may be called directly.
        of: The reference to the model, which all hooks share.
        dtype: The dtype to which inputs are cast.
    """
    for module in _submodules(model):
        if type(module) is nn.Sequential:
            continue  # it only passes its input on
        if any(p.dtype == dtype for p in module.parameters()) and not _own_hooks(module, model):
            module.register_forward_pre_hook(CastInputs(of), with_kwargs=True)


def unwatch_submodules(model: nn.Module) -> None:
    """Remove the hooks of ``watch_submodules`` from ``model``."""
    for module in model.modules():
        for key in _own_hooks(module, model):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _submodules(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        # A hook anywhere in such a layer would disable its fused path for inference; scripted modules take no hooks.
        if not isinstance(child, (nn.TransformerEncoderLayer, torch.jit.ScriptModule)):
            yield child
            yield from _submodules(child)


def _own_hooks(module: nn.Module, model: nn.Module) -> list[int]:
    hooks = module._forward_pre_hooks.items()
    return [key for key, hook in hooks if isinstance(hook, CastInputs) and hook.of.model is model]
