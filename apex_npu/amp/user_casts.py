# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Casts for the user's own functions at O1: as decorators, or registered by name for the next ``amp.initialize``.

==========  ===========================================================================================================
half        floating-point tensors among the arguments become float16 (O1's dtype); float64 stays
float       float16 and bfloat16 become float32
promote     all take the widest floating-point type among the arguments
==========  ===========================================================================================================

Casts apply to positional and keyword arguments, in nested lists, tuples and dicts. A function that is cast to float
runs with O1's casts off. So does a function of torch or in C++ with any cast, since O1's lists would otherwise apply
after the user's cast. Inside any other function O1's casts stay on, as in Apex: float32 weights of a module are cast
when they meet half inputs. If O1 is not active, under ``amp.disable_casts`` and in backward, the function is called
without casts. Tensors on other devices than the model's are not cast.

A **decorator** takes effect at the call: apply it before or after ``amp.initialize``.

A **registered name** is patched by each later ``amp.initialize`` at O1 (not by an earlier one). The next ``initialize``
or ``amp.shutdown`` restores it. The registration itself stays until ``unregister_function``: a script registers once
and may initialize several times. Registering a name again replaces its cast. A function that was imported by value
before, as in ``from torch import mm``, cannot be patched.

With ``user_cast_preferred=True`` O1's own lists do not apply to a registered function. Without it they apply before
the registered cast. "half" and "float" give the same types in both cases. "promote" widens the arguments, and the lists
then cast them (``torch.mm`` remains half).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from apex_npu.amp.policy import Policy
from apex_npu.amp.session import current, disable_casts
from apex_npu.autocast.cast_lists import AUTOCAST_FLOATS, MODEL_FLOATS
from apex_npu.backends.patching import patch_attribute
from apex_npu.ops import LOW_PRECISION

_F = TypeVar("_F", bound=Callable[..., Any])
Kind = Literal["half", "float", "promote"]


# --------------------------------------------------------------------------------------------------------- decorators


def half_function(function: _F) -> _F:
    """Call ``function`` with its floating-point arguments in float16, or O1's other dtype; see ``user_casts``.

    Example::

        >>> @amp.half_function
        ... def project(x, weight):
        ...     return x @ weight
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> project(torch.ones(2, 4), torch.ones(4, 2)).dtype
        torch.float16
    """
    return cast(_F, _casting(function, "half"))


def float_function(function: _F) -> _F:
    """Call ``function`` with its half-precision arguments in float32; see ``user_casts``.

    Example::

        >>> @amp.float_function
        ... def variance(x):
        ...     return x.square().mean() - x.mean().square()
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> variance(torch.ones(4, dtype=torch.float16)).dtype
        torch.float32
    """
    return cast(_F, _casting(function, "float"))


def promote_function(function: _F) -> _F:
    """Call ``function`` with its floating-point arguments in the widest of their types; see ``user_casts``.

    Example::

        >>> @amp.promote_function
        ... def add(x, y):
        ...     return x + y
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> add(torch.ones(4, dtype=torch.float16), torch.ones(4)).dtype
        torch.float32
    """
    return cast(_F, _casting(function, "promote"))


# ------------------------------------------------------------------------------------------------------- registrations


# The owners and names that O1 patches, with their casts. Registrations are made before any session, and outlive it.
_registered: list[tuple[Any, str, Kind]] = []


def register_half_function(module: Any, name: str) -> None:
    """Run ``module.name`` in float16 at O1, from the next ``amp.initialize`` on.

    Args:
        module: A module, a class (for a method), or an object.
        name: The name of its attribute.

    Raises:
        ValueError: There is no such attribute.
        TypeError: The attribute is not a function.

    Example::

        >>> amp.register_half_function(torch, "addcmul")
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> torch.addcmul(torch.ones(4), torch.ones(4), torch.ones(4)).dtype
        torch.float16
    """
    _register(module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """Run ``module.name`` in float32 at O1, from the next ``amp.initialize`` on.

    Arguments and errors are those of ``register_half_function``.

    Example::

        >>> amp.register_float_function(torch, "logaddexp")
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> torch.logaddexp(torch.ones(4).half(), torch.ones(4).half()).dtype
        torch.float32
    """
    _register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Widen the arguments of ``module.name`` to one type at O1, from the next ``amp.initialize`` on.

    Arguments and errors are those of ``register_half_function``.

    Example::

        >>> amp.register_promote_function(torch, "lerp")
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> torch.lerp(torch.zeros(4), torch.ones(4, dtype=torch.float16), 0.5).dtype
        torch.float32
    """
    _register(module, name, "promote")


def unregister_function(module: Any, name: str) -> None:
    """Remove the registration of ``module.name``. A patch by ``amp.initialize`` stays until it is undone.

    Raises:
        ValueError: No cast was registered.

    Example::

        >>> amp.register_float_function(torch, "logaddexp")
        >>> amp.unregister_function(torch, "logaddexp")
    """
    kept = _without(module, name)
    if len(kept) == len(_registered):
        raise ValueError(f"No cast is registered for {name} of {module}.")
    _registered[:] = kept


def _register(owner: Any, name: str, kind: Kind) -> None:
    function = getattr(owner, name, None)
    if not hasattr(owner, name):
        raise ValueError(f"No function named {name} in module {owner}.")
    if isinstance(function, type):
        raise TypeError(f"{name} of {owner} is a class; register a method of it: ({name}, 'forward'), say")
    if not callable(function):
        raise TypeError(f"{name} of {owner} must be a function, got {type(function).__name__}")
    _registered[:] = [*_without(owner, name), (owner, name, kind)]


def _without(owner: Any, name: str) -> list[tuple[Any, str, Kind]]:
    return [old for old in _registered if old[0] is not owner or old[1] != name]


def registered_patches(policy: Policy) -> list[Callable[[ExitStack], None]]:
    """Return functions that patch the currently registered functions as ``policy`` needs, until a stack is closed.

    Raises:
        ValueError: A registered attribute no longer exists.
    """
    patches: list[Callable[[ExitStack], None]] = []
    for owner, name, kind in _registered if policy.patch_torch_functions else []:
        if not hasattr(owner, name):
            raise ValueError(
                f"No function named {name} in module {owner}. It existed when it was registered; if it is no longer "
                "needed, call amp.unregister_function first."
            )
        keep_casts = kind == "promote" and not policy.user_cast_preferred
        make = functools.partial(_casting, kind=kind, keep_casts=keep_casts)
        patches.append(functools.partial(patch_attribute, owner=owner, name=name, make=make))
    return patches


# -------------------------------------------------------------------------------------------------------------- wrapper


def _casting(function: Callable[..., Any], kind: Kind, *, keep_casts: bool = False) -> Callable[..., Any]:
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"amp.{kind}_function takes a function, got {function!r}; for a class, decorate its methods")

    keeps_casts = keep_casts or not (kind == "float" or _is_operator(function))

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device_types = _device_types()
        if device_types:
            results = {"out": kwargs.pop("out")} if "out" in kwargs else {}  # which the function writes
            args, kwargs = _cast(kind, (args, kwargs), device_types)
            kwargs |= results
        if keeps_casts or not device_types:
            return function(*args, **kwargs)
        with disable_casts():
            return function(*args, **kwargs)

    return wrapper


def _is_operator(function: Callable[..., Any]) -> bool:
    """Return True for functions of torch or in C++, which compute from their arguments alone."""
    function = inspect.unwrap(function)  # O1 patches some of them
    if inspect.isbuiltin(function) or inspect.ismethoddescriptor(function):
        return True
    module = str(getattr(function, "__module__", ""))
    return module.partition(".")[0] in ("torch", "torch_npu") and not module.startswith("torch.nn.modules.")


def _device_types() -> list[str]:
    """Return the device types where O1's casts are on in this thread."""
    session = current()
    if session is None or not session.casts.active:
        return []
    return [name for name in session.casts.device_types if torch.is_autocast_enabled(name)]


# The dtypes that are cast.
_CAST: dict[Kind, Collection[torch.dtype]] = {"half": AUTOCAST_FLOATS, "float": LOW_PRECISION, "promote": MODEL_FLOATS}


def _cast(kind: Kind, arguments: Any, device_types: list[str]) -> Any:
    dtype = torch.float32 if kind == "float" else torch.uint8  # narrower than all that are promoted

    def is_cast(tensor: Tensor) -> bool:
        return tensor.dtype in _CAST[kind] and tensor.device.type in device_types

    def convert(tensor: Tensor) -> Tensor:
        if not is_cast(tensor):
            return tensor
        return tensor.to(torch.get_autocast_dtype(tensor.device.type) if kind == "half" else dtype)

    def widen(tensor: Tensor) -> Tensor:
        nonlocal dtype
        if is_cast(tensor):
            dtype = torch.promote_types(dtype, tensor.dtype)
        return tensor

    if kind == "promote":
        _map_tensors(widen, arguments)
    return _map_tensors(convert, arguments)


def _map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [_map_tensors(change, item) for item in value]
        make: Any = getattr(type(value), "_make", type(value))  # of a named tuple
        return make(items)
    if isinstance(value, list):
        return [_map_tensors(change, item) for item in value]
    if type(value) is dict:
        return {key: _map_tensors(change, item) for key, item in value.items()}
    return value
