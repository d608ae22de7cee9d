# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The diagnostics that ``python -m apex_npu run`` applies to the steps of an unchanged script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer

from apex_npu.amp.inspect import patch_step, policy, settings
from apex_npu.amp.policy import Policy, resolve
from apex_npu.autocast.cast_lists import CastPolicy
from apex_npu.backends._torch_private import dispatch_modes
from apex_npu.debug.comparison.check_operators import check_operators
from apex_npu.debug.comparison.record import record
from apex_npu.debug.gradient_range.measure import gradient_range
from apex_npu.debug.model_report.report import LEVELS, report
from apex_npu.debug.overflow.explain import explain_script
from apex_npu.debug.profiling.profile import profile
from apex_npu.debug.text import count
from apex_npu.debug.watching.opening import is_of_amp
from apex_npu.debug.watching.stream import Stream, on_forward
from apex_npu.distributed.rank_progress import LastRank

_OPENS = "the script itself opens find_overflow, check_operators or record"


class Part:
    """A diagnostic that covers some steps, and whose result is printed after them.

    Attributes:
        option: The command-line option that requests it.
        first: The first step that it covers, counted from 0.
        last: The step after the last one that it covers.
        begun: Whether step ``first`` has begun.
        failed: Why the diagnostic could not begin; empty if it could.
    """

    option = ""

    def __init__(self, first: int, last: int) -> None:
        """Set the range of steps."""
        self.first, self.last, self.begun, self.failed = first, last, False, ""

    def begin(self, module: nn.Module | None, args: Any) -> None:
        """Handle the start of step ``first``: in the forward of ``module``, or after the previous step if None."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Handle the moment before ``optimizer.step()`` is called, in one of the covered steps."""

    def step_ended(self) -> None:
        """Handle the return of ``optimizer.step()``."""

    def end(self, is_complete: bool) -> object:
        """Handle the end; return the object to print. The script has ended before the last step if not complete."""
        raise NotImplementedError


class ProfilePart(Part):
    """The diagnostic of where the time goes."""

    option = "--profile"

    def __init__(self, first: int, last: int, trace: str | None = None) -> None:
        """Profile the steps, and write a trace to the folder ``trace`` if it is not None."""
        super().__init__(first, last)
        self._profile = profile(last - first, trace)

    def begin(self, module: nn.Module | None, args: Any) -> None:
        self._profile.__enter__()
        if module is not None and settings.labels is not None:
            settings.labels.enter_module(module, args)

    def step_ended(self) -> None:
        self._profile.step()

    def end(self, is_complete: bool) -> object:
        self._profile.__exit__(None, None, None)
        return self._profile


class GradientRangePart(Part):
    """The diagnostic of the range of a step's gradients."""

    option = "--gradient-range"
    _found: object = "--gradient-range: no optimizer of amp has stepped"

    def before_step(self, optimizer: Optimizer) -> None:
        try:
            self._found = gradient_range(optimizer)
        except RuntimeError as error:
            self._found = error

    def end(self, is_complete: bool) -> object:
        return self._found


class WatchingPart(Part):
    """A part that opens a watching context, which ``make`` creates, and leaves it when the script opens one itself."""

    make: Callable[[], Any]

    def begin(self, module: nn.Module | None, args: Any) -> None:
        if module is not None and not Stream.is_open() and dispatch_modes():
            raise RuntimeError(
                f"the first forward is called inside another dispatch mode, {type(dispatch_modes()[-1]).__name__}: "
                "choose a later step, or remove that mode"
            )
        self._context = self.make()
        self._found = self._context.__enter__()
        stream = self._context.stream  # None when the script has entered a watching context of its own
        stream.make_way = self._context.leave
        if module is not None:
            stream.enter_module(module, args)


class CheckOperatorsPart(WatchingPart):
    """The diagnostic that checks the operators of a step."""

    option = "--check-operators"
    make = check_operators

    def end(self, is_complete: bool) -> object:
        why = f"\n{self.option} has ended because {_OPENS}" if self._context.stream is None else ""
        self._context.leave()
        return f"{self._found}{why}"


class RecordPart(WatchingPart):
    """The diagnostic that records a step in a file."""

    option = "--record"

    def __init__(self, first: int, path: str) -> None:
        """Record step ``first`` to the file ``path``."""
        super().__init__(first, first + 1)
        self.make = lambda: record(path)

    def end(self, is_complete: bool) -> object:
        why = "" if is_complete else "the script ended before the step did"
        if self._context.stream is None:
            why = _OPENS
        try:
            if why:
                self._context.leave()
            else:
                self._context.__exit__(None, None, None)
        except (RuntimeError, OSError) as error:  # for example, the disk is full
            why = str(error)
        if why:
            return f"{self.option}: no file is written: {why}"
        return f"{self.option}: step {self.first} is in {self._context.path}, {len(self._found.rows)} tensors"


