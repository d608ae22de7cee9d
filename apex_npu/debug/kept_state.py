# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``KeptState``: what the forward of a model depends on besides its arguments, kept so that it can be put back."""

from __future__ import annotations

import copy
import random
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apex_npu.autocast.containers import rebuild_tuple

# Those of other classes may share what they hold with their copies.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# So many items are copied for a forward; what is beyond, as a vocabulary, is kept by reference.
_MOST_ITEMS = 1000
_DEEPEST = 8


def leaves_of(value: Any, depth: int = 0) -> Iterator[Any]:
    """What is in the containers of ``value``: lists, tuples, mappings, dataclasses."""
    items: Iterable[Any]
    if depth > _DEEPEST:
        return
    if isinstance(value, (list, tuple, deque, set)):
        items = list(value)
    elif isinstance(value, Mapping):
        items = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name, None) for field in fields(value)]
    else:
        yield value
        return
    for item in items:
        yield from leaves_of(item, depth + 1)


def tensors_of(value: Any) -> list[Tensor]:
    """The distinct tensors among them."""
    return list({id(leaf): leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)}.values())


class Copier:
    """Copies containers, each once, and what is in them by ``change``."""

    def __init__(self, change: Callable[[Any], Any], most_items: float = _MOST_ITEMS) -> None:
        """Up to so many items are copied."""
        self._change = change
        self._left = most_items
        # With the originals, whose ids others would get.
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any, depth: int = 0) -> Any:
        """A copy of ``value``."""
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, tuple):
            return rebuild_tuple(value, [self(item, depth + 1) for item in value]) if depth < _DEEPEST else value
        if type(value) not in _CONTAINERS:
            result = self._change(value)
            self._known[id(value)] = value, result
            return result
        self._left -= len(value)
        if self._left < 0 or depth == _DEEPEST:
            return value
        result = copy.copy(value)
        self._known[id(value)] = value, result
        if not isinstance(value, set):
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                result[key] = self(item, depth + 1)
        return result

    @property
    def containers(self) -> list[Any]:
        """Those that were copied."""
        return [value for value, _ in self._known.values() if type(value) in _CONTAINERS]


class Generators:
    """The states of generators of random numbers."""

    def __init__(self, devices: Sequence[torch.device], own: Iterable[Any]) -> None:
        """Torch's on the host and on ``devices``, NumPy's and Python's, and ``own``, those of a model."""
        self._host = torch.random.get_rng_state()
        modules: list[tuple[Any, torch.device]] = [(getattr(torch, d.type, None), d) for d in devices]
        self._devices = [(m, d, m.get_rng_state(d)) for m, d in modules if hasattr(m, "get_rng_state")]
        self._numpy, self._python = np.random.get_state(), random.getstate()
        self._others = [(one, _state_of(one)) for one in own]

    def set(self) -> None:
        """Make them so again."""
        torch.random.set_rng_state(self._host)
        for module, device, state in self._devices:
            module.set_rng_state(state, device)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        for one, state in self._others:
            if isinstance(one, np.random.Generator):
                one.bit_generator.state = state
            elif isinstance(one, random.Random):
                one.setstate(state)
            else:
                one.set_state(state)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


