# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The example is what people run first: it learns, resumes bit for bit, and answers mistakes with one line."""

import runpy
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from example_runs import differences

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ["--device", "cpu", "--samples", "192", "--epochs", "4"]
O2 = ["--opt-level", "O2", "--combine-grad"]


@pytest.fixture(autouse=True)
def _same_threads():
    """The example chooses its number of threads; other tests keep theirs."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def digits(monkeypatch):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits

    # What the comparison compares is to depend on no machine.
    monkeypatch.setattr(digits, "native_dtype", lambda device: None)
    return digits


@pytest.fixture
def run(digits, tmp_path, capsys):
    """Runs the example's command line here; returns its exit status and what it wrote to stdout and stderr."""

    def run_here(*args: str) -> tuple[int, str, str]:
        try:
            status = digits.main([*QUICK, "--plot", str(tmp_path / "plot.png"), *args])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        return status, *capsys.readouterr()

    return run_here


@pytest.fixture
def checkpoint(run, made_once, tmp_path_factory, tmp_path) -> Path:
    """A copy of what an epoch at O2 saves."""

    def make() -> str:
        path = tmp_path_factory.mktemp("saved") / "run.pt"
        assert run(*O2, "--epochs", "1", "--save", str(path))[0] == 0
        return str(path)

    return Path(shutil.copy(made_once("checkpoint_of_digits", make), tmp_path / "run.pt"))


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


