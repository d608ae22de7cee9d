# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Functions through which packages above amp read a session, its optimizers and their gradients.

These packages import this module, ``policy.py`` and the names of ``apex_npu.amp``, and no other module of amp. This
module keeps no state. Optimizers are passed as to ``scale_loss``: one or several, with or without wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu.amp.amp_optimizer import AmpOptimizerMixin
from apex_npu.amp.optimizer_state import adopted_inside as adopted_inside
from apex_npu.amp.optimizer_state import state_of
from apex_npu.amp.optimizer_state import stepped as stepped
from apex_npu.amp.policy import Policy
from apex_npu.amp.preconditions import check_incoming as check_incoming
from apex_npu.amp.scaler import StepDecision, StepReport
from apex_npu.amp.session import Observer as Observer
from apex_npu.amp.session import Session, current, standing_in
from apex_npu.amp.session import check_thread as check_thread
from apex_npu.amp.session import require as require
from apex_npu.amp.session import settings as settings
from apex_npu.amp.user_casts import registered_patches
from apex_npu.autocast.forward_cast import Ambient, convert_model
from apex_npu.backends.patching import patch_attribute
from apex_npu.distributed.torch_ddp import ddps_of


def policy() -> Policy | None:
    """Return the policy of the current session; None: there is no session."""
    session = current()
    return None if session is None else session.policy


def models() -> list[nn.Module]:
    """Return the models that were passed to ``initialize`` and still exist."""
    session = current()
    return [] if session is None else session.live_models()


def parameter_names() -> dict[Tensor, str]:
    """Return the names of all parameters of ``models()``."""
    session = current()
    return {} if session is None else session.parameter_names()


def optimizers() -> list[Optimizer]:
    """Return the optimizers that were passed to ``initialize`` and still exist."""
    session = current()
    return [] if session is None else list(session.adopted)


def loss_scale(loss_id: int) -> float:
    """Return the current scale of one loss, after all of its blocks that have ended."""
    return require("loss_scale").scaler(loss_id).scale


def ambient() -> Ambient | None:
    """Return the ``Ambient`` of the session, which manages O1's casts outside of models; None without a session."""
    session = current()
    return None if session is None else session.casts


def at_end(call: Callable[[], object]) -> None:
    """Register ``call`` to be called when the current session ends."""
    session = current()
    if session is not None:
        session.undo.callback(call)


@contextmanager
def trial(model: nn.Module, tried: Policy, device_types: list[str]) -> Iterator[None]:
    """Convert ``model``, a copy, for the policy ``tried``. In the context its casts are on instead of the session's."""
    session = Session(tried, [], patches=registered_patches(tried))
    session.casts.device_types = tuple(device_types)
    with standing_in(session):
        convert_model(model, tried, device_types, session.casts)
        yield


def observers() -> list[Observer]:
    """Return the observers of the current session, the latest first."""
    session = current()
    return [] if session is None else session.observers


def observe(observer: Observer) -> None:
    """Add ``observer`` to the observers of the current session's blocks and skipped steps."""
    session = current()
    if session is not None:
        session.observers = [observer, *session.observers]


def leave(observer: Observer) -> None:
    """Remove ``observer``; the others stay in their order."""
    session = current()
    if session is not None:
        session.observers = [other for other in session.observers if other is not observer]


def policy_of(optimizer: Any) -> Policy | None:
    """Return the policy of an optimizer; None if it was never passed to ``initialize``."""
    state = state_of(optimizer)
    return None if state is None else state.policy


def is_retired(optimizer: Any) -> bool:
    """Return True if another optimizer steps the model of ``optimizer`` now, or amp was shut down."""
    state = state_of(optimizer)
    return state is not None and state.masters.retired


def decision_of(optimizer: Any) -> StepDecision | None:
    """Return the decision of blocks about the next step; None if no decision since the last step is known."""
    state = state_of(optimizer)
    return None if state is None else state.decision


def report_of(optimizer: Any) -> StepReport | None:
    """Return the report of the last step whose outcome is known. Unlike ``amp.last_step`` it does not wait."""
    state = state_of(optimizer)
    return None if state is None else state.report


def patch_step(undo: ExitStack, around: Callable[[Any], Any]) -> None:
    """Replace ``step`` of all optimizers of amp by ``around(step)``, until ``undo`` is closed."""
    patch_attribute(undo, AmpOptimizerMixin, "step", around)


def float32_of(param: Tensor) -> Tensor:
    """Return the float32 value of a model's parameter: its master, or the parameter itself."""
    session = current()
    for optimizer in [] if session is None else session.adopted:
        masters = optimizer._amp_state.masters
        value: Tensor | None = masters.float32(param, param.detach()) if masters.has(param) else None
        if value is not None:
            return value
    return param


def parameters(given: Any) -> list[Tensor]:
    """Return the parameters that optimizers step."""
    return [p for p, _, _ in gradients(given)]


def gradients(given: Any) -> list[tuple[Tensor, Tensor | None, float]]:
    """Return each parameter that optimizers step, with its gradient or None, and the factor of the gradient."""
    found = []
    for optimizer in stepped(given):
        if (state := state_of(optimizer)) is not None:
            groups = state.grads.groups_of(optimizer)
            found += [(p, p.grad, state.grad_scale) for group in groups for p in group.params]
    return found


def are_averaged(params: Sequence[Tensor]) -> bool:
    """Return whether amp or DistributedDataParallel averages the gradients of ``params`` over processes."""
    session = current()
    if session is None or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return session.data_parallel is not None or bool(ddps_of(session.ddps, params))
