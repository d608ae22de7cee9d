# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu run``: how its options are read, and what they have looked at."""

import itertools
import os
import sys

import pytest

from apex_npu.__main__ import main
from apex_npu._cli.options import OPTIONS, of_environment

VARIABLES = [variable for variable, *_ in OPTIONS.values()]


@pytest.fixture
def script(monkeypatch, tmp_path):
    """A script that prints its arguments; the current folder is its folder, and there are no variables."""
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(sys, "argv", ["apex_npu"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr("apex_npu.migrate.run.command.install_as_apex", lambda force: None)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"
    path.write_text("import sys; print(*sys.argv[1:])")
    return str(path)


@pytest.fixture
def looked(monkeypatch):
    """What ``run`` has looked at."""
    found = {}
    monkeypatch.setattr("apex_npu.debug.script.look", found.update)
    return found


def refused(capsys, *arguments):
    """What wrong arguments print."""
    try:
        status = main(arguments)
    except SystemExit as left:
        status = left.code
    assert status == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ([], None),
        (["--explain-overflows"], "2"),
        (["--explain-overflows=5"], "5"),
        (["--force", "--explain-overflows"], "2"),
        (["--explain-overflows=1", "--replay"], "1,replay"),
        (["--replay", "--explain-overflows=1"], "1,replay"),
    ],
)
def test_an_option_with_a_value_of_its_own(options, value, script, looked, capsys):
    assert main(["run", *options, script, "--explain-overflows=9", "--", "--replay", "--explain-overflows"]) == 0
    assert capsys.readouterr().out == "--explain-overflows=9 -- --replay --explain-overflows\n"
    assert looked.get("explain_overflows") == value


def test_options_are_taken_in_any_order(script, looked, tmp_path):
    words = [["--profile", "1:2"], ["--explain-overflows"], ["--force"], ["--record=7:a:b.pt"], ["--trace", "t"]]
    for order in itertools.permutations(words):
        looked.clear()
        assert main(["run", *itertools.chain(*order), script]) == 0
        files = {"record": f"7:{tmp_path / 'a:b.pt'}", "trace": str(tmp_path / "t")}
        assert looked == {"profile": "1:2", "explain_overflows": "2", **files}


def test_the_last_of_two_counts(script, looked):
    assert main(["run", "--gradient-range", "1", "--check-operators=0", "--gradient-range", "7", script]) == 0
    assert looked == {"gradient_range": "7", "check_operators": "0"}


