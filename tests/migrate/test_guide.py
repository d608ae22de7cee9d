# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The guides' tables are current, and their examples are what the rules do."""

import re

import pytest
import torch
from devices import DEVICE
from migrate import golden, guide

from apex_npu.migrate import rewrite

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in guide.GUIDES}
_BLOCK = r"```python\n((?:(?!```).)*)```\n\n"
PAIRS = {
    name: re.findall(
        r"(?:<!-- options: ([\w= ]+) -->\n)?" + _BLOCK + r"(?:becomes|改写为)\n\n" + _BLOCK, text, re.DOTALL
    )
    for name, text in TEXTS.items()
}
ENGLISH, CHINESE = (path.name for path in guide.GUIDES)


@pytest.mark.parametrize("path", guide.GUIDES, ids=lambda path: path.name)
def test_tables_are_current(path):
    text = TEXTS[path.name]
    assert guide.GUIDES[path].current(text) == text, "PYTHONPATH=tests python -m migrate.guide"


@pytest.mark.parametrize(("options", "before", "after"), PAIRS[ENGLISH])
def test_an_example(options, before, after):
    assert rewrite(before, options=golden.options_of(f"# options: {options}")).source == after


@pytest.mark.skipif(DEVICE.type != "cpu", reason="without an accelerator")
def test_the_portable_example_runs_on_the_cpu(monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    (program,) = (after for options, _, after in PAIRS[ENGLISH] if options == "portable")
    try:
        exec(program, {})
    finally:
        torch.distributed.destroy_process_group()


def test_all_examples_are_tested():
    assert len(PAIRS[ENGLISH]) == TEXTS[ENGLISH].count("\nbecomes\n") > 0


def test_examples_in_chinese_are_those_in_english():
    assert PAIRS[CHINESE] == PAIRS[ENGLISH]
    code = [re.findall(r"```.*?```", TEXTS[name], re.DOTALL) for name in (ENGLISH, CHINESE)]
    plain = [[re.sub(r" +# .*", "", block) for block in blocks] for blocks in code]
    assert plain[0] == plain[1]


def test_the_guides_have_the_same_sections():
    assert TEXTS[CHINESE].count("\n## ") == TEXTS[ENGLISH].count("\n## ")


def test_the_example_from_python(capsys):
    (program,) = re.findall(r"From Python, without torch:\n\n```python\n(.*?)```", TEXTS[ENGLISH], re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == "import torch\nimport torch_npu  # noqa: F401\nx = torch.ones(2).npu()\n\n"
