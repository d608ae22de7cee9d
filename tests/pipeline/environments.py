# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fresh environments that borrow torch and the tools from this one, and the scripts run in them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
Done = subprocess.CompletedProcess[str]
BORROWED = ("torch", "numpy", "setuptools", "pip", "packaging", "npu_simulator", "host_cann")


class Environment:
    """A virtual environment of its own in ``folder``; what it has not, it finds where this interpreter does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Our own pip: making one from the bundled archive takes longer than all the rest.
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (self.site,) = (folder / "lib").glob("python3*/site-packages")
        specs = [importlib.util.find_spec(name) for name in BORROWED]
        lenders = {str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin}
        (self.site / "borrowed.pth").write_text("\n".join(sorted(lenders)) + "\n", encoding="utf-8")

    def run(
        self, *arguments: str | Path, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """The interpreter with ``arguments``, without this checkout on its path."""
        return run(self.python, *arguments, cwd=cwd or self.folder, **variables)

    def output(self, *arguments: str | Path, **variables: str) -> str:
        """What it prints, where it succeeds."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pip(self, *arguments: str | Path) -> str:
        """What pip prints; it may use no network."""
        index = ["--no-index"] if arguments[0] == "install" else []
        return self.output("-m", "pip", "--disable-pip-version-check", *arguments, *index)


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> Done:
    """``command``, in an environment without variables of the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "APEX_NPU"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **variables}
    return subprocess.run(
        list(map(str, command)), env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )


def script(name: str, *arguments: str | Path, cwd: Path, **variables: str) -> Done:
    """One of ``scripts/``."""
    return run("bash", ROOT / "scripts" / f"{name}.sh", *arguments, cwd=cwd, **{"PYTHON": sys.executable, **variables})
