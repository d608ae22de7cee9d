# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What scripts written for Apex touch by private or side names, over the session and the optimizers' records."""

import importlib

from apex_npu import amp
from apex_npu.amp import float32_copies
from apex_npu.amp.accessors import add_accessors
from apex_npu.compat.amp.handle import init
from apex_npu.compat.amp.stash import LegacyOptimizerNames
from apex_npu.compat.amp.state import _amp_state

__all__ = ["_amp_state", "init"]

amp.init, amp._amp_state = init, _amp_state
add_accessors(LegacyOptimizerNames)
# The hooks of models have their former home in pickles. amp.master_params is a function.
vars(importlib.import_module("apex_npu.amp.master_params")).update(
    {name: getattr(float32_copies, name) for name in ("_show_fp32", "_fill_masters", "_follow_loaded")}
)
