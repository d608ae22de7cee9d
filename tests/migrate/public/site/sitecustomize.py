# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every process of a public script's run begins with this: its device, its draws, a file for its losses.

``SCRIPT_DEVICE`` is the package that simulates an NPU, or cpu: the names of CUDA mean the CPU then, so that a script
takes the same branches as on a GPU. Numbers are drawn on the CPU wherever a script draws them. ``SCRIPT_STEPS`` losses
are written below ``SCRIPT_LOSSES``, and the process ends.
"""

import os

if "SCRIPT_LOSSES" in os.environ:
    import recording

    recording.start()
