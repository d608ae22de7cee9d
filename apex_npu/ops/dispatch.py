# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ops declared once: a typed Python function whose signature is the schema and whose body is the reference kernel.

A call of a declared op goes through torch's dispatcher to the kernel for the operands' device: the kernel that
``kernels.py`` registers, or else the body. In signatures:

- ``Mutated`` is a tensor that is updated in place;
- ``Scratch`` is a tensor that is updated in place and has arbitrary values before and after the call;
- ``float | Tensor`` and ``int | Tensor`` are numbers, or tensors of one element on the operands' device.

A *rule* updates parameters and has four overloads:

- the default overload takes numbers;
- ``on_device`` also takes ``<name>_tensor`` for each number that may be a tensor, and ``found_inf``;
- ``runs`` takes lists of operands and of numbers, for several ranges of parameters;
- ``encoded`` takes states that are stored in fewer bytes.

A call of the rule uses one of the first two. ``call_of_all`` uses ``runs``, and ``encoded_calls.py`` uses ``encoded``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_, itemgetter
from string import ascii_lowercase
from types import NoneType
from typing import Annotated, Any, Generic, ParamSpec, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from apex_npu.backends._torch_private import is_dispatch_observed
from apex_npu.ops.reference import chunks

_P = ParamSpec("_P")
_R = TypeVar("_R")

Mutated = Annotated[Tensor, "mutated"]
Scratch = Annotated[Tensor, "mutated", "scratch"]

# An op or another function, its arguments and its options.
Call: TypeAlias = tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]

_library = torch.library.Library("apex_npu", "DEF")  # lives as long as the process


class Op(Generic[_P, _R]):
    """A declared op.

    name: The name that torch registers, with the overload.
    overload: The object that the dispatcher calls.
    reference: The body: the op in plain torch, on any device.
    operands: The names of the positional parameters.
    defaults: The defaults of the parameters that have one.
    """

    def __init__(self, body: Callable[_P, _R], name: str, fake: Callable[..., object]) -> None:
        """Register the op.

        Args:
            body: The declaration; see the module's docstring.
            name: The name that torch registers, with the overload.
            fake: A function that returns the result of the op for tensors without memory.
        """
        self.__name__, self.__doc__, self.__wrapped__ = body.__name__, body.__doc__, body
        self.name = name
        self.reference: Callable[..., Any] = body
        parameters = inspect.signature(body).parameters.values()
        self.operands = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.overload = _register(name + _schema(body), body, fake)
        self._cuda_kernel: Callable[..., Any] | None = None

    def __call__(self, *operands: _P.args, **options: _P.kwargs) -> _R:
        """Run the kernel for the operands' device."""
        result: _R = self.overload(*operands, **options)
        return result

    def quickly(self, *operands: Any) -> Any:
        """Call the op with plain tensors and no graph; on a GPU without torch's dispatcher, if nothing observes it.

        The dispatcher takes longer than a launch to reach a kernel in Python.
        """
        kernel = self._cuda_kernel if operands[0].is_cuda and not torch.compiler.is_compiling() else None
        if kernel is None or is_dispatch_observed():
            return self.overload(*operands)
        return kernel(*operands)

    def implement(self, kernel: Callable[..., Any], key: str, overload: str = "") -> None:
        """Register ``kernel`` for an overload, by default the declared one, under the dispatch key ``key``."""
        if key == "CUDA" and not overload:
            self._cuda_kernel = kernel
        _library.impl(f"{self.name}.{overload}" if overload else self.name, kernel, key)


