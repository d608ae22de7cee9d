# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``convert_model``: a model's parameters, and what goes into and comes out of its forward, in the policy's dtype."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import threading
import types
import weakref
from collections import OrderedDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence

from .cast_lists import MODEL_FLOATS
from .policy import Policy


def convert_model(model: nn.Module, policy: Policy, device_types: Sequence[str]) -> ModelCast:
    """Cast ``model`` and wrap its forward as ``policy`` says; all of it, or nothing if something fails.

    O0, O2, O3: floating parameters, buffers and existing gradients take ``policy.model_dtype`` (an affine BatchNorm
    keeps its own where ``keep_batchnorm_fp32``); so do floating tensors passed to the model's forward. Its outputs take
    ``cast_model_outputs``, by default float32. Only the model's own forward is wrapped: call a submodule directly, and
    the inputs' dtype is up to you.

    O1: the forward is an autocast region; outputs are cast only where ``cast_model_outputs`` says so.

    The wrapper is an instance attribute ``forward``, as upstream's is. Copies run their own weights; pickling,
    DataParallel replicas, ``torch.compile`` and ``inspect.signature`` work. Convert first and compile afterwards: a
    copy of a compiled module, or of an ``fx.GraphModule``, makes itself a new forward. What an earlier call wrapped is
    unwrapped.

    Args:
        model: Changed in place; parameters keep their identity.
        policy: What to do.
        device_types: Device types that O1 casts on.

    Returns:
        The handle that takes the wrapper off again.
    """
    previous = vars(model).get("forward")
    inner = previous.inner if isinstance(previous, CastForward) else previous
    if inner is None and isinstance(model, torch.jit.ScriptModule):
        inner = model.forward  # its class has no forward to call
    settings = _forward_settings(policy, device_types)
    if policy.enabled and policy.model_dtype is not None:
        cast_parameters(model, policy.model_dtype, keep_batchnorm=bool(policy.keep_batchnorm_fp32))
    forward = CastForward(model, inner, settings)
    if settings is not None:
        vars(model)["forward"] = forward
        vars(model)["_replicate_for_data_parallel"] = _Replicate(model)
    else:
        _remove_wrapper(model, inner)
    return ModelCast(model, forward)


def _remove_wrapper(model: nn.Module, inner: Callable[..., Any] | None) -> None:
    vars(model).pop("forward", None)
    vars(model).pop("_replicate_for_data_parallel", None)
    if inner is not None:
        vars(model)["forward"] = inner


class ModelCast:
    """A converted model's undo handle."""

    def __init__(self, model: nn.Module, forward: CastForward) -> None:
        """Made by ``convert_model``."""
        # Weak: whoever keeps the handle does not keep the model.
        self._model = weakref.ref(model)
        self._forward = weakref.ref(forward)

    @property
    def alive(self) -> bool:
        """False once the model is gone."""
        return self._model() is not None

    def undo(self) -> None:
        """Give the model its forward back; dtypes stay. May be called again, or after another conversion."""
        model: nn.Module | None = self._model()
        forward: CastForward | None = self._forward()
        if forward is None:
            return
        inner = forward.inner
        # Whoever wrapped the forward after us keeps calling this object, which now passes everything through.
        forward.settings = None
        if model is not None and vars(model).get("forward") is forward:
            _remove_wrapper(model, inner)


# ------------------------------------------------------------------------------------------------------------- forward


@dataclasses.dataclass(frozen=True)
class ForwardSettings:
    """What a wrapped forward does. Shared by a model's copies; a pickle forgets the thread.

    Attributes:
        input_dtype: Floating inputs are cast to it; None: left alone.
        output_dtype: Floating outputs are cast to it; None: left alone.
        device_types: The forward is an autocast region for these.
        autocast_dtype: The region's dtype in a thread other than ``thread_id``.
        thread_id: Where the casts were enabled and can be disabled: there the region keeps the thread's state.
    """

    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    device_types: tuple[str, ...]
    autocast_dtype: torch.dtype
    thread_id: int | None

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardSettings:
        """Itself: it cannot change."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the thread: another process may give the same number to any of its threads."""
        return {**vars(self), "thread_id": None}


def _forward_settings(policy: Policy, device_types: Sequence[str]) -> ForwardSettings | None:
    if not policy.enabled:
        return None
    input_dtype, output_dtype = policy.model_dtype, policy.cast_model_outputs
    if input_dtype is not None and output_dtype is None:
        output_dtype = torch.float32
    regions = tuple(dict.fromkeys(device_types)) if policy.patch_torch_functions else ()
    if input_dtype is None and output_dtype is None and not regions:
        return None
    return ForwardSettings(input_dtype, output_dtype, regions, policy.autocast_dtype, threading.get_ident())


