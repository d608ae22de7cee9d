# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Kills ``migrate --write`` at each change of the file system, and lets a next run take back what that leaves.

``killed_writes.py FOLDER``; run by ``test_journal.py``. Prints how many times it was killed, and what was there then.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from apex_npu.__main__ import main
from apex_npu.migrate.journal import take_back

BEFORE = "import torch\nx = torch.ones(2).cuda()\n"
AFTER = "import torch\nimport torch_npu  # noqa: F401\nx = torch.ones(2).npu()\n"
NAMES = ("one/a.py", "one/inner/b.py", "two/c.py")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write(folder):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(["migrate", "--write", "--backup", "--jobs", "1", str(folder / "one"), str(folder / "two")])


def killed(folder, number):
    """Whether ``--write`` was killed before the change with this number; it ends otherwise."""
    child = os.fork()
    if child == 0:
        seen = 0

        def audit(event, arguments):
            nonlocal seen
            changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")
            if changes or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES):
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)
        os._exit(write(folder))
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        assert os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def made(folder):
    shutil.rmtree(folder, ignore_errors=True)
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(BEFORE)


def check(folder):
    old = dict.fromkeys(NAMES, BEFORE)
    new = dict.fromkeys(NAMES, AFTER) | {f"{name}.orig": BEFORE for name in NAMES}
    counts = {"kills": 0, "mixed": 0, "old": 0, "new": 0}
    while True:
        number = counts["kills"] + 1
        made(folder)
        if not killed(folder, number):
            assert contents(folder) == new
            return counts
        counts["kills"] = number
        left = contents(folder)
        counts["mixed"] += len({left[name] for name in NAMES}) == 2
        take_back([folder / "one", folder / "two"])
        found = contents(folder)
        assert found in (old, new), (number, found)
        counts["old" if found == old else "new"] += 1
        # The same again, and the same command.
        made(folder)
        assert killed(folder, number)
        if found == new:
            take_back([folder / "one", folder / "two"])
        else:
            assert write(folder) == 0
        assert contents(folder) == new, number


if __name__ == "__main__":
    print(json.dumps(check(Path(sys.argv[1]))))