def test_an_option_comes_before_a_variable(script, looked, monkeypatch):
    monkeypatch.setenv("APEX_NPU_EXPLAIN_OVERFLOWS", "7")
    monkeypatch.setenv("APEX_NPU_PROFILE", "1:9")
    monkeypatch.setenv("APEX_NPU_PROFILE_TRACE", "traces")
    assert main(["run", "--profile", "0:1", "--model-report", script]) == 0
    assert looked == {"explain_overflows": "7", "profile": "0:1", "trace": "", "model_report": "1"}
    # A process that the script spawns finds the same.
    assert of_environment() == {"explain_overflows": "7", "profile": "0:1", "model_report": "1"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--profile", "10"], "--profile: '10': give A:B"),
        (["--profile", "3:3"], "--profile: '3:3': give A:B"),
        (["--profile", "a:b"], "--profile: 'a:b': give A:B"),
        (["--trace", "traces"], "--trace needs --profile"),
        (["--profile", "1:3", "--trace", __file__], "test_command.py: no folder can be made there (File exists)"),
        (["--profile", "1:3", "--trace", __file__ + "/below"], "no folder can be made there (Not a directory)"),
        (["--gradient-range", "1:2"], "--gradient-range: '1:2': give a step"),
        (["--check-operators", "x"], "--check-operators: 'x': give a step"),
        (["--record", "x:a.pt"], "--record: 'x:a.pt': give STEP:FILE"),
        (["--record", "3"], "--record: '3': give STEP:FILE"),
        (["--record", "3:no/a.pt"], "3:no/a.pt: there is no folder 'no'"),
        (["--check-operators", "03", "--record", "3:a.pt"], "--record and --check-operators cannot look at the same"),
        (["--explain-overflows=0"], "--explain-overflows: '0': give N"),
        (["--explain-overflows=x"], "--explain-overflows: 'x': give N"),
        (["--replay"], "--replay needs --explain-overflows"),
        (["--explain-overflow"], "--explain-overflow; did you mean '--explain-overflows'?"),
        (["--profil=1:3"], "--profil=1:3; did you mean '--profile'?"),
        (["--host", "tim"], "did you mean 'timm'?"),
        (["--host", "timm", "--host", "keras"], "'keras' is not one of deepspeed"),
        (["--device", "xpu"], "'xpu' is not one of npu"),
        (["--force=1"], "--force"),
    ],
)
def test_bad_input(options, said, script, looked, capsys):
    assert said in refused(capsys, "run", *options, script)
    assert not looked
    assert {os.environ[variable] for variable in VARIABLES} == {""}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--record"], "--record: expected one argument"),
        (["--record", "-m", "tool"], "--record: expected one argument"),
        (["--trace=", "s.py"], "--trace: '': give a folder"),
        (["--profile", "s.py"], "--profile: 's.py': give A:B"),
        ([], "a script is missing"),
        (["-m"], "a module is missing"),
        (["not_there.py"], "can't open file 'not_there.py'"),
    ],
)
def test_options_without_what_they_need(words, said, script, capsys):
    assert said in refused(capsys, "run", *words)


def test_nothing_is_set_before_all_options_are_checked(script, looked, capsys, tmp_path):
    folder = tmp_path / "traces"
    refused(capsys, "run", "--explain-overflows=3", "--profile", "1:3", "--trace", str(folder), "not_there.py")
    assert not looked
    assert {os.environ[variable] for variable in VARIABLES} == {""}
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        *(("PROFILE", text, "A:B") for text in ("10", "3:3", "a:b", "x", "1:", ":2", "-1", "1:2:3")),
        *(("RECORD", text, "STEP:FILE") for text in ("x", "3", "3:", ":a.pt", "-1:a.pt")),
    ],
)
def test_a_wrong_variable(name, text, form, script, monkeypatch, capsys):
    monkeypatch.setenv(f"APEX_NPU_{name}", text)
    assert f"APEX_NPU_{name}='{text}': give {form}" in refused(capsys, "run", script)


@pytest.mark.parametrize("words", [["--force", "--help"], ["--model-report", "-h", "s.py"]])
def test_help_is_an_option_among_others(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert ended.value.code == 0
    assert "--explain-overflows" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_a_command_shows_its_own_usage(command, capsys):
    errors = refused(capsys, command, "x")
    assert f" {command} [-h] " in errors
    assert "unrecognized arguments: x" in errors


def test_a_wrong_command(capsys):
    assert "did you mean 'migrate'?" in refused(capsys, "migrat", "train.py")
    assert "COMMAND" in refused(capsys)


def test_a_wrong_value(capsys):
    assert "did you mean 'O2'?" in refused(capsys, "migrate", "--amp", "o2", "train.py")
    assert "did you mean 'torch'?" in refused(capsys, "convert", "a.pt", "--to", "torhc", "--out", "b.pt")
    assert "did you mean 'A355'?" in refused(capsys, "migrate", "--explain", "A335")


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "apex_npu 0.1.0\n"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/usr/bin/apex-npu", "apex-npu"),
        ("/usr/bin/apex_npu", "apex_npu"),
        ("/site-packages/apex_npu/__main__.py", "python -m apex_npu"),
    ],
)
def test_the_program_has_the_name_by_which_it_is_called(path, name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [path])
    assert refused(capsys, "doctor", "x").startswith(f"usage: {name} doctor ")
