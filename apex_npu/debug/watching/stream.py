# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Stream``: reports each operator of forward and backward, with its module, line and graph node."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from apex_npu.amp.inspect import policy
from apex_npu.backends._torch_private import (
    TorchDispatchMode,
    autograd_node,
    dispatch_modes,
    labelled,
    pop_mode,
    sequence_number,
)
from apex_npu.debug.text import first_line
from apex_npu.debug.watching.calls import Call, NotReplayedError, Phase
from apex_npu.debug.watching.operators import Execution, Operator, call_operator, kept, operator_of, tensors_in
from apex_npu.debug.watching.places import Caller, ModuleStack, Names, Place, calling_line

# The number of forward calls that are remembered, because their backward refers to them.
_KEPT = 100_000


class Consumer:
    """The receiver of a ``Stream``'s events; a method that is not overridden does nothing.

    Attributes:
        names: The names of the models.
        stream: The stream that reports to it.
        reads: Whether it reads operands as they were before the call; operands that are written are then copied.
    """

    reads = False

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Create a stream of ``models`` that reports to this consumer."""
        self.names = Names(models)
        self.stream = Stream(self.names, self)

    def begins(self, given: Sequence[tuple[str, Tensor]]) -> None:
        """Handle the start of a forward that no other encloses; ``given`` are its tensors, with names in words."""

    def ended(self, module: nn.Module, output: Any) -> None:
        """Handle the end of the forward of ``module``."""

    def before(self) -> None:
        """Handle the moment before an operator is called."""

    def saw(self, call: Call, ran: Execution) -> None:
        """Handle an operator of the iteration that has run."""

    def passed_over(self, ran: Execution) -> None:
        """Handle an operator of amp or of an optimizer that has run."""

    def closed(self) -> None:
        """Handle the end of the stream."""


class Stream(TorchDispatchMode):
    """A dispatch mode that reports each operator, and its caller, to a consumer.

    It does not change what the iteration computes.

    Attributes:
        names: The names of the models.
        suspended: Whether operators are called without a report.
        scale: The factor of the loss in the open block; 1 outside of blocks.
        calls: The number of operators that were reported.
        not_measured: The reasons why results were not measured, with the number of results.
        make_way: A function that ends a stream that the script did not open, when the script opens its own; else None.
        when_over: A function to call when the next iteration begins: at a forward after an optimizer's step.
        is_replay: Whether a forward is being run again, which is no iteration.
        caller: The line that had called that forward.
    """

    def __init__(self, names: Names, consumer: Consumer) -> None:
        """Report the operators of models with ``names`` to ``consumer``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self._consumer = names, consumer
        self.suspended = False
        self.scale = 1.0
        self.calls = 0
        self.not_measured: Counter[str] = Counter()
        self.make_way: Callable[[], object] | None = None
        self.when_over: Callable[[], object] | None = None
        self.is_replay = False
        self.caller: Place | None = None
        self._backward_seen = False
        self._optimizer_seen = False
        self._forward: dict[int, list[Call]] = {}
        self._modules = ModuleStack()
        self._hooks: list[Any] = []
        self._lock = threading.RLock()
        self._outer: list[Any] = []

    # ---- when it sees operators ------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Begin to report."""
        self._hooks = [
            torch_module.register_module_forward_pre_hook(self.enter_module),
            torch_module.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._outer = dispatch_modes()
        self.__enter__()  # type: ignore[no-untyped-call]

    def detach(self) -> bool:
        """Stop. Return False if modes were left in the wrong order, so that operators since then are missing."""
        self.suspended = True
        self._consumer.closed()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        modes = dispatch_modes()
        is_on = any(mode is self for mode in modes)
        if modes and modes[-1] is self:
            self.__exit__(None, None, None)
            return True
        # Leaving a mode removes the innermost one. An outer mode that was left has removed this one and is still there.
        left = [self] if is_on else [m for m in modes if any(m is outer for outer in self._outer)][-1:]
        for mode in left:
            pop_mode(mode)
        return is_on

    def set_block(self, scale: float) -> None:
        """Set the factor of the loss at the start or the end of a block."""
        self.scale, self._backward_seen = scale, False

    @classmethod
    def is_open(cls) -> bool:
        """Return whether a context of the script watches; a stream that the script did not open ends here."""
        for mode in dispatch_modes():
            if isinstance(mode, cls) and mode.make_way is not None:
                mode.make_way()
                mode.make_way = None
            elif isinstance(mode, cls) and not mode.suspended:
                return True
        return False

    @classmethod
    @contextmanager
    def none_watches(cls) -> Iterator[None]:
        """Suspend all streams in the block, whose operators are not part of a watched iteration."""
        watching = [mode for mode in dispatch_modes() if isinstance(mode, cls) and not mode.suspended]
        for mode in watching:
            mode.suspended = True
        try:
            yield
        finally:
            for mode in watching:
                mode.suspended = False

    # ---- modules ---------------------------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Handle the start of the forward of ``module``."""
        if self.suspended:
            return
        if not self._modules.calls:
            if self.when_over is not None and self._optimizer_seen:
                self.when_over()
                return
            self._backward_seen = False
            of = f"of {self.names.of_module(module) or type(module).__name__}"
            self._consumer.begins([(f"argument {i} {of}", t) for i, arg in enumerate(args) for t in tensors_in(arg)])
        self._modules.push(module, autograd_node())

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop(module)
        if not self.suspended:
            self._consumer.ended(module, output)

    def _current_module(self) -> str | None:
        calls = self._modules.calls
        for module, _ in reversed(calls):
            name = self.names.of_module(module)
            if name is not None:
                return name
        return f"({type(calls[-1][0]).__name__})" if calls else None

    # ---- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and report it."""
        kwargs = kwargs or {}
        if self.suspended:
            return call_operator(func, args, kwargs)
        operator, place, given = operator_of(func), calling_line(), (args, kwargs)
        if self.is_replay and operator.is_collective:
            raise NotReplayedError(f"it calls {operator.name}, a collective that needs the other processes")
        if place is Caller.DEBUG:
            place = self.caller
        if place is Caller.OPTIMIZER or place is Caller.AMP:
            returned = call_operator(func, args, kwargs)
            self._optimizer_seen |= place is Caller.OPTIMIZER
            self._consumer.passed_over(Execution(func, operator, place, given, given, returned))
            return returned
        if operator.passed_over and not operator.makes_tensor:
            with self._lock:
                self._note_forward(operator, place)
            return call_operator(func, args, kwargs)
        with self._lock:
            self._consumer.before()
            try:
                before = kept(operator, given) if self._consumer.reads else given
            except RuntimeError as error:  # the base class of OutOfMemoryError
                self.not_measured[f"{operator.name}: {first_line(error)}"] += 1
                returned = call_operator(func, args, kwargs)
                self._consumer.passed_over(Execution(func, operator, place, given, given, returned))
                return returned
            returned = call_operator(func, args, kwargs)
            try:
                with torch.no_grad():
                    self._look(Execution(func, operator, place, given, before, returned))
            except (RuntimeError, NotImplementedError, TypeError, MemoryError) as error:
                self.not_measured[f"{operator.name}: {first_line(error)}"] += 1
        return returned

    @labelled("amp.watch")
    def _look(self, ran: Execution) -> None:
        self._consumer.saw(self.new_call(ran.operator, ran.place), ran)

    def _phase(self, operator: Operator, place: Place | Caller | None, node: Any) -> Phase:
        if node is not None:
            self._backward_seen = True
            calls = self._modules.calls
            begun = calls[-1][1] if calls else None  # the node at which the innermost forward has begun
            if begun is not None:  # in a checkpoint's recomputation; another node belongs to a backward within it
                return "recompute" if node is begun else "backward"
            return "recompute" if calls and isinstance(place, Place) else "backward"
        return "block" if self._backward_seen and operator.written else "forward"

    def new_call(self, operator: Operator, place: Place | Caller | None) -> Call:
        """Create the next call of ``operator``; in backward, with the call of forward that it is the derivative of."""
        node = autograd_node()
        phase = self._phase(operator, place, node)
        line = place if isinstance(place, Place) else None
        call = Call(self.calls, operator.name, phase, self._current_module(), line)
        self.calls += 1
        if phase != "backward":
            self._remember(call)
            return call
        call.node = node.name()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            call.parameter = self.names.of_tensor(variable)
            call.module = call.parameter.rpartition(".")[0] if call.parameter is not None else None
        call.forward = self._forward_of(node, str(call.node))
        if call.forward is not None:
            call.module = call.forward.module
            call.place = line or call.forward.place
        return call

    def _remember(self, call: Call) -> None:
        known = self._forward.setdefault(sequence_number() - 1, [])
        # A node of a recomputation on another thread can have the number of a node of this thread.
        if not known or (call.phase == "recompute" and known[-1].phase != "recompute"):
            known.append(call)
        while len(self._forward) > _KEPT:
            del self._forward[next(iter(self._forward))]

    def _note_forward(self, operator: Operator, place: Place | Caller | None) -> None:
        """Remember a view, because its backward may compute; the backward of ``expand`` is a sum."""
        if autograd_node() is None and sequence_number() - 1 not in self._forward:
            self.new_call(operator, place)
            self.calls -= 1

    def _forward_of(self, node: Any, name: str) -> Call | None:
        known = self._forward.get(node._sequence_nr(), [])
        plain = name.rstrip("0123456789").removesuffix("Backward").lower()
        for call in known if len(known) > 1 else ():
            if call.operator.rpartition(":")[2].replace("_", "") == plain:
                return call
        return known[0] if known else None


def on_forward(call: Callable[[nn.Module, Any], object]) -> Any:
    """Call ``call`` where a forward of amp's iterations begins; return a hook with ``remove()``."""

    def begins(module: nn.Module, args: Any) -> None:
        if policy() is not None and torch.is_grad_enabled():
            call(module, args)

    return torch_module.register_module_forward_pre_hook(begins)
