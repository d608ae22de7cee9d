# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of 16-bit parameters that are float32 between blocks, stored in ``param.grad`` alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apex_npu._extension import extension
from apex_npu.amp.grad_groups import GradGroup, dense_grad, sparse_grad, writable_grads
from apex_npu.backends import number_on
from apex_npu.fusion import FlatGrads, any_grads, drop_grads, grads_of, set_grads
from apex_npu.fusion.flat_buffer import is_dense
from apex_npu.fusion.grad_slots import ELSEWHERE, IN_BUFFER, NONE
from apex_npu.ops import LOW_PRECISION, accumulate_, unscale_grads


class LooseGrads:
    """Float32 gradients of 16-bit parameters, each in memory of its own.

    ``FlatGrads`` documents the members that both classes have.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = self.full_params = list(params)
        self._taken: dict[int, int] = {}  # the addresses of gradients that a block has widened

    def states(self) -> bytes:
        """Return one byte for each parameter; IN_BUFFER is a gradient that ``take`` has made."""
        return bytes(map(self._state_of, range(len(self.params)), grads_of(self.params)))

    def _state_of(self, slot: int, grad: Tensor | None) -> int:
        if grad is None:
            return NONE
        return IN_BUFFER if grad.dtype == torch.float32 and self._taken.get(slot) == _address(grad) else ELSEWHERE

    def gather(self) -> None:
        """Copy the gradients that are not float32, have gaps, or share memory, to float32 memory of their own."""
        copied: list[int] = []
        seen: set[int] = set()
        for slot, grad in enumerate(grads_of(self.params)):
            if grad is not None:
                address = _address(grad)
                if grad.dtype != torch.float32 or address in seen or not _fills_memory(grad):
                    copied.append(slot)
                seen.add(address)
        set_grads([self.params[i] for i in copied], [_widened(self.params[i]) for i in copied])

    @torch.no_grad()
    def take(self, inv_scale: float = 1.0, found_inf: Tensor | None = None, slots: Sequence[int] | None = None) -> None:
        """Widen the gradients of ``slots``, multiply them by ``inv_scale`` and check them."""
        chosen = range(len(self.params)) if slots is None else slots
        taken = [i for i in chosen if self.params[i].grad is not None]
        params = [self.params[i] for i in taken]
        wide = list(map(_widened, params))
        unscale_grads([g if g.layout == torch.strided else g.values() for g in wide], inv_scale, found_inf)
        set_grads(params, wide)
        self._taken.update((i, _address(grad)) for i, grad in zip(taken, wide, strict=True))


def _widened(param: Tensor) -> Tensor:
    """Return the gradient of ``param`` in new float32 memory."""
    grad: Tensor = param.grad  # type: ignore[assignment]
    if grad.layout != torch.strided:
        return sparse_grad(grad, torch.float32)
    return torch.empty_like(param, dtype=torch.float32, requires_grad=False).copy_(dense_grad(grad, param))


def _fills_memory(grad: Tensor) -> bool:
    return grad.layout != torch.strided or grad.is_contiguous() or is_dense(grad.size(), grad.stride())


def _address(grad: Tensor) -> int:
    return grad.data_ptr() if grad.layout == torch.strided else id(grad)


class _Aside:
    """The float32 gradients that are not in ``param.grad`` while a block is open, or gradients are delayed.

    Attributes:
        grads: Maps a slot to the gradient in it.
        are_zero: All of ``grads`` are known to be zero, and may have 16 bits.
        delayed: ``param.grad`` is multiplied by the loss scale, and a later block unscales it.
        shown: Maps a slot of ``grads`` to the delayed gradient in ``param.grad``, and its version.
        is_open: A block is open.
    """

    def __init__(self) -> None:
        self.grads: dict[int, Tensor] = {}
        self.shown: dict[int, tuple[Tensor, int]] = {}
        self.delayed = self.is_open = self.are_zero = False


class WidenedGrads(GradGroup):
    """The gradients of 16-bit parameters whose slots are float32.

    A block sets existing gradients aside, since autograd and DistributedDataParallel require new gradients of one dtype
    and scale. At its end one pass widens, divides and checks the new gradients, and writes them to the slots. The
    gradients set aside are added. With ``fuse_unscale`` all gradients stay multiplied by the loss scale, and those to
    which nothing is added stay as backward has left them.
    """

    def __init__(
        self, grads: FlatGrads | LooseGrads, slots: Sequence[int] | None = None, aside: _Aside | None = None
    ) -> None:
        """Make a group of the parameters in the given slots of a buffer.

        Args:
            grads: The buffer, or gradients without a buffer.
            slots: The slots of ``grads``; None: all.
            aside: The gradients set aside, which the groups of one buffer share.
        """
        self._grads, self._slots = grads, range(len(grads.params)) if slots is None else slots
        flat = grads if slots is None and isinstance(grads, FlatGrads) else None
        super().__init__([grads.full_params[slot] for slot in self._slots], flat)
        self._aside = _Aside() if aside is None else aside
        # LayerNorm's backward on an NPU returns float32 for 16-bit weights.
        self.casts_in_backward = self.device.type == "npu"
        self._accept(any_dtype=True)

    def _accept(self, *, any_dtype: bool) -> None:
        """Let autograd accept gradients of any dtype, as scripts assign, or cast them to the parameter's dtype."""
        for param in self.params if hasattr(Tensor, "grad_dtype") else ():
            if param.dtype in LOW_PRECISION and (any_dtype or param.grad is None or param.grad.dtype == param.dtype):
                param.grad_dtype = None if any_dtype else param.dtype

    def adopt_from(self, former: Sequence[GradGroup]) -> None:
        """Take over the gradients of these parameters that ``former`` groups have set aside."""
        slot_of = {id(p): slot for p, slot in zip(self.params, self._slots, strict=True)}
        for group in former:
            if isinstance(group, WidenedGrads):
                for slot, grad in group._aside.grads.items():
                    own = slot_of.get(id(group._grads.full_params[slot]))
                    if own is not None:
                        self._aside.are_zero = False
                        self._aside.grads[own] = grad.float()

    def part(self, indices: Sequence[int]) -> GradGroup:
        return WidenedGrads(self._grads, [self._slots[i] for i in indices], self._aside)

    def begin_block(self, factor: float, *, fuses: bool) -> bool:
        """Set gradients aside, or scale delayed ones. Return True if some come from outside of blocks, unchecked."""
        unchecked = False
        if self._aside.delayed:
            self.scale_sources_(factor)
        elif any_grads(self.params):
            self._aside.are_zero = extension is not None and extension.are_zero_grads_cpu(self.params)
            if not self._aside.are_zero:
                unchecked = ELSEWHERE in self._grads.states()
                self._grads.gather()
            for slot, param in zip(self._slots, self.params, strict=True):
                if param.grad is not None:
                    self._aside.grads[slot] = param.grad
            drop_grads(self.params)
        if fuses:
            self._scale_aside_(factor)
        self._aside.is_open = True
        if self.casts_in_backward:
            self._accept(any_dtype=False)
        return unchecked

    @torch.no_grad()
    def scale_sources_(self, factor: float) -> None:
        if factor != 1.0 and any_grads(self.params):
            # In place: in the slots they would be float32, which backward cannot add to.
            unscale_grads(writable_grads(self.params), factor, None)

    @torch.no_grad()
    def _scale_aside_(self, factor: float) -> None:
        if factor != 1.0 and self._aside.grads and not self._aside.are_zero:
            torch._foreach_mul_(list(self._aside.grads.values()), factor)

    @torch.no_grad()
    def clip_(self, coefficient: Tensor) -> None:
        for grad in self._aside.grads.values():
            grad.mul_(number_on(coefficient.reshape(()), grad.device))
        if not self._aside.is_open:
            self.widen()
        super().clip_(coefficient)

    def abandon_block(self, factor: float, *, fuses: bool) -> None:
        if self.casts_in_backward:
            self._accept(any_dtype=True)
        if fuses:
            self._scale_aside_(factor)
        if self._aside.delayed:
            self.scale_sources_(factor)
        else:
            drop_grads(self.params)
            self._put_back()

    def note_delayed(self) -> None:
        """Note delayed gradients. If a script clears one of them, ``drop_cleared`` clears the one set aside."""
        if self.casts_in_backward:
            self._accept(any_dtype=True)
        self._aside.delayed, self._aside.is_open = True, False
        for slot in self._aside.grads:
            param = self._grads.full_params[slot]
            if param.grad is None:
                param.grad = torch.zeros_like(param, requires_grad=False)
            self._aside.shown[slot] = param.grad, param.grad._version

    def begin_step(self) -> None:
        """Gather gradients for optimizers that are not fused, which require the dtype of the stepped parameter."""
        if isinstance(self._grads, LooseGrads) or self._grads.is_widened:
            self.widen()

    def widen(self) -> None:
        if not self._aside.delayed:
            self._grads.gather()

    def drop_cleared(self) -> None:
        shown, self._aside.shown = self._aside.shown, {}
        for slot, (grad, version) in shown.items():
            now = self._grads.full_params[slot].grad
            if now is None:
                self._aside.grads.pop(slot, None)
            elif slot in self._aside.grads:
                self._aside.shown[slot] = now, now._version
                if now is grad and now._version != version and not now.any():
                    self._aside.grads[slot].zero_()

    def forget(self, set_to_none: bool) -> None:
        self._aside.delayed = False
        if set_to_none:
            self._aside.grads, self._aside.shown = {}, {}
            return
        if not self._aside.is_open:
            self.drop_cleared()  # dropped gradients do not become zeros
        for grad in self._aside.grads.values():
            grad.zero_()
        if not self._aside.is_open:
            self._put_back()

    @property
    def holds_aside(self) -> bool:
        """True if gradients are set aside."""
        return bool(self._aside.grads)

    def clear_aside(self, params: Collection[int], set_to_none: bool) -> None:
        """Clear the gradients set aside of ``params``, given by their identities."""
        aside = self._aside.grads
        for slot in [slot for slot in aside if id(self._grads.full_params[slot]) in params]:
            if set_to_none:
                del aside[slot]
            else:
                aside[slot].zero_()

    def has_grads(self) -> bool:
        return bool(self._aside.grads) or any_grads(self.params)

    @torch.no_grad()
    def zero_(self) -> None:
        super().zero_()
        for grad in self._aside.grads.values():
            grad.zero_()

    @torch.no_grad()
    def unscale_(self, inv_scale: float, found_inf: Tensor | None, *, share: bool = False) -> None:
        if self.casts_in_backward:
            self._accept(any_dtype=True)
        slots = None if len(self._slots) == len(self._grads.params) else self._slots
        if self._aside.are_zero:
            self._put_back_zeros(share=share)
        elif self._aside.grads:
            slots = [slot for slot in self._slots if slot not in self._aside.grads]
            self._add_to_aside(inv_scale, found_inf)
        if not share:
            self._grads.take(inv_scale, found_inf, slots)
        elif found_inf is not None:
            self.check(found_inf)
        self._aside.delayed = self._aside.is_open = False

    def _put_back_zeros(self, *, share: bool) -> None:
        """Put back the zeros of parameters without a new gradient, and drop the other zeros."""
        zeros = {i: grad for i, grad in self._aside.grads.items() if self._grads.full_params[i].grad is None}
        if not share:
            zeros = {i: grad.float() for i, grad in zeros.items()}
        self._aside.grads = zeros
        self._put_back()

    def _add_to_aside(self, inv_scale: float, found_inf: Tensor | None) -> None:
        """Put the gradients set aside back, with the new gradients added."""
        flat = self._grads.sum_into_slots(self._aside.grads, inv_scale) if isinstance(self._grads, FlatGrads) else None
        if flat is not None:
            self._put_back()
            unscale_grads([flat], 1.0, found_inf)
            return
        dense: list[tuple[Tensor, Tensor]] = []
        others: list[Tensor] = []
        for slot, grad in self._aside.grads.items():
            new = self._grads.full_params[slot].grad
            if new is not None and grad.layout == new.layout == torch.strided:
                dense.append((grad, new.detach()))
            else:
                total = grad if new is None else grad + new.detach().float() * inv_scale
                self._aside.grads[slot] = total
                others.append(total if total.layout == torch.strided else total.coalesce().values())
        self._put_back()
        if dense:
            accumulate_([grad for grad, _ in dense], [new for _, new in dense], inv_scale, found_inf)
        unscale_grads(others, 1.0, found_inf)

    def _put_back(self) -> None:
        aside, self._aside.grads = self._aside.grads, {}
        self._aside.shown, self._aside.is_open, self._aside.are_zero = {}, False, False
        set_grads([self._grads.full_params[slot] for slot in aside], list(aside.values()))

    @torch.no_grad()
    def scale_(self, factor: float, found_inf: Tensor | None = None) -> None:
        if self.flat is None:
            self.widen()
        super().scale_(factor, found_inf)


def clearing_aside(adopted: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a wrapper of ``nn.Module.zero_grad`` that also clears the gradients that blocks have set aside.

    ``adopted`` are the optimizers whose blocks set gradients aside.
    """

    def wrapped(original: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
            original(module, set_to_none)
            if torch.compiler.is_compiling():
                return  # no block is opened in compiled code
            groups = [g for o in adopted for g in o._amp_state.grads.groups if isinstance(g, WidenedGrads)]
            holding = [g for g in groups if g.holds_aside]
            if holding:
                cleared = set(map(id, module.parameters()))
                for group in holding:
                    group.clear_aside(cleared, set_to_none)

        return zero_grad

    return wrapped
