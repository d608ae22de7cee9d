# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision with the interface of apex.amp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apex_npu._cli import hooks
from apex_npu.amp.amp_scaler import AmpScaler
from apex_npu.amp.float32_copies import float32_copy
from apex_npu.amp.frontend import initialize, load_state_dict, state_dict
from apex_npu.amp.grad_sync import no_sync
from apex_npu.amp.optimizer_functions import (
    checkpoint_view,
    float32_params,
    last_step,
    master_params,
    masters_of,
    will_skip,
)
from apex_npu.amp.scale_loss import scale_loss
from apex_npu.amp.scaler import StepReport
from apex_npu.amp.session import disable_casts, shutdown
from apex_npu.amp.sharding import fsdp_policy
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
    "AmpScaler",
    "StepReport",
    "_amp_state",
    "checkpoint_view",
    "disable_casts",
    "float32_copy",
    "float32_params",
    "float_function",
    "fsdp_policy",
    "half_function",
    "init",
    "initialize",
    "last_step",
    "load_state_dict",
    "master_params",
    "masters_of",
    "no_sync",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "shutdown",
    "state_dict",
    "unregister_function",
    "will_skip",
]

# Names of Apex that ``apex_npu.compat.amp`` sets here. It sets others on optimizers (``accessors.py``). It does so in a
# hook, because amp does not import packages above it.
init: Callable[..., Any]
_amp_state: Any
hooks.amp_imported()


def __getattr__(name: str) -> Any:
    if name == "debug":  # above amp, and imported when it is asked for
        return hooks.debug()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
