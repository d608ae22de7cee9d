# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``KeptState``: what the forward of a model depends on besides its arguments, kept so that it can be put back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apex_npu.backends._torch_private import tree_leaves

# Attributes of every module, of which buffers and modes are kept, and the others are not a forward's to write.
_OF_MODULES = set(vars(nn.Module()))
_UNSEEN = (np.ndarray, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_States = tuple[Tensor, list[tuple[Any, torch.device, Tensor]]]


def _random_states(devices: Sequence[torch.device]) -> _States:
    """Those of torch's generators on the host and on ``devices``."""
    modules: list[tuple[Any, torch.device]] = [(getattr(torch, d.type, None), d) for d in devices]
    found = [(m, device, m.get_rng_state(device)) for m, device in modules if hasattr(m, "get_rng_state")]
    return torch.random.get_rng_state(), found


def _set_random_states(states: _States) -> None:
    torch.random.set_rng_state(states[0])
    for module, device, state in states[1]:
        module.set_rng_state(state, device)


class KeptState:
    """The buffers of a model, the modes of its modules and the states of torch's generators, as they are now.

    A forward that writes other state of its modules, such as a list or a tensor that is no buffer, is not run again.
    Numbers that it draws elsewhere, and what is outside of the model, are not kept: gradients then differ from those of
    the step, which is noticed.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        """Of ``model``, which draws random numbers on the host and on ``devices``."""
        self._devices = devices
        self._modules = list(model.modules())
        self._modes = [module.training for module in self._modules]
        with torch.no_grad():
            buffers = {b: b.detach().clone() for m in self._modules for b in m._buffers.values() if b is not None}
        self._buffers = [
            {name: None if b is None else buffers[b] for name, b in m._buffers.items()} for m in self._modules
        ]
        self._random = _random_states(devices)
        self._attributes = [
            (module, name, value, _contents(value))
            for module in self._modules
            for name, value in vars(module).items()
            if name not in _OF_MODULES and isinstance(value, (Tensor, list, dict, set, tuple, deque, *_UNSEEN))
        ]
        self._written = ""
        self._params = list(dict.fromkeys(p for m in self._modules for p in m._parameters.values() if p is not None))
        # Their memory may be another one since: optimizers fuse them.
        self._versions = [param._version for param in self._params]

    def forward_ended(self) -> None:
        """Notice what of the attributes the forward has written."""
        for module, name, value, contents in self._attributes:
            if contents is None or contents != _contents(value):
                self._written = f"{name} of {type(module).__name__}"
        self._attributes = []  # results of forward may be among them

    def why_not(self) -> str | None:
        """Why it cannot be put back; None: it can."""
        if any(isinstance(m, torch.jit.ScriptModule) and any(True for _ in m.buffers()) for m in self._modules):
            return "a module of torch.jit has buffers, which are out of reach"
        if any(param.grad_fn is not None for param in self._params):
            return "its parameters are results of operators, as with torch.func.functional_call"
        if self._written:
            return f"its forward may write {self._written}: of attributes but buffers no copies are kept"
        for param, version in zip(self._params, self._versions, strict=True):
            if version != param._version:
                return (
                    f"a parameter of shape {list(param.shape)} was written since, by forward itself or by the step of "
                    "another optimizer"
                )
        return None

    @contextmanager
    def put_back(self) -> Iterator[list[Tensor]]:
        """Make everything as it was then, with copies of buffers; afterwards it is as it is now, attributes too.

        Returns:
            From ``with``: a list that afterwards has the parameters that were written within.
        """
        now = [(module, dict(vars(module)), dict(module._buffers)) for module in self._modules]
        states = _random_states(self._devices), np.random.get_state(), random.getstate()
        params = [(param, param.data, param.detach().clone()) for param in self._params]
        copies: dict[Tensor, Tensor] = {}
        written: list[Tensor] = []
        try:
            for module, mode, buffers in zip(self._modules, self._modes, self._buffers, strict=True):
                vars(module)["training"] = mode
                copies.update((b, b.clone()) for b in buffers.values() if b is not None and b not in copies)
                module._buffers.update((name, None if b is None else copies[b]) for name, b in buffers.items())
            _set_random_states(self._random)
            yield written
        finally:
            _set_random_states(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
            for module, attributes, own in now:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(own)
            with torch.no_grad():
                for param, data, value in params:
                    moved, param.data = param.data_ptr() != data.data_ptr(), data
                    if moved or not torch.equal(data.nan_to_num(1.0), value.nan_to_num(1.0)):
                        data.copy_(value)
                        written.append(param)


def _contents(value: Any) -> list[Any] | None:
    """What differs once ``value``, or what it contains, was written; None: of some kinds it cannot be told."""
    found: list[Any] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, _UNSEEN):
            return None
        found.append(sorted(map(id, leaf)) if isinstance(leaf, set) else id(leaf))
        tensors = [leaf] if isinstance(leaf, Tensor) else leaf.buffers() if isinstance(leaf, nn.Module) else ()
        found += [tensor._version for tensor in tensors if not tensor.is_inference()]
    return found
