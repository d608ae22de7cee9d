# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``amp.debug``: why steps are skipped, which scale fits, where time goes, what is wrong, and what levels do."""

from apex_npu.debug.comparison.check_operators import CheckedOperators, OperatorError, check_operators
from apex_npu.debug.comparison.compare import compare
from apex_npu.debug.comparison.record import record
from apex_npu.debug.comparison.recorded import Recorded
from apex_npu.debug.comparison.report import ComparedRow, Comparison
from apex_npu.debug.gradient_range.measure import gradient_range
from apex_npu.debug.gradient_range.report import GradientRange
from apex_npu.debug.gradients import bad_gradients
from apex_npu.debug.model_report.report import report
from apex_npu.debug.model_report.table import LevelReport, ModelReport
from apex_npu.debug.overflow.causes import Finding
from apex_npu.debug.overflow.explain import explain_overflows
from apex_npu.debug.overflow.find_overflow import find_overflow
from apex_npu.debug.overflow.report import OverflowReport, Overflows
from apex_npu.debug.profiling.labels import profiler_ranges
from apex_npu.debug.profiling.profile import profile
from apex_npu.debug.scalars import scalars

__all__ = [
    "CheckedOperators",
    "ComparedRow",
    "Comparison",
    "Finding",
    "GradientRange",
    "LevelReport",
    "ModelReport",
    "OperatorError",
    "OverflowReport",
    "Overflows",
    "Recorded",
    "bad_gradients",
    "check_operators",
    "compare",
    "explain_overflows",
    "find_overflow",
    "gradient_range",
    "profile",
    "profiler_ranges",
    "record",
    "report",
    "scalars",
]
