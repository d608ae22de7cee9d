# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``cast_floating``: casts tensors, also in nested containers, which keep their types."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserList, defaultdict, deque
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from apex_npu.autocast.cast_lists import MODEL_FLOATS


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every floating-point tensor in it cast to ``dtype``, in containers of the same types.

    Integer, bool and complex tensors, and objects that are not known containers, are returned unchanged; so is a
    container in which nothing changes. An object with a method ``to`` (a batch class, say) is cast by that method.

    Args:
        value: Any object.
        dtype: A floating-point dtype.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in MODEL_FLOATS else value
    kind = type(value)
    if kind in (list, tuple):
        items = [cast_floating(item, dtype) for item in value]
        return kind(items) if _differ(items, value) else value
    if kind is dict:
        pairs = {key: cast_floating(item, dtype) for key, item in value.items()}
        return pairs if _differ(pairs.values(), value.values()) else value
    if value is None or isinstance(value, (str, bytes, bool, int, float, type, nn.Module)):
        return value
    if not isinstance(value, PackedSequence) and callable(getattr(value, "to", None)):
        return value.to(dtype)
    return _cast_other_container(value, dtype)


def cast_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward with their floating-point tensors cast to ``dtype``."""
    return (
        tuple([cast_floating(value, dtype) for value in args]),
        {name: cast_floating(value, dtype) for name, value in kwargs.items()},
    )


def _cast_other_container(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        items = [cast_floating(item, dtype) for item in value]
        return rebuild_tuple(value, items) if _differ(items, value) else value
    if isinstance(value, (list, deque, UserList)):
        changed = _changed_items(enumerate(value), dtype)
        return _copy_with_items(value, changed) if changed else value
    if isinstance(value, Mapping):
        changed = _changed_items(value.items(), dtype)
        return _rebuild_mapping(value, changed) if changed else value
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        changed = _changed_items([(name, getattr(value, name)) for name in names], dtype)
        return _rebuild_dataclass(value, names, changed) if changed else value
    return value


def _changed_items(items: Iterable[tuple[Any, Any]], dtype: torch.dtype) -> dict[Any, Any]:
    return {key: new for key, old in items if (new := cast_floating(old, dtype)) is not old}


def _differ(new: Iterable[Any], old: Iterable[Any]) -> bool:
    if torch.compiler.is_compiling():
        return True  # older torch traces "is" between containers as a comparison of their tensors' values
    return any(a is not b for a, b in zip(new, old, strict=True))


def rebuild_tuple(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the class of ``value`` with other ``items``."""
    kind: Any = type(value)
    if hasattr(kind, "_make"):  # namedtuple
        result = kind._make(items)
    elif hasattr(kind, "n_sequence_fields"):  # torch.return_types: tuple.__new__ is refused
        result = kind(items)
    else:
        result = tuple.__new__(kind, items)  # not kind(items): a subclass may take other arguments
    if hasattr(value, "__dict__"):
        vars(result).update(vars(value))
    return result  # type: ignore[no-any-return]


def _copy_with_items(value: Any, changed: Mapping[Any, Any]) -> Any:
    result = copy.copy(value)
    for key, item in changed.items():
        result[key] = item
    return result


def _rebuild_dataclass(value: Any, names: list[str], changed: Mapping[str, Any]) -> Any:
    # dataclasses.replace would run __init__ again. setattr and copy would fail for a frozen class.
    kind: Any = type(value)
    result = kind.__new__(kind)
    if hasattr(value, "__dict__"):
        vars(result).update(vars(value))
    for name in names:
        object.__setattr__(result, name, changed.get(name, getattr(value, name)))
    return result


def _rebuild_mapping(value: Mapping[Any, Any], changed: Mapping[Any, Any]) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, MutableMapping):
            return _copy_with_items(value, changed)
        kind: Any = type(value)
        return kind({**value, **changed})
    # Without __init__, whose arguments are unknown: Hugging Face's ModelOutput is a dict, and a dataclass with fields.
    result: Any = type(value).__new__(type(value))
    if isinstance(value, defaultdict):
        result.default_factory = value.default_factory
    if hasattr(value, "__dict__"):
        twins = {n: changed[n] for n, item in vars(value).items() if n in changed and item is value[n]}
        vars(result).update(vars(value), **twins)
    put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
    for key, item in value.items():
        put(result, key, changed.get(key, item))
    return result
