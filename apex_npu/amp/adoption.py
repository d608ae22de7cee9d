# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``adopt`` gives an optimizer amp's class and state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu._extension import extension
from apex_npu.amp.amp_optimizer import SharedGroupsMixin, adopted_class
from apex_npu.amp.float32_masters import Float32Masters
from apex_npu.amp.optimizer_state import AmpOptimizerState, state_of
from apex_npu.amp.pending_step import PendingStep
from apex_npu.amp.policy import Policy
from apex_npu.amp.preconditions import optimizers_inside, shares_groups, steps_remainders
from apex_npu.amp.remainder_masters import RemainderMasters
from apex_npu.amp.session import Session
from apex_npu.fusion import HasFusedGroups
from apex_npu.ops import LOW_PRECISION

# None: the dtype that the optimizer has chosen, or int16.
_REMAINDERS: dict[Any, torch.dtype] = {True: torch.int16, "int8": torch.int8}


def adopt(
    optimizer: Optimizer, session: Session, fp32_values: Mapping[int, Tensor], shared: Collection[int] = ()
) -> None:
    """Give ``optimizer`` amp's behaviour, and masters if the policy has them.

    Args:
        optimizer: An optimizer that has passed ``check_adoptable``.
        session: The session whose policy applies, and which registers the masters.
        fp32_values: ``id(param)`` → the value before the model was cast.
        shared: Identities of parameters that other optimizers step, too. Their float32 values are in no optimizer.
    """
    vars(optimizer).pop("step", None)
    policy = session.policy
    state = AmpOptimizerState(policy, parallel=session.data_parallel)
    if policy.fuse_unscale or getattr(optimizer, "capturable", False):
        state.pending = PendingStep()
    optimizer._amp_state = state  # type: ignore[attr-defined]
    cls: Any = type(optimizer)
    optimizer.__class__ = adopted_class(cls)
    if policy.check_combined_tensors is not None and isinstance(optimizer, HasFusedGroups):
        optimizer.check_combined_tensors = policy.check_combined_tensors  # type: ignore[attr-defined]
    if state.widens:
        dtype = _REMAINDERS.get(policy.store_param_remainders)
        keeps_remainders = _keeps_remainders(optimizer, policy, shared)
        state.masters = RemainderMasters(dtype) if keeps_remainders else Float32Masters()
        state.masters.make(optimizer, fp32_values)
        before = [(p, fp32_values.get(id(p))) for p in state.masters.params()]
        state.masters.uncast = [p for p, value in before if value is not None and value.dtype in LOW_PRECISION]
    session.register(optimizer, state)


def _keeps_remainders(optimizer: Any, policy: Policy, shared: Collection[int]) -> bool:
    """Return whether masters are stored as 16-bit remainders, which kernels exist for on CPUs and CUDA devices."""
    if policy.store_param_remainders or getattr(optimizer, "on_host", False):
        return True
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        policy.store_param_remainders is None
        and extension is not None
        and steps_remainders(optimizer)
        and {p.device.type for p in params} <= {"cpu", "cuda"}
        and not any(id(p) in shared for p in params)
    )


def optimizer_snapshot(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that undoes ``adopt`` and ``adopt_inside``, even if they have failed halfway."""
    found = [(one, type(one), dict(vars(one))) for one in (optimizer, *optimizers_inside(optimizer))]

    def put_back() -> None:
        for one, cls, attributes in found:
            one.__class__ = cls
            vars(one).update(attributes)
            for name in vars(one).keys() - attributes.keys():
                del vars(one)[name]

    return put_back


def adopt_inside(optimizer: Optimizer) -> None:
    """Adopt the optimizers inside of ``optimizer``, an adopted one, that share its groups."""
    state = state_of(optimizer)
    found = [o for o in optimizers_inside(optimizer) if state_of(o) is None and shares_groups(optimizer, o)]
    if state is None or not found:
        return
    stepping: list[Optimizer] = []
    for inner in found:
        vars(inner).pop("step", None)
        vars(inner).update(_amp_state=state, _amp_stepping=stepping)
        cls: Any = type(inner)
        inner.__class__ = adopted_class(cls, SharedGroupsMixin)
    vars(optimizer)["_amp_stepping"] = stepping
    optimizer.__class__ = adopted_class(type(optimizer).__bases__[1], SharedGroupsMixin)
