# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The command: searching, exit statuses, reports, files in place and copies, what goes wrong."""

import csv
import json
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from apex_npu.__main__ import main
from apex_npu.migrate import Options, plan
from apex_npu.migrate.files import command

ROOT = Path(__file__).parents[2]
BEFORE = "import torch\nx = torch.ones(2).cuda()\n"
AFTER = "import torch\nimport torch_npu  # noqa: F401\nx = torch.ones(2).npu()\n"


@pytest.fixture
def tree(tmp_path):
    """A folder with two programs to change, one without, and a shell script."""
    folder = tmp_path / "tree"
    (folder / "inner").mkdir(parents=True)
    for name in ("a.py", "inner/b.py"):
        (folder / name).write_text(BEFORE)
    (folder / "c.py").write_text("print(1)\n")
    (folder / "run.sh").write_text("CUDA_VISIBLE_DEVICES=0,1 python a.py\n")
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def migrate(*arguments):
    try:
        return main(["migrate", *map(str, arguments)])
    except SystemExit as left:  # of argparse
        return left.code


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_dry_run_changes_nothing(tree, capsys):
    before = contents(tree)
    assert migrate(tree) == 0
    assert contents(tree) == before
    printed = capsys.readouterr().out
    assert "a.py:2:18" in printed
    assert ".cuda -> .npu" in printed
    assert "run.sh:1:1" in printed
    assert "4 files read, 2 would change: 4 changes" in printed


def test_a_diff_can_be_applied(tree, monkeypatch, capsys):
    monkeypatch.chdir(tree)
    assert migrate("--diff", ".") == 0
    patch = capsys.readouterr().out
    subprocess.run(["git", "apply", "-"], input=patch, text=True, check=True, cwd=tree)
    assert (tree / "a.py").read_text() == AFTER


def test_a_diff_says_what_is_left(tree, capsys):
    (tree / "a.py").write_text(BEFORE + "model = torch.nn.DataParallel(model)\n")
    assert migrate("--diff", tree) == 1
    printed = capsys.readouterr()
    assert "D150 refused" in printed.err
    assert "D103" not in printed.err
    assert "D150" not in printed.out


def test_files_in_place_keep_their_modes(tree):
    (tree / "a.py").chmod(0o755)
    assert migrate("--write", "--allow-dirty", tree) == 0
    assert (tree / "a.py").read_text() == (tree / "inner/b.py").read_text() == AFTER
    assert stat.S_IMODE((tree / "a.py").stat().st_mode) == 0o755
    assert sorted(contents(tree)) == ["a.py", "c.py", "inner/b.py", "run.sh"]
    assert migrate("--check", tree) == 0


def test_a_backup(tree, capsys):
    assert migrate("--write", "--backup", tree) == 0
    assert (tree / "a.py.orig").read_text() == BEFORE
    (tree / "a.py").write_text(BEFORE)
    assert migrate("--write", "--backup", tree) == 2
    assert "a.py.orig exists" in capsys.readouterr().err
    assert (tree / "a.py").read_text() == BEFORE


def test_git_decides_what_may_be_changed(tree, capsys):
    assert migrate("--write", tree) == 2
    assert "is not in git" in capsys.readouterr().err
    git(tree, "init", "-q")
    (tree / ".gitignore").write_text("ignored.py\n")
    (tree / "ignored.py").write_text(BEFORE)
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "a")
    with (tree / "inner/b.py").open("a") as file:
        file.write("# edited\n")
    assert migrate("--write", tree) == 2
    assert "inner/b.py has changes that are not committed" in capsys.readouterr().err
    assert (tree / "a.py").read_text() == BEFORE
    git(tree, "commit", "-qam", "b")
    assert migrate("--write", tree) == 0
    assert (tree / "a.py").read_text() == AFTER
    assert (tree / "ignored.py").read_text() == BEFORE


