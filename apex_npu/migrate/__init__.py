# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Convert training scripts for CUDA to scripts for npu.

Rules look at the syntax tree, edit spans of the text, and report what they found. The logic of a script stays the same.
The command is ``python -m apex_npu migrate``; ``docs/migrating_cuda.md`` describes it. Importing this package does not
import torch.
"""

from apex_npu.migrate.engine.program import Finding, Options
from apex_npu.migrate.files.planning import Plan, plan

from .rewriting import Rewritten, rewrite

__all__ = ["Finding", "Options", "Plan", "Rewritten", "plan", "rewrite"]
