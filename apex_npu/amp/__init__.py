# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision with the interface of apex.amp."""

from apex_npu.amp.block_of_ranks import no_sync
from apex_npu.amp.checkpoint_view import checkpoint_view
from apex_npu.amp.frontend import initialize, last_step, load_state_dict, master_params, state_dict
from apex_npu.amp.legacy.handle import init
from apex_npu.amp.legacy.state import _amp_state
from apex_npu.amp.scale_loss import scale_loss
from apex_npu.amp.session import disable_casts, shutdown
from apex_npu.amp.step_report import StepReport
from apex_npu.amp.user_casts import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    unregister_function,
)

__all__ = [
    "StepReport",
    "_amp_state",
    "checkpoint_view",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "last_step",
    "load_state_dict",
    "master_params",
    "no_sync",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "shutdown",
    "state_dict",
    "unregister_function",
]
