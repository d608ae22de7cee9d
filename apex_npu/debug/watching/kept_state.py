# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``KeptState``: the state besides parameters that forwards read and change, and that a replay restores."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apex_npu.backends._torch_private import tree_leaves, tree_map

# Attributes that every module has; their contents are not a forward's to write, except for the buffers.
_OF_MODULES = set(vars(nn.Module()))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class KeptState:
    """A copy of the buffers, the modes and the states of torch's generators, taken when it is created."""

    def __init__(self, models: Iterable[nn.Module], devices: Iterable[torch.device]) -> None:
        """Copy the state of ``models``, which draw random numbers on the host and on ``devices``."""
        self._devices = [d for d in dict.fromkeys(devices) if hasattr(getattr(torch, d.type, None), "get_rng_state")]
        modules = dict.fromkeys(module for model in models for module in _modules_of(model))
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

        This also undoes changes of modules' attributes, whose lists, dicts, arrays, tensors and generators are copies
        in the block, and of the generators of Python and NumPy.
        """
        now = [(module, dict(vars(module)), dict(module._buffers)) for module in self._modules]
        states = self._random_states(), np.random.get_state(), random.getstate()
        copies: dict[int, Any] = {}  # of attributes, as several modules may share one
        try:
            for module, mode, own in zip(self._modules, self._modes, _copied(self._buffers), strict=True):
                for name, value in _own_attributes(module):
                    if id(value) not in copies:
                        copies[id(value)] = tree_map(_copy_of, value)
                    vars(module)[name] = copies[id(value)]
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


def _copied(buffers: Iterable[dict[str, Tensor | None]]) -> list[dict[str, Tensor | None]]:
    """Copy buffers; a buffer that several modules share is copied once."""
    copies: dict[Tensor | None, Tensor | None] = {None: None}
    with torch.no_grad():
        return [
            {n: copies[b] if b in copies else copies.setdefault(b, b.detach().clone()) for n, b in own.items()}  # type: ignore[union-attr]
            for own in buffers
        ]


def _own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of ``module`` that not every module has."""
    return [(name, value) for name, value in vars(module).items() if name not in _OF_MODULES]


def _modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of ``model``, and those in lists, tuples and dicts that are attributes."""
    for module in model.modules():
        yield module
        containers = [value for _, value in _own_attributes(module) if isinstance(value, (list, tuple, dict))]
        for leaf in tree_leaves(containers) if containers else ():
            if isinstance(leaf, nn.Module):
                yield from leaf.modules()


def _copy_of(value: Any) -> Any:
    """Return a copy of a value that a forward may write in place, and other values themselves."""
    if isinstance(value, Tensor):  # a parameter, or a result with a graph, is used by others, too
        return value if value.requires_grad or isinstance(value, nn.Parameter) else value.detach().clone()
    if isinstance(value, (set, list, dict, np.ndarray)):  # lists and dicts are of classes that tree_map does not know
        return copy.copy(value)
    return copy.deepcopy(value) if isinstance(value, _GENERATORS) else value