class Rule(Op[_P, None]):
    """A declared op that updates parameters.

    Attributes:
        scalars: The parameters that are numbers, with their types.
        numbers: The scalars that may be tensors, with their types as numbers.
        on_device: The overload for such tensors and for ``found_inf``.
        runs: The overload for lists of operands, empty for an operand that is None, and of numbers.
        state_end: The number of the operands up to the last state; the states begin with number 2.
        is_elementwise: Whether no element depends on others.
        joins_on: The device types where a kernel of ``runs`` is faster than a call for each range.
    """

    joins_on: tuple[str, ...] = ()

    def __init__(self, body: Callable[_P, None]) -> None:
        """Register all overloads. The body need not read ``found_inf``."""
        super().__init__(body, body.__name__, _return_none)
        hints = {name: _members(hint) for name, hint in get_type_hints(body, include_extras=True).items()}
        self.numbers = {name: kinds[0] for name, kinds in hints.items() if Tensor in kinds[1:]}
        marks = [get_args(hints[name][0]) for name in self.operands]
        self._restored = [i for i, mark in enumerate(marks) if "mutated" in mark and "scratch" not in mark]
        self.state_end = next((i for i, mark in enumerate(marks) if "scratch" in mark), len(marks))
        self.is_elementwise = "starts" not in self.operands
        self.reference = self._skippable
        tensors = [f"Tensor? {name}=None" for name in (*(f"{number}_tensor" for number in self.numbers), "found_inf")]
        schema = f"{self.name}.on_device{_schema(body)}".replace(") -> ()", f", {', '.join(tensors)}) -> ()")
        self.on_device = _register(schema, self.device_scalars(self.reference), _return_none)
        self.scalars = {name: kinds[0] for name, kinds in hints.items() if kinds[0] in (float, int)}
        self.runs = _register(f"{self.name}.runs{_schema(body, lists=True)}", self.each, _return_none)
        _library.define(f"{self.name}.encoded{_schema(body)}".replace(") -> ()", f", {_ENCODING}) -> ()"))
        rules[f"apex_npu::{self.name}"] = self

    def __call__(self, *operands: _P.args, **options: _P.kwargs) -> None:
        """Run the kernel for the operands' device."""
        found_inf = options.pop("found_inf", None)
        tensors = {}
        for name, number in self.numbers.items():
            if isinstance(options.get(name), Tensor):
                tensors[f"{name}_tensor"] = options[name]
                options[name] = number()  # required, but not read
        if tensors or found_inf is not None:
            self.on_device(*operands, found_inf=found_inf, **tensors, **options)
        else:
            self.overload(*operands, **options)

    def bind(self, *operands: _P.args, **options: _P.kwargs) -> Call:
        """Return a call with these arguments, to be made later."""
        return self, operands, options

    def call_of_all(self, operands: Sequence[tuple[Any, ...]], options: Sequence[dict[str, Any]]) -> Call | None:
        """Join several calls into one; return None if they differ in more than tensors and numbers."""
        columns = list(zip(*operands, strict=True))
        if any(len(kinds) > 1 and NoneType in kinds for kinds in (set(map(type, column)) for column in columns)):
            return None
        joined: dict[str, Any] = {}
        for name, first in options[0].items():
            values, number = list(map(itemgetter(name), options)), self.scalars.get(name)
            if number is not None:
                if Tensor in set(map(type, values)):
                    return None
                joined[name] = list(map(number, values))
            elif all(map(is_, values, repeat(first))):
                joined[name] = first
            else:
                return None
        if joined.pop("found_inf", None) is not None:
            return None
        for name in self.scalars.keys() - joined.keys():  # lists have no defaults
            joined[name] = [self.defaults[name]] * len(options)
        return self.runs, tuple([] if column[0] is None else column for column in columns), joined

    def each(self, *operands: Any, **options: Any) -> None:
        """Return the kernel of ``runs`` on all devices."""
        for i in range(len(operands[0])):
            numbers = {name: value[i] if name in self.scalars else value for name, value in options.items()}
            self.overload(*(column[i] if column else None for column in operands), **numbers)

    def device_scalars(self, kernel: Callable[..., None]) -> Callable[..., None]:
        """Wrap a kernel with the declared signature as a kernel of the overload ``on_device``."""

        def on_device(*operands: Any, **options: Any) -> None:
            for name in self.numbers:
                tensor = options.pop(f"{name}_tensor", None)
                if tensor is not None:
                    options[name] = tensor.reshape(())
            kernel(*operands, **options)

        return on_device

    def host_scalars(self) -> Callable[..., None]:
        """Return a kernel of ``on_device`` for the CPU, which reads tensors without waiting and passes on numbers."""

        def default(*operands: Any, found_inf: Tensor | None = None, **options: Any) -> None:
            if found_inf is not None and bool(found_inf):
                return
            for name in self.numbers.keys() & options.keys():  # the others keep their defaults
                options[name] = self.numbers[name](options[name])
            self.overload(*operands, **options)

        return self.device_scalars(default)

    def _skippable(self, *operands: Any, found_inf: Tensor | None = None, **options: Any) -> None:
        """Run the body; if ``found_inf`` is not 0, restore everything that it has written.

        It clones the mutated operands, one chunk at a time if elements are independent of each other.
        """
        if found_inf is None:
            self.__wrapped__(*operands, **options)
            return
        skipped = found_inf.reshape(()) != 0
        for pieces in chunks(operands) if self.is_elementwise else (operands,):
            written = [pieces[i] for i in self._restored if i < len(pieces) and pieces[i] is not None]
            before = [t.clone() for t in written]
            self.__wrapped__(*pieces, **options)
            for now, then in zip(written, before, strict=True):
                torch.where(skipped, then, now, out=now)


