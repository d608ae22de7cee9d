# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Watch``: sees every operator of forward and backward, and remembers where inf and nan began."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from apex_npu.backends._torch_private import (
    TorchDispatchMode,
    autograd_node,
    dispatch_modes,
    has_python_dispatch,
    pop_mode,
    sequence_number,
)
from apex_npu.debug.text import first_line
from apex_npu.debug.watching.calls import KEPT, KEPT_BAD, Call, Input, Leaf, NotReplayedError, Phase, Result, Vanished
from apex_npu.debug.watching.lineage import Lineage
from apex_npu.debug.watching.operators import (
    Arguments,
    Execution,
    Operator,
    call_operator,
    is_measurable,
    mapped,
    nonfinite_number_in,
    operator_of,
    tensors_in,
    vanishing_number_in,
)
from apex_npu.debug.watching.places import Caller, ModuleStack, Names, Place, calling_line
from apex_npu.debug.watching.ranges import OverflowFlag, Ranges
from apex_npu.debug.watching.second_opinion import Opinion, ask, largest_of, stays_bad
from apex_npu.fusion.shards import local_part

# Of a tensor that is no argument of a module, and that no operator has written.
GIVEN = "a tensor given from outside"

# Each element of their results is computed of one of each input: they are 0 for inputs that are not by rounding alone.
_ELEMENTWISE = {"mul", "mul_", "pow", "pow_", "square", "square_", "div", "div_", "exp", "exp_", "sigmoid", "prod"}


