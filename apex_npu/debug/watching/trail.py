# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Trail``: finds where inf and nan began, and which results they reached."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from apex_npu.backends import Backend, for_device
from apex_npu.debug.watching.calls import Call, Input, Leaf, Result, Vanished
from apex_npu.debug.watching.lineage import Lineage
from apex_npu.debug.watching.operators import (
    Execution,
    followed,
    is_finite,
    numbers_in,
    ranges_of,
    tensors_in,
    vanishing_number_in,
)
from apex_npu.debug.watching.second_opinion import ask, stays_bad
from apex_npu.debug.watching.stream import Consumer

# The name of a tensor that is no argument of a module and that no operator has written.
GIVEN = "a tensor given from outside"

# The number of calls with results that are not finite that are remembered.
_KEPT_BAD = 1_000
# Each result element is computed from one element of each input: from nonzero inputs, it is 0 only by rounding.
_ELEMENTWISE = {"mul", "mul_", "pow", "pow_", "square", "square_", "div", "div_", "exp", "exp_", "sigmoid", "prod"}


def saturating(models: Sequence[nn.Module]) -> list[torch.device]:
    """Return the devices of ``models`` on which a result that overflows is the largest number and raises a flag."""
    devices = dict.fromkeys(p.device for model in models for p in model.parameters())
    return [device for device in devices if device.type != "meta" and for_device(device).saturates()]


class Saturation:
    """The overflow flags of devices where a result that overflows is the largest number and raises a flag.

    The results are finite, so whatever reads them inherits the fault. amp finds the flag as if nothing had watched.
    Elsewhere there are no such devices: a result that overflows is inf, and no method has an effect.

    Attributes:
        saturates: Whether there are such devices.
        raised: Whether a flag was raised since amp last cleared it.
        constants: The calls with inf or nan among their own arguments, such as masks, which do not count as overflows.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Set the ``devices`` that saturate; empty if none does."""
        self._devices: list[tuple[torch.device, Backend]] = [(device, for_device(device)) for device in devices]
        self.saturates = bool(devices)
        self.raised = False
        self.constants: list[Call] = []

    def read(self) -> bool:
        """Return whether the flag is raised, clear it, and remember it for amp."""
        raised = [backend.overflow_flag(device) for device, backend in self._devices]
        if any(raised):
            self.raised = True
            self.clear()
        return any(raised)

    def hand_back(self) -> None:
        """Raise the flag if an operator has raised it since amp last cleared it."""
        if self.raised:
            self.raised = False
            for device, _ in self._devices:
                torch.full((1,), 65504.0, dtype=torch.float16, device=device).mul_(2)

    def clear(self) -> None:
        """Clear the flag, because a diagnostic operator may have raised it."""
        for device, backend in self._devices:
            backend.clear_overflow_flag(device)

    def limit(self, tensor: Tensor) -> float:
        """Return the smallest magnitude in ``tensor`` that counts as not finite."""
        return torch.finfo(tensor.dtype).max if self.saturates and tensor.dtype.is_floating_point else math.inf

    def goes_on(self, call: Call, is_bad: bool | None) -> bool | None:
        """Return whether readers of a result of ``call`` inherit its fault; ``is_bad``: the result is not finite."""
        return call.is_bad or bool(call.causes) if self.saturates else is_bad

    def excuses(self, call: Call) -> bool:
        """Return whether ``call`` is not an overflow although its result is not finite."""
        if not (self.saturates and call.from_constant):
            return False
        self.constants.append(call)
        return True


