# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The backend "hccl" of ``torch.distributed``: gloo, on host views of the devices' memory."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from npu_simulator import _C  # type: ignore[attr-defined]


def register() -> None:
    """Make ``init_process_group("hccl")`` work, and hccl the backend of npu tensors."""
    if not dist.is_gloo_available():
        return
    dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["npu"])


def _create(group: Any, options: Any = None) -> Any:
    gloo = dist.ProcessGroupGloo(group.store, group.group_rank, group.group_size, timeout=group.timeout)
    return _C.HcclBackend(gloo, group.group_rank, group.group_size)