@pytest.mark.parametrize(
    ("folder", "name"), [(".", "inner/ab.py"), (".", "inner/a.py"), ("inner", "b.py"), ("inner", "inner/b.py")]
)
def test_the_file_that_is_not_committed_is_named(tree, capsys, folder, name):
    for path in ("b.py", "ab.py", "inner/a.py", "inner/ab.py", "inner/inner/b.py"):
        (tree / path).parent.mkdir(exist_ok=True)
        (tree / path).write_text(BEFORE)
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "a")
    (tree / folder / name).write_text(f"{BEFORE}# edited\n")
    assert migrate("--write", tree / folder) == 2
    assert f"{tree / folder / name} has changes that are not committed" in capsys.readouterr().err


def test_a_copy(tree, tmp_path):
    before = contents(tree)
    (tree / "link.py").symlink_to("a.py")
    os.mkfifo(tree / "pipe.py")
    out = tmp_path / "out"
    assert migrate("--out", out, tree) == 1  # the pipe cannot be read
    assert (out / "link.py").is_symlink()
    (out / "link.py").unlink()
    assert contents(out) == {**before, "a.py": AFTER.encode(), "inner/b.py": AFTER.encode()}
    assert contents(tree) == {**before, "link.py": BEFORE.encode()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "a path is missing"),
        (("nosuch",), "neither a file nor a folder"),
        (("--write", "--out", "x", "."), "give one of them"),
        (("--out", "x", "a", "b"), "give one path"),
        (("--report", "a.txt", "."), "has no known format"),
        (("--explain", "D999"), "no rule D999"),
        (("--select", "D,Q", "."), "no rule or family Q"),
        (("--to", "xpu", "."), "not one of npu, portable"),
        (("--out", "inner", "."), "inner exists"),
        (("--out", "inner/new", "."), "is inside"),
        (("link",), "is a link"),
        (("--report", "nosuch/a.csv", "."), "cannot be written"),
    ],
)
def test_wrong_usage(tree, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tree)
    (tree / "link").symlink_to("inner")
    before = contents(tree)
    assert migrate(*arguments) == 2
    assert words in capsys.readouterr().err
    assert contents(tree) == before


def test_exit_statuses(tree):
    assert migrate("--check", tree) == 1
    (tree / "a.py").write_text("pick('cuda')\n")
    assert migrate(tree) == 1
    assert migrate("--unsure", tree) == 0
    assert migrate("--ignore", "D106", tree) == 0
    assert migrate("--select", "X", "--check", tree) == 0
    assert migrate("--exclude", "a.py", tree) == 0


def test_links_are_neither_read_nor_written_through(tree, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "d.py").write_text(BEFORE)
    (tree / "d.py").symlink_to(outside / "d.py")
    (tree / "folder").symlink_to(outside)
    os.mkfifo(tree / "e.py")
    assert migrate("--write", "--allow-dirty", tree) == 1
    assert (outside / "d.py").read_text() == BEFORE
    assert (tree / "d.py").is_symlink()
    assert (tree / "a.py").read_text() == AFTER
    assert [finding.rule for finding in plan([tree]).findings if "e.py" in finding.path] == ["F906"]


def test_what_is_searched(tree):
    for folder in (".git", "venv", "node_modules", "lib/site-packages", "build"):
        (tree / folder).mkdir(parents=True)
        (tree / folder / "x.py").write_text(BEFORE)
    (tree / "venv/pyvenv.cfg").touch()
    assert sorted(change.target.path for change in plan([tree]).files) == ["a.py", "inner/b.py"]


@pytest.mark.parametrize("given", [["a.py", "inner/../a.py"], [".", "inner/../inner"], ["./inner/../a.py", "inner"]])
def test_a_file_in_two_spellings_is_one_file(tree, monkeypatch, capsys, given):
    monkeypatch.chdir(tree)
    assert migrate(*given, "--write", "--allow-dirty") == 0
    assert (tree / "a.py").read_text() == AFTER
    assert "inner/.." not in capsys.readouterr().out


def test_a_script_for_several_cards_may_have_another_spelling(tree, monkeypatch, capsys):
    monkeypatch.chdir(tree)
    migrate("inner/../a.py", "inner", "--data-parallel", "a.py")
    assert "not one of the given Python files" not in capsys.readouterr().err


def test_large_files_of_data_are_not_searched(tree, capsys):
    (tree / "small.json").write_text('"cuda"')
    (tree / "large.json").write_text('"cuda"' + " " * 1_000_000)
    assert migrate(tree) == 0
    printed = capsys.readouterr().out
    assert "small.json:1" in printed
    assert "large.json" not in printed