class Watch(TorchDispatchMode):
    """A dispatch mode that reads the range of each result; where one is not finite, it finds out why.

    Nothing that the iteration computes depends on it: values, random numbers and the device's flag of overflows are the
    same without it.

    Attributes:
        suspended: Operators pass unseen.
        scale: What the loss is multiplied with in the block that is open; 1 outside of blocks.
        calls: Operators that were seen.
        not_measured: Why results of operators were not measured, and how often.
        bad: The calls with a result that is not finite, in their order.
        saturates: A device has the largest number in place of inf.
        flag: Its flag of overflows.
        ranges: Reads the ranges of results.
        constants: Where a device saturates, calls whose own arguments have inf or nan, as masks have: their results are
            not counted as saturated.
        dropped_bad: Further calls like ``bad``, of which too many were.
        module_ranges: The largest magnitude of what each module has returned last.
        make_way: Ends the watching that no context of the script has begun, for one that the script opens; else None.
        is_replay: What runs is no iteration, but a forward once more.
        caller: The line that had called that forward.
    """

    def __init__(self, names: Names, saturating: Sequence[torch.device] = ()) -> None:
        """Of models with ``names``; devices ``saturating`` have the largest number in place of inf, and a flag."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.suspended = False
        self.scale = 1.0
        self.calls = 0
        self.not_measured: Counter[str] = Counter()
        self.bad: list[Call] = []
        self.dropped_bad = 0
        self.module_ranges: dict[str, float] = {}
        self.saturates = bool(saturating)
        self.flag = OverflowFlag(saturating)
        self.ranges = Ranges(self.flag)
        self.constants: list[Call] = []
        self.make_way: Callable[[], object] | None = None
        self.is_replay = False
        self.caller: Place | None = None
        self._bad_given: set[int] = set()
        self._backward_seen = False
        self._optimizer_seen = False
        self._lineage: Lineage[Result] = Lineage()
        self._gradients: Lineage[str] = Lineage()
        self._forward: dict[int, list[Call]] = {}
        self._modules = ModuleStack()
        self._arguments: dict[int, str] = {}
        self._hooks: list[Any] = []
        self._lock = threading.RLock()
        self._outer: list[Any] = []

    # ---- when it watches -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Begin."""
        self._note_gradients()
        self._hooks = [
            torch_module.register_module_forward_pre_hook(self.enter_module),
            torch_module.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._outer = dispatch_modes()
        self.__enter__()  # type: ignore[no-untyped-call]

    def detach(self) -> bool:
        """End; False where a mode that was entered before was left before, and operators since then are missing."""
        self.suspended = True
        self.flag.hand_back()
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

    def begin_block(self, scale: float, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """A block begins: what follows is multiplied with ``scale``; ``gradients`` are there, each with a name."""
        self.scale = scale
        for name, gradient in gradients:
            self._note_gradient(name, gradient)
        self._backward_seen = False
        self.flag.hand_back()

    def end_block(self, gradients: Sequence[Tensor]) -> None:
        """The block has ended: its ``gradients`` are unscaled, clipped and so on by what is not watched."""
        self.scale = 1.0
        self._backward_seen = False
        for gradient in gradients:
            local = self._followed(gradient)
            if local is not None:
                self._lineage.forget(local)

    def _note_gradients(self) -> None:
        """Remember which memory the gradients that are there have: what adds to them reads it."""
        for known in self.names.tensors:
            if known.is_leaf and known.grad is not None:
                self._note_gradient(self.names.of_tensor(known) or "", known.grad)

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        local = self._followed(gradient)
        if local is not None:
            self._gradients.write(local, name)

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
            self._backward_seen = False
            self._note_gradients()
            for i, argument in enumerate(args):
                for tensor in tensors_in(argument):
                    if self._followed(tensor) is not None:
                        key = tensor.untyped_storage()._cdata
                        name = self.names.of_module(module) or type(module).__name__
                        self._arguments[key] = f"argument {i} of {name}"
            if self.saturates:
                self._check_given([*self.names.tensors, *tensors_in(args)])
        self._modules.push(module)

    def _check_given(self, tensors: Sequence[Tensor]) -> None:
        """Where nothing spreads: find what is not finite from the beginning."""
        self.flag.take()
        with torch.no_grad():
            for tensor in tensors:
                local = self._followed(tensor)
                if local is not None and not self._lineage.writers(local) and self.ranges.is_at_limit(local):
                    self._bad_given.add(local.untyped_storage()._cdata)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop(module)
        name = self.names.of_module(module)
        if self.suspended or not name:
            return
        for tensor in tensors_in(output):
            local = self._followed(tensor)
            for _, result in self._lineage.writers(local) if local is not None else ():
                self.module_ranges[name] = result.largest
            break

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
        """Call ``func``, and look at what it has returned and written."""
        kwargs = kwargs or {}
        if self.suspended:
            return call_operator(func, args, kwargs)
        operator: Operator = operator_of(func)
        place = calling_line()
        if self.is_replay:
            if operator.is_collective:
                raise NotReplayedError(
                    f"it calls {operator.name}, in which the other processes would have to take part"
                )
            place = self.caller if place is Caller.REPLAY else place
        if place is Caller.OPTIMIZER or place is Caller.AMP:
            returned = call_operator(func, args, kwargs)
            self._pass_over(operator, place, args, kwargs, returned)
            return returned
        if operator.passed_over and not operator.makes_tensor:
            with self._lock:
                self._note_forward(operator, place)
            return call_operator(func, args, kwargs)
        with self._lock:
            self.flag.take()
            before = self._keep_written(operator, args, kwargs)
            returned = call_operator(func, args, kwargs)
            given = args, kwargs
            ran = Execution(func, operator, place, given, before or given, returned, before is not None)
            try:
                with torch.no_grad():
                    self._look(ran)
            except (RuntimeError, NotImplementedError, TypeError, MemoryError) as error:
                self.not_measured[f"{operator.name}: {first_line(error)}"] += 1
        return returned

    def is_over(self) -> bool:
        """An optimizer has stepped, and no module's forward runs: another iteration begins."""
        return self._optimizer_seen and not self._modules.modules

    def _pass_over(
        self, operator: Operator, place: Caller, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any
    ) -> None:
        self.flag.leave()
        self._optimizer_seen |= place is Caller.OPTIMIZER
        for name, value in operator.operands(args, kwargs):
            for tensor in tensors_in(value) if name in operator.written else ():
                local = self._followed(tensor)
                if local is not None:
                    self._lineage.forget(local)

    def _keep_written(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments, with copies of those that are read and written; None: there is no memory for them."""
        if not operator.written or all(operator.written.values()):
            return args, kwargs

        def kept(value: Any) -> Any:
            local = self._followed(value) if isinstance(value, Tensor) else None
            return value if local is None else local.detach().clone()

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

    def _followed(self, tensor: Any) -> Tensor | None:
        """``tensor``, or the part of it that is here, if its range and memory can be looked at."""
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:  # not in vain for each operand
            tensor = local_part(tensor)
            if has_python_dispatch(tensor):
                return None
        return tensor if is_measurable(tensor) else None

    def _phase(self, operator: Operator, place: Place | Caller | None, node: Any) -> Phase:
        if node is not None:
            self._backward_seen = True
            begun = self._modules.node
            if begun is not None:  # in a checkpoint's recomputation; another node is of a backward within it
                return "recompute" if node is begun else "backward"
            return "recompute" if self._modules.modules and isinstance(place, Place) else "backward"
        return "block" if self._backward_seen and operator.written else "forward"

    def _new_call(self, operator: Operator, place: Place | Caller | None) -> Call:
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
            self._new_call(operator, place)
            self.calls -= 1

    def _forward_of(self, node: Any, name: str) -> Call | None:
        known = self._forward.get(node._sequence_nr(), [])
        plain = name.rstrip("0123456789").removesuffix("Backward").lower()
        for call in known if len(known) > 1 else ():
            if call.operator.rpartition(":")[2].replace("_", "") == plain:
                return call
        return known[0] if known else None

    def _own_results(self, ran: Execution) -> list[Tensor]:
        """The results without views of what was read."""
        results = ran.results()
        if ran.operator.makes_tensor:
            return results
        operands = [(name, tensor) for name, value in ran.operands() for tensor in tensors_in(value)]
        written = {id(tensor) for name, tensor in operands if name in ran.operator.written}
        followed = (self._followed(tensor) for _, tensor in operands)
        read = {local.untyped_storage()._cdata for local in followed if local is not None}

        def is_view(tensor: Tensor) -> bool:
            local = None if id(tensor) in written else self._followed(tensor)
            return local is not None and local.untyped_storage()._cdata in read

        return [tensor for tensor in results if not is_view(tensor)]

    def _look(self, ran: Execution) -> None:
        operator = ran.operator
        call = self._new_call(operator, ran.place)
        saturated = self.flag.read()
        measured: list[Tensor] = []
        for tensor in self._own_results(ran):
            local = self._followed(tensor)
            if local is None:
                if (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and tensor.numel():
                    self.not_measured[f"{operator.name}: {tensor.layout}, {type(tensor).__name__}"] += 1
                continue
            measured.append(local)
        if not measured:
            return
        found: list[tuple[Tensor, bool | None, float]] = []
        zeros = all_zero = False
        if operator.is_collective:  # not there yet
            found = [(tensor, None, math.nan) for tensor in measured]
        else:
            for tensor, (low, high) in zip(measured, self.ranges.of(measured), strict=True):
                bad = saturated or not (math.isfinite(low) and math.isfinite(high))
                found.append((tensor, bad, max(abs(low), abs(high))))
                zeros |= low == 0.0 or high == 0.0
            all_zero = not any(largest for _, _, largest in found)
        first = next((tensor for tensor, bad, _ in found if bad), found[0][0])
        call.dtype, call.shape = first.dtype, tuple(first.shape)
        if self.saturates:
            self._follow_saturation(call, ran)
        call.is_bad = any(bad for _, bad, _ in found) or bool(call.leaves)
        if call.is_bad:
            self._explain(call, ran, saturated, first)
            self._keep_bad(call)
        elif zeros and call.dtype.is_floating_point:
            call.vanished = self._vanished_in(ran, call) or self._vanished_before(ran)
            if all_zero and call.vanished is None and operator.plain in _ELEMENTWISE:
                call.vanished = self._vanished_result(call, ran)
        elif operator.is_collective:
            self._find_inputs(call, ran)
            call.from_other_process = not call.causes and not call.leaves
        for tensor, is_bad, largest in found:
            # What has saturated goes on as a finite number.
            followed = call.is_bad or bool(call.causes) if self.saturates else is_bad
            self._lineage.write(tensor, Result(call, followed, largest))

    def _keep_bad(self, call: Call) -> None:
        if self.saturates and call.from_constant:
            call.is_bad = False
            self.constants.append(call)
        elif len(self.bad) < KEPT_BAD:
            self.bad.append(call)
        else:
            self.dropped_bad += 1

    # ---- why -------------------------------------------------------------------------------------------------------

    def _explain(self, call: Call, ran: Execution, saturated: bool, first: Tensor) -> None:
        if ran.operator.makes_tensor:
            kind: Literal["constant", "data"] = "constant" if first.numel() == 1 else "data"
            call.leaves.append(Leaf(kind, "a tensor made here", first.dtype, tuple(first.shape)))
            return
        if not ran.was_copied:
            call.opinion = Opinion(reason="out of memory while its operands were copied")
            return
        self._find_inputs(call, ran)
        if call.causes or call.leaves:
            call.inputs = []
        elif any(nonfinite_number_in(value) for _, value in ran.operands()):
            call.from_constant = True
        else:
            call.opinion = ask(ran, saturated=saturated)
            if not (call.opinion.is_finite or call.opinion.reason):
                call.vanished = self._vanished_before(ran)

    @staticmethod
    def _vanished_in(ran: Execution, call: Call) -> Vanished | None:
        """A number that the dtype of the result rounds to 0, such as an eps."""
        assert call.dtype is not None
        for name, value in ran.operands():
            number = vanishing_number_in(value, call.dtype)
            if number is not None:
                what = f"{number:g} ({name} of {ran.operator.plain})"
                return Vanished(what, call.dtype, call.operator, call.place)
        return None

    def _written_before(self, ran: Execution) -> Iterator[list[Result]]:
        """For each tensor that an operator reads what has written it."""
        for _, tensor in ran.tensors_read():
            local = self._followed(tensor)
            yield [] if local is None else [result for _, result in self._lineage.writers(local)]

    def _vanished_before(self, ran: Execution) -> Vanished | None:
        """What an input is 0 for."""
        every = (result.call.vanished for results in self._written_before(ran) for result in results)
        return next((vanished for vanished in every if vanished is not None), None)

    def _vanished_result(self, call: Call, ran: Execution) -> Vanished | None:
        """The result itself, where no input is 0 throughout, and float64 has another number."""
        inputs = list(self._written_before(ran))
        if not ran.was_copied or not inputs or not all(results and results[-1].largest for results in inputs):
            return None
        largest = largest_of(ran)
        if not largest:
            return None
        assert call.dtype is not None
        what = f"the result of {ran.operator.plain}, at most {largest:.2g},"
        return Vanished(what, call.dtype, call.operator, call.place)

    def _follow_saturation(self, call: Call, ran: Execution) -> None:
        """What has saturated before ``call``, and has gone on to it as a finite number."""
        for _, tensor in ran.tensors_read():
            local = self._followed(tensor)
            if local is None:
                continue
            writers = self.bad_writers(local)
            call.causes += [writer for writer in writers if writer not in call.causes]
            if local.untyped_storage()._cdata in self._bad_given and not self._lineage.writers(local):
                leaf = self.leaf(local)
                if leaf not in call.leaves and self.ranges.is_at_limit(local):
                    call.leaves.append(leaf)

    def _find_inputs(self, call: Call, ran: Execution) -> None:
        """What ``call`` has read that was not finite: calls, and tensors that no call has written."""
        seen: set[int] = set()
        bad: list[Input] = []
        earlier = ran._replace(given=ran.before).tensors_read()
        for (name, tensor), (_, values) in zip(ran.tensors_read(), earlier, strict=True):
            local, read = self._followed(tensor), self._followed(values)
            if local is not None and read is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found = self._find_input(call, name, local, read)
                if found is not None:
                    bad.append(found._replace(value=values))
        for one in self._to_blame(bad, ran):
            call.causes += [writer for writer in one.writers if writer not in call.causes]
            call.leaves += [leaf for leaf in one.leaves if leaf not in call.leaves]

    def _find_input(self, call: Call, name: str, tensor: Tensor, values: Tensor) -> Input | None:
        low, high = self.ranges.of_one(values)
        is_finite = math.isfinite(low) and math.isfinite(high)
        # Where the device saturates, what has overflowed is finite.
        writers = self.bad_writers(tensor) if self.saturates or not is_finite else []
        if writers:
            return Input(values, writers, [])
        if not is_finite:
            return Input(values, [], [self.leaf(tensor)])
        own = self.names.of_memory(tensor)
        call.inputs.append((f"{name} ({own})" if own else name, low, high))
        return None

    def _to_blame(self, bad: list[Input], ran: Execution) -> list[Input]:
        """Those that make the result bad: -inf in a mask does not where a gradient beside it has overflowed."""
        groups: dict[Any, list[Input]] = {}
        for one in bad:
            ends = frozenset[int]().union(*(writer.ends for writer in one.writers))
            groups.setdefault((ends, tuple(one.leaves)), []).append(one)
        if len(groups) < 2 or self.saturates:
            return bad
        guilty: list[Input] = []
        for key, members in groups.items():
            others = {id(one.value) for other, found in groups.items() if other != key for one in found}
            stays = stays_bad(ran, others)
            if stays is None:
                return bad
            guilty += members if stays else []
        return guilty or bad

    def bad_writers(self, tensor: Tensor) -> list[Call]:
        """The calls that have made ``tensor`` not finite, as far as they were seen."""
        local = self._followed(tensor)
        writers = [] if local is None else self._lineage.writers(local)
        return [result.call for _, result in writers if result.is_bad is not False]

    def leaf(self, tensor: Tensor) -> Leaf:
        """``tensor``, which is not finite, and which no call has written."""
        name = self.names.of_memory(tensor)
        if name is not None:
            return Leaf("weights", name, tensor.dtype, tuple(tensor.shape))
        given = self._arguments.get(tensor.untyped_storage()._cdata)
        if given is None and tensor.is_leaf and tensor.requires_grad:
            return Leaf("weights", "a parameter of no known model", tensor.dtype, tuple(tensor.shape))
        for _, parameter in self._gradients.writers(tensor):
            return Leaf("stale", parameter, tensor.dtype, tuple(tensor.shape))
        return Leaf("data", given or GIVEN, tensor.dtype, tuple(tensor.shape))
