# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The flat buffers of parameters of one device and dtype: the parameters, their gradients and their state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.fusion.flat_buffer import FlatBuffer, Layout, Slot, leave_private_formats, may_move, numbers_in
from apex_npu.fusion.flat_grads import FlatGrads
from apex_npu.fusion.grad_slots import ELSEWHERE, NONE, InPlace, check_grad
from apex_npu.fusion.shards import local_grad, local_part
from apex_npu.fusion.storage import (
    SlotTable,
    increment_versions,
    release_previous,
    storage_numel,
    storage_views,
)
from apex_npu.ops import wide_dtype


class OwnGrad:
    """The gradient of one parameter, or of this process's part of a sharded parameter. No step moves it.

    ``FlatGrads`` documents the members that both classes have.

    Attributes:
        index: The place of the parameter in its group, for error messages.
    """

    index = 0

    def __init__(self, param: Tensor, full_param: Tensor | None = None) -> None:
        """Wrap the gradient of ``param``, this process's part of ``full_param``; None: it is not a part."""
        self.params, self.full_params, self.offsets = [param], [param if full_param is None else full_param], [0]

    def _grad(self) -> Tensor | None:
        param, full = self.params[0], self.full_params[0]
        return param.grad if full is param else local_grad(full)

    def states(self, slots: range | None = None) -> bytes:
        """Return one byte: NONE or ELSEWHERE."""
        return bytes([NONE if self.full_params[0].grad is None else ELSEWHERE])

    def gather(self, slots: range | None = None, *, in_place: InPlace = InPlace.NO) -> bytes:
        """Return ``states()``, after a check that the gradient can be stepped."""
        grad = self._grad()
        if grad is not None:
            check_grad(self.index, self.params[0], grad, self.params[0].dtype)
        return self.states()

    def operand(self, slots: range, numel: int, *, writable: bool = True) -> Tensor:
        """Return the gradient, 1-D, with its elements in the parameter's order; a copy if necessary."""
        param, grad = self.params[0], self._grad()
        assert grad is not None
        grad = grad.detach()
        of_param = grad.untyped_storage()._cdata == param.untyped_storage()._cdata
        if of_param or grad.is_neg() or grad.stride() != param.stride():
            grad = torch.empty_like(param, dtype=grad.dtype, requires_grad=False).copy_(grad)
        return grad.as_strided((param.numel(),), (1,), grad.storage_offset())

    @property
    def flat(self) -> Tensor:
        """The ``operand``, in the parameter's dtype."""
        param = self.params[0]
        return self.operand(range(1), param.numel()).to(param.dtype)

    def have_parts(self) -> bool:
        """Return True while ``params[0]`` is the part inside the sharded parameter."""
        return local_part(self.full_params[0]) is self.params[0]

    def end_step(self) -> None:
        """Increment the version of the sharded parameter if it has been stepped."""
        full = self.full_params[0]
        if full.grad is not None:
            increment_versions([full])


