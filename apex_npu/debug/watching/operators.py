# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Operator`` and ``Execution``: the operands of an operator, and which of them it reads and writes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from apex_npu.backends._torch_private import autocast_within, has_python_dispatch, tree_map
from apex_npu.debug.watching.places import Caller, Place
from apex_npu.fusion.shards import local_part

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# These operators only allocate or describe memory.
_ALLOCATIONS = {
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"),
}
# These operators write all of their first operand and do not read it.
_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"}
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Operator:
    """The schema of one overload.

    Attributes:
        name: The name with its namespace, without the overload: ``aten::addmm``.
        passed_over: Whether it computes nothing: a view, an allocation or a query.
        is_random: Whether it draws random numbers, always or for some arguments.
        is_collective: Whether it is a collective, whose result depends on other processes and is available later.
        makes_tensor: Whether it receives a tensor that Python numbers were written to.
    """

    def __init__(self, func: Any) -> None:
        """Read the schema of ``func``, an ``OpOverload``."""
        schema = func._schema
        self.name: str = schema.name
        namespace, _, plain = self.name.partition("::")
        self.plain = plain
        returns = [r.alias_info for r in schema.returns]
        is_view = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
        self.passed_over = is_view or plain in _ALLOCATIONS or (not schema.returns and not schema.is_mutable)
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.is_collective = namespace in _COLLECTIVES
        self.makes_tensor = self.name in ("aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift")
        self.arguments = [a.name for a in schema.arguments]
        self.written = {
            a.name: a.kwarg_only or plain in _OVERWRITING
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        }

    def operands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the arguments with their names."""
        yield from zip(self.arguments, args, strict=False)
        yield from kwargs.items()


operator_of = functools.cache(Operator)


class Execution(NamedTuple):
    """One execution of an operator.

    Attributes:
        func: The overload, an ``OpOverload``.
        operator: The schema of the overload.
        place: The line that calls it.
        given: Its arguments.
        before: Its arguments, with copies, made before the call, of those that it reads and writes.
        returned: Its return value.
    """

    func: Any
    operator: Operator
    place: Place | Caller | None
    given: Arguments
    before: Arguments
    returned: Any

    def operands(self) -> Iterator[tuple[str, Any]]:
        """Yield the arguments with their names."""
        return self.operator.operands(*self.given)

    @property
    def is_random(self) -> bool:
        """Return whether the call drew random numbers; a recurrent layer on a GPU draws them only for its dropout."""
        if not self.operator.is_random:
            return False
        given = dict(self.operands())
        return given.get("dropout") != 0.0 and given.get("train") is not False

    def tensors_read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensor arguments that are read, with the names of the arguments."""
        for name, value in self.operands():
            for tensor in () if self.operator.written.get(name) else tensors_in(value):
                yield name, tensor

    def results(self) -> list[Tensor]:
        """Return the distinct tensors that the call returned or wrote."""
        return results_of(self.operator, self.returned, self.given)

    def own_results(self) -> list[Tensor]:
        """Return the results that are not views of inputs."""
        results = self.results()
        if self.operator.makes_tensor:
            return results
        operands = [(name, tensor) for name, value in self.operands() for tensor in tensors_in(value)]
        written = {id(tensor) for name, tensor in operands if name in self.operator.written}
        read = {local.untyped_storage()._cdata for _, t in operands if (local := followed(t)) is not None}

        def is_view(tensor: Tensor) -> bool:
            local = None if id(tensor) in written else followed(tensor)
            return local is not None and local.untyped_storage()._cdata in read

        return [tensor for tensor in results if not is_view(tensor)]


def results_of(operator: Operator, returned: Any, given: Arguments) -> list[Tensor]:
    """Return the distinct tensors that an operator returned or wrote."""
    found = list(tensors_in(returned))
    for name, value in operator.operands(*given):
        if name in operator.written:
            found += tensors_in(value)
    return list({id(t): t for t in found}.values())


def kept(operator: Operator, given: Arguments) -> Arguments:
    """Return the arguments, with copies of those that are both read and written."""
    if not operator.written or all(operator.written.values()):
        return given

    def copied(value: Any) -> Any:
        local = followed(value) if isinstance(value, Tensor) else None
        return value if local is None else local.detach().clone()

    args, kwargs = given
    with torch.no_grad():
        # An argument that is overwritten is not read.
        copies = {
            name: value if operator.written.get(name, True) else tree_map(copied, value)
            for name, value in operator.operands(args, kwargs)
        }
    return tuple(copies[name] for name in operator.arguments[: len(args)]), {n: copies[n] for n in kwargs}


def call_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` from a dispatch mode, with the same autocasting as without the mode."""
    # A dispatch mode sees this as one operator, but its kernel calls bmm, which autocast casts.
    if func._schema.name != "aten::affine_grid_generator":
        return func(*args, **kwargs)
    with autocast_within():
        return func(*args, **kwargs)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument or a result: in sequences, mappings and fields of dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def numbers_in(value: Any) -> Iterator[float]:
    """Yield the floating numbers in an argument: in sequences, and the parts of complex ones."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, complex):
        yield from (value.real, value.imag)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_in(item)


def vanishing_number_in(value: Any, dtype: torch.dtype) -> float | None:
    """Return a nonzero number in an argument that ``dtype`` rounds to 0; None if there is none."""
    info = torch.finfo(dtype)
    return next((n for n in numbers_in(value) if 0.0 < abs(n) <= info.smallest_normal * info.eps / 2), None)


def held(tensor: Any) -> Tensor | None:
    """Return ``tensor``, or its part in this process; None if its elements cannot be read."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:  # skip the call for plain tensors
        tensor = local_part(tensor)
        if has_python_dispatch(tensor) or is_lazy(tensor):
            return None
    readable = tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_nested
    return tensor if readable and tensor.numel() > 0 else None


def followed(tensor: Any) -> Tensor | None:
    """Return ``held(tensor)`` if it is floating or complex, and else None."""
    local = held(tensor)
    return local if local is not None and (local.dtype.is_floating_point or local.dtype.is_complex) else None


def gradient_values(grad: Tensor) -> Tensor:
    """Return the part of ``grad`` in this process; of a sparse one the values, with each index once."""
    local = local_part(grad.detach())
    return local.coalesce().values() if local.layout == torch.sparse_coo else local


def ranges_of(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Return the smallest and the largest element of each tensor, or nan for both if it contains nan.

    This launches one kernel for each tensor, and waits once for each device and dtype.
    """
    ranges = [(0.0, 0.0)] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(i)
    for (device, dtype), indices in alike.items():
        ends = torch.empty(len(indices), 2, dtype=dtype.to_real(), device=device)
        for i, pair in zip(indices, ends, strict=True):
            _read_ends(tensors[i], *pair.unbind())
        for i, (smallest, largest) in zip(indices, ends.tolist(), strict=True):
            ranges[i] = smallest, largest
    return ranges


def _read_ends(tensor: Tensor, low: Tensor, high: Tensor) -> None:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.dtype.is_complex else tensor.detach()
    try:
        torch.aminmax(real, out=(low, high))
    except RuntimeError:  # not every CANN release has it
        low.copy_(real.amin())
        high.copy_(real.amax())


def is_finite(ends: tuple[float, float]) -> bool:
    """Return whether the tensor with this range is finite."""
    return all(map(math.isfinite, ends))


def count_bad(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of elements of ``tensor`` that are nan and inf."""
    return int(tensor.isnan().sum()), int(tensor.isinf().sum())
