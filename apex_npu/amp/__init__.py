# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision with the interface of apex.amp."""

from apex_npu.amp.frontend import initialize, last_step, load_state_dict, master_params, state_dict
from apex_npu.amp.legacy.handle import init
from apex_npu.amp.legacy.state import _amp_state
from apex_npu.amp.scale_loss import scale_loss
from apex_npu.amp.session import disable_casts, shutdown

__all__ = [
    "_amp_state",
    "disable_casts",
    "init",
    "initialize",
    "last_step",
    "load_state_dict",
    "master_params",
    "scale_loss",
    "shutdown",
    "state_dict",
]