class GroupBuffers:
    """The flat buffers of some parameters.

    Attributes:
        params: The parameters, of one dtype and device, dense, not overlapping.
        owners: For each of ``params``, the tensor that states belong to: itself, or the parameter on an accelerator
            that it is a host copy of.
        chunk_of: For each of ``params``, the number of the chunk in which it is stepped; empty: there is one.
        places: For each parameter, the index of its entry of ``param_groups``, and its place there. Slots are in any
            order.
        param_flat: A 1-D tensor over the memory of all parameters.
        grads: The gradients, in the same layout. A gradient of a parameter that is not moved stays where it is.
        table: The place of each parameter when it was fused.
        kept: Parameters whose former memory may still be referenced from outside torch (a numpy array).
        has_buffer: Whether ``param_flat`` was made for the parameters; else it is the memory that a parameter had.
        encoding: A ``GroupEncoding`` if states are kept in fewer bytes than float32, else None.
        counts_always: Steps are also counted for rules without state, because stochastic rounding draws its random bits
            by the count.
    """

    has_buffer = True
    encoding: Any = None
    counts_always = False

    def __init__(self, params: Sequence[Tensor], param_flat: Tensor, offsets: Sequence[int]) -> None:
        """Wrap ``param_flat``, which holds ``params``; they count as one param group's until ``places`` are set."""
        self.params = self.owners = list(params)
        self.chunk_of: list[int] = []
        self.places = [(0, place) for place in range(len(self.params))]
        self.param_flat = param_flat
        self.grads: FlatGrads | OwnGrad
        if extension is None:
            (param,) = self.params
            self.grads = OwnGrad(param)
        else:
            self.grads = FlatGrads(self.params, offsets, param_flat.numel())
        self.table = SlotTable(self.params)
        self.kept = [p for p in self.params if not release_previous(p)]
        self._states: dict[str, _State] = {}
        self._scratch: dict[str, FlatBuffer] = {}
        self._used = bytearray(len(self.params))

    def span(self, slots: range) -> tuple[int, int]:
        """Return the range [begin, end) of the elements of consecutive ``slots``, padding included."""
        offsets = self.grads.offsets
        return offsets[slots.start], offsets[slots.stop] if slots.stop < len(offsets) else self.param_flat.numel()

    def broken(self) -> list[int]:
        """Return the indices of parameters that have left their slot (``p.data = …``, ``.to()``, another fusion)."""
        return self.table.broken(self.params)

    def release_kept(self) -> None:
        """Release former memory that is no longer referenced from outside torch."""
        self.kept = [p for p in self.kept if not release_previous(p)]

    # State

    @property
    def own_states(self) -> tuple[str, ...]:
        """The names of the states that are shown in addition to the rule's."""
        return () if self.encoding is None else self.encoding.own_states

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype in which updates are computed: float32 for float16 and bfloat16 parameters, else their own."""
        return wide_dtype(self.param_flat.dtype)

    def state_flat(self, name: str) -> Tensor:
        """Return the buffer of state ``name``, allocated with zeros at first use."""
        return self._state(name).flat

    def scalar_flat(self, name: str) -> Tensor:
        """Return a state of one number for each parameter, allocated with zeros at first use."""
        return self._state(name, scalar=True).flat

    def scratch_flat(self, name: str) -> Tensor:
        """Return memory like a state's for intermediate values. It is never shown, saved or zeroed."""
        buffer = self._scratch.get(name)
        if buffer is None:
            buffer = self._scratch[name] = FlatBuffer(self.param_flat.numel(), self.state_dtype, self.param_flat.device)
        return buffer.flat

    def state_views(self, name: str, *, scalar: bool = False) -> list[Tensor]:
        """Return state ``name`` of all parameters: shaped like them, or 0-dim for a state of one number."""
        return self._state(name, scalar=scalar).views

    def reset_state(self, name: str, index: int, initial: float, *, scalar: bool = False) -> None:
        """Set state ``name`` of one parameter to ``initial``. Launches nothing if it already has that value."""
        state = self._state(name, initial, scalar=scalar)
        if self._used[index] or initial != state.initial:
            state.views[index].fill_(initial)

    def _state(self, name: str, initial: float = 0.0, *, scalar: bool = False) -> _State:
        state = self._states.get(name)
        if state is None and self.encoding is not None and name in self.encoding.formats:
            values, shown = self.encoding.new_state(self, name)
            state = self._states[name] = _State(values, shown, 0.0, scalar)
        if state is None:
            numel = len(self.params) if scalar else self.param_flat.numel()
            buffer = FlatBuffer(numel, self.state_dtype, self.param_flat.device)
            if initial:
                buffer.flat.fill_(initial)
            state = self._states[name] = _State(buffer.flat, [], initial, scalar)
            self._renew_views(state)
        return state

    def renew_views(self) -> None:
        """Make new views of the states, since a script has given some of those that it was shown other memory."""
        for name, state in self._states.items():
            if self.encoding is None or name not in self.encoding.formats:
                self._renew_views(state)

    def _renew_views(self, state: _State) -> None:
        made = numbers_in(state.flat) if state.scalar else storage_views(state.flat, self.grads.offsets, self.params)
        state.views[:] = made

    def drop_state(self, name: str) -> None:
        """Drop the buffer of state ``name``, so that it gets a new one; views that were shown keep the values."""
        self._states.pop(name, None)

    def use(self, index: int) -> None:
        """Record that the states of one parameter may have been written."""
        self._used[index] = 1

    def add_model_params(self, tensors: Sequence[Tensor | None]) -> ModelParamBuffer | None:
        """Move ``tensors``, one or None for each parameter, into a new buffer with the layout of this one.

        A tensor moves only if it has its parameter's shape and strides, owns its storage, and has the common dtype.
        Tensors in private formats leave these first.

        Args:
            tensors: The model parameters.

        Returns:
            The buffer, or None if nothing can move.
        """
        leave_private_formats([t for t in tensors if t is not None])
        movable = [
            (i, t)
            for i, (t, p) in enumerate(zip(tensors, self.params, strict=True))
            if t is not None
            and (t.device, t.size(), t.stride(), t.storage_offset()) == (p.device, p.size(), p.stride(), 0)
            and storage_numel(t) == t.numel() > 0
            and may_move([t])
        ]
        movable = [(i, t) for i, t in movable if t.dtype == movable[0][1].dtype]
        if not movable:
            return None
        moved = [t for _, t in movable]
        buffer = FlatBuffer(self.param_flat.numel(), moved[0].dtype, moved[0].device)
        slots = tuple(Slot(self.grads.offsets[i], t.numel()) for i, t in movable)
        buffer.adopt(moved, Layout(slots, tuple(range(len(slots))), buffer.flat.numel()))
        return ModelParamBuffer(buffer.flat, moved)


class _State(NamedTuple):
    """One state of all parameters.

    Attributes:
        flat: The buffer.
        views: A view for each parameter.
        initial: The value that filled the buffer.
        scalar: It is one number for each parameter.
    """

    flat: Tensor
    views: list[Tensor]
    initial: float
    scalar: bool


class ModelParamBuffer:
    """The 16-bit data of parameters that are stepped in float32, in a buffer with the layout of a ``GroupBuffers``.

    Attributes:
        flat: 1-D, as long as the group's ``param_flat``; arbitrary values where a parameter has no 16-bit data.
        params: The parameters.
        table: The places of their 16-bit data when it was moved here.
        kept: Parameters whose former memory may still be referenced from outside torch.
    """

    def __init__(self, flat: Tensor, params: Sequence[Tensor]) -> None:
        """Wrap ``flat``, which already holds ``params``."""
        self.flat = flat
        self.params = list(params)
        self.table = SlotTable(self.params)
        self.kept = [p for p in self.params if not release_previous(p)]

    def release_kept(self) -> None:
        """Release former memory that is no longer referenced from outside torch."""
        self.kept = [p for p in self.kept if not release_previous(p)]
