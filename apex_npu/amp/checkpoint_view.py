# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A view of an optimizer with masters, for code that looks for the model's own parameters in its groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.optimizer_state import adopted_inside, state_of


def checkpoint_view(optimizer: Optimizer) -> Optimizer:
    """Return a view of ``optimizer`` to pass to ``torch.distributed.checkpoint.state_dict``.

    ``get_state_dict`` and ``set_state_dict`` name states by the model's parameters. At O2 and O5
    ``optimizer.param_groups`` has fp32 masters instead. Make a view for each call:

        state, states = get_state_dict(model, amp.checkpoint_view(optimizer))

    Returns:
        A view that can be saved and loaded, but not trained with; ``optimizer`` itself if it has no masters.

    Example::

        >>> from torch.distributed.checkpoint.state_dict import get_state_dict
        >>> optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        >>> model_state, optimizer_state = get_state_dict(model, amp.checkpoint_view(optimizer))
    """
    optimizer = adopted_inside(optimizer)
    state = state_of(optimizer)
    if state is None or not state.pairs:
        return optimizer
    return _CheckpointView(optimizer, {id(pair.master_param): pair.model_param for pair in state.pairs})


class _CheckpointView(Optimizer):
    def __init__(self, optimizer: Optimizer, model_param_of: dict[int, Tensor]) -> None:
        # Does not call Optimizer.__init__: all attributes are those of `optimizer`.
        self._optimizer = optimizer
        self._model_param_of = model_param_of
        self.defaults = optimizer.defaults
        self._look()

    def _look(self) -> None:
        def shown(param: Tensor) -> Tensor:
            return self._model_param_of.get(id(param), param)

        groups = self._optimizer.param_groups
        self.param_groups = [{**group, "params": [shown(p) for p in group["params"]]} for group in groups]
        self.state = defaultdict(dict, {shown(p): entry for p, entry in self._optimizer.state.items()})

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)
        self._look()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make the state and leave all values unchanged. torch calls this before it loads into an empty state."""
        groups = self._optimizer.param_groups
        rates = [group.get("lr") for group in groups]
        for group in groups:
            for param in group["params"]:
                param.grad = torch.zeros_like(param) if param.requires_grad else None
        try:
            for group, rate in zip(groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate * 0.0
            self._optimizer.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate
        self._look()
