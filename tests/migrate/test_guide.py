# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The guide's tables are current, and its examples are what the rules do."""

import re

import pytest
from migrate import golden, guide

from apex_npu.migrate import rewrite

TEXT = guide.GUIDE.read_text(encoding="utf-8")
PAIRS = re.findall(
    r"(?:<!-- options: ([\w= ]+) -->\n)?```python\n((?:(?!```).)*)```\n\nbecomes\n\n```python\n(.*?)```",
    TEXT,
    re.DOTALL,
)


def test_tables_are_current():
    assert guide.current(TEXT) == TEXT, "PYTHONPATH=tests python -m migrate.guide"


@pytest.mark.parametrize(("options", "before", "after"), PAIRS)
def test_an_example(options, before, after):
    assert rewrite(before, options=golden.options_of(f"# options: {options}")).source == after


def test_all_examples_are_tested():
    assert len(PAIRS) == TEXT.count("becomes") - 1 == 7


def test_the_example_from_python(capsys):
    (program,) = re.findall(r"From Python, without torch:\n\n```python\n(.*?)```", TEXT, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == "import torch\nimport torch_npu  # noqa: F401\nx = torch.ones(2).npu()\n\n"
