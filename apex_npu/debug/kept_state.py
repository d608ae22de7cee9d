# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``KeptState``: what the forward of a model depends on besides its arguments, kept so that it can be put back."""

from __future__ import annotations

import copy
import random
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from apex_npu.autocast.containers import rebuild_tuple

# Larger containers are tables, as of a vocabulary, and deeper ones may contain themselves.
_LARGEST, _DEEPEST = 1000, 8
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def mapped(value: Any, change: Callable[[Any], Any], *, dataclasses: bool = True, depth: int = 0) -> Any:
    """``value`` with new containers, of the same types, and what ``change`` makes of all that is in them.

    Args:
        value: Anything.
        change: Takes what is in a container, or ``value`` itself where it is none.
        dataclasses: They are containers, too.
        depth: Of containers around ``value``.
    """

    def inner(item: Any) -> Any:
        return mapped(item, change, dataclasses=dataclasses, depth=depth + 1)

    if isinstance(value, (tuple, list, deque, set, UserList, MutableMapping)):
        if depth == _DEEPEST or len(value) > _LARGEST:
            return value
        if isinstance(value, tuple):
            return rebuild_tuple(value, [inner(item) for item in value])
        result: Any = copy.copy(value)
        if not isinstance(value, set):
            for key, item in list(value.items() if isinstance(value, Mapping) else enumerate(value)):
                result[key] = inner(item)
        return result
    if dataclasses and is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for name in [field.name for field in fields(value) if hasattr(value, field.name)]:
            object.__setattr__(result, name, inner(getattr(value, name)))
        return result
    return change(value)


def leaves_of(value: Any) -> list[Any]:
    """What is in the containers of ``value``."""
    found: list[Any] = []

    def take(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    mapped(value, take)
    return found


def tensors_of(value: Any) -> list[Tensor]:
    """The distinct tensors among them."""
    return list({id(leaf): leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)}.values())


class Clones:
    """Copies of tensors, made again where they have been written since."""

    def __init__(self) -> None:
        """None so far."""
        self._known = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor``, which is not to be written."""
        written = None if tensor.is_inference() else _written(tensor)
        known = self._known.get(tensor)
        if known is None or written is None or known[0] != written:
            known = self._known[tensor] = written, tensor.detach().clone()
        result: Tensor = known[1]
        return result


class Generators:
    """The states of generators of random numbers."""

    def __init__(self, devices: Sequence[torch.device], own: Iterable[Any]) -> None:
        """Torch's on the host and on ``devices``, NumPy's and Python's, and ``own``, those of a model."""
        self._host = torch.random.get_rng_state()
        modules: list[tuple[Any, torch.device]] = [(getattr(torch, d.type, None), d) for d in devices]
        self._devices = [(m, d, m.get_rng_state(d)) for m, d in modules if hasattr(m, "get_rng_state")]
        self._numpy, self._python = np.random.get_state(), random.getstate()
        self._own = [(one, _state_of(one)) for one in own]

    def set(self) -> None:
        """Make them so again."""
        torch.random.set_rng_state(self._host)
        for module, device, state in self._devices:
            module.set_rng_state(state, device)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        for one, state in self._own:
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


class KeptState:
    """The attributes of a model's modules, and the generators that it may draw from, as they are now.

    Containers among the attributes, buffers and other tensors are copied; objects of other classes are not.

    Attributes:
        computes_parameters: They have a graph of their own.
    """

    def __init__(self, model: nn.Module, given: Any, devices: Sequence[torch.device], clones: Clones) -> None:
        """Of ``model``, which is called with ``given``; ``clones`` are shared with other calls."""
        self._clones, self._devices = clones, devices
        self._own: dict[int, Any] = {id(leaf): leaf for leaf in leaves_of(given) if isinstance(leaf, _GENERATORS)}
        with torch.no_grad():
            self._attributes = [(module, self._kept(module)) for module in model.modules()]
        self.computes_parameters = any(param.grad_fn is not None for param in model.parameters())
        # Their memory may be another one since: optimizers fuse them.
        self._versions = [(param, param._version) for param in model.parameters()]
        self._generators = Generators(devices, self._own.values())

    def _kept(self, module: nn.Module) -> dict[str, Any]:
        attributes = {name: value for name, value in vars(module).items() if not _is_left_out(name)}
        return {
            name: dict(value) if name == "_parameters" else mapped(value, self._kept_leaf, dataclasses=False)
            for name, value in attributes.items()
        }

    def _kept_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, _GENERATORS):
            self._own[id(leaf)] = leaf
        return self._clones.of(leaf) if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf

    def written_parameter(self) -> Tensor | None:
        """The first parameter that has been written since."""
        return next((param for param, version in self._versions if version != param._version), None)

    @contextmanager
    def put_back(self) -> Iterator[list[Tensor]]:
        """Make everything as it was then; afterwards it is as it is now.

        Returns:
            From ``with``: the parameters that were written within, known afterwards.
        """
        now = Generators(self._devices, self._own.values())
        attributes = [(module, dict(vars(module))) for module, _ in self._attributes]
        values = [(param, param.data, param.detach().clone()) for param, _ in self._versions]
        written: list[Tensor] = []
        try:
            for module, kept in self._attributes:
                left_out = {name: value for name, value in vars(module).items() if _is_left_out(name)}
                _set_attributes(module, {**left_out, **{n: _writable(n, value) for n, value in kept.items()}})
            self._generators.set()
            yield written
        finally:
            for module, own in attributes:
                _set_attributes(module, own)
            with torch.no_grad():
                for param, data, value in values:
                    moved, changed = param.data_ptr() != data.data_ptr(), not torch.equal(data, value)
                    if moved:
                        param.data = data
                    if changed:
                        data.copy_(value)
                    written += [param] * (moved or changed)
            now.set()


def _is_left_out(name: str) -> bool:
    """Hooks are called as they are when it runs again."""
    return name == "_modules" or "_hooks" in name


def _written(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr() if tensor.layout == torch.strided else -1


def _writable(name: str, value: Any) -> Any:
    if name == "_parameters":
        return dict(value)

    def copied(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf

    return mapped(value, copied, dataclasses=False)


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    own = vars(module)
    for name in [name for name in own if name not in attributes]:
        del own[name]
    own.update(attributes)
