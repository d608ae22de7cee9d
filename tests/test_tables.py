# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables of the commands: plain lines in files and pipes, and without rich; rich's on a terminal."""

import io
import sys

import pytest

from apex_npu._cli.tables import show

LINES = ["torch  2.13", "numpy  [bold]2.4"]
ROWS = [("torch", "2.13"), ("numpy", "[bold]2.4")]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(file, rows=ROWS, lines=LINES):
    show(lines, ("package", "version"), rows, title="Versions", styles=["", "red"], file=file)
    return file.getvalue()


def test_plain_in_a_file():
    assert shown(io.StringIO()) == "torch  2.13\nnumpy  [bold]2.4\n"


def test_plain_without_rich(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert shown(Terminal()) == "torch  2.13\nnumpy  [bold]2.4\n"


def test_nothing_is_no_table():
    assert shown(Terminal(), [], []) == ""


def test_a_table_on_a_terminal():
    pytest.importorskip("rich", reason="rich is not installed")
    text = shown(Terminal())
    assert "Versions" in text
    assert "package" in text
    assert "[bold]2.4" in text  # as it is: no markup
    assert "torch  2.13\n" not in text


def test_the_plain_lines_go_to_stdout(capsys):
    show(LINES, ("", ""), ROWS)
    assert capsys.readouterr().out == "torch  2.13\nnumpy  [bold]2.4\n"
