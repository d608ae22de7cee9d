# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Insertion``: amp in one file, as the rules for its parts see it."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.rules.ours import name_of

from .torch_amp import TorchAmp
from .training import Training, UnclearError

# What ``amp.initialize`` gets so that several processes average their gradients; ``{}`` is torch.
COMBINE = "combine_grad=True, combine_ddp={}.distributed.is_initialized()"
# What is changed together where a script becomes one for several cards.
PARALLEL = "data parallel"
_OF_BFLOAT16 = {"O1": "O4", "O2": "O5"}


class Insertion:
    """amp in one file.

    Raises:
        UnclearError: A part of what it takes cannot be told.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.source = program, program.source
        self.torch_amp = TorchAmp(program)
        self.training = Training(program, self.torch_amp.scalers)
        self.level = program.options.amp
        if self.torch_amp.is_bfloat16:
            self.level = _OF_BFLOAT16.get(self.level, self.level)
        self.casts_model = self.level in ("O2", "O5")
        self.removed: dict[int, list[ast.stmt]] = {}
        self.amp = name_of(program, "amp") or ""

    @property
    def combines(self) -> bool:
        """Whether amp averages gradients over processes: every optimizer is a fused one, and amp is always on."""
        options = self.program.options
        given = "combine_" in options.amp_args
        if options.data_parallel != "main" or not options.amp or self.torch_amp.enabled or given:
            return False
        fused = {one.start for one in self.program.drafts if one.rule == "O501" and one.status == "changed"}
        calls = [one.call for one in self.training.made]
        made = {self.source.span(call.func)[0]: self.program.names.dotted(call.func) or "" for call in calls}
        starts = {start for start, name in made.items() if not name.startswith("apex_npu.optimizers.NpuFused")}
        left = any(one.rule == "O501" and one.status == "refused" for one in self.program.drafts)
        return starts <= fused and not left and options.has("O501")

    def put_after(self, rule: str, anchor: ast.stmt, statements: list[str], links: Iterable[str] = ("amp",)) -> None:
        """Put statements after another: the first one, with what belongs to it, on a line of its own."""
        if self.torch_amp.holds(anchor):
            raise UnclearError(anchor, "A355", "it is inside of autocast, which is taken off")
        edit = self.program.lines(anchor, statements)
        self.program.report(rule, "changed", (edit.start, edit.end), [edit], links=links)
