# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Options of ``run`` that examine the steps of a script, and environment variables of the same meaning.

The variables are for scripts that are started without ``run``, and for processes that a script spawns.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError

# For each option: its variable, the pattern of its value, and the meaning of the pattern.
OPTIONS = {
    "explain_overflows": ("APEX_NPU_EXPLAIN_OVERFLOWS", r"0*[1-9]\d*(,replay)?", "N, a positive integer"),
    "profile": ("APEX_NPU_PROFILE", r"\d+:\d+", "A:B, from step A, counted from 0, to before step B"),
    "trace": ("APEX_NPU_PROFILE_TRACE", r".+", "a folder"),
    "gradient_range": ("APEX_NPU_GRADIENT_RANGE", r"\d+", "a step, counted from 0"),
    "check_operators": ("APEX_NPU_CHECK_OPERATORS", r"\d+", "a step, counted from 0"),
    "record": ("APEX_NPU_RECORD", r"\d+:.+", "STEP:FILE, a step, counted from 0, and a file"),
    "model_report": ("APEX_NPU_MODEL_REPORT", r".+", "1"),
}

# Options that may be given without a value, and the value that they have then.
ALONE = {"--explain-overflows": "2"}


def checked(name: str, text: str) -> str:
    """Return ``text`` after a check that it is a value of the option.

    Raises:
        ArgumentTypeError: ``text`` is not a value of the option.
    """
    _, pattern, form = OPTIONS[name]
    first, _, last = text.partition(":")
    if not re.fullmatch(pattern, text) or (name == "profile" and int(first) >= int(last)):
        raise ArgumentTypeError(f"{text!r}: give {form}")
    return text


def of_environment() -> dict[str, str]:
    """Return the values of the environment variables, by the names of the options.

    Raises:
        ValueError: A value is wrong.
    """
    texts = {name: os.environ.get(variable, "").strip() for name, (variable, *_) in OPTIONS.items()}
    if texts["explain_overflows"] == "0":
        del texts["explain_overflows"]
    for name, text in texts.items():
        try:
            _ = text and checked(name, text)
        except ArgumentTypeError as error:
            raise ValueError(f"{OPTIONS[name][0]}={error}") from None
    return {name: text for name, text in texts.items() if text}