class ScriptSteps:
    """Counts the steps of the first amp optimizer that steps, and runs ``parts`` in their steps."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Begin to count."""
        self._parts = list(parts)
        self._count = 0
        self._leader: int | None = None
        self._rank = LastRank()
        self._undo = ExitStack()
        patch_step(self._undo, self._counting)
        if any(part.first == 0 for part in parts):
            self._undo.callback(on_forward(self._begin).remove)
        self._exit = Finalize(None, self.end, exitpriority=0)  # atexit is not for processes of multiprocessing

    def _counting(self, original: Any) -> Any:
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._leader not in (None, id(optimizer)):
                return original(optimizer, *args, **kwargs)
            self._leader = id(optimizer)
            self._rank.update()
            self._begin(None, None)
            for part in self._parts:
                if part.begun and not part.failed:
                    part.before_step(optimizer)
            result = original(optimizer, *args, **kwargs)
            self._count += 1
            for part in self._parts:
                if part.begun and not part.failed:
                    part.step_ended()
            for part in [part for part in self._parts if part.last <= self._count]:
                self._finish(part)
            self._begin(None, None)
            if not self._parts:
                self.end()
            return result

        return step

    def _begin(self, module: nn.Module | None, args: Any) -> None:
        for part in self._parts:
            if not part.begun and self._count >= part.first:
                part.begun = True
                try:
                    part.begin(module, args)
                except (RuntimeError, ValueError, OSError) as error:  # for example, the script itself runs a profiler
                    part.failed = f"{part.option}: {error}"

    def _finish(self, part: Part) -> None:
        self._parts.remove(part)
        if not part.begun:
            none = "and no optimizer of amp has stepped in this process"
            steps = f"after {count(self._count, 'step')}" if self._count else none
            said: object = f"{part.option}: the script has ended {steps}"
        else:
            said = part.failed or part.end(part.last <= self._count)
        # Most processes that a script starts do not train, such as data loaders.
        if not self._rank.rank and (self._count or parent_process() is None):
            print(said, flush=True)

    def end(self) -> None:
        """Stop counting; if the script ends before a part's last step, print what is known."""
        self._exit.cancel()
        self._undo.close()
        for part in list(self._parts):
            self._finish(part)


class FirstForward:
    """A hook that reports on the first model passed to ``amp.initialize`` that is called for training."""

    def __init__(self) -> None:
        """Begin to wait for that call."""
        self._rank = LastRank()
        hook = torch_module.register_module_forward_hook(self._forward_ended, with_kwargs=True)
        self._remove = hook.remove
        self._exit = Finalize(None, self._script_ended, exitpriority=0)  # as in ScriptSteps

    def _forward_ended(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Report after the forward, so that tensors in the model's caches have values."""
        if torch.compiler.is_compiling():
            return
        self._rank.update()
        own = policy()
        if own is not None and own.enabled and torch.is_grad_enabled() and is_of_amp(module):
            self.end()
            if not self._rank.rank:
                self._report(own, module, args, kwargs)

    def _report(self, own: Policy, module: nn.Module, args: Any, kwargs: Any) -> None:
        level = own.opt_level
        plain = resolve(level)
        overrides = {
            name: getattr(own, name)
            for name in (*(field.name for field in fields(CastPolicy)), "master_weights")
            if getattr(own, name) != getattr(plain, name)
        }
        levels: list[str | Policy] = [*LEVELS, level]
        trains = f"the script trains at {level}"
        if overrides:
            levels.append(replace(plain, opt_level=f"{level}*", **overrides))
            trains += f" with {', '.join(f'{name}={value}' for name, value in overrides.items())}: {level}*"
        try:
            found = report(module, *args, levels=levels, kwargs=kwargs)
        except Exception as error:  # the script goes on, and may show why
            print(f"--model-report: {type(error).__name__}: {error}", flush=True)
            return
        found.notes.append(trains)
        print(found, flush=True)

    def _script_ended(self) -> None:
        self.end()
        if not self._rank.rank and (policy() is not None or parent_process() is None):
            print(
                "--model-report: the script has ended before a model of amp.initialize was called for training, "
                "outside of compiled functions, in this process",
                flush=True,
            )

    def end(self) -> None:
        """Stop waiting for calls."""
        self._exit.cancel()
        self._remove()


def look(asked: Mapping[str, str]) -> None:
    """Start the diagnostics in ``asked``, a dict in the format of ``OPTIONS`` (``_cli/options.py``)."""
    parts: list[Part] = []
    if text := asked.get("explain_overflows"):
        after, comma, _ = text.partition(",")
        explain_script(int(after), replay=bool(comma))
    if text := asked.get("profile"):
        first, _, last = text.partition(":")
        parts.append(ProfilePart(int(first), int(last), asked.get("trace") or None))
    if text := asked.get("gradient_range"):
        parts.append(GradientRangePart(int(text), int(text) + 1))
    if text := asked.get("check_operators"):
        parts.append(CheckOperatorsPart(int(text), int(text) + 1))
    if text := asked.get("record"):
        step, _, path = text.partition(":")
        parts.append(RecordPart(int(step), path))
    if parts:
        ScriptSteps(parts)
    if asked.get("model_report"):
        FirstForward()