@dataclasses.dataclass(eq=False)
class CastForward:
    """Stands in for ``model.forward``.

    An object rather than a closure or a bound function: deepcopy and pickle then follow ``model`` to the copy. (A
    pickled bound function is looked up by name on the class, which would find the forward without casts.)

    Attributes:
        model: Whose forward this is.
        inner: The instance attribute ``forward`` that was there before, or None for the class's method.
        settings: What to do; None after an undo: call straight through.
    """

    model: nn.Module
    inner: Callable[..., Any] | None
    settings: ForwardSettings | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward as the settings say."""
        settings = self.settings
        if settings is None:
            return self._call_inner(args, kwargs)
        if settings.input_dtype is not None:
            args = tuple([cast_floating(value, settings.input_dtype) for value in args])
            kwargs = {name: cast_floating(value, settings.input_dtype) for name, value in kwargs.items()}
        output = self._call_in_regions(settings, settings.device_types, args, kwargs)
        return output if settings.output_dtype is None else cast_floating(output, settings.output_dtype)

    def _call_inner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    def _call_in_regions(
        self, settings: ForwardSettings, device_types: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not device_types:
            return self._call_inner(args, kwargs)
        device_type, rest = device_types[0], device_types[1:]
        enabled, dtype = True, settings.autocast_dtype
        if _is_thread(settings.thread_id):
            enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        if not enabled:
            return self._call_in_regions(settings, rest, args, kwargs)
        with torch.autocast(device_type, dtype=dtype, cache_enabled=True):
            return self._call_in_regions(settings, rest, args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The forward's own: trainers read it to see which inputs a model takes."""
        return inspect.signature(self._inner_or_method())

    @property
    def __code__(self) -> types.CodeType:
        """The forward's own: torch.export quotes its place in the source."""
        code: types.CodeType = self._inner_or_method().__code__
        return code

    def _inner_or_method(self) -> Any:
        return self.inner if self.inner is not None else types.MethodType(type(self.model).forward, self.model)

    def bound_to(self, model: nn.Module) -> CastForward:
        """The same wrapper for another model, a shallow copy of this one's."""
        inner = self.inner
        if isinstance(inner, types.MethodType) and inner.__self__ is self.model:
            inner = types.MethodType(inner.__func__, model)
        return CastForward(model, inner, self.settings)


def _is_thread(thread_id: int | None) -> bool:
    # torch.compile cannot trace get_ident. It guards on the autocast state: the state of the moment is the right one.
    return torch.compiler.is_compiling() or threading.get_ident() == thread_id


@dataclasses.dataclass(eq=False)
class _Replicate:
    """Stands in for ``model._replicate_for_data_parallel``, so that a replica's forward runs the replica's weights."""

    model: nn.Module

    def __call__(self) -> nn.Module:
        replicate: Callable[[nn.Module], nn.Module] = type(self.model)._replicate_for_data_parallel
        replica = replicate(self.model)
        forward = vars(replica).get("forward")
        if isinstance(forward, CastForward):
            vars(replica)["forward"] = forward.bound_to(replica)
        return replica


# ---------------------------------------------------------------------------------------------------------- parameters


def cast_parameters(model: nn.Module, dtype: torch.dtype, *, keep_batchnorm: bool) -> None:
    """Cast the floating parameters, buffers and gradients of ``model`` in place; all of them, or none if that fails.

    Args:
        model: Its parameters keep their identity.
        dtype: What to cast to.
        keep_batchnorm: Leave affine batch norms as they are.
    """
    before: list[tuple[Tensor, Tensor]] = []
    try:
        for module in model.modules():
            if keep_batchnorm and isinstance(module, _BatchNorm) and module.affine:
                continue
            cast_own_parameters(module, dtype, before)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
    except BaseException:
        for tensor, data in reversed(before):
            tensor.data = data
        raise


def cast_own_parameters(module: nn.Module, dtype: torch.dtype, before: list[tuple[Tensor, Tensor]]) -> None:
    """Cast those of ``module`` itself, not its children's; what they were is appended to ``before``."""
    for tensor in chain(module._parameters.values(), module._buffers.values()):
        if tensor is not None:
            _cast_data(tensor, dtype, before)


def _cast_data(tensor: Tensor, dtype: torch.dtype, before: list[tuple[Tensor, Tensor]]) -> None:
    # .data, not a new Parameter: optimizers, tied weights and RNNs hold the object.
    for target in (tensor, tensor.grad if tensor.is_leaf else None):
        if target is not None and target.dtype in MODEL_FLOATS and target.dtype != dtype:
            data = target.data
            cast = data.to(dtype)
            before.append((target, data))
            target.data = cast


# ---------------------------------------------------------------------------------------------------------- containers


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor in it cast to ``dtype``, in containers of the same types.

    Integer, bool and complex tensors, and whatever is not a known container, are returned as they are; so is a
    container in which nothing changes. An object with a method ``to`` (a batch class, say) is asked to cast itself.

    Args:
        value: Anything.
        dtype: A floating dtype.
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


def _cast_other_container(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        items = [cast_floating(item, dtype) for item in value]
        return _rebuild_tuple(value, items) if _differ(items, value) else value
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


def _rebuild_tuple(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    kind: Any = type(value)
    if hasattr(kind, "_make"):  # namedtuple
        result = kind._make(items)
    elif hasattr(kind, "n_sequence_fields"):  # torch.return_types: tuple.__new__ is refused
        result = kind(items)
    else:
        result = tuple.__new__(kind, items)  # not kind(items): a subclass may want other arguments
    if hasattr(value, "__dict__"):
        vars(result).update(vars(value))
    return result  # type: ignore[no-any-return]


def _copy_with_items(value: Any, changed: Mapping[Any, Any]) -> Any:
    result = copy.copy(value)
    for key, item in changed.items():
        result[key] = item
    return result


def _rebuild_dataclass(value: Any, names: list[str], changed: Mapping[str, Any]) -> Any:
    # Not dataclasses.replace: it runs __init__ again. Not setattr, nor copy: the class may be frozen.
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
    # Past __init__, whose arguments are unknown: Hugging Face's ModelOutput is a dict, and a dataclass with own fields.
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
