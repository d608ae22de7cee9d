# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Turn a checkout of NVIDIA's Apex into one that uses this package, and back. Start reading at ``patching.py``.

No import needs torch: ``scripts/gen.sh`` runs this package on machines that may have only git and Python.
"""


class PipelineError(Exception):
    """A refusal or a failure. The message says what is wrong and how to fix it; the tree has not changed."""
