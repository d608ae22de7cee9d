# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``KeptState``: the state besides parameters that forwards read and change, and that a replay restores."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apex_npu.backends._torch_private import tree_leaves

# Attributes that every module has. KeptState restores buffers and modes; a forward does not write the others.
_OF_MODULES = set(vars(nn.Module()))
_UNSEEN = (np.ndarray, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_Buffers = list[dict[str, Tensor | None]]


class KeptState:
    """A copy of the buffers, the modes and the states of torch's generators, taken when it is created."""

    def __init__(self, models: Iterable[nn.Module], devices: Iterable[torch.device]) -> None:
        """Copy the state of ``models``, which draw random numbers on the host and on ``devices``."""
        self._devices = [d for d in dict.fromkeys(devices) if hasattr(getattr(torch, d.type, None), "get_rng_state")]
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self._modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._modes = [module.training for module in self._modules]
        self._buffers = _copied([module._buffers for module in self._modules])
        self._random = self._random_states()

    def _random_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(getattr(torch, d.type).get_rng_state(d) for d in self._devices)]

    def _set_random_states(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            getattr(torch, device.type).set_rng_state(state, device)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore the copied state in the block, with copies of the buffers; undo all changes afterwards.

        This also undoes changes of modules' attributes and of the generators of Python and NumPy.
        """
        now = [(module, dict(vars(module)), dict(module._buffers)) for module in self._modules]
        states = self._random_states(), np.random.get_state(), random.getstate()
        try:
            for module, mode, own in zip(self._modules, self._modes, _copied(self._buffers), strict=True):
                vars(module)["training"] = mode
                module._buffers.update(own)
            self._set_random_states(self._random)
            yield
        finally:
            self._set_random_states(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
            for module, attributes, buffers in now:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)


def _copied(buffers: Iterable[dict[str, Tensor | None]]) -> _Buffers:
    """Copy buffers; a buffer that several modules share is copied once."""
    copies: dict[Tensor | None, Tensor | None] = {None: None}
    with torch.no_grad():
        return [
            {n: copies[b] if b in copies else copies.setdefault(b, b.detach().clone()) for n, b in own.items()}  # type: ignore[union-attr]
            for own in buffers
        ]


class Attributes:
    """The attributes of a model's modules that a forward may write and that ``KeptState`` does not restore."""

    def __init__(self, model: nn.Module) -> None:
        """Record the attributes as they are now."""
        self._held = [
            (module, name, value, _contents(value))
            for module in model.modules()
            for name, value in vars(module).items()
            if name not in _OF_MODULES and isinstance(value, (Tensor, list, dict, set, tuple, deque, *_UNSEEN))
        ]
        scripted = (m for m in model.modules() if isinstance(m, torch.jit.ScriptModule))
        self._out_of_reach = any(any(True for _ in module.buffers()) for module in scripted)

    def written(self) -> str:
        """Return the name of an attribute that may have been written since; empty if there is none."""
        if self._out_of_reach:
            return "a buffer of torch.jit"
        found = ((module, name) for module, name, value, was in self._held if was is None or was != _contents(value))
        return next((f"{name} of {type(module).__name__}" for module, name in found), "")


def _contents(value: Any) -> list[Any] | None:
    """Return values that change when ``value`` or its contents are written; None for kinds that cannot be compared."""
    found: list[Any] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, _UNSEEN):
            return None
        found.append(sorted(map(id, leaf)) if isinstance(leaf, set) else id(leaf))
        tensors = [leaf] if isinstance(leaf, Tensor) else leaf.buffers() if isinstance(leaf, nn.Module) else ()
        found += [tensor._version for tensor in tensors if not tensor.is_inference()]
    return found
