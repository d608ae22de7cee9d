# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The names that scripts import from apex.amp.rnn_compat. RNNs need no special treatment to be cast."""

from __future__ import annotations

from typing import Any

__all__ = ["RNN_NAMES", "has_old_rnns", "whitelist_rnn_cells"]

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


def has_old_rnns() -> bool:
    """Return False: only torch 0.4 had these."""
    return False


def whitelist_rnn_cells(handle: Any, verbose: bool = False) -> None:
    """Do nothing: cells are in the list of functions that O1 casts."""
