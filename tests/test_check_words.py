# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``scripts/check_words.py``: which words it finds, and where."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_words.py"

PYTHON = '''"""First line.

It lies here.
"""
behind = "words: anew"  # Nobody
print(f"whoever {PI}")
'''

CPP = """// somebody
int behind = '"';  /* one
and behind */
const char* text = "lie";
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("check_words", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.py", PYTHON, [(3, "lies"), (5, "anew"), (5, "Nobody"), (6, "whoever")]),
        ("a.cpp", CPP, [(1, "somebody"), (3, "behind"), (4, "lie")]),
        ("a.md", "belies, lied\n\nbehind `behind`\n", [(3, "behind"), (3, "behind")]),
    ],
)
def test_words_are_found_in_prose_alone(script, tmp_path, name, text, found):
    path = tmp_path / name
    path.write_text(text)
    assert list(script.findings(path)) == found


def test_an_exception_covers_its_own_words_alone(script, tmp_path):
    path = tmp_path / "a.md"
    path.write_text("where it lies\nit lies\n")
    assert list(script.findings(path, "where it lies")) == [(2, "lies")]
