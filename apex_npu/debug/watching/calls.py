# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Call``: what is remembered of one call of an operator, and of what it has read and written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from apex_npu.debug.watching.places import Place
from apex_npu.debug.watching.second_opinion import Opinion

Phase = Literal["forward", "backward", "recompute", "block"]

# Of the operators of forward so many are remembered, for their backward; of those with results that are not finite
# fewer.
KEPT = 100_000
KEPT_BAD = 1_000


class NotReplayedError(Exception):
    """A forward cannot be run once more."""


class Leaf(NamedTuple):
    """A tensor that was not finite before any operator that was watched has read it."""

    kind: Literal["data", "weights", "constant", "stale"]
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Vanished(NamedTuple):
    """What has become 0 where its dtype is too small for it.

    Attributes:
        what: The number or the result, in words.
        dtype: That is too small.
        operator: That has rounded it.
        place: The line that calls it.
    """

    what: str
    dtype: torch.dtype
    operator: str
    place: Place | None


@dataclass(eq=False)
class Call:
    """One call of an operator.

    Attributes:
        index: How many calls came before it.
        operator: Its name.
        phase: "block" is what changes gradients in place after backward.
        module: The name of the innermost module whose forward it is part of, or of whose backward; None: of none.
        place: The line that calls it; in backward, that of the operator of forward.
        node: In backward the name of the graph's node.
        forward: In backward the operator of forward.
        parameter: The name of the parameter that a gradient is accumulated for.
        dtype: Of the first result that is not finite, or else of the first result.
        shape: Likewise.
        is_bad: A result is not finite.
        causes: Calls whose results made it so.
        leaves: What was not finite from the beginning.
        inputs: The smallest and the largest element of each input, where none is to blame.
        opinion: What float64 says, where no input is to blame.
        from_constant: A number among the arguments is not finite.
        from_other_process: A collective, whose own inputs were finite.
        vanished: What was rounded to 0, where a result is 0 for it, or is not finite as an input is 0 for it.
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
        """Where it is, by the names of the attributes of what is found."""
        found = {"phase": self.phase, "module": self.module, "operator": self.operator}
        place = self.place
        if place is None:
            return {**found, "file": None, "line": None, "source": "", "place": ""}
        return {**found, "file": place.file, "line": place.line, "source": place.source, "place": str(place)}

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """The indices of the calls where this began; asked for once its causes are known."""
        found = frozenset[int]().union(*(cause.ends for cause in self.causes))
        return found | {self.index} if self.leaves or not self.causes else found


class Result(NamedTuple):
    """What a call has written.

    Attributes:
        call: The call.
        is_bad: It was not finite; None: not known yet, as of a collective.
        largest: The largest magnitude.
    """

    call: Call
    is_bad: bool | None
    largest: float


class Input(NamedTuple):
    """What a call has read that is not finite, and what has made it so."""

    value: Tensor
    writers: list[Call]
    leaves: list[Leaf]


def iterate(calls: Sequence[Call], follow: Callable[[Call], Sequence[Call]]) -> Iterator[tuple[Call, Call | None]]:
    """All that ``follow`` leads to from ``calls``, nearest first, each with the call that it was reached from."""
    seen = {id(call) for call in calls}
    waiting: list[tuple[Call, Call | None]] = [(call, None) for call in calls]
    for call, origin in waiting:
        yield call, origin
        for further in follow(call):
            if id(further) not in seen:
                seen.add(id(further))
                waiting.append((further, call))
