# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What scripts ask a fused optimizer for over all of its parameters: combined buffers, and clipping by one norm."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from operator import attrgetter

import torch
from torch import Tensor

from apex_npu.backends._torch_private import disable_dynamo
from apex_npu.fusion import (
    FusedGroup,
    HasFusedGroups,
    clip_grad_norm_,
    combined,
    fuse_combined,
    joined,
    not_combinable,
    split_by_kind,
)
from apex_npu.optimizers.fused_param_group import FusedParamGroup


class CombinedAccessors(HasFusedGroups):
    """A base of ``FusedOptimizer``, which has the attributes below."""

    capturable: bool
    _fused: list[FusedParamGroup]
    _has_owners: bool
    _groups: list[FusedGroup]
    _all_fused: bool

    def _end_fusing(self) -> None:
        """Take note of the groups that ``_fused`` has, and bring state to them."""
        raise NotImplementedError

    def clip_optimizer_grad_norm_fused(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of all parameters to a common norm, in one pass over each buffer.

        The same values as ``torch.nn.utils.clip_grad_norm_``, without a host sync. Before the first backward there is
        nothing to clip, and the norm is 0.

        Args:
            max_norm: Largest norm.
            norm_type: p of the p-norm.
            error_if_nonfinite: Raise where the norm is inf or nan.

        Returns:
            The norm before clipping, 0-dim.
        """
        flats = self.flat_grads()
        return clip_grad_norm_(flats, self._with_gaps(), max_norm, norm_type, error_if_nonfinite)

    def _with_gaps(self) -> list[Tensor]:
        """The parameters whose gradients are in no buffer."""
        return [p for record in self._fused for p in record.owners_of(record.copies())] if self._has_owners else []

    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """``clip_optimizer_grad_norm_fused`` by the name that ``torch_npu.optim`` has for it."""
        return self.clip_optimizer_grad_norm_fused(max_norm, norm_type)

    @disable_dynamo
    def combined_groups(self) -> list[list[FusedGroup]]:
        """The fused groups that each combined buffer spans; they get common memory now if they have none.

        Raises:
            RuntimeError: See ``get_optimizer_combined_params``; nothing has moved.
        """
        self.flat_grads()
        for p in self._with_gaps():
            raise not_combinable(p)
        leading = {id(p) for p in self.leading_params()}
        found = combined(self._groups, leading, attrgetter("param_flat"))
        if found is None or any(not fused.owns_memory for groups in found if len(groups) > 1 for fused in groups):
            self.check_combining()
            self._combine(leading)
            found = combined(self._groups, leading, attrgetter("param_flat"))
            assert found is not None
        return found

    @torch.no_grad()
    def _combine(self, leading: Collection[int]) -> None:
        if any(fused.runs.is_captured for fused in self._groups):
            raise RuntimeError(
                f"{type(self).__name__} has a step in a captured CUDA graph, which writes parameters where they are: "
                "they cannot be moved into a combined buffer. Call the accessor once before the capture; or, once the "
                "graph is not to be replayed any more, give each parameter other memory (p.data = p.data.clone()), and "
                "call it then. Nothing has moved"
            )
        kinds = split_by_kind([record.combinable_params() for record in self._fused], leading)
        with ExitStack() as stack:
            for record in self._fused:
                stack.enter_context(record.without_those_in_place())
            made = fuse_combined(
                [[params for _, params in kind] for kind in kinds], self._release_groups, capturable=self.capturable
            )
        for kind, groups in zip(kinds, made, strict=True):
            for (index, _), fused in zip(kind, groups, strict=True):
                self._fused[index].take(fused)
        self._end_fusing()

    def _release_groups(self) -> None:
        self._all_fused = False  # until all have been taken: what is interrupted by then, the next step completes
        for record in self._fused:
            record.release()

    def get_optimizer_combined_params(self) -> list[Tensor]:
        """All parameters that are trained, over all param groups: one flat buffer for each device and dtype.

        Under amp with masters these are the first, and parameters without one have a buffer after it. What is written
        to a buffer, the parameters have. The first call after parameters were fused, added or unfrozen moves those of
        several groups into one buffer; call it in each step, since a buffer from before has none of them any more.

        Raises:
            RuntimeError: A parameter shares its memory with other tensors, or is sharded over processes; or, where
                parameters have yet to move, a CUDA graph is being captured, or a ``scale_loss`` block is open.
            torch.OutOfMemoryError: There is no memory for the buffer. Nothing has moved in either case.
        """
        return [joined(fused.param_flat for fused in groups) for groups in self.combined_groups()]

    def get_optimizer_combined_grads(self) -> list[Tensor]:
        """The gradients of these parameters, laid out alike, with zeros where a gradient is None.

        What is written to a buffer the next step takes, but where a gradient is None, which stays None. Call it after
        each backward, which gives new gradients.

        Raises:
            RuntimeError: As of ``get_optimizer_combined_params``.
        """
        return [joined(fused.grads.show() for fused in groups) for groups in self.combined_groups()]

    def get_optimizer_combined_grad_masks(self) -> list[Tensor]:
        """For each of these buffers float32 ones where there is a gradient now, and zeros elsewhere.

        Raises:
            RuntimeError: As of ``get_optimizer_combined_params``.
        """
        return [torch.cat([fused.grads.mask() for fused in groups]) for groups in self.combined_groups()]

    # Without masters the model's parameters are the optimizer's; amp overrides these where they are not.
    clip_model_grad_norm_fused = clip_optimizer_grad_norm_fused
    get_model_combined_params = get_optimizer_combined_params
    get_model_combined_grads = get_optimizer_combined_grads
    get_model_combined_grad_masks = get_optimizer_combined_grad_masks