class Trail(Consumer):
    """Reads the range of each result, and explains each result that is not finite.

    Attributes:
        overflows: How overflows appear on the device.
        bad: The last calls with a result that is not finite, in order.
    """

    reads = True

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Watch ``models``."""
        super().__init__(models)
        self.overflows = Saturation(saturating(models))
        self.bad: deque[Call] = deque(maxlen=_KEPT_BAD)
        self._bad_given: set[int] = set()
        self._lineage: Lineage[Result] = Lineage()
        self._gradients: Lineage[str] = Lineage()
        self._arguments: dict[int, str] = {}
        self._note_gradients()

    # ---- blocks and modules ----------------------------------------------------------------------------------------

    def begin_block(self, scale: float, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """Handle the start of a block: the loss is multiplied with ``scale``; ``gradients`` exist, each with a name."""
        self.stream.set_block(scale)
        for name, gradient in gradients:
            self._gradients.write(gradient, name)
        self.overflows.hand_back()

    def end_block(self, gradients: Sequence[Tensor]) -> None:
        """Handle the end of a block, whose ``gradients`` are then unscaled and clipped unwatched."""
        self.stream.set_block(1.0)
        for gradient in gradients:
            self._lineage.forget(gradient)

    def closed(self) -> None:
        self.overflows.hand_back()

    def _note_gradients(self) -> None:
        """Remember the memory of the existing gradients, which the operators that add to them read."""
        for known in self.names.tensors:
            if known.is_leaf and known.grad is not None:
                self._gradients.write(known.grad, self.names.of_tensor(known) or "")

    def begins(self, given: Sequence[tuple[str, Tensor]]) -> None:
        self._note_gradients()
        for name, tensor in given:
            if followed(tensor) is not None:
                self._arguments[tensor.untyped_storage()._cdata] = name
        if self.overflows.saturates:  # nothing spreads: find the inputs that are not finite before the first operator
            self.overflows.read()
            with torch.no_grad():
                known = (followed(tensor) for tensor in [*self.names.tensors, *(tensor for _, tensor in given)])
                unwritten = [t for t in known if t is not None and not self._lineage.writers(t)]
                self._bad_given |= {t.untyped_storage()._cdata for t in unwritten if self.is_bad(t)}

    # ---- operators -------------------------------------------------------------------------------------------------

    def before(self) -> None:
        self.overflows.read()

    def passed_over(self, ran: Execution) -> None:
        for name, value in ran.operands():
            for tensor in tensors_in(value) if name in ran.operator.written else ():
                self._lineage.forget(tensor)

    def saw(self, call: Call, ran: Execution) -> None:
        operator = ran.operator
        saturated = self.overflows.read()
        measured: list[Tensor] = []
        for tensor in ran.own_results():
            local = followed(tensor)
            if local is not None:
                measured.append(local)
            elif (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and tensor.numel():
                self.stream.not_measured[f"{operator.name}: {tensor.layout}, {type(tensor).__name__}"] += 1
        if not measured:
            return
        found: list[tuple[Tensor, bool | None, float]] = [(tensor, None, math.nan) for tensor in measured]
        zeros = all_zero = False
        if not operator.is_collective:  # whose result is not there yet
            ranges = self.ranges_of(measured)
            found = [
                (tensor, saturated or not is_finite(ends), max(map(abs, ends)))
                for tensor, ends in zip(measured, ranges, strict=True)
            ]
            zeros, all_zero = any(0.0 in ends for ends in ranges), not any(largest for _, _, largest in found)
        first = next((tensor for tensor, bad, _ in found if bad), found[0][0])
        call.dtype, call.shape = first.dtype, tuple(first.shape)
        if self.overflows.saturates:
            self._follow_saturation(call, ran)
        call.is_bad = any(bad for _, bad, _ in found) or bool(call.leaves)
        if call.is_bad:
            self._explain(call, ran, saturated, first)
            call.is_bad = not self.overflows.excuses(call)
            if call.is_bad:
                self.bad.append(call)
        elif zeros and call.dtype.is_floating_point:
            call.vanished = self._vanished_in(ran, call) or self._vanished_before(ran)
            if all_zero and call.vanished is None and operator.plain in _ELEMENTWISE:
                call.vanished = self._vanished_result(call, ran)
        elif operator.is_collective:
            self._find_inputs(call, ran)
            call.from_other_process = not call.causes and not call.leaves
        for tensor, is_bad, largest in found:
            self._lineage.write(tensor, Result(call, self.overflows.goes_on(call, is_bad), largest))

    def is_bad(self, tensor: Tensor) -> bool:
        """Return whether an element of ``tensor`` is inf or nan, or a number that stands for them."""
        limit = self.overflows.limit(tensor)
        return not all(abs(end) < limit for end in self.ranges_of([tensor])[0])

    def ranges_of(self, tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
        """Call ``operators.ranges_of``, and clear the overflow flag if reading inf may have raised it."""
        found = ranges_of(tensors)
        if not all(map(is_finite, found)):
            self.overflows.clear()
        return found

    # ---- why -------------------------------------------------------------------------------------------------------

    def _explain(self, call: Call, ran: Execution, saturated: bool, first: Tensor) -> None:
        if ran.operator.makes_tensor:
            kind: Literal["constant", "data"] = "constant" if first.numel() == 1 else "data"
            call.leaves.append(Leaf(kind, "a tensor made here", first.dtype, tuple(first.shape)))
            return
        self._find_inputs(call, ran)
        if call.causes or call.leaves:
            call.inputs = []
        elif not all(math.isfinite(number) for _, value in ran.operands() for number in numbers_in(value)):
            call.from_constant = True
        else:
            call.opinion = ask(ran, of_all=saturated)
            if not (call.opinion.is_finite or call.opinion.reason):
                call.vanished = self._vanished_before(ran)

    @staticmethod
    def _vanished_in(ran: Execution, call: Call) -> Vanished | None:
        """Return a number among the arguments, such as an eps, that the dtype of the result rounds to 0."""
        assert call.dtype is not None
        for name, value in ran.operands():
            number = vanishing_number_in(value, call.dtype)
            if number is not None:
                return Vanished(f"{number:g} ({name} of {ran.operator.plain})", call)
        return None

    def _vanished_before(self, ran: Execution) -> Vanished | None:
        """Return the reason why an input is 0, if it was rounded to 0."""
        calls = (result.call for _, tensor in ran.tensors_read() for result in self._lineage.writers(tensor))
        return next((call.vanished for call in calls if call.vanished is not None), None)

    def _vanished_result(self, call: Call, ran: Execution) -> Vanished | None:
        """Return the result itself, if no input is 0 everywhere and the result is nonzero in float64."""
        inputs = [self._lineage.writers(tensor) for _, tensor in ran.tensors_read()]
        if not inputs or not all(results and results[-1].largest for results in inputs):
            return None
        largest = ask(ran, of_all=True).largest
        return Vanished(f"the result of {ran.operator.plain}, at most {largest:.2g},", call) if largest > 0.0 else None

    def _follow_saturation(self, call: Call, ran: Execution) -> None:
        """Add to ``call`` the saturated inputs, which are finite numbers by now."""
        for _, tensor in ran.tensors_read():
            local = followed(tensor)
            if local is None:
                continue
            writers = self.bad_writers(local)
            call.causes += [writer for writer in writers if writer not in call.causes]
            if local.untyped_storage()._cdata in self._bad_given and not self._lineage.writers(local):
                leaf = self.leaf(local)
                if leaf not in call.leaves and self.is_bad(local):
                    call.leaves.append(leaf)

    def _find_inputs(self, call: Call, ran: Execution) -> None:
        """Find the inputs that were not finite: the calls that wrote them, and tensors that no call wrote."""
        seen: set[int] = set()
        bad: list[Input] = []
        earlier = ran._replace(given=ran.before).tensors_read()
        for (name, tensor), (_, values) in zip(ran.tensors_read(), earlier, strict=True):
            local, read = followed(tensor), followed(values)
            if local is None or read is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            low, high = self.ranges_of([read])[0]
            holds_inf = not is_finite((low, high))
            # On a saturating device, a value that has overflowed is finite.
            writers = self.bad_writers(local) if self.overflows.saturates or holds_inf else []
            if writers or holds_inf:
                bad.append(Input(values, writers, [] if writers else [self.leaf(local)]))
            else:
                own = self.names.of_memory(local)
                call.inputs.append((f"{name} ({own})" if own else name, low, high))
        for one in self._to_blame(bad, ran):
            call.causes += [writer for writer in one.writers if writer not in call.causes]
            call.leaves += [leaf for leaf in one.leaves if leaf not in call.leaves]

    def _to_blame(self, bad: list[Input], ran: Execution) -> list[Input]:
        """Return the inputs that make the result not finite; beside an overflowed gradient, -inf in a mask does not."""
        groups: dict[Any, list[Input]] = {}
        for one in bad:
            ends = frozenset[int]().union(*(writer.ends for writer in one.writers))
            groups.setdefault((ends, tuple(one.leaves)), []).append(one)
        if len(groups) < 2 or self.overflows.saturates:
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
        """Return the known calls that made ``tensor`` not finite."""
        memory = tensor._values() if tensor.layout == torch.sparse_coo else tensor
        return [result.call for result in self._lineage.writers(memory) if result.is_bad is not False]

    def leaf(self, tensor: Tensor) -> Leaf:
        """Return the ``Leaf`` of ``tensor``, which is not finite and which no call has written."""
        name = self.names.of_memory(tensor)
        if name is not None:
            return Leaf("weights", name, tensor.dtype, tuple(tensor.shape))
        given = self._arguments.get(tensor.untyped_storage()._cdata)
        if given is None and tensor.is_leaf and tensor.requires_grad:
            return Leaf("weights", "a parameter of a model that is not watched", tensor.dtype, tuple(tensor.shape))
        for parameter in self._gradients.writers(tensor):
            return Leaf("stale", parameter, tensor.dtype, tuple(tensor.shape))
        return Leaf("data", given or GIVEN, tensor.dtype, tuple(tensor.shape))
