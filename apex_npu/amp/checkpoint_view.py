# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``checkpoint_view``: an optimizer as ``torch.distributed.checkpoint.state_dict`` takes it."""

from __future__ import annotations

from torch.optim import Optimizer

from apex_npu.amp.optimizer_state import adopted_inside


def checkpoint_view(optimizer: Optimizer) -> Optimizer:
    """Return ``optimizer`` without its wrapper, as ``torch.distributed.checkpoint.state_dict`` requires.

    ``get_state_dict`` and ``set_state_dict`` name states by the model's parameters, which ``optimizer.param_groups``
    contains at all levels.

    Example::

        >>> from torch.distributed.checkpoint.state_dict import get_state_dict
        >>> optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        >>> model_state, optimizer_state = get_state_dict(model, amp.checkpoint_view(optimizer))
    """
    found: Optimizer = adopted_inside(optimizer)
    return found
