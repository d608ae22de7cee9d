# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``AmpScaler``: ``scale_loss`` for code written for ``torch.amp.GradScaler``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from apex_npu.amp.optimizer_grads import any_raised, look_for_overflow
from apex_npu.amp.optimizer_state import adopted_inside, state_of
from apex_npu.amp.scale_loss import scale_loss
from apex_npu.amp.session import require
from apex_npu.ops import LOW_PRECISION


class AmpScaler:
    """``scale_loss`` with the interface of ``torch.amp.GradScaler``, for training frameworks.

    ``scale`` opens a ``scale_loss`` block. The first call after its backward closes it: ``unscale_``, ``step``,
    ``update``, ``state_dict`` or the next ``scale``. Gradients, weights, the loss scale and skipped steps are therefore
    those of a block around each backward. At O2 and O5 gradients are accumulated in float32.

    As with GradScaler, ``step`` calls ``optimizer.step`` unless a gradient is inf or NaN, and only ``update`` changes
    ``get_scale``; either shows whether a step was skipped. There are three differences from GradScaler. One overflow
    skips the step of all optimizers with gradients in the block. ``unscale_`` may be called repeatedly. ``state_dict``
    returns ``amp.state_dict()``. The next ``scale`` zeroes gradients whose step was skipped. At O2 and O5, between
    ``scale`` and its backward, only ``optimizer.zero_grad()`` clears gradients, as inside a ``scale_loss`` block.

    Args:
        optimizers: One optimizer or a list, as passed to ``amp.initialize``, or a framework's wrappers of them.
        loss_id: Which of the ``num_losses`` scalers to use.

    Raises:
        RuntimeError: amp, or one of ``optimizers``, has not been initialized, or an optimizer needs a closure.
        IndexError: ``loss_id`` is not below ``num_losses``.

    Example::

        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> scaler = amp.AmpScaler(optimizer)
        >>> scaler.scale(loss_fn(model(input), target)).backward()
        >>> scaler.unscale_(optimizer)
        >>> norm = torch.nn.utils.clip_grad_norm_(amp.masters_of(model.parameters()), max_norm=1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def __init__(self, optimizers: Optimizer | Sequence[Optimizer], loss_id: int = 0) -> None:
        given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.optimizers: list[Optimizer] = list(map(adopted_inside, given))
        session = require("amp.AmpScaler")
        for optimizer in self.optimizers if session.policy.enabled else []:
            if state_of(optimizer) is None:
                raise RuntimeError(f"{type(optimizer).__name__} was not passed to amp.initialize before amp.AmpScaler")
            if isinstance(optimizer, LBFGS):
                raise RuntimeError("LBFGS needs a closure, which neither amp.AmpScaler nor GradScaler supports")
        if session.policy.enabled:
            session.scaler(loss_id)
        self._loss_id = loss_id
        self._block: AbstractContextManager[Tensor] | None = None
        self._backward_begun = False
        self._scale = 1.0
        self._scale_until_update: float | None = None
        self._skipped: set[Optimizer] = set()  # since the last block has begun

    def scale(self, outputs: Any) -> Any:
        """Open a ``scale_loss`` block, and multiply ``outputs`` by the loss scale.

        Several calls before one backward share the block, so that their results may be added.

        Args:
            outputs: A loss, or a list or tuple of losses.

        Returns:
            The scaled losses, in the same structure. A low-precision loss becomes float32.

        Raises:
            TypeError: One of ``outputs`` is not a tensor.
            RuntimeError: ``scale_loss`` raises it.
        """
        if isinstance(outputs, (list, tuple)):
            several = list(map(self.scale, outputs))
            return several if isinstance(outputs, list) else tuple(several)
        if not isinstance(outputs, Tensor):
            raise TypeError(f"AmpScaler.scale takes a loss, or a list of them, got {type(outputs).__name__}")
        if not self.is_enabled():
            return outputs
        if self._block is None or self._backward_begun:
            self._close()
            scaled = self._open(outputs)
        else:
            scaled = (outputs.float() if outputs.dtype in LOW_PRECISION else outputs) * self._scale
        if scaled.requires_grad:
            scaled.register_hook(self._note_backward)
        return scaled

    def _open(self, loss: Tensor) -> Tensor:
        # For example, a discriminator that is frozen for the generator's loss keeps its gradients.
        trained = [o for o in self.optimizers if any(p.requires_grad for g in o.param_groups for p in g["params"])]
        self._drop_overflowed()
        scale = require("amp.AmpScaler").scaler(self._loss_id).scale
        block = scale_loss(loss, trained or self.optimizers, loss_id=self._loss_id)
        scaled = block.__enter__()
        self._block, self._backward_begun, self._scale = block, False, scale
        if self._scale_until_update is None:
            self._scale_until_update = scale
        return scaled

    def _drop_overflowed(self) -> None:
        """Zero gradients that were not cleared after a skipped step, so that the next block does not find them again.

        The next block checks the gradients of all optimizers, including those that its backward does not reach.
        """
        while self._skipped:
            optimizer = self._skipped.pop()
            state = state_of(optimizer)
            groups = [] if state is None else state.grads.groups_of(optimizer)
            if state is not None and (state.grads.saturated or any_raised(look_for_overflow(groups))):
                for group in groups:
                    group.zero_()

    def _note_backward(self, _: Tensor) -> None:
        self._backward_begun = True

    def _close(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)

    def _close_after_backward(self) -> None:
        if self._backward_begun:
            self._close()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of all optimizers, including ``optimizer``, for clipping.

        Clip the gradients of ``amp.masters_of(model.parameters())``. With ``fuse_unscale`` they are unscaled here
        rather than in ``step``.

        Raises:
            RuntimeError: DistributedDataParallel has not averaged the gradients yet, as in its ``no_sync``.
        """
        self._close()
        optimizer = adopted_inside(optimizer)
        state = state_of(optimizer)
        if state is None:
            return
        state.check_unscaled("unscale_()")
        if state.holds_scaled:
            state.pending.start()
            state.pending.unscale_now_(state, state.grads.groups_of(optimizer))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step ``optimizer`` unless its gradients have overflowed; ``amp.last_step(optimizer)`` reports the outcome.

        Waits for the device if ``scale_loss`` has left the overflow check open.

        Args:
            optimizer: An optimizer given to the constructor, or its wrapper.
            *args: Positional arguments of its ``step``.
            **kwargs: Keyword arguments of its ``step``.

        Returns:
            The result of ``optimizer.step``; None if the step is skipped.

        Raises:
            RuntimeError: An argument is a closure, or the gradients are not averaged yet.
        """
        if any(map(callable, [*args, *kwargs.values()])):
            raise RuntimeError(
                "AmpScaler.step takes no closure, as GradScaler's does not: compute the loss, scale it and call "
                "backward, then step without one"
            )
        self._close()
        optimizer = adopted_inside(optimizer)
        state = state_of(optimizer)
        if state is not None and state.skip:
            # A wrapper that a framework has set as the instance's step must see that it is not called.
            self._skipped.add(optimizer)
            return type(optimizer).step(optimizer)
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Make ``get_scale`` return the loss scale of the next block, as the last block has set it.

        Args:
            new_scale: The loss scale to use from now on instead.

        Raises:
            ValueError: ``new_scale`` is not positive and finite.
        """
        self._close_after_backward()
        self._scale_until_update = None
        if new_scale is not None and self.is_enabled():
            scaler = require("amp.AmpScaler").scaler(self._loss_id)
            scaler.load_state_dict({**scaler.state_dict(), "loss_scale": new_scale})

    def get_scale(self) -> float:
        """Return the scale of the first block since ``update``; between ``update`` and ``scale``, of the next block."""
        if not self.is_enabled():
            return 1.0
        if self._scale_until_update is not None:
            return self._scale_until_update
        return require("amp.AmpScaler").scaler(self._loss_id).scale

    def is_enabled(self) -> bool:
        """Return False after ``amp.initialize(..., enabled=False)``, when all methods pass through."""
        return require("amp.AmpScaler").policy.enabled

    def state_dict(self) -> dict[str, Any]:
        """Return ``amp.state_dict()``, the scales of all losses."""
        self._close_after_backward()
        return require("amp.AmpScaler").scaler_states()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict``, or of ``state_dict`` of a ``torch.amp.GradScaler``."""
        self._close_after_backward()
        self._scale_until_update = None
        require("amp.AmpScaler").load_scaler_states(state_dict)
