# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Stream``: one event for each operator of forward and backward, with the module, the line and the node it is of."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
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
    pop_mode,
    sequence_number,
)
from apex_npu.debug.text import first_line
from apex_npu.debug.watching.calls import KEPT, Call, NotReplayedError, Phase
from apex_npu.debug.watching.operators import (
    Arguments,
    Execution,
    Operator,
    call_operator,
    followed,
    mapped,
    operator_of,
)
from apex_npu.debug.watching.places import Caller, ModuleStack, Names, Place, calling_line


class Consumer:
    """What a ``Stream`` tells of an iteration; a method that is not overridden does nothing.

    Attributes:
        stream: What tells it.
        reads: It looks at operands as they were before: those that an operator reads and writes are copied.
    """

    stream: Stream
    reads = False

    def begins(self, module: nn.Module, args: Any) -> None:
        """The forward of ``module`` begins, inside of no other."""

    def ended(self, module: nn.Module, output: Any) -> None:
        """The forward of ``module`` has ended."""

    def before(self) -> None:
        """An operator is about to be called."""

    def saw(self, call: Call, ran: Execution) -> None:
        """An operator of the iteration has run."""

    def passed_over(self, ran: Execution) -> None:
        """An operator of amp or of an optimizer has run."""

    def closed(self) -> None:
        """The stream has ended."""


class Stream(TorchDispatchMode):
    """A dispatch mode that tells a consumer of each operator, and what calls it.

    Nothing that the iteration computes depends on it.

    Attributes:
        names: The names of the models.
        suspended: Operators pass unseen.
        scale: What the loss is multiplied with in the block that is open; 1 outside of blocks.
        calls: Operators that were seen.
        not_measured: Why results of operators were not measured, and how often.
        make_way: Ends the stream, which no context of the script has begun, for one that the script opens; else None.
        when_over: Is called where another iteration begins: at a forward after an optimizer has stepped.
        is_replay: What runs is no iteration, but a forward once more.
        caller: The line that had called that forward.
    """

    def __init__(self, names: Names, consumer: Consumer) -> None:
        """Of models with ``names``, for ``consumer``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self._consumer = names, consumer
        consumer.stream = self
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
        """Begin."""
        self._hooks = [
            torch_module.register_module_forward_pre_hook(self.enter_module),
            torch_module.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._outer = dispatch_modes()
        self.__enter__()  # type: ignore[no-untyped-call]

    def detach(self) -> bool:
        """End; False where a mode that was entered before was left before, and operators since then are missing."""
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
        # Leaving a mode takes off the innermost one: of an outer one it was this, and the outer one is still there.
        left = [self] if is_on else [m for m in modes if any(m is outer for outer in self._outer)][-1:]
        for mode in left:
            pop_mode(mode)
        return is_on

    def set_block(self, scale: float) -> None:
        """A block begins or has ended: what follows is multiplied with ``scale``."""
        self.scale, self._backward_seen = scale, False

    @classmethod
    def is_open(cls) -> bool:
        """Whether a context of the script watches; what else does makes way for one."""
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
        """What runs within is no part of the iterations that others watch."""
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
        """The forward of ``module`` begins."""
        if self.suspended:
            return
        if not self._modules.modules:
            if self.when_over is not None and self._optimizer_seen:
                self.when_over()
                return
            self._backward_seen = False
            self._consumer.begins(module, args)
        self._modules.push(module)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop(module)
        if not self.suspended:
            self._consumer.ended(module, output)

    def _current_module(self) -> str | None:
        for module in reversed(self._modules.modules):
            name = self.names.of_module(module)
            if name is not None:
                return name
        return f"({type(self._modules.modules[-1]).__name__})" if self._modules.modules else None

    # ---- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, and tell of it."""
        kwargs = kwargs or {}
        if self.suspended:
            return call_operator(func, args, kwargs)
        operator, place, given = operator_of(func), calling_line(), (args, kwargs)
        if self.is_replay and operator.is_collective:
            raise NotReplayedError(f"it calls {operator.name}, in which the other processes would have to take part")
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
            before = _kept(operator, given) if self._consumer.reads else given
            returned = call_operator(func, args, kwargs)
            try:
                with torch.no_grad():
                    self._look(Execution(func, operator, place, given, before or given, returned, before is not None))
            except (RuntimeError, NotImplementedError, TypeError, MemoryError) as error:
                self.not_measured[f"{operator.name}: {first_line(error)}"] += 1
        return returned

    def _look(self, ran: Execution) -> None:
        self._consumer.saw(self.new_call(ran.operator, ran.place), ran)

    def _phase(self, operator: Operator, place: Place | Caller | None, node: Any) -> Phase:
        if node is not None:
            self._backward_seen = True
            begun = self._modules.node
            if begun is not None:  # in a checkpoint's recomputation; another node is of a backward within it
                return "recompute" if node is begun else "backward"
            return "recompute" if self._modules.modules and isinstance(place, Place) else "backward"
        return "block" if self._backward_seen and operator.written else "forward"

    def new_call(self, operator: Operator, place: Place | Caller | None) -> Call:
        """One more call of ``operator``, in backward with what it is the derivative of."""
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
        # A node of a recomputation on another thread can have a number of this one's.
        if not known or (call.phase == "recompute" and known[-1].phase != "recompute"):
            known.append(call)
        while len(self._forward) > KEPT:
            del self._forward[next(iter(self._forward))]

    def _note_forward(self, operator: Operator, place: Place | Caller | None) -> None:
        """A view has a backward, too, which computes: that of ``expand`` is a sum."""
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


def _kept(operator: Operator, given: Arguments) -> Arguments | None:
    """The arguments, with copies of those that are read and written; None: there is no memory for them."""
    if not operator.written or all(operator.written.values()):
        return given

    def kept(value: Any) -> Any:
        local = followed(value) if isinstance(value, Tensor) else None
        return value if local is None else local.detach().clone()

    args, kwargs = given
    try:
        with torch.no_grad():
            # What is overwritten is not read.
            copies = {
                name: value if operator.written.get(name, True) else mapped(kept, value)
                for name, value in operator.operands(args, kwargs)
            }
            return tuple(copies[name] for name in operator.arguments[: len(args)]), {n: copies[n] for n in kwargs}
    except RuntimeError:  # OutOfMemoryError is one
        return None


def on_forward(call: Callable[[nn.Module, Any], object]) -> Any:
    """Have ``call`` called where a forward of amp's iterations begins; returns a hook that ``remove`` ends."""

    def begins(module: nn.Module, args: Any) -> None:
        if policy() is not None and torch.is_grad_enabled():
            call(module, args)

    return torch_module.register_module_forward_pre_hook(begins)
