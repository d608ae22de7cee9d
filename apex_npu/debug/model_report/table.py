# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``ModelReport``: the result of ``amp.debug.report``, which prints as plain text or by rich."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from apex_npu._cli.tables import as_rich
from apex_npu.debug.model_report.tally import Tally
from apex_npu.debug.text import aligned, name_of
from apex_npu.optimizers.memory_choices import MemoryChoice

_LOW = (torch.float16, torch.bfloat16)
_ROWS = 40
_KEPT = 8
_MEANING = {
    "O0": "float32 throughout",
    "O1": "float32 weights; each function in float16 or float32, by lists",
    "O2": "float16 weights, except in batch norms; the optimizer steps their float32 values",
    "O3": "float16 weights",
    "O4": "as O1, with bfloat16",
    "O5": "as O2, with bfloat16",
}


@dataclass
class Memory:
    """The memory of a model, in bytes for each dtype.

    Attributes:
        parameters: The bytes of the model's parameters and buffers.
        gradients: The bytes of the parameters' gradients, as ``scale_loss`` leaves them.
        masters: The bytes of the float32 values of 16-bit parameters. Fused optimizers on a CPU and a GPU need half.
        states: The bytes of the state of each requested optimizer.
    """

    parameters: Counter[torch.dtype] = field(default_factory=Counter)
    gradients: Counter[torch.dtype] = field(default_factory=Counter)
    masters: Counter[torch.dtype] = field(default_factory=Counter)
    states: dict[str, int] = field(default_factory=dict)


@dataclass
class LevelReport:
    """The effect of a level on a model.

    Attributes:
        level: The level, "O0" to "O5"; with a star if a script overrides some of it.
        tally: The FLOPs, casts, bytes and functions of one iteration.
        memory: The bytes of parameters, gradients, masters and optimizer state.
    """

    level: str
    tally: Tally
    memory: Memory


