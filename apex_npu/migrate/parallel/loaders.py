# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the DataLoaders that a program trains with, and the loops that count its epochs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from apex_npu.migrate.amp.training import Training
from apex_npu.migrate.engine.program import Program, UnclearError
from apex_npu.migrate.engine.syntax import LOOPS, argument, constant, keywords, text
from apex_npu.migrate.rules.tables import DATA_LOADERS

# Functions around a loader that yield its batches, and functions that yield the numbers of epochs.
_AROUND = frozenset({"enumerate", "tqdm", "track", "notebook_tqdm", "iter"})
_NUMBERED = frozenset({"range", "trange"})

ELSEWHERE = "the backward is in another file than the DataLoader"
UNSEEDED = "each process draws other numbers: call manual_seed before, or pass a generator (random_state)"
# Functions that draw a split or an order: the argument that makes all processes draw the same, and the library to seed.
_SPLITS = {
    "torch.utils.data.random_split": ("generator", "torch"),
    "torch.utils.data.dataset.random_split": ("generator", "torch"),
    "sklearn.model_selection.train_test_split": ("random_state", "numpy"),
}
_ORDERS = {
    "torch.randperm": ("generator", "torch"),
    "numpy.random.permutation": ("", "numpy"),
    "numpy.random.shuffle": ("", "numpy"),
    "random.shuffle": ("", "random"),
    "random.sample": ("", "random"),
}


def unseeded(program: Program) -> Iterator[tuple[ast.Call, bool]]:
    """Yield the calls that would draw different numbers in each process, and whether they split the data."""
    calls = [*program.every(ast.Call)]
    seeds = [(call, seeded) for call in calls if (seeded := _seeded(program, call))]
    for call in calls:
        name = program.dotted(call.func)
        argument, library = (_SPLITS | _ORDERS).get(name, ("", ""))
        if not library or _is_fixed(call, argument):
            continue
        start, function = program.source.span(call)[0], program.function_of(call)
        here = [one for at, one in seeds if program.function_of(at) is function and program.source.span(at)[0] < start]
        others = [one for at, one in seeds if program.function_of(at) is not function]
        if not {library, "all"} & {*here, *others}:
            yield call, name in _SPLITS


def _is_fixed(call: ast.Call, argument: str) -> bool:
    """Return whether ``call`` gets a seed, or draws nothing."""
    given = keywords(call)
    in_order = not constant(given.get("shuffle"))
    return argument in given or None in given or in_order or (argument == "generator" and len(call.args) > 2)


def _seeded(program: Program, call: ast.Call) -> str:
    """Return the library that a call seeds, or "". A function of the program or another library may seed "all"."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else text(call.func)
    dotted = program.dotted(call.func)
    root = dotted.partition(".")[0]
    if "seed" not in name or dotted.startswith("torch.cuda") or (not dotted and name in ("manual_seed", "seed")):
        return ""
    return root if root in ("torch", "numpy", "random") else "all"


class Loaders:
    """The DataLoaders of a program.

    ``made`` has the loaders of training data, ``sampled`` the names of their datasets, and ``others`` all other
    loaders. ``epochs`` has the loops over epochs, each with the name that the loader has there.
    """

    def __init__(self, put: Training) -> None:
        self.put, self.program = put, put.program
        program = put.program
        self._all = [call for call in put.calls if program.dotted(call.func) in DATA_LOADERS]
        for node in program.every(ast.Name, ast.Attribute):
            if program.dotted(node).endswith(".IterableDataset"):
                raise UnclearError(node, "P602", "let the IterableDataset yield a part of the data in each process")
        self.made: list[ast.Call] = []
        self.epochs: list[tuple[ast.For, str]] = []
        if not put.backwards:
            at = next(iter(self._all), put.made[0].call)
            raise UnclearError(at, "P602", f"{ELSEWHERE}: put both into this file")
        for backward in put.backwards:
            self._follow(backward.call)
        self.others = [call for call in self._all if call not in self.made]
        datasets = [argument(call, 0, "dataset") for call in self.made]
        self.sampled = {text(one) for one in datasets if one is not None} - {""}

    def counted(self) -> Iterator[ast.Call]:
        """Yield calls of ``len`` on a dataset that is divided between the processes."""
        for call in self.put.calls:
            if text(call.func) == "len" and len(call.args) == 1:
                name = text(call.args[0])
                loader, _, last = name.rpartition(".")
                if name in self.sampled or (last == "dataset" and self._is_sampled(loader, call)):
                    yield call

    def _is_sampled(self, name: str, node: ast.AST) -> bool:
        try:
            return any(call in self.made for call in self._made(name, node))
        except UnclearError:
            return False

    def _follow(self, backward: ast.Call) -> None:
        """Find the loop over a loader around a backward."""
        function = self.program.function_of(backward)
        loops = [one for one in self.program.around(backward) if isinstance(one, ast.For)]
        for loop in (one for one in loops if self.program.function_of(one) is function):
            given = _inside(loop.iter)
            if isinstance(given, ast.Call) and given in self._all:
                raise UnclearError(given, "P602", "assign the DataLoader to a name before the loop")
            if found := self._made(text(given), loop) if text(given) else []:
                self.made += [call for call in found if call not in self.made]
                self._count(loop, text(given))
                return
        raise UnclearError(backward, "P602", "this is not in a loop over a DataLoader that is made here")

    def _made(self, name: str, node: ast.AST) -> list[ast.Call]:
        """Return the calls of ``DataLoader`` whose result ``name`` may have at ``node``."""
        values = self.put.values(name, node)
        if self.program.is_argument(node, name):
            return [call for given in values if text(given) for call in self._made(text(given), given)]
        made = [one for one in values if isinstance(one, ast.Call) and one in self._all]
        if len(made) != len(values) or len(made) > 1:
            raise UnclearError(values[0], "P602", f"{name} is made in several places, or not only by DataLoader")
        return made

    def _count(self, loop: ast.AST, name: str) -> None:
        """Find the loop over epochs around the loop over a loader, or around the calls of its function."""
        function = self.program.function_of(loop)
        outer = next((one for one in self.program.around(loop) if isinstance(one, LOOPS)), None)
        if outer is not None and self.program.function_of(outer) is function:
            numbers = _inside(outer.iter) if isinstance(outer, ast.For) else None
            called = text(numbers.func).rpartition(".")[2] if isinstance(numbers, ast.Call) else ""
            if not isinstance(outer, ast.For) or called not in _NUMBERED or not isinstance(outer.target, ast.Name):
                reason = "write the loop over epochs with range: the sampler needs the number of the epoch"
                raise UnclearError(outer, "P603", reason)
            if (outer, name) not in self.epochs:
                self.epochs.append((outer, name))
            return
        if self.program.is_argument(loop, name):
            for call, given in self.put.passed(name, loop):
                if text(given):
                    self._count(call, text(given))


def _inside(node: ast.expr) -> ast.expr:
    """Return the iterable of a loop, without the calls around it that count or show progress."""
    while isinstance(node, ast.Call) and node.args and text(node.func).rpartition(".")[2] in _AROUND:
        node = node.args[0]
    return node
