# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Accessors over all parameters of a fused optimizer: combined buffers, and clipping by one norm."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from apex_npu._extension import require_extension
from apex_npu.backends._torch_private import disable_dynamo, labelled
from apex_npu.distributed.part_sums import clip_grad_norm_
from apex_npu.fusion import FusedGroup, HasFusedGroups, by_kind, combined
from apex_npu.fusion.fused_group import fuse_combined
from apex_npu.optimizers.fused_params import FusedParams


class CombinedAccessors(HasFusedGroups):
    """A base class of ``FusedOptimizer``, which sets these attributes."""

    capturable: bool
    _fused: FusedParams
    _all_fused: bool

    def _end_fusing(self) -> None:
        """Record the groups of ``_fused``, and move their state into buffers."""
        raise NotImplementedError

    @labelled("amp.clip")
    def clip_optimizer_grad_norm_fused(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of all parameters to a common norm, in one pass over each buffer.

        The values are those of ``torch.nn.utils.clip_grad_norm_``, without a host sync. Without gradients the norm is
        0. If parameters are sharded over processes (DTensor), the norm is that of the whole gradients, equal on all
        processes, and all processes must call this method.

        Args:
            max_norm: Largest norm.
            norm_type: p of the p-norm.
            error_if_nonfinite: Raise if the norm is inf or nan.

        Returns:
            The norm before clipping, 0-dim.
        """
        flats = self.flat_grads()
        return clip_grad_norm_(flats, self._fused.apart(), max_norm, norm_type, error_if_nonfinite)

    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Call ``clip_optimizer_grad_norm_fused``, which has this name in ``torch_npu.optim``."""
        return self.clip_optimizer_grad_norm_fused(max_norm, norm_type)

    @disable_dynamo
    def combined_groups(self) -> list[FusedGroup]:
        """Return the fused groups, one for each combined buffer. Moves parameters into these buffers if necessary.

        Raises:
            RuntimeError: ``get_optimizer_combined_params`` documents it; nothing has moved.
        """
        self.flat_grads()
        if self._fused.is_any_sharded():
            raise RuntimeError(
                f"{type(self).__name__} has parameters that are sharded over processes (DTensor), so that a buffer "
                "would hold only parts of them. Use the parameters and gradients themselves, as DTensors, or their "
                "to_local(); clip_optimizer_grad_norm_fused computes the norm over all processes"
            )
        if self._fused.hosted:
            raise RuntimeError(
                f"{type(self).__name__} has state_device='cpu', with which parameters and gradients stay where the "
                "model has them, in no common buffer. Work on the parameters and gradients themselves; "
                "clip_optimizer_grad_norm_fused takes their norm"
            )
        require_extension("a combined buffer")
        leading = {id(p) for p in self.leading_params()}
        found = combined(self._fused.groups, leading)
        if found is None:
            self.check_combining()
            self._combine(leading)
            found = self._fused.groups
        return found

    @torch.no_grad()
    def _combine(self, leading: Collection[int]) -> None:
        if any(fused.runs.is_captured for fused in self._fused.groups):
            raise RuntimeError(
                f"{type(self).__name__} has a step in a captured CUDA graph, which writes to the present addresses of "
                "parameters, so that they cannot be moved into a combined buffer. Call the accessor once before the "
                "capture; or, after the last replay, give each parameter other memory (p.data = p.data.clone()) and "
                "then call it. Nothing has moved"
            )
        kinds = by_kind(self._fused.combinable_params(), leading)
        with self.moving_params():
            self._fused.adopt(fuse_combined(kinds, self._release_groups, capturable=self.capturable))
        self._end_fusing()

    def _release_groups(self) -> None:
        self._all_fused = False  # so that the next step fuses again if an error follows
        self._fused.release()

    def get_optimizer_combined_params(self) -> list[Tensor]:
        """Return all trained parameters of all param groups, as one flat buffer for each device and dtype.

        Under amp at O2 and O5 the buffer of 16-bit parameters comes first. Writing to a buffer changes the parameters.
        The first call after parameters were fused, added or unfrozen may move them into one buffer. Call this in each
        step: a buffer from an earlier call may no longer hold the parameters.

        Raises:
            RuntimeError: A parameter shares its memory with other tensors, or is sharded over processes. Or parameters
                must move while a CUDA graph is being captured or a ``scale_loss`` block is open. Or the C++ extension
                is missing.
            torch.OutOfMemoryError: There is no memory for the buffer. Nothing has moved in either case.
        """
        return [fused.param_flat for fused in self.combined_groups()]

    def get_optimizer_combined_grads(self) -> list[Tensor]:
        """Return the gradients of the combined parameters, in the same layout, with zeros where a gradient is None.

        The next step reads the values written to a buffer, except for gradients that are None, which stay None. Call it
        after each backward, which makes new gradients.

        Raises:
            RuntimeError: ``get_optimizer_combined_params`` documents it.
        """
        return [grads.show() for grads in self.combined_grads()]

    def get_optimizer_combined_grad_masks(self) -> list[Tensor]:
        """Return float32 masks of the combined buffers: one where a gradient exists, else zero.

        Raises:
            RuntimeError: ``get_optimizer_combined_params`` documents it.
        """
        return [grads.mask() for grads in self.combined_grads()]

    # The optimizer steps the model's parameters.
    clip_model_grad_norm_fused = clip_optimizer_grad_norm_fused
    get_model_combined_params = get_optimizer_combined_params
    get_model_combined_grads = get_optimizer_combined_grads
    get_model_combined_grad_masks = get_optimizer_combined_grad_masks
