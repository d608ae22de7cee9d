# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``OPTIONS``: what ``python -m apex_npu run`` looks at in a script, each with the variable of the environment.

The command line sets the variables, and ``apex_npu.debug`` reads them when ``apex_npu.amp`` is imported. A script to
which a variable is given needs no command.
"""

from __future__ import annotations

from typing import NamedTuple


class Option(NamedTuple):
    """One option.

    Attributes:
        name: On the command line.
        variable: In the environment.
        help: For ``--help``.
        metavar: What its value is called; None: it has none, and the variable is ``1``.
        bare: The value where the option stands alone; None: it needs one.
    """

    name: str
    variable: str
    help: str
    metavar: str | None = None
    bare: str | None = None

    @property
    def attribute(self) -> str:
        """Where the parser leaves its value."""
        return self.name.removeprefix("--").replace("-", "_")


EXPLAIN_OVERFLOWS = Option(
    "--explain-overflows",
    "APEX_NPU_EXPLAIN_OVERFLOWS",
    "after N skipped steps in a row (2, or as in --explain-overflows=5) watch the next iteration, and log what "
    "overflowed",
    "N",
    "2",
)
PROFILE = Option(
    "--profile",
    "APEX_NPU_PROFILE",
    "print where the time goes of the steps from A, counted from 0, to before B",
    "A:B",
)
TRACE = Option("--trace", "APEX_NPU_PROFILE_TRACE", "with --profile: also write a trace into this folder", "DIR")
GRADIENT_RANGE = Option(
    "--gradient-range", "APEX_NPU_GRADIENT_RANGE", "print what float16 loses of the gradients of this step", "STEP"
)
CHECK_OPERATORS = Option(
    "--check-operators", "APEX_NPU_CHECK_OPERATORS", "print how far operators of this step are from float64", "STEP"
)
RECORD = Option("--record", "APEX_NPU_RECORD", "write what this step computes to a file, for compare", "STEP:FILE")
MODEL_REPORT = Option(
    "--model-report", "APEX_NPU_MODEL_REPORT", "print what each opt_level makes of the script's model"
)
OPTIONS = (EXPLAIN_OVERFLOWS, PROFILE, TRACE, GRADIENT_RANGE, CHECK_OPERATORS, RECORD, MODEL_REPORT)
