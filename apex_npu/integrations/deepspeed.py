# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""DeepSpeed: ZeRO with the fused optimizers."""

from __future__ import annotations

from apex_npu.backends.requirements import require
from apex_npu.integrations.optimizer_names import optimizer_classes

require(__name__, "deepspeed", "0.19.8")

from deepspeed.runtime.zero import utils  # noqa: E402


def register() -> None:
    """Make ZeRO accept the fused optimizers without ``zero_allow_untested_optimizer``. Idempotent.

    ZeRO then accepts the optimizers whose rule treats each element by itself. It gives an optimizer a part of the
    parameters, joined into one tensor. LAMB, NovoGrad and AdamP would use the norm of this tensor instead of each
    parameter's, so DeepSpeed still refuses them.
    """
    for cls in optimizer_classes().values():
        if cls.elementwise and cls not in utils.ZERO_SUPPORTED_OPTIMIZERS:
            utils.ZERO_SUPPORTED_OPTIMIZERS.append(cls)