def test_git_is_asked_once_for_a_tree(tree, monkeypatch):
    for i in range(8):
        (tree / f"part{i}").mkdir()
        (tree / f"part{i}" / "a.py").write_text(BEFORE)
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "all")
    run, asked = subprocess.run, []
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: asked.append(args) or run(*args, **options))
    assert migrate(tree, "--write") == 0
    assert len(asked) <= 2


def test_a_command_runs_outside_of_the_main_thread():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(migrate, "--list-rules").result() == 0


def test_an_attribute_of_another_file_is_the_programs_own(tree):
    (tree / "a.py").write_text("class A:\n    def is_cuda(self): pass\n")
    (tree / "c.py").write_text("print(a.is_cuda)\n")
    assert {finding.rule for finding in plan([tree]).findings if finding.path.endswith("c.py")} == {"D154"}


STAR = """from parts.utils import *

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
optimizer = optim.SGD(nn.Linear(2, 1).to(device).parameters(), lr=0.1)
"""


@pytest.mark.parametrize("statement", ["from parts.utils import *", "from parts.utils import torch, nn, optim"])
def test_torch_that_another_file_imports_is_followed(tree, statement):
    (tree / "parts").mkdir()
    (tree / "parts/utils.py").write_text("from .base import *\nfrom torch import optim\nfrom math import *\n")
    (tree / "parts/base.py").write_text("import torch\nimport torch.nn as nn\n__all__ = ['torch', 'nn']\n")
    (tree / "d.py").write_text(STAR.replace("from parts.utils import *", statement))
    made = plan([tree / "d.py"], Options(ignore=("O",)))
    after = STAR.replace("cuda", "npu").replace(
        "from parts.utils import *", f"{statement}\nimport torch_npu  # noqa: F401"
    )
    assert [change.after.decode() for change in made.files] == [after]
    assert {finding.status for finding in made.findings} == {"changed"}


def test_torch_that_is_not_followed_leaves_the_file(tree, capsys):
    (tree / "d.py").write_text(STAR)
    assert migrate("--check", tree / "d.py") == 1
    assert "D102 refused  torch comes from parts.utils, which is not read here" in capsys.readouterr().out
    assert not plan([tree / "d.py"]).files


def test_unsure_changes_after_the_others(tree):
    program = "import torch\nx = pick('cuda')\ny = torch.ones(2).cuda()\n"
    for folder in ("one", "two"):
        (tree / folder).mkdir()
        (tree / folder / "d.py").write_text(program)
    assert migrate("--write", "--allow-dirty", tree / "one") == 1
    assert migrate("--write", "--allow-dirty", "--unsure", tree / "one") == 0
    assert migrate("--write", "--allow-dirty", "--unsure", tree / "two") == 0
    assert contents(tree / "one") == contents(tree / "two")
    assert contents(tree / "one")["d.py"].decode().count("npu") == 3


def test_notes_come_once_for_a_file(tree, capsys):
    (tree / "c.py").write_text("import torch\n" + "torch.backends.cudnn.benchmark = True\n" * 3)
    (tree / "run.sh").write_text("CUDA_VISIBLE_DEVICES=0 python a.py\npython b.py --device cuda\n")
    assert migrate(tree) == 0
    printed = capsys.readouterr().out
    assert "c.py:2:1" in printed
    assert "torch.backends.cudnn.benchmark has no effect on npu; 2 more places" in printed
    assert "(npu: ASCEND_RT_VISIBLE_DEVICES); 1 more line\n" in printed
    assert "; 2 notes." in printed


