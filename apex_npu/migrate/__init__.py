# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Training scripts for CUDA become scripts for npu: rules on syntax trees, edits of spans, a report.

Importing this package imports no torch. ``python -m apex_npu migrate`` is its command, ``docs/migrating_cuda.md`` says
how to use it. It reads scripts for PyTorch that ran on a GPU, and leaves their logic as it was.
"""

from apex_npu.migrate.engine.program import Finding, Options
from apex_npu.migrate.files.planning import Plan, plan

from .rewriting import Rewritten, rewrite

__all__ = ["Finding", "Options", "Plan", "Rewritten", "plan", "rewrite"]
