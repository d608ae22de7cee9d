# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``import apex_npu.transfer``: a script starts itself again under ``run --device npu``, once."""

import importlib
import sys

import pytest
from migrate.started import start

from apex_npu.migrate.run.running import Rewriter


def test_it_does_nothing_where_modules_are_rewritten_already(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Rewriter(tmp_path), *sys.meta_path])
    importlib.import_module("apex_npu.transfer")
    del sys.modules["apex_npu.transfer"]


SCRIPT = '''"""A script."""

from __future__ import annotations

import apex_npu.transfer

import sys

def device():
    return "cuda:0"

if __name__ == "__main__":
    print(device(), sys.argv[1:], sys.flags.dont_write_bytecode, sys.warnoptions[-1:], __name__)
'''


@pytest.mark.slow
@pytest.mark.parametrize("way", [("train.py",), ("-X", "faulthandler", "-m", "train"), ("-um", "train"), ("-mtrain",)])
def test_a_script_starts_itself_again_with_its_options_and_arguments(tmp_path, way):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = start(tmp_path, "-B", "-Wignore::UserWarning", *way, "--device", "cuda", "a b")
    assert done.stdout == "npu:0 ['--device', 'npu', 'a b'] 1 ['ignore::UserWarning'] __main__\n", done.stderr
    assert (tmp_path / "train.py").read_text() == SCRIPT


LAUNCHER = """
import runpy
import sys

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "words", "reason"),
    [
        ("", ("-c", "import apex_npu.transfer"), "there is no script that"),
        ("", ("-",), "there is no script that"),
        ("import os\nimport apex_npu.transfer", ("train.py",), "as the first statement, by itself"),
        ("import apex_npu.transfer, os", ("train.py",), "as the first statement, by itself"),
        ("from apex_npu import transfer", ("-m", "cProfile", "train.py"), "was started by another program"),
        ("from apex_npu import transfer", ("-um", "cProfile", "train.py"), "was started by another program"),
        ("from apex_npu import transfer", ("launcher.py", "train.py", "--lr", "1"), "was started by another program"),
    ],
)
def test_what_cannot_be_started_again_is_refused_with_the_way_out(tmp_path, script, words, reason):
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    done = start(tmp_path, *words, text="import apex_npu.transfer")
    assert done.returncode == 1
    assert reason in done.stderr
    assert "python -m apex_npu run --device npu" in done.stderr


def test_a_module_that_is_imported_by_a_script_is_not_its_first_statement(tmp_path):
    (tmp_path / "train.py").write_text("import helper")
    (tmp_path / "helper.py").write_text("import apex_npu.transfer")
    done = start(tmp_path, "train.py")
    assert done.returncode == 1
    assert "as the first statement" in done.stderr


def test_an_interactive_interpreter_runs_the_script_and_stays_one(tmp_path):
    (tmp_path / "train.py").write_text("import apex_npu.transfer")
    done = start(tmp_path, "-i", "train.py", text="import sys\nprint(sys.flags.interactive)\n")
    assert "were rewritten for npu" in done.stderr
    assert done.stdout == "1\n"
