# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which DataLoaders a program trains with, and which loops count its epochs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .program import Program
from .training import Training, UnclearError, around, function_of, is_argument, text

_LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
# Calls around a loader that give what it gives, and around a range.
_AROUND = frozenset({"enumerate", "tqdm", "track", "notebook_tqdm", "iter"})
_NUMBERED = frozenset({"range", "trange"})


class Loaders:
    """The DataLoaders of a program.

    Attributes:
        made: Calls of ``DataLoader`` whose data are trained with; ``others`` are the rest.
        others: See ``made``.
        epochs: Loops that go over such a loader several times, and what it is called there.

    Raises:
        UnclearError: Where the data of a backward come from cannot be told.
    """

    def __init__(self, program: Program, training: Training) -> None:
        self.program, self.training = program, training
        calls = training.calls
        self._all = [call for call in calls if program.names.dotted(call.func) in _LOADER]
        self._check_iterable()
        self.made: list[ast.Call] = []
        self.epochs: list[tuple[ast.For, str]] = []
        for backward in training.backwards:
            self._follow(backward.call)
        self.others = [call for call in self._all if call not in self.made]

    def _check_iterable(self) -> None:
        for node in self.program.names.nodes:
            if isinstance(node, (ast.Name, ast.Attribute)) and self._is_iterable(node):
                raise UnclearError(node, "P602", "an IterableDataset has no sampler: give each process its part there")

    def _is_iterable(self, node: ast.AST) -> bool:
        return (self.program.names.dotted(node) or "").endswith(".IterableDataset")

    def _follow(self, backward: ast.Call) -> None:
        """Find the loop over a loader around a backward."""
        function = function_of(self.program, backward)
        loops = [one for one in around(self.program, backward) if isinstance(one, ast.For)]
        for loop in loops:
            if function_of(self.program, loop) is not function:
                break
            given = _inside(loop.iter)
            if isinstance(given, ast.Call) and given in self._all:
                raise UnclearError(given, "P602", "assign the DataLoader to a name before the loop")
            found = list(self._made(text(given), loop)) if text(given) else []
            if found:
                self.made += [call for call in found if call not in self.made]
                self._count(loop, text(given))
                return
        raise UnclearError(backward, "P602", "no loop over a DataLoader that is made here contains this")

    def _made(self, name: str, node: ast.AST) -> Iterator[ast.Call]:
        """The calls of ``DataLoader`` that ``name`` can be at ``node``."""
        if is_argument(self.program, node, name):
            for _, given in self._passed(name, node):
                if text(given):
                    yield from self._made(text(given), given)
            return
        assigned = self.training.assigned(name, node)
        values = [one.value for one in assigned if isinstance(one.value, ast.Call) and one.value in self._all]
        if len(values) != len(assigned) or len(values) > 1:
            raise UnclearError(assigned[0], "P602", f"{name} is made at several places, or not by DataLoader alone")
        yield from values

    def _passed(self, name: str, node: ast.AST) -> list[tuple[ast.Call, ast.expr]]:
        """Calls of the function around ``node``, with what they give for its argument ``name``."""
        function = function_of(self.program, node)
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return []
        places = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        found = []
        for call in self.training.calls:
            if text(call.func).rpartition(".")[2] == function.name:
                shift = isinstance(call.func, ast.Attribute) and places[:1] == ["self"]
                given = dict(zip(places[shift:], call.args, strict=False))
                given |= {one.arg: one.value for one in call.keywords if one.arg}
                if name in given:
                    found.append((call, given[name]))
        return found

    def _count(self, loop: ast.AST, name: str) -> None:
        """Find the loop over epochs around the loop over a loader, or around the calls of its function."""
        function = function_of(self.program, loop)
        outer = next((one for one in around(self.program, loop) if isinstance(one, _LOOPS)), None)
        if outer is not None and function_of(self.program, outer) is function:
            numbers = _inside(outer.iter) if isinstance(outer, ast.For) else None
            called = text(numbers.func).rpartition(".")[2] if isinstance(numbers, ast.Call) else ""
            if not isinstance(outer, ast.For) or called not in _NUMBERED or not isinstance(outer.target, ast.Name):
                raise UnclearError(
                    outer, "P603", "write the loop over epochs with range: the sampler needs their number"
                )
            if (outer, name) not in self.epochs:
                self.epochs.append((outer, name))
            return
        if is_argument(self.program, loop, name):
            for call, given in self._passed(name, loop):
                if text(given):
                    self._count(call, text(given))


def _inside(node: ast.expr) -> ast.expr:
    """What a loop goes over, without the calls around it that count or show progress."""
    while isinstance(node, ast.Call) and node.args and text(node.func).rpartition(".")[2] in _AROUND:
        node = node.args[0]
    return node
