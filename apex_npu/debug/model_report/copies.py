# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Copies of a model in float32, with sizes and dtypes only, on which a level is tried."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from apex_npu.amp import float32_copy
from apex_npu.backends._torch_private import (
    TorchDispatchMode,
    fake_modes,
    is_fake,
    tree_leaves,
    tree_map,
    without_fused_rnns,
)
from apex_npu.debug.watching.operators import call_operator, operator_of
from apex_npu.fusion import drop_grads, set_grads

# The buffers that batch norms write, although the schemas of some do not declare it.
_STATISTICS = ("running_mean", "running_var")


class _EqualMasters(TorchFunctionMode):
    """A mode in which ``torch.equal`` returns True, as fake masters and weights have no values to compare."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func is torch.equal else func(*args, **(kwargs or {}))


class _WriteNothingReal(TorchDispatchMode):
    """A mode in which operators write fakes of real tensors, such as a teacher's statistics or averages of a loss."""

    def __init__(self, fake: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake  # the mode of the fakes, which encloses this one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = operator_of(func)
        written = {*operator.written, *_STATISTICS}
        args = [
            self._without_values(value) if name in written else value
            for name, value in zip(operator.arguments, args, strict=False)
        ]
        kwargs = {n: self._without_values(value) if n in written else value for n, value in (kwargs or {}).items()}
        return call_operator(func, tuple(args), kwargs)

    def _without_values(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._without_values(item) for item in value]
        return self._fake.from_tensor(value) if isinstance(value, Tensor) and not is_fake(value) else value


@contextmanager
def fake_copies(model: nn.Module, batch: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yield copies of ``model`` and ``batch`` without values; results in the block have no values either."""
    fake, copying = fake_modes()
    with without_fused_rnns(), fake:
        with copying, _EqualMasters():
            made = float32_copy(model, allow_rounded=True)
        with _WriteNothingReal(fake):
            yield made, _copied(batch, fake.from_tensor)


def _copied(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy ``batch`` with all its tensors changed, also in objects; keep modules and what cannot be copied."""
    memo: dict[int, Any] = {id(tensor): change(tensor) for tensor in every_tensor(batch)}

    def copied(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return value
        try:
            return copy.deepcopy(value, memo)
        except Exception:  # such as for a lock
            return value

    return tree_map(copied, batch)


def every_tensor(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors of ``value`` in containers and attributes of objects, but not in modules."""
    seen = set() if seen is None else seen
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            for part in _parts(leaf):
                yield from every_tensor(part, seen)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (nn.Module, ModuleType, FunctionType, type)):
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set)):  # of classes that tree_leaves does not know
        return list(value)
    return list(getattr(value, "__dict__", {}).values())


@contextmanager
def without_gradients(tensors: Iterable[Tensor]) -> Iterator[Callable[[Iterable[Tensor]], None]]:
    """Remove gradients of ``tensors``, and of those given to the yielded function; restore them at the end."""
    former: dict[int, tuple[Tensor, Tensor | None]] = {}

    def remove(found: Iterable[Tensor]) -> None:
        for tensor in found:
            if id(tensor) not in former:
                former[id(tensor)] = tensor, tensor.grad
                tensor.grad = None

    try:
        remove(tensors)
        yield remove
    finally:
        drop_grads([tensor for tensor, _ in former.values()])
        held = [(tensor, grad) for tensor, grad in former.values() if grad is not None]
        set_grads([tensor for tensor, _ in held], [grad for _, grad in held])  # float32 ones of 16-bit tensors, too


def nodes_of(roots: Iterable[Any]) -> set[Any]:
    """Return the nodes that a backward from the nodes ``roots`` reaches, including ``roots``."""
    found = set(roots)
    waiting = list(found)
    while waiting:
        following = {node for node, _ in waiting.pop().next_functions if node is not None} - found
        found |= following
        waiting += following
    return found


def leaves_of_graph(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors to which a backward of ``outputs`` gives gradients."""
    outputs = list(outputs)
    nodes = nodes_of(t.grad_fn for t in outputs if t.grad_fn is not None)
    accumulating = (node for node in nodes if node.name() == "torch::autograd::AccumulateGrad")
    return [t for t in outputs if t.requires_grad and t.grad_fn is None] + [node.variable for node in accumulating]
