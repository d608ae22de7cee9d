# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision with the interface of apex.amp."""

from apex_npu.amp.frontend import initialize, last_step, load_state_dict, master_params, state_dict
from apex_npu.amp.scale_loss import scale_loss
from apex_npu.amp.session import disable_casts, shutdown
from apex_npu.amp.step_report import StepReport

__all__ = [
    "StepReport",
    "disable_casts",
    "initialize",
    "last_step",
    "load_state_dict",
    "master_params",
    "scale_loss",
    "shutdown",
    "state_dict",
]
