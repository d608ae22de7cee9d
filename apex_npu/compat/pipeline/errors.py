# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Errors that are reported to the user."""


class PipelineError(Exception):
    """A refusal or a failure, with what was expected, what was found and the way out. Trees are whole."""
