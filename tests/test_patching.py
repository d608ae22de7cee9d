# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Changes are taken back, all of them, also where taking one back fails or is interrupted."""

import pytest

from apex_npu.backends.patching import Undo


def test_a_call_that_raises_does_not_keep_the_others():
    undo, made = Undo(), []
    undo.callback(made.append, "first")
    undo.callback([].remove, "missing")
    undo.callback(made.append, "last")
    with pytest.raises(ValueError, match="not in list"):
        undo.close()
    assert made == ["last", "first"]
    undo.close()
    assert made == ["last", "first"]


def test_an_interrupted_call_is_made_again():
    undo, made = Undo(), []

    def call():
        made.append("call")
        if len(made) == 1:
            raise KeyboardInterrupt

    undo.callback(call)
    with pytest.raises(KeyboardInterrupt):
        undo.close()
    undo.close()
    assert made == ["call", "call"]
