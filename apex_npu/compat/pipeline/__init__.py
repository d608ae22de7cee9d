# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Turns a checkout of NVIDIA's Apex into one that answers with this package, and back. Start at ``checkout.py``.

No import needs torch: ``scripts/*.sh`` run this package on machines that may have git and Python alone.
"""


class PipelineError(Exception):
    """A refusal or a failure. It says what is wrong and the way out; the tree has not changed."""