# The rules by their names in torch.
rules: dict[str, Rule[...]] = {}

# The additional arguments of the overload `encoded`: the remainders of 16-bit parameters; the scales of each 8-bit
# state; int64 rows (first element, elements, position, first scale), one for each parameter; the step, for random bits;
# and whether bfloat16 parameters are rounded stochastically.
_ENCODING = "Tensor(y!)? remainder, Tensor(z!)[] scales, Tensor table, int count, bool stochastic_param"


def call_of_all(calls: Sequence[Call]) -> Call | None:
    """Join ``calls`` into one; return None if that is impossible or not faster."""
    rule = calls[0][0]
    if not isinstance(rule, Rule) or calls[0][1][0].device.type not in rule.joins_on:
        return None
    rules, operands, options = zip(*calls, strict=True)
    return rule.call_of_all(operands, options) if all(map(is_, rules, repeat(rule))) else None


def op(name: str, fake: Callable[..., object]) -> Callable[[Callable[_P, _R]], Op[_P, _R]]:
    """Declare an op under ``name``; see ``Op`` for the arguments."""
    return lambda body: Op(body, name, fake)


def _register(schema: str, kernel: Callable[..., Any], fake: Callable[..., object]) -> Any:
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, fake, "Meta")
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.apex_npu, packet), overload or "default")


def _return_none(*operands: object, **options: object) -> None:
    """Return None, as a kernel for tracing."""


# torch.library.infer_schema makes int a SymInt, which no kernel here takes, and does not support unions.
_TYPES: dict[Any, str] = {Tensor: "Tensor", float: "float", int: "int", bool: "bool", type(None): "()"}


def _schema(body: Callable[..., Any], *, lists: bool = False) -> str:
    """Return the schema of the signature of ``body``; it includes ``found_inf`` only if that is mutated.

    With ``lists`` it is the schema of an overload that takes lists of operands and numbers.
    """
    hints = get_type_hints(body, include_extras=True)
    aliases = iter(ascii_lowercase)
    arguments = []
    for p in inspect.signature(body).parameters.values():
        kind, *others = _members(hints[p.name])
        if p.kind is p.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        if p.name == "found_inf" and others:
            continue
        mutated = get_origin(kind) is Annotated
        type_ = f"Tensor({next(aliases)}!)" if mutated else _TYPES[kind]
        listed = lists and (p.kind is not p.KEYWORD_ONLY or kind in (float, int))
        optional = "[]" if listed else "?" if type(None) in others else ""
        default = "" if p.default is p.empty or listed else f"={p.default}"
        arguments.append(f"{type_}{optional} {p.name}{default}")
    return f"({', '.join(arguments)}) -> {_TYPES[hints['return']]}"


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types in a union, or the one type."""
    return (hint,) if get_origin(hint) is Annotated else get_args(hint) or (hint,)