@dataclass
class ModelReport:
    """The result of ``report``; ``print`` it.

    Attributes:
        model: The name of the model's class.
        parameters: The number of elements of the model's parameters.
        batch: The dtype and shape of each tensor that the model was called with.
        levels: The report of each level.
        choices: The bytes of a parameter for each choice of level and format; empty for optimizers of other libraries.
        notes: Further remarks on the figures.
    """

    model: str
    parameters: int
    batch: list[str]
    levels: dict[str, LevelReport]
    choices: list[MemoryChoice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines: list[str] = []
        for part in parts_of(self):
            lines += [*part.lines(), ""] if isinstance(part, Table) else [part]
        return "\n".join(lines).rstrip()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yield the renderables for ``rich.print``."""
        from rich.text import Text

        for part in parts_of(self):
            if isinstance(part, Table):
                yield as_rich(part.head, part.rows, part.title, numbers=True)
            else:
                yield Text(part)


@dataclass
class Table:
    """Rows of cells, with the names of the rows in the first column."""

    title: str
    head: list[str]
    rows: list[list[str]]

    def lines(self) -> Iterator[str]:
        """Yield the lines of plain text, with names to the left and all other cells to the right."""
        yield self.title
        yield from aligned([self.head, *self.rows])


def parts_of(found: ModelReport) -> Iterator[Table | str]:
    """Yield the tables and lines of text of the report."""
    batch = ", ".join(found.batch)
    yield f"{found.model}, {found.parameters:,} parameters, called with {batch or 'no tensors'}"
    yield "from sizes and dtypes only: no values were computed, and the model is unchanged"
    yield from found.notes
    for level in found.levels:
        if level in _MEANING:  # a script's own level is in a note
            yield f"  {level}: {_MEANING[level]}"
    yield ""
    yield _totals(list(found.levels.values()))
    yield "FLOPs: operations of matrix products, convolutions and attention, forward and backward"
    yield "casts: conversions between floating dtypes; those of O0 are the model's own, the other levels add amp's"
    yield "moved: bytes that operators read and write; saved: what forward keeps in memory for backward"
    yield ""
    if found.choices:
        yield _choices(found)
    yield from _kept_in_float32(found)
    yield from _functions(found)


def _totals(levels: list[LevelReport]) -> Table:
    tallies, memories = [one.tally for one in levels], [one.memory for one in levels]
    flops = [tally.flops.total() for tally in tallies]
    rows = [["FLOPs", *map(_count, flops)]]
    for dtype in _ordered({f.dtype for tally in tallies for f in tally.flops}):
        shares = (_percent(tally.flops_in(dtype), n) for tally, n in zip(tallies, flops, strict=True))
        rows.append([f"  in {name_of(dtype)}", *shares])
    rows += [
        ["casts", *(str(tally.casts.total()) for tally in tallies)],
        ["  weights that are cast", *(str(len(tally.cast_weights)) for tally in tallies)],
        ["  moved by casts", *(_bytes(tally.cast_bytes.total()) for tally in tallies)],
        ["moved, casts included", *(_bytes(tally.bytes_moved) for tally in tallies)],
        *_by_dtype("saved for backward", [tally.saved for tally in tallies], least=1),
        *_by_dtype("parameters and buffers", [memory.parameters for memory in memories]),
        *_by_dtype("gradients", [memory.gradients for memory in memories]),
        ["float32 values", *(_bytes(memory.masters.total()) for memory in memories)],
    ]
    titles = memories[0].states
    rows += [[f"state of {title}", *(_bytes(memory.states[title]) for memory in memories)] for title in titles]
    rows += [[f"in all, with {title}", *(_bytes(_sum(one, title)) for one in levels)] for title in titles]
    return Table("one iteration at each level", ["", *(one.level for one in levels)], rows)


def _by_dtype(name: str, levels: Sequence[Counter[torch.dtype]], least: int = 2) -> Iterator[list[str]]:
    """Yield a row of all bytes, and if there are ``least`` dtypes, a row for each."""
    yield [name, *(_bytes(found.total()) for found in levels)]
    dtypes = _ordered({dtype for found in levels for dtype, n in found.items() if n})
    for dtype in dtypes if len(dtypes) >= least else ():
        yield [f"  {name_of(dtype)}", *(_bytes(found[dtype]) for found in levels)]


def _choices(found: ModelReport) -> Table:
    state = next(iter(reversed(next(iter(found.levels.values())).memory.states)))
    rows = [
        [choice.name, *(f"{nbytes:.3g}" for nbytes in choice.parts().values()), f"{choice.total:.3g}"]
        for choice in found.choices
    ]
    return Table(
        f"bytes of a parameter with {state}, by options of amp.initialize and of the optimizer (docs/memory.md)",
        ["", *found.choices[0].parts(), "sum"],
        rows,
    )


def _sum(one: LevelReport, optimizer: str) -> int:
    memory = one.memory
    kinds = (memory.parameters, memory.gradients, memory.masters, one.tally.saved)
    return sum(kind.total() for kind in kinds) + memory.states[optimizer]


def _kept_in_float32(found: ModelReport) -> Iterator[Table | str]:
    """Yield the functions with FLOPs that each level keeps in float32."""
    for level, one in found.levels.items():
        kept: Counter[tuple[str, str]] = Counter()
        for function, n in one.tally.flops.items():
            if function.dtype not in _LOW:
                kept[_starred(function.module), function.operator] += n
        if level == "O0" or not kept:
            continue
        total = one.tally.flops.total()
        yield f"FLOPs that {level} keeps in float32, {_percent(kept.total(), total)}:"
        for (module, operator), n in kept.most_common(_KEPT):
            yield f"  {_percent(n, total)}  {operator}  {module}"
        if len(kept) > _KEPT:
            yield f"  and {len(kept) - _KEPT} more"
        yield ""
    counted = {level: one.tally for level, one in found.levels.items() if level != "O0" and not one.tally.uncounted}
    whole = [level for level, tally in counted.items() if tally.flops and all(f.dtype in _LOW for f in tally.flops)]
    if whole:
        yield f"no FLOPs stay in float32 at {', '.join(whole)}"
        yield ""


def _functions(found: ModelReport) -> Iterator[Table | str]:
    """Yield the dtype of each function of forward at each level, with modules of one kind together."""
    dtypes: dict[tuple[str | None, str], dict[str, list[str]]] = {}
    calls: Counter[tuple[str | None, str]] = Counter()
    for level, one in found.levels.items():
        counts: Counter[tuple[str | None, str]] = Counter()
        for function, n in one.tally.calls.items():
            if function.phase == "forward":
                key = function.module, function.operator
                dtypes.setdefault(key, {}).setdefault(level, []).append(name_of(function.dtype))
                counts[key] += n
        calls |= counts
    grouped: dict[tuple[str, ...], int] = {}
    for key, of_level in dtypes.items():
        cells = [", ".join(dict.fromkeys(of_level.get(level, ["-"]))) for level in found.levels]
        row = (f"{_starred(key[0])}  {key[1]}", *cells)
        grouped[row] = grouped.get(row, 0) + calls[key]
    rows = [[row[0], str(n), *row[1:]] for row, n in grouped.items()]
    head = ["module and function", "calls", *found.levels]
    compared = "O1" in found.levels and "O2" in found.levels
    if compared:
        before, after = head.index("O1"), head.index("O2")
        rows = [[*row, f"to {row[after]}" if row[before] != row[after] else ""] for row in rows]
        head.append("O2 changes")
    yield Table("dtype of what each function of forward returns", head, rows[:_ROWS])
    if len(rows) > _ROWS:
        yield f"and {len(rows) - _ROWS} more; r.levels[...].tally.calls has all"
    if compared:
        changed = sum(bool(row[-1]) for row in rows)
        yield f"O2 computes {changed} of {len(rows)} rows in another dtype than O1"


def _starred(module: str | None) -> str:
    """Return the name of a module with ``*`` for the numbers of layers in a stack."""
    if module is None:
        return "(outside of the model)"
    return re.sub(r"(?<![^.=])\d+(?=\.)|(?<=\.)\d+(?=$|=)", "*", module) or "(the model itself)"


def _ordered(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    return sorted(dtypes, key=lambda dtype: (not dtype.is_floating_point, dtype.itemsize, str(dtype)))


def _count(n: float) -> str:
    for unit in ("", " k", " M", " G", " T"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g} P" if n < 1000 else f"{n / 1000:.3g} E"


def _bytes(n: float) -> str:
    if n < 1024:
        return f"{n:.0f} B" if n else "0"
    for unit in ("KB", "MB", "GB"):
        n /= 1024
        if n < 1000:
            return f"{n:.3g} {unit}"
    return f"{n / 1024:.3g} TB"


def _percent(part: float, total: float) -> str:
    return f"{100 * part / total:.3g} %" if total and part else "0"
