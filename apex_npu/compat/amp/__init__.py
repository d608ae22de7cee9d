# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apex's private names that scripts use: views of the session and of the optimizers' records."""

from apex_npu import amp
from apex_npu.amp.accessors import add_accessors
from apex_npu.compat.amp.handle import init
from apex_npu.compat.amp.stash import LegacyOptimizerNames
from apex_npu.compat.amp.state import _amp_state

__all__ = ["_amp_state", "init"]

amp.init, amp._amp_state = init, _amp_state
add_accessors(LegacyOptimizerNames)