# Runs the example until its second checkpoint is written but not yet in the place of the first, and kills it, hard.
KILLED = """
import os, signal

replace, checkpoints = os.replace, []

def replace_or_die(*paths):
    checkpoints.append(paths)
    if len(checkpoints) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)

os.replace = replace_or_die
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--opt-level", "O0"], marks=pytest.mark.sweep),
        ["--opt-level", "O1", "--optimizer", "Adam"],
        O2,
        pytest.param(["--opt-level", "O2", "--optimizer", "Adam"], marks=pytest.mark.sweep),
    ],
    ids=" ".join,
)
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(start_example, run, tmp_path, options):
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    arguments = [*QUICK, *options, "--save", str(killed), "--plot", str(tmp_path / "killed.png")]
    done = start_example("digits.py", *arguments, before=KILLED)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(load(killed)["history"]["test_losses"]) == 1
    assert run(*options, "--save", str(whole))[0] == 0
    assert run(*options, "--save", str(killed), "--resume", str(killed))[0] == 0

    expected, actual = load(whole), load(killed)
    for state in (expected, actual):
        del state["history"]["seconds"]  # the only measurement that may differ
        state["optimizer"] = state["optimizer"]["state"]  # the groups' options are the command line's
    assert len(actual["history"]["losses"]) >= 12
    assert differences(actual, expected) == []


@pytest.mark.parametrize(("native", "levels"), [(None, ("O1", "O2")), (torch.bfloat16, ("O4", "O5"))])
def test_comparison_prints_a_table_and_draws_a_picture(digits, run, monkeypatch, tmp_path, native, levels):
    monkeypatch.setattr(digits, "native_dtype", lambda device: native)
    status, out, err = run("--epochs", "2", "--samples", "64")
    assert status == 0
    assert err == ""
    assert "\r" not in out  # without a terminal: lines instead of a progress bar
    for run_name in ("fp32 torch, Adam", f"{levels[0]}, Adam", f"{levels[1]}, NpuFusedAdam, combine_grad"):
        assert f"{run_name}: epoch 2/2" in out
    assert "final loss scale" in out
    assert ("accuracy, not speed" in out) == (native is None)
    assert ("epochs/s" in out) == (native is not None)
    assert "A step of Adam over 300 small tensors: torch.optim.Adam" in out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_accelerators_are_compared_in_float16(digits, monkeypatch):
    monkeypatch.undo()
    assert digits.native_dtype(torch.device("cuda")) == torch.float16
    levels = [recipe.opt_level for recipe in digits.comparison(torch.float16)]
    assert levels == [None, "O1", "O2"]


def test_help_needs_no_other_package(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("matplotlib", "sklearn", "tqdm"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    monkeypatch.delitem(sys.modules, "digits_report", raising=False)
    monkeypatch.setattr(sys, "argv", ["digits.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLES / "digits.py"), run_name="__main__")
    assert "--opt-level" in capsys.readouterr().out


def test_a_missing_package_is_named(digits, run, monkeypatch):
    find = digits.importlib.util.find_spec
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda name: None if name == "sklearn" else find(name))
    refused(run(), "scikit-learn is missing", "pip install scikit-learn")


def test_levels_follow_plain_fp32(digits):
    histories = {
        recipe.label: digits.train(recipe, torch.device("cpu"))
        for recipe in (
            digits.Recipe(None, "Adam", epochs=1, samples=192),
            digits.Recipe("O0", "NpuFusedAdam", epochs=1, samples=192),
            digits.Recipe("O1", "NpuFusedAdam", epochs=1, samples=192),
            digits.Recipe("O2", "NpuFusedAdam", combine_grad=True, epochs=1, samples=192),
        )
    }
    reference, *others = (torch.tensor(history.losses) for history in histories.values())
    for losses in others:
        torch.testing.assert_close(losses, reference, rtol=0.02, atol=0.0)  # fp16 keeps three digits per operation


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "not a whole checkpoint"), (b"no checkpoint at all\n", "not a whole checkpoint"), (None, "not a whole")],
    ids=["empty", "foreign", "truncated"],
)
def test_unreadable_checkpoint_gives_one_line_and_is_left_alone(run, tmp_path, content, words, request):
    path = tmp_path / "run.pt"
    if content is None:
        content = request.getfixturevalue("checkpoint").read_bytes()[:-1000]
    path.write_bytes(content)
    refused(run(*O2, "--epochs", "1", "--resume", str(path), "--save", str(path)), words, str(path))
    assert path.read_bytes() == content


def test_checkpoint_of_something_else_is_refused(run, tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.zeros(3)}, path)
    refused(run(*O2, "--resume", str(path)), "not a checkpoint of digits.py", str(path))


def test_damaged_contents_are_refused(run, tmp_path, checkpoint):
    for part, value in [("model", {}), ("history", {"losses": 3}), ("recipe", 3), ("optimizer", [])]:
        torch.save({**load(checkpoint), part: value}, tmp_path / "damaged.pt")
        refused(run(*O2, "--epochs", "1", "--resume", str(tmp_path / "damaged.pt")), "damaged.pt", "--resume")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--opt-level", "O1", "--combine-grad"], "--opt-level O2"),
        ([*O2, "--optimizer", "NpuFusedSGD"], "--optimizer NpuFusedAdam"),
        ([*O2, "--seed", "1"], "--seed 0"),
        ([*O2, "--epochs", "3"], "--epochs 1"),
        (["--opt-level", "O2"], "--combine-grad True"),
    ],
)
def test_checkpoint_of_another_run_is_refused(run, checkpoint, options, words):
    refused(run("--epochs", "1", *options, "--resume", str(checkpoint)), words, str(checkpoint))


@pytest.mark.parametrize(
    "options",
    [
        ["--epochs", "0"],
        ["--epochs", "two"],
        ["--epochs", "-1"],
        ["--seed", "-1"],
        ["--seed", str(2**32)],
        ["--samples", "0"],
        ["--samples", "899"],
        ["--device", "tpu"],
        ["--opt-level", "02"],
        ["--opt-level", "O2", "--optimizer", "Adamantium"],
        ["--opt-level", "O2", "--loss-scale", "banana"],
        ["--opt-level", "O2", "--loss-scale", "nan"],
        ["--opt-level", "O2", "--loss-scale", "inf"],
        ["--opt-level", "O2", "--loss-scale", "-1"],
        ["--opt-level", "O2", "--lr", "0"],
        ["--opt-level", "O2", "--save", "no/such/folder/run.pt"],
        ["--opt-level", "O2", "--resume", "no-such-file.pt"],
        ["--plot", "no/such/folder/plot.png"],
        ["--save", "run.pt"],
        ["--combine-grad"],
        ["--lr", "0.1"],
        ["--unknown"],
        ["file"],
    ],
    ids=" ".join,
)
def test_a_wrong_argument_gives_one_line(run, options):
    refused(run(*options), options[-2] if len(options) > 1 else options[0])


def refused(outcome: tuple[int, str, str], *words: str) -> None:
    """One line on stderr that holds ``words``, and exit status 2."""
    status, _, err = outcome
    assert status == 2
    assert err.startswith("digits.py: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_ctrl_c_says_how_to_continue(digits, run, tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    write = digits.write_checkpoint

    def write_then_interrupt(*args):
        write(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(digits, "write_checkpoint", write_then_interrupt)
    status, _, err = run(*O2, "--save", str(path))
    assert status == 130
    assert f"--resume {path}" in err


def test_a_failed_save_leaves_the_checkpoint_before(digits, tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    digits.write_checkpoint(path, {"epoch": 1})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(digits.torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        digits.write_checkpoint(path, {"epoch": 2})
    monkeypatch.undo()
    assert load(path) == {"epoch": 1}
