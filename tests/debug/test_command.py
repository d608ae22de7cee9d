# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu run --explain-overflows[=N] --profile A:B``: how the options are read."""

import os
import re

import pytest

from apex_npu.__main__ import RUN, main


@pytest.fixture
def environment(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["apex_npu"])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.setattr("apex_npu.__main__.install_as_apex", lambda force: None)
    monkeypatch.setenv("APEX_NPU_EXPLAIN_OVERFLOWS", "7")
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ.get('APEX_NPU_EXPLAIN_OVERFLOWS'), *sys.argv[1:])")
    return str(script)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ([], "7"),
        (["--explain-overflows"], "2"),
        (["--explain-overflows=5"], "5"),
        (["--force", "--explain-overflows"], "2"),
        (["--explain-overflows=1", "--replay"], "1,replay"),
    ],
)
def test_the_script_finds_the_variable(options, value, environment, capsys):
    assert main(["run", *options, environment, "--explain-overflows=9"]) == 0
    assert capsys.readouterr().out == f"{value} --explain-overflows=9\n"


def test_steps_to_profile(environment, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_NPU_PROFILE", "")
    monkeypatch.setenv("APEX_NPU_PROFILE_TRACE", "")
    script = tmp_path / "profiled.py"
    script.write_text("import os; print(os.environ['APEX_NPU_PROFILE'], os.environ['APEX_NPU_PROFILE_TRACE'])")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--profile", "10:13", "--trace", "traces", str(script)]) == 0
    assert main(["run", "--profile", "0:1", str(script)]) == 0
    assert capsys.readouterr().out == f"10:13 {tmp_path / 'traces'}\n0:1 \n"


def test_steps_to_look_at(environment, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_NPU_GRADIENT_RANGE", "")
    monkeypatch.setenv("APEX_NPU_CHECK_OPERATORS", "")
    script = tmp_path / "looked_at.py"
    script.write_text("import os; print(os.environ['APEX_NPU_GRADIENT_RANGE'], os.environ['APEX_NPU_CHECK_OPERATORS'])")
    assert main(["run", "--gradient-range", "7", "--check-operators", "0", str(script)]) == 0
    assert capsys.readouterr().out == "7 0\n"


def test_a_step_to_record(environment, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_NPU_RECORD", "")
    script = tmp_path / "recorded.py"
    script.write_text("import os; print(os.environ['APEX_NPU_RECORD'])")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--record", "7:a:b.pt", str(script)]) == 0
    assert capsys.readouterr().out == f"7:{tmp_path / 'a:b.pt'}\n"


def test_a_report_on_the_model(environment, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_NPU_MODEL_REPORT", "")
    script = tmp_path / "reported.py"
    script.write_text("import os; print(os.environ['APEX_NPU_MODEL_REPORT'])")
    assert main(["run", "--model-report", str(script)]) == 0
    assert capsys.readouterr().out == "1\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--profile", "10"], "--profile 10: give A:B, from step A"),
        (["--profile", "3:3"], "--profile 3:3: give A:B"),
        (["--profile", "a:b"], "--profile a:b: give A:B"),
        (["--trace", "traces"], "--trace goes with --profile"),
        (["--profile", "1:3", "--trace", __file__], "test_command.py: no folder can be made there (File exists)"),
        (["--profile", "1:3", "--trace", __file__ + "/below"], "no folder can be made there (Not a directory)"),
        (["--gradient-range", "1:2"], "--gradient-range 1:2: give a step, counted from 0"),
        (["--check-operators", "x"], "--check-operators x: give a step, counted from 0"),
        (["--record", "x:a.pt"], "--record x:a.pt: give STEP:FILE, a step, counted from 0, and a file"),
        (["--record", "3"], "--record 3: give STEP:FILE"),
        (["--record", "3:no/a.pt"], "--record 3:no/a.pt: there is no folder 'no'"),
        (["--check-operators", "03", "--record", "3:a.pt"], "--record and --check-operators cannot look at the same"),
        (["--explain-overflows=0"], "--explain-overflows=0: N is a positive integer"),
        (["--explain-overflows=x"], "--explain-overflows=x: N is a positive integer"),
        (["--replay"], "--replay goes with --explain-overflows"),
        (["--explain-overflow"], "unknown option '--explain-overflow'"),
        (["--force=1"], "unknown option '--force=1'"),
    ],
)
def test_bad_input(options, said, environment, capsys):
    assert main(["run", *options, environment]) == 2
    assert said in capsys.readouterr().err
    assert os.environ["APEX_NPU_EXPLAIN_OVERFLOWS"] == "7"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--record"], "--record needs a value, STEP:FILE"),
        (["--record", "-m", "tool"], "--record needs a value, STEP:FILE"),
        (["--trace=", "s.py"], "--trace needs a value, DIR"),
        (["--profile", "s.py"], "--profile s.py: give A:B, from step A"),
        (["--record", "s.py"], "--record s.py: give STEP:FILE"),
        (["-m"], "a module is missing"),
        (["--profile", "1:3", "--force", "s.py"], "--force is given twice, or out of order"),
    ],
)
def test_options_without_what_they_need(words, said, environment, capsys):
    assert main(["run", *words]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"apex_npu: {said}")
    assert errors.count("[--force] [--host NAME]...") == 1


def test_options_are_taken_in_the_order_in_which_the_usage_shows_them():
    shown = [name for name in re.findall(r"--[a-z-]+", RUN.usage[0]) if name != "--device"]
    assert shown == [name for a in RUN.arguments if (name := a.name) in shown]


def test_nothing_is_set_before_all_options_are_checked(environment, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_NPU_PROFILE", "")
    folder = tmp_path / "traces"
    assert main(["run", "--explain-overflows=3", "--profile", "1:3", "--trace", str(folder), "not_there.py"]) == 2
    assert (os.environ["APEX_NPU_EXPLAIN_OVERFLOWS"], os.environ["APEX_NPU_PROFILE"]) == ("7", "")
    assert not folder.exists()


def test_values_may_be_assigned(environment, capsys, tmp_path, monkeypatch):
    for name in ("PROFILE", "PROFILE_TRACE", "RECORD"):
        monkeypatch.setenv(f"APEX_NPU_{name}", "")
    script = tmp_path / "assigned.py"
    script.write_text("import os; print(os.environ['APEX_NPU_PROFILE_TRACE'], os.environ['APEX_NPU_RECORD'])")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--profile=1:3", "--trace=-a=b", "--record=7:a.pt", str(script)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / '-a=b'} 7:{tmp_path / 'a.pt'}\n"


@pytest.mark.parametrize("words", [["--force", "--help"], ["--model-report", "-h", "s.py"], ["--record", "--help"]])
def test_help_is_an_option_among_others(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--explain-overflows [=N]\n" in printed


@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_a_command_shows_its_own_usage(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "x"])
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert errors.startswith(f"usage: python -m apex_npu {command} [-h] ")
    assert errors.endswith(f"python -m apex_npu {command}: error: unrecognized arguments: x\n")
