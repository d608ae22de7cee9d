# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ops: typed Python functions whose body is the reference, in plain torch, with a table of kernels for devices.

A call takes the kernel for the type of the first operand's device, or else the reference. ``kernels.py`` fills the
tables. A kernel takes the declared arguments and computes the same as the reference.

In signatures, ``Mutated`` is a tensor that is updated in place, and ``Scratch`` one that is updated in place and has
arbitrary values before and after the call. ``float | Tensor`` and ``int | Tensor`` are numbers, or tensors of one
element on the operands' device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Generic, ParamSpec, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.backends._torch_private import labelled
from apex_npu.ops.grad_lists import with_memory
from apex_npu.ops.reference import chunks

_P = ParamSpec("_P")
_R = TypeVar("_R")

Mutated = Annotated[Tensor, "mutated"]
Scratch = Annotated[Tensor, "mutated", "scratch"]

# A kernel or another function, its arguments and its options.
Call: TypeAlias = tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]


class Op(Generic[_P, _R]):
    """A function with kernels for devices.

    Attributes:
        name: The name of the function.
        reference: The function itself, without a graph: plain torch, on any device.
        kernels: The kernels, by the type of the device.
        operands: The names of the positional parameters.
        defaults: The defaults of the parameters that have one.
    """

    def __init__(self, body: Callable[_P, _R]) -> None:
        """Declare the op ``body``."""
        functools.update_wrapper(self, body)
        self.name = body.__name__
        self.reference: Callable[..., Any] = labelled(f"apex_npu::{self.name}")(torch.no_grad()(body))
        self.kernels: dict[str, Callable[..., Any]] = {}
        parameters = inspect.signature(body).parameters.values()
        self.operands = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def __call__(self, *operands: _P.args, **options: _P.kwargs) -> _R:
        """Run the kernel for the device of the operands."""
        first: Any = operands[0]
        result: _R = self.kernels.get(first.device.type, self.reference)(*operands, **options)
        return result


class Rule(Op[_P, None]):
    """An op that updates parameters.

    The body need read neither ``found_inf`` nor ``encoding``.

    Attributes:
        options: The names of the keyword parameters, without ``found_inf`` and ``encoding``.
        scalars: The parameters that are numbers, with their types.
        numbers: The scalars that may be tensors.
        states: The names of the operands that are states, from number 2 on.
        is_elementwise: Whether no element depends on others.
    """

    def __init__(self, body: Callable[_P, None]) -> None:
        """Declare the rule ``body``."""
        super().__init__(body)
        hints = {name: _members(hint) for name, hint in get_type_hints(body, include_extras=True).items()}
        marks = [get_args(hints[name][0]) for name in self.operands]
        state_end = next((i for i, mark in enumerate(marks) if "scratch" in mark), len(marks))
        self.options = [name for name in hints if name not in {*self.operands, "found_inf", "encoding", "return"}]
        self.scalars = {name: kinds[0] for name, kinds in hints.items() if kinds[0] in (float, int)}
        self.numbers = {name for name in self.scalars if Tensor in hints[name]}
        self.states = self.operands[2:state_end]
        self.is_elementwise = "starts" not in self.operands
        self._body = torch.no_grad()(body)
        self._restored = [i for i, mark in enumerate(marks) if "mutated" in mark and "scratch" not in mark]
        self.reference = self.decoding(self._skippable)

    def __call__(self, *operands: _P.args, **options: _P.kwargs) -> None:
        """Run the kernel for the device of the operands."""
        kernel, args, kwargs = self.bind(*operands, **options)
        kernel(*args, **kwargs)

    def bind(self, *operands: _P.args, **options: _P.kwargs) -> Call:
        """Return a call of the kernel with these arguments, to be made later.

        Numbers are converted, so that a wrong one raises an error before a call is made.
        """
        first: Any = operands[0]
        given: dict[str, Any] = options
        for name, number in self.scalars.items():
            value = given.get(name)
            if isinstance(value, Tensor) and name in self.numbers:
                given[name] = value.reshape(())
            elif name in given:
                given[name] = number(value)
        return self.kernels.get(first.device.type, self.reference), operands, given

    def by_extension(self) -> Callable[..., None]:
        """Return the kernel for the CPU of the C++ extension (csrc/fused_optim), which reads tensors for numbers."""
        function, plain = getattr(extension, self.name), extension.Encoding()
        defaults = {name: self.defaults.get(name) for name in self.options}

        def step(*operands: Any, found_inf: Tensor | None = None, encoding: Any = None, **options: Any) -> None:
            if found_inf is not None and bool(found_inf):
                return
            in_cpp = plain
            if encoding is not None:
                scales = [
                    encoding.scales[name]
                    for name, state in zip(self.states, operands[2:], strict=False)
                    if state is not None and state.dtype.itemsize == 1
                ]
                others = encoding.places.table, int(encoding.step), encoding.stochastic_param
                in_cpp = extension.Encoding(encoding.remainder, scales, *others)
            function(in_cpp, *operands, *{**defaults, **options}.values())

        return step

    def decoding(self, kernel: Callable[..., None]) -> Callable[..., None]:
        """Return a kernel that decodes and encodes operands for ``kernel``, which takes no ``encoding``.

        It copies a list of gradients, which ``kernel`` cannot read, and labels the call for profilers.
        """

        @labelled(f"apex_npu::{self.name}")
        def decoded(*operands: Any, encoding: Any = None, **options: Any) -> None:
            operands = tuple(map(with_memory, operands))
            if encoding is None:
                kernel(*operands, **options)
            else:
                encoding.decode_and_run(kernel, self.states, operands, options, by_piece=self.is_elementwise)

        return decoded

    def _skippable(self, *operands: Any, found_inf: Tensor | None = None, **options: Any) -> None:
        """Run the body; if ``found_inf`` is not 0, restore everything that it has written.

        It clones the mutated operands, one chunk at a time if elements are independent of each other.
        """
        if found_inf is None:
            self._body(*operands, **options)
            return
        skipped = found_inf.reshape(()) != 0
        for pieces in chunks(operands) if self.is_elementwise else (operands,):
            written = [pieces[i] for i in self._restored if i < len(pieces) and pieces[i] is not None]
            before = [t.clone() for t in written]
            self._body(*pieces, **options)
            for now, then in zip(written, before, strict=True):
                torch.where(skipped, then, now, out=now)


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types in a union, or the one type."""
    return (hint,) if get_origin(hint) is Annotated else get_args(hint) or (hint,)
