# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Call``: one call of an operator, and the facts about its inputs and results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from apex_npu.debug.watching.places import Place
from apex_npu.debug.watching.second_opinion import Opinion

Phase = Literal["forward", "backward", "recompute", "block"]


@dataclass(frozen=True, kw_only=True)
class Located:
    """The call of an operator that is reported on, and its result.

    Attributes:
        phase: ``"forward"``, ``"backward"``, ``"recompute"`` (an activation checkpoint runs forward again), or
            ``"block"`` (gradients are changed after backward).
        module: The name of the innermost module whose forward or backward has made the call; ``""`` for the model
            itself. A module outside the given models has its class in parentheses. None outside of modules.
        operator: The name of the operator, such as ``"aten::addmm"``.
        file: The file of the line of code; in backward, of the line of forward. None if no line is known.
        line: The number of the line of code.
        source: The text of the line of code.
        dtype: The dtype of the result.
        shape: The shape of the result.
    """

    phase: str
    module: str | None
    operator: str
    file: str | None = None
    line: int | None = None
    source: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    place: str = field(default="", repr=False)


class NotReplayedError(Exception):
    """A forward that cannot be run again."""


class Leaf(NamedTuple):
    """A tensor that was not finite before a watched operator read it."""

    kind: Literal["data", "weights", "constant", "stale"]
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Vanished(NamedTuple):
    """``what``, a number or a result in words, that ``call`` has rounded to 0, because its dtype is too small."""

    what: str
    call: Call


@dataclass(eq=False)
class Call:
    """One call of an operator.

    Attributes:
        index: The number of calls before this one.
        operator: The name of the operator.
        phase: The phase; "block" is an operator that changes gradients in place after backward.
        module: The name of the innermost module whose forward, or the backward of that forward, makes the call; None if
            there is no such module.
        place: The line that calls the operator; in backward, the line that calls the operator of forward.
        node: In backward, the name of the graph's node.
        forward: In backward, the call of forward that this call is the derivative of.
        parameter: The name of the parameter, if the call accumulates its gradient.
        dtype: The dtype of the first result that is not finite, or else of the first result.
        shape: The shape of the same result.
        is_bad: Whether a result is not finite.
        causes: The calls that wrote the inputs that made the result not finite.
        leaves: The inputs that were not finite before any watched operator.
        inputs: The smallest and the largest element of each input; empty if an input is the cause.
        opinion: The result of the operator in float64; None if an input is the cause.
        from_constant: Whether a number among the arguments is not finite.
        from_other_process: Whether the call is a collective whose inputs in this process were finite.
        vanished: The value that was rounded to 0 and explains a result that is 0 or, because an input is 0, not finite.
    """

    index: int
    operator: str
    phase: Phase
    module: str | None
    place: Place | None
    node: str | None = None
    forward: Call | None = None
    parameter: str | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    is_bad: bool = False
    causes: list[Call] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    inputs: list[tuple[str, float, float]] = field(default_factory=list)
    opinion: Opinion | None = None
    from_constant: bool = False
    from_other_process: bool = False
    vanished: Vanished | None = None

    def described(self) -> dict[str, Any]:
        """Return the attributes of ``Located``, except for those of the result."""
        found: dict[str, Any] = {"phase": self.phase, "module": self.module, "operator": self.operator}
        place = self.place
        if place is not None:
            found |= {"file": place.file, "line": place.line, "source": place.source, "place": str(place)}
        return found

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """The indices of the calls where the fault began; read it only after the causes are known."""
        found = frozenset[int]().union(*(cause.ends for cause in self.causes))
        return found | {self.index} if self.leaves or not self.causes else found


class Result(NamedTuple):
    """A result of ``call``, its largest magnitude, and whether it was not finite (None for that of a collective)."""

    call: Call
    is_bad: bool | None
    largest: float


class Input(NamedTuple):
    """An input of a call that is not finite, and the calls and tensors that made it so."""

    value: Tensor
    writers: list[Call]
    leaves: list[Leaf]


def traced(calls: Sequence[Call]) -> dict[Call, Call | None]:
    """Return ``calls`` and all their causes, nearest first, each with the call that led to it."""
    found: dict[Call, Call | None] = dict.fromkeys(calls)
    waiting = list(calls)
    for call in waiting:
        further = [cause for cause in call.causes if cause not in found]
        found.update(dict.fromkeys(further, call))
        waiting += further
    return found
