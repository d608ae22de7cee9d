# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A torch device called "npu" in host memory, and a stand-in for ``torch_npu``.

import npu_simulator
npu_simulator.install()
torch.ones(3, device="npu")
"""

from npu_simulator.control import Count, Settings, configure, count, fail_after, live_storages
from npu_simulator.installation import install, installed

__all__ = ["Count", "Settings", "configure", "count", "fail_after", "install", "installed", "live_storages"]
