# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The vendor's ``torch_npu`` on a machine without an NPU: the libraries of CANN that it needs, in host memory.

``install()`` gives torch devices called npu, driven by the wheel as it is published.
"""

import os

# A torch that is imported after this one does not import torch_npu by itself, before there are libraries for it.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from host_cann.build import BuildError, unavailable
from host_cann.control import (
    Count,
    Memory,
    count,
    fail_after,
    hang_after,
    live_storages,
    memory,
    memory_limit,
    missing_operators,
    out_of_memory_after,
    saturates,
    set_collective_timeout,
)
from host_cann.installation import install

__all__ = [
    "BuildError",
    "Count",
    "Memory",
    "count",
    "fail_after",
    "hang_after",
    "install",
    "live_storages",
    "memory",
    "memory_limit",
    "missing_operators",
    "out_of_memory_after",
    "saturates",
    "set_collective_timeout",
    "unavailable",
]