@pytest.mark.parametrize("keeps", ["--backup", "--allow-dirty"])
@pytest.mark.parametrize(("owner", "name"), [(Path, "write_bytes"), (os, "replace")])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device", "a.py"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [False, True])
def test_a_failure_at_any_write_leaves_all_files_as_they_were(tree, monkeypatch, owner, name, error, after, keeps):
    before, real, left = contents(tree), getattr(owner, name), [0]
    calls = 4 if name == "write_bytes" and keeps == "--backup" else 2

    def fails(*arguments):
        left[0] -= 1
        if left[0] == 0:
            if after:
                real(*arguments)
            raise error
        return real(*arguments)

    monkeypatch.setattr(owner, name, fails)
    for call in range(1, calls + 1):
        left[0] = call
        assert migrate("--write", keeps, tree) == (130 if isinstance(error, KeyboardInterrupt) else 2)
        assert contents(tree) == before
    left[0] = calls + 1
    assert migrate("--write", keeps, tree) == 0
    assert contents(tree) == {
        **before,
        **dict.fromkeys(("a.py", "inner/b.py"), AFTER.encode()),
        **dict.fromkeys(("a.py.orig", "inner/b.py.orig") if keeps == "--backup" else (), BEFORE.encode()),
    }


def test_a_termination_between_two_renames_leaves_all_files_as_they_were(tree, monkeypatch):
    before, real = contents(tree), os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (real(*paths), os.kill(os.getpid(), signal.SIGTERM)))
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert migrate("--write", "--allow-dirty", tree) == 130
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert contents(tree) == before


def test_a_read_only_file_leaves_all(tree, monkeypatch, capsys):
    before = contents(tree)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "b.py")  # root may write it
    assert migrate("--write", "--allow-dirty", tree) == 2
    assert "inner/b.py is read-only: nothing has been changed" in capsys.readouterr().err
    assert contents(tree) == before


def test_an_edit_in_between_is_not_overwritten(tree, monkeypatch, capsys):
    def edited(*arguments):
        made = plan(*arguments)
        (tree / "inner/b.py").write_text("edited\n")
        return made

    monkeypatch.setattr(command, "plan", edited)
    assert migrate("--write", "--allow-dirty", tree) == 2
    assert "has been edited" in capsys.readouterr().err
    assert (tree / "a.py").read_text() == BEFORE


def test_reports(tree, tmp_path):
    (tree / "a.py").write_text(BEFORE + "x = '=1'; pick('cuda'); torch.nn.DataParallel(x)\n")
    for suffix in (".csv", ".json", ".sarif"):
        assert migrate("-q", "--report", tmp_path / f"r{suffix}", tree) == 1
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:5] == ["path", "line", "end_line", "status", "message"]
    read = json.loads((tmp_path / "r.json").read_text())
    assert [row["rule"] for row in rows] == [row["rule"] for row in read]
    assert [(row["rule"], row["line"], row["column"], row["after"]) for row in read[:2]] == [
        ("D113", 1, 13, "\nimport torch_npu  # noqa: F401"),
        ("D103", 2, 18, ".npu"),
    ]
    sarif = json.loads((tmp_path / "r.sarif").read_text())
    assert sarif["version"] == "2.1.0"
    results = sarif["runs"][0]["results"]
    assert len(results) == len(read)
    assert {result["ruleId"] for result in results} == {
        rule["id"] for rule in sarif["runs"][0]["tool"]["driver"]["rules"]
    }
    for result, row in zip(results, read, strict=True):
        region = result["locations"][0]["physicalLocation"]["region"]
        assert (region["startLine"], region["startColumn"]) == (row["line"], row["column"])
        assert ("fixes" in result) == (row["after"] is not None)
    assert {result["level"] for result in results} == {"note", "warning", "error"}


def test_advice_is_asked_for(tree, capsys):
    (tree / "c.py").write_text("import torch\ntorch.utils.data.DataLoader(points, 8, pin_memory=True)\n")
    assert migrate(tree) == 0
    assert "N70" not in capsys.readouterr().out
    assert migrate("--select", "N", tree) == 0
    printed = capsys.readouterr().out
    assert "N701 note" in printed
    assert "N702 note" in printed


def test_rules_are_listed(capsys):
    assert migrate("--list-rules") == 0
    assert "D103  cuda() of tensors and modules" in capsys.readouterr().out
    assert migrate("--explain", "X201") == 0
    assert "from apex_npu import amp" in capsys.readouterr().out


def test_torch_is_not_imported(tree):
    program = (
        "import sys; sys.modules['torch'] = None; from apex_npu.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "migrate", tree]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
