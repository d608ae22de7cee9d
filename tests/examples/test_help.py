# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``--help`` of the examples is quick: it imports nothing large."""

import pytest


@pytest.mark.parametrize(
    ("folder", "option"),
    [
        ("imagenet", "--keep-batchnorm-fp32"),
        ("bert", "--accumulate"),
        ("gan", "--opt-level"),
        ("language_model", "--temperature"),
    ],
)
def test_help_imports_nothing_large(start_example, folder, option):
    before = "sys.modules.update(torch=None, numpy=None, transformers=None)"
    done = start_example(f"{folder}/main.py", "--help", before=before)
    assert done.returncode == 0, done.stderr
    assert option in done.stdout
