# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Forward``: what a model was called with, kept so that it can be called once more with the same result."""

from __future__ import annotations

import functools
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apex_npu.backends import is_capturing
from apex_npu.debug.places import Place, calling_line


class NotReplayedError(Exception):
    """A forward cannot be run once more."""


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in the arguments or the outputs of a model: in lists, tuples, mappings, dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name, None) for field in fields(value)]
    for item in items:
        yield from tensors_of(item)


def _autocast_of(device_types: Iterable[str]) -> dict[str, tuple[torch.dtype, bool, bool]]:
    """The dtype of autocast, whether it is on, and whether it caches weights."""
    caches = torch.is_autocast_cache_enabled()
    return {kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), caches) for kind in device_types}


class RandomState:
    """The states of the generators that a forward may draw from: torch's, NumPy's and Python's own."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """As they are now, on the host and on ``devices``."""
        self._host = torch.random.get_rng_state()
        modules: list[tuple[Any, torch.device]] = [(getattr(torch, d.type, None), d) for d in devices]
        self._devices = [(m, d, m.get_rng_state(d)) for m, d in modules if hasattr(m, "get_rng_state")]
        self._numpy, self._python = np.random.get_state(), random.getstate()

    def set(self) -> None:
        """Make them so again."""
        torch.random.set_rng_state(self._host)
        for module, device, state in self._devices:
            module.set_rng_state(state, device)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


@dataclass(eq=False)
class Forward:
    """One call of a model.

    Attributes:
        module: The model.
        args: What it was called with, by reference.
        kwargs: Likewise.
        place: The line that has called it.
        gradients: What backward has passed to its outputs, by their number among those that require a gradient; a
            backward that is repeated adds another entry.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: Place | None

    def __post_init__(self) -> None:
        """Keep what else its result depends on."""
        given = list(tensors_of((self.args, self.kwargs)))
        self._versions = [(tensor, tensor._version) for tensor in given if not tensor.is_inference()]
        owners = self.module.modules()
        with torch.no_grad():
            self._buffers = [(o, n, b.clone()) for o in owners for n, b in o._buffers.items() if b is not None]
        tensors = [*self.module.parameters(), *given]
        devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type != "meta")
        self._devices = [device for device in devices if device.type != "cpu"]
        self._random = RandomState(self._devices)
        self._autocast = _autocast_of({"cpu", *(device.type for device in devices)})

    def why_not(self) -> str | None:
        """Why it cannot be called with the same result; None: it can."""
        for i, (tensor, version) in enumerate(self._versions):
            if tensor._version != version:
                return (
                    f"tensor {i} of its arguments, of shape {list(tensor.shape)}, was written in place since, by the "
                    "model or by the script"
                )
        return None

    @property
    def inputs(self) -> list[Tensor]:
        """The arguments that require a gradient."""
        return [tensor for tensor, _ in self._versions if tensor.requires_grad]

    @contextmanager
    def as_it_was(self) -> Iterator[Callable[[], list[Tensor]]]:
        """Give random numbers, buffers and autocast as they were before it; afterwards they are as they are now.

        Returns:
            From ``with``: calls the model, and returns the outputs that require a gradient.
        """
        now = RandomState(self._devices)
        buffers = [(owner, name, owner._buffers[name]) for owner, name, _ in self._buffers if name in owner._buffers]
        with ExitStack() as stack:
            stack.callback(now.set)
            for owner, name, buffer in buffers:
                stack.callback(owner._buffers.__setitem__, name, buffer)
            for owner, name, buffer in self._buffers:
                owner._buffers[name] = buffer.clone()
            stack.enter_context(torch.enable_grad())
            here = _autocast_of(self._autocast)
            for device_type, state in self._autocast.items():
                if state != here[device_type]:
                    stack.enter_context(torch.autocast(device_type, *state))
            self._random.set()
            yield self._call

    def _call(self) -> list[Tensor]:
        return [t for t in tensors_of(self.module(*self.args, **self.kwargs)) if t.requires_grad]


class _Hook:
    """A hook of a module that belongs to that module alone: its copies and pickles have none."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call(*args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook()

    def __copy__(self) -> _Hook:
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()


class Forwards:
    """Keeps what models are called with, for as long as the graph of what they have returned lives."""

    def __init__(self, gradient_arrived: Callable[[Forward, int, Tensor], None]) -> None:
        """Of no model so far.

        Args:
            gradient_arrived: Is called in backward, with the number of the output and its gradient.
        """
        self._gradient_arrived = gradient_arrived
        self._hooks: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
        self._open = threading.local()

    @property
    def models(self) -> list[nn.Module]:
        """Those whose calls are kept, as long as they are there."""
        return list(self._hooks)

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Keep the calls of ``models``, and of no others."""
        if len(models) == len(self._hooks) and all(model in self._hooks for model in models):
            return
        self.end()
        for model in models:
            before, after = _Hook(self._forward_begins), _Hook(self._forward_ended)
            self._hooks[model] = [
                model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                model.register_forward_hook(after, always_call=True, with_kwargs=True),
            ]

    def end(self) -> None:
        """Keep no calls."""
        for hooks in list(self._hooks.values()):
            for hook in hooks:
                hook.remove()
        self._hooks.clear()

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outer: list[tuple[nn.Module, Forward | None]] = vars(self._open).setdefault("modules", [])
        is_outermost = not outer and module in self._hooks and torch.is_grad_enabled() and not is_capturing()
        if is_outermost:
            place = calling_line(3)  # past the hook, and what torch calls it by
            outer.append((module, Forward(module, args, kwargs, place if isinstance(place, Place) else None)))
        else:
            outer.append((module, None))

    def _forward_ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        outer = self._open.modules
        while outer:  # those inside of it that an exception has ended
            begun, forward = outer.pop()
            if begun is module:
                break
        if forward is not None and begun is module:
            outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
            for i, tensor in enumerate(outputs):
                tensor.register_hook(functools.partial(self._note_gradient, forward, i))

    def _note_gradient(self, forward: Forward, i: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._gradient_arrived(forward, i, gradient)