class _Weak:
    """A tensor with a graph: kept itself, it would keep the graphs of earlier forwards."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)


class KeptState:
    """The attributes of a model's modules, and the generators that it may draw from, as they are now.

    Copied are buffers, other tensors without a graph, numpy's arrays, and lists, dicts, sets and deques of them.
    Objects of other classes are kept by reference.

    Attributes:
        computes_parameters: They have a graph of their own.
        scripted: It has a module of torch.jit with buffers, which are out of reach.
    """

    def __init__(self, model: nn.Module, given: Any, devices: Sequence[torch.device]) -> None:
        """Of ``model``, which is called with ``given``."""
        self._devices = devices
        self._drawn_from: dict[int, Any] = {
            id(leaf): leaf for leaf in leaves_of(given) if isinstance(leaf, _GENERATORS)
        }
        self._modules = {id(module): module for module in model.modules()}
        copied = Copier(self._kept)
        with torch.no_grad():
            waiting = list(self._modules.values())
            self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
            while waiting:
                known, module = len(self._modules), waiting.pop()
                self._attributes.append((module, {n: copied(v) for n, v in vars(module).items() if not _is_hook(n)}))
                waiting += list(self._modules.values())[known:]  # in lists, as a teacher that is not to be trained
        modules = list(self._modules.values())
        self.scripted = any(isinstance(m, torch.jit.ScriptModule) and any(True for _ in m.buffers()) for m in modules)
        found = [param for module in modules for param in module._parameters.values() if param is not None]
        self._params = list(dict.fromkeys(found))
        self.computes_parameters = any(param.grad_fn is not None for param in self._params)
        # Their memory may be another one since: optimizers fuse them.
        self._versions = [param._version for param in self._params]
        self._generators = Generators(devices, self._drawn_from.values())

    def _kept(self, leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            self._modules.update((id(module), module) for module in leaf.modules())
        elif isinstance(leaf, _GENERATORS):
            self._drawn_from[id(leaf)] = leaf
        elif isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            return _Weak(leaf)
        return _copied(leaf)

    def written_parameter(self) -> Tensor | None:
        """The first parameter that has been written since."""
        pairs = zip(self._params, self._versions, strict=True)
        return next((param for param, version in pairs if version != param._version), None)

    @contextmanager
    def put_back(self) -> Iterator[list[Tensor]]:
        """Make everything as it was then; afterwards it is as it is now.

        Returns:
            From ``with``: a list that afterwards has the parameters that were written within.
        """
        now = _Now(self._attributes, self._params)
        generators = Generators(self._devices, self._drawn_from.values())
        written: list[Tensor] = []
        try:
            writable = Copier(_writable)
            for module, kept in self._attributes:
                hooks = {name: value for name, value in vars(module).items() if _is_hook(name)}
                attributes = {name: writable(value) for name, value in kept.items()}
                _set_attributes(module, {**hooks, **{n: v for n, v in attributes.items() if not isinstance(v, _Weak)}})
            self._generators.set()
            yield written
        finally:
            generators.set()
            written += now.put_back()


class _Now:
    """What is put back after a replay: the very objects, with what they hold."""

    def __init__(self, attributes: Sequence[tuple[nn.Module, Any]], params: Sequence[Tensor]) -> None:
        self._attributes = [(module, dict(vars(module))) for module, _ in attributes]
        self._values: list[tuple[Any, Any]] = []
        look = Copier(self._look, most_items=float("inf"))
        for _, own in self._attributes:
            for value in own.values():
                look(value)
        self._containers = [(container, copy.copy(container)) for container in look.containers]
        self._params = [(param, param.data, param.detach().clone()) for param in params]

    def _look(self, leaf: Any) -> Any:
        value = _copied(leaf)
        if value is not leaf:
            self._values.append((leaf, value))
        return leaf

    def put_back(self) -> list[Tensor]:
        """Make it so; returns the parameters that had been written."""
        for module, own in self._attributes:
            _set_attributes(module, own)
        for container, content in self._containers:
            if _items_of(container) != _items_of(content):
                _refill(container, content)
        written = []
        with torch.no_grad():
            for value, copied in self._values:
                if isinstance(value, Tensor):
                    _write(value, copied)
                else:
                    value[...] = copied
            for param, data, value in self._params:
                moved = _address(param) != _address(data)
                if moved:
                    param.data = data
                written += [param] * (_write(data, value) or moved)
        return written


def _items_of(container: Any) -> list[Any]:
    """What is in it, by identity."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return sorted(map(id, container)) if isinstance(container, set) else list(map(id, container))


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
        return
    container.clear()
    if isinstance(container, deque):
        container.extend(content)
    else:
        container.update(content)


def _copied(leaf: Any) -> Any:
    """A copy of what may be written, without a graph; else ``leaf``."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    is_state = isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and not leaf.requires_grad
    return leaf.detach().clone() if is_state else leaf


def _writable(kept: Any) -> Any:
    if isinstance(kept, _Weak):
        tensor = kept.tensor()
        return kept if tensor is None else tensor
    return _copied(kept)


def _write(tensor: Tensor, value: Tensor) -> bool:
    """Make the elements of ``tensor`` those of ``value``; False where they are already."""
    try:
        if _are_same_bytes(tensor, value):
            return False
        tensor.copy_(value)
    except (RuntimeError, NotImplementedError, TypeError):  # of a subclass that has no memory of its own
        return False
    return True


def _are_same_bytes(one: Tensor, other: Tensor) -> bool:
    if one.layout != torch.strided or one.is_complex():
        return torch.equal(one, other)
    # nan is not equal to itself
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return -1


def _is_hook(name: str) -> bool:
    """Hooks, and modules, are those of the time when it runs again."""
    return name == "_modules" or (name.startswith("_") and "_hooks" in name)


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    own = vars(module)
    for name in [name for name in own if name not in attributes]:
        del own[name]
    own.update(attributes)
