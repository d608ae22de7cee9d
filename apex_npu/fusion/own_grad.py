# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``OwnGrad``: the gradient of one parameter that is stepped in place."""

from __future__ import annotations

import torch
from torch import Tensor

from apex_npu.fusion.grad_slots import ELSEWHERE, NONE, InPlace, check_grad
from apex_npu.fusion.many_tensors import increment_versions
from apex_npu.fusion.shards import local_grad, local_part


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
