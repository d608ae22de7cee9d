# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Convert training scripts for CUDA to scripts for npu, by rules on syntax trees, edits of spans, and a report.

Importing this package does not import torch. Its command is ``python -m apex_npu migrate``; ``docs/migrating_cuda.md``
says how to use it. It reads PyTorch scripts that ran on a GPU, and leaves their logic unchanged.
"""

from apex_npu.migrate.engine.program import Finding, Options
from apex_npu.migrate.files.planning import Plan, plan

from .rewriting import Rewritten, rewrite

__all__ = ["Finding", "Options", "Plan", "Rewritten", "plan", "rewrite"]
