# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``amp.debug``: why steps are skipped, which scale fits, where time goes, what is wrong, and what levels do."""

from apex_npu.debug.causes import Finding
from apex_npu.debug.check_operators import CheckedOperators, OperatorError, check_operators
from apex_npu.debug.compare import Comparison, compare
from apex_npu.debug.comparison_report import ComparedRow
from apex_npu.debug.explain import explain_overflows
from apex_npu.debug.find_overflow import find_overflow
from apex_npu.debug.gradient_range import gradient_range
from apex_npu.debug.gradients import bad_gradients
from apex_npu.debug.labels import profiler_ranges
from apex_npu.debug.model_report import report
from apex_npu.debug.model_table import LevelReport, ModelReport
from apex_npu.debug.overflow_report import OverflowReport, Overflows
from apex_npu.debug.profile import profile
from apex_npu.debug.range_report import GradientRange
from apex_npu.debug.record import record
from apex_npu.debug.recorded import Recorded
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
