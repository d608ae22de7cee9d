# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The public functions that take an adopted optimizer: its parameters, and the outcome of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.masters import Float32Loop, Masters
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage, adopted_inside, inner_optimizer, state_of
from apex_npu.amp.scaler import APPLIED, StepReport
from apex_npu.amp.session import current


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterate over the parameters that ``optimizer`` steps. Clip the gradients of these.

    At O2 and O5 the gradient of a 16-bit parameter is float32. In the body of a ``for`` loop the data of the current
    parameter is its float32 value, so that ``for p in amp.master_params(optimizer): p.data.mul_(1 - wd)`` is exact. In
    ``list(amp.master_params(optimizer))`` parameters have 16-bit data; see ``float32_params``.

    Example::

        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> with amp.scale_loss(loss_fn(model(input), target), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm=1.0)
        >>> optimizer.step()
    """
    stepped = adopted_inside(optimizer)
    state = state_of(stepped)

    def params() -> list[Tensor]:  # runs when the first parameter is requested
        if state is not None:
            for link in state.links:
                link.load_written()
            state.drop_cleared(stepped)
        return [p for group in stepped.param_groups for p in group["params"]]

    return Float32Loop(params, Masters() if state is None else state.masters)


@contextmanager
def float32_params(optimizer: Optimizer) -> Iterator[None]:
    """Give 16-bit parameters of ``optimizer`` their float32 values as data, for arithmetic that 16 bits would round.

    Writes to the data take effect. The context is re-entrant. At levels without 16-bit parameters it does nothing. Call
    the model outside of it.

    Example::

        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        >>> with amp.float32_params(optimizer), torch.no_grad():
        ...     for p in model.parameters():
        ...         p.mul_(1 - 1e-5)
    """
    state = state_of(adopted_inside(inner_optimizer(optimizer)))
    if state is None:
        yield
        return
    for link in state.links:
        link.load_written()
    state.masters.end_loop()
    with state.masters.float32_data():
        yield


def masters_of(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return ``parameters`` as a list: optimizers step a model's own parameters, at all levels.

    In Apex, optimizers step float32 copies at O2, and scripts need this list to find them.

    Args:
        parameters: One parameter or several, of any models.

    Example::

        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        >>> with amp.scale_loss(loss_fn(model(input), target), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(amp.masters_of(model.parameters()), max_norm=1.0)
        >>> optimizer.step()
    """
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def will_skip(optimizer: Optimizer) -> bool:
    """Return True if the next ``optimizer.step()`` does nothing because the last ``scale_loss`` found inf or NaN.

    Waits for the device if the result has not been read yet. After the step use ``amp.last_step``.

    Raises:
        RuntimeError: ``optimizer`` was not passed to ``initialize``, or a ``scale_loss`` block is still open.

    Example::

        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> with amp.scale_loss(loss_fn(model(input), target), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> amp.will_skip(optimizer)
        False
    """
    state = _initialized(optimizer)
    if state is None:
        return False
    if state.stage is Stage.SCALED:
        raise RuntimeError(
            "amp.will_skip was called inside of amp.scale_loss, which decides when it ends; call it after the block, "
            "with amp.AmpScaler after unscale_()"
        )
    return state.skip


def _initialized(optimizer: Optimizer) -> AmpOptimizerState | None:
    """Return the amp state of ``optimizer``; None if amp is disabled."""
    state = state_of(adopted_inside(optimizer))
    session = current()
    if state is None and (session is None or session.policy.enabled):
        raise RuntimeError(f"{type(optimizer).__name__} was not passed to amp.initialize")
    return state


def last_step(optimizer: Optimizer) -> StepReport | None:
    """Return a report of the last ``optimizer.step()``; None before the first step.

    With ``enabled=False`` all steps are reported as applied. Use it for a schedule that counts updates, not calls::

        optimizer.step()
        if amp.last_step(optimizer).applied:
            scheduler.step()

    Raises:
        RuntimeError: ``optimizer`` was not passed to ``initialize``.

    Example::

        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
        >>> with amp.scale_loss(loss_fn(model(input), target), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> if amp.last_step(optimizer).applied:
        ...     scheduler.step()
    """
    state = _initialized(optimizer)
    if state is None:
        return APPLIED
    if state.pending is not None:
        state.pending.resolve_step()
    return state.report


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
