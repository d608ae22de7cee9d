# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What whole optimizers that version 0.1 has pickled name: they load as those of this version.

``table.py`` has this module under the names of the modules that were there.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from apex_npu.amp.amp_optimizer import new_adopted
from apex_npu.amp.data_parallel import GradSync, LocalGrads
from apex_npu.amp.deferred_inf_check import Deferral
from apex_npu.amp.master_params import MasterParams
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.session import current
from apex_npu.amp.step_decision import StepDecision as Verdict
from apex_npu.amp.step_decision import StepReport
from apex_npu.compat.amp.stash import Legacy

__all__ = ["OptimizerRecord", "StepReport", "Verdict"]

_STAGES = {None: Stage.READY, "delay_unscale": Stage.DELAYED, "delay_overflow_check": Stage.UNCHECKED}


class OptimizerRecord(AmpOptimizerState):
    """What version 0.1 knew of an optimizer; it becomes an ``AmpOptimizerState`` when it is loaded."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__class__ = AmpOptimizerState  # type: ignore[assignment]
        policy = state["policy"]
        converted = {
            **vars(AmpOptimizerState(policy)),
            "stage": Stage.CAPTURED if state["captured_block"] else _STAGES[state["unchecked"]],
            "grad_scale": state["held_scale"] if policy.fuse_unscale else state["grad_scale"],
            "decision": state["verdict"],
            "report": state["latest_report"],
            "masters": MasterParams(state["pairs"]),
            "deferral": Deferral() if policy.fuse_unscale else None,
            "sync": _sync(state["local_grads"]) if policy.combine_ddp else None,
        }
        if state["legacy"]:
            converted["legacy"] = Legacy(state["legacy"])
        if converted["deferral"] is not None:
            converted["deferral"].clip_coefficient = state["clip_coefficient"]
        self.__setstate__(converted)


def _sync(local_grads: LocalGrads) -> GradSync | None:
    session = current()
    if session is None or session.data_parallel is None:
        return None
    sync = GradSync(session.data_parallel)
    sync.local_grads = local_grads
    return sync


def _new_adopted(cls: Any) -> Optimizer:
    adopted: Any = type(new_adopted(cls))
    loading: type[Optimizer] = type(adopted.__name__, (adopted,), {"__setstate__": _set_state})
    return loading.__new__(loading)


def _set_state(optimizer: Any, state: dict[str, Any]) -> None:
    optimizer.__class__ = type(optimizer).__bases__[0]
    amp_state = state.pop("_amp_record")
    if amp_state.deferral is None and state.get("capturable", False):
        amp_state.deferral = Deferral()
    optimizer.__setstate__({**state, "_amp_state": amp_state})
