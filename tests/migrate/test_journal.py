# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``--write`` that is killed: all files are old or all new once the next run has looked at what was left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from apex_npu.__main__ import main
from apex_npu.compat.pipeline import files
from apex_npu.compat.pipeline.errors import PipelineError
from apex_npu.migrate import journal, plan
from apex_npu.migrate.planning import JOURNAL
from apex_npu.migrate.writing import write_in_place

ROOT = Path(__file__).parents[2]
BEFORE = "import torch\nx = torch.ones(2).cuda()\n"


@pytest.mark.slow
def test_killed_at_each_change(tmp_path):
    worker = Path(__file__).with_name("killed_writes.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, worker, tmp_path / "t"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] == counts["old"] + counts["new"] > 20
    assert counts["mixed"] >= 2  # killed between the renames
    assert counts["new"] > 0


class KilledError(BaseException):
    """What a kill leaves, in this process."""


@pytest.fixture
def left(tmp_path, monkeypatch):
    """Two folders of which one has been written when the process ended."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        (folder / "a.py").write_text(BEFORE)
    made, real = plan(folders), files.rename

    def stops(root, path, target):
        if (folders[0] / "a.py").read_text() != BEFORE:
            os._exit(9)
        real(root, path, target)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(files, "rename", stops)
        write_in_place(made.files, allow_dirty=True)
        os._exit(0)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 9
    assert (folders[0] / "a.py").read_text() != BEFORE == (folders[1] / "a.py").read_text()
    return folders


def refuses(words, *folders):
    with pytest.raises(PipelineError, match=words):
        journal.take_back(folders)


def test_a_dry_run_says_so(left, capsys):
    (left[0] / "inner").mkdir()
    for path in (left[0], left[0] / "a.py", left[0] / "inner", left[0].parent):
        assert main(["migrate", str(path)]) == 2
        assert f"an earlier --write in {left[0]} was interrupted" in " ".join(capsys.readouterr().err.split())


def test_all_folders_are_needed(left):
    refuses("wrote files in .*one, too: give that folder", left[1])
    refuses("wrote files in .*two, too: give that folder", left[0])
    assert journal.take_back(left)
    assert [(folder / "a.py").read_text() for folder in left] == [BEFORE, BEFORE]
    assert not journal.take_back(left)
    assert sorted(path.name for path in left[0].iterdir()) == ["a.py"]


def test_edits_since_then_stay(left):
    (left[0] / "a.py").write_text("edited\n")
    refuses("has been edited since", *left)
    assert (left[0] / "a.py").read_text() == "edited\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda read: read.update(paths=["../b.py"]),
        lambda read: read.update(paths=["/b.py"]),
        lambda read: read.update(paths=["b.sh"]),
        lambda read: read.update(paths=[]),
        lambda read: read.update(folders=["/elsewhere"]),
        lambda read: read.pop("backup"),
    ],
)
def test_journals_of_other_origin_are_refused(left, change):
    path = left[0] / JOURNAL / "journal.json"
    read = json.loads(path.read_text())
    change(read)
    path.write_text(json.dumps(read))
    (left[0].parent / "b.py").write_text("outside")
    refuses("was not left by an interrupted", *left)
    assert (left[0].parent / "b.py").read_text() == "outside"


def test_a_journal_that_is_a_link_is_refused(left, tmp_path):
    (left[0] / JOURNAL).rename(tmp_path / "elsewhere")
    (left[0] / JOURNAL).symlink_to(tmp_path / "elsewhere")
    refuses("links are not followed", *left)


def test_a_file_of_that_name_is_refused(tmp_path):
    (tmp_path / JOURNAL).touch()
    refuses("was not left by an interrupted", tmp_path)


def test_one_writes_at_a_time(left):
    with journal.locked([left[0]]):
        refuses("another process is at work", *left)
