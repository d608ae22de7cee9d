# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The code of docs/debug.md runs, and prints what is shown there."""

import logging
import re
from pathlib import Path

import pytest
import torch
from devices import DEVICE

from apex_npu import amp
from apex_npu.debug.overflow import causes

TEXT = (Path(__file__).parents[2] / "docs" / "debug.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the code is for the CPU")
@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_a_block_prints_what_is_shown(block, tmp_path, monkeypatch, capsys, caplog):
    code, shown = BLOCKS[block]
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS")
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    with caplog.at_level(logging.WARNING, logger="apex_npu.debug"):
        exec(compile(code, str(tmp_path / "train.py"), "exec"), {"__name__": "__main__"})
    logged = "".join(record.getMessage() + "\n" for record in caplog.records if record.name == "apex_npu.debug")
    assert comparable(logged + capsys.readouterr().out) == comparable(shown)


def comparable(text):
    """A table of times or of shares without its numbers, rows that these sort, and the advice; else ``text``."""
    text = re.sub(r"\+(cpu|cu\d+)\b", "", text)  # of torch's version
    if not re.search("share|lossy|float64 on the host|they diverge at", text):
        return text
    text = re.sub(r"\n {4}(?=\S)", " ", text)  # where lines are broken depends on numbers
    text = re.sub("[█░]+ *", "", text).replace("less than ", "").replace("<", "")
    lines = [line for line in text.splitlines() if not re.match("advice:|forward|backward|after backward|.*::", line)]
    return [re.sub(r"[\d.]+(e[+-]\d+)?", "0", " ".join(line.split())) for line in lines]


def test_each_block_of_code_is_run():
    assert len(BLOCKS) == TEXT.count("```python") > 0


def test_all_ranges_are_listed():
    sources = [path.read_text(encoding="utf-8") for path in Path(amp.__file__).parents[1].rglob("*.py")]
    named = {name for text in sources for name in re.findall(r'(?:labelled|record_function)\("(amp\.\w+)', text)}
    assert set(re.findall(r"^\| `(amp\.\w+)(?:\[i\])?` \|", TEXT, flags=re.MULTILINE)) == named


def test_all_kinds_and_names_are_explained():
    assert re.findall(r"^\| `(\w+)` \|", TEXT, flags=re.MULTILINE) == list(causes.ORDER)
    assert set(amp.debug.__all__) >= set(re.findall(r"amp\.debug\.(\w+)", TEXT))
