# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fetches a script from a clone, rewrites it, runs it, and reads the losses that it wrote."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

from apex_npu.migrate import Options, Plan, plan
from apex_npu.migrate.files.command import write_copy

from .catalogue import Script

# A folder with clones, bare or not: OWNER/NAME of each repository.
CLONES = "MIGRATE_SCRIPTS"
_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]


def why_not(script: Script) -> str:
    """Why a script cannot be run here; "": it can."""
    if not os.environ.get(CLONES):
        return f"{CLONES} names no folder of clones"
    if not clone_of(script).is_dir():
        return f"{CLONES} has no {script.repository}"
    lacking = [need for need in script.needs if not _is_installed(Requirement(need))]
    return f"it needs {', '.join(lacking)}" if lacking else ""


def _is_installed(need: Requirement) -> bool:
    try:
        return version(need.name) in need.specifier
    except PackageNotFoundError:
        return False


def clone_of(script: Script) -> Path:
    return Path(os.environ[CLONES], script.repository)


def fetch(script: Script, folder: Path) -> Path:
    """Take the files of a script's commit, make its data, and return the folder that it is started in."""
    command = ["git", "-C", str(clone_of(script)), "archive", script.commit, *script.paths]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    script.prepare(folder / script.folder)
    return folder / script.folder


def migrated(original: Path, out: Path, options: Options) -> Plan:
    """A rewritten copy of a script's folder; what was done."""
    made = plan([original], options)
    shutil.rmtree(out, ignore_errors=True)
    write_copy(original, made.files, out)
    return made


def losses_of(
    script: Script,
    folder: Path,
    device: str,
    before: Sequence[str] = (),
    python: Sequence[str] = (sys.executable,),
    **environment: str,
) -> list[list[float]]:
    """Run a script in ``folder``, and return the first losses of each of its ranks.

    Args:
        script: The script.
        folder: Where it, or what it has become, is.
        device: The package that simulates an NPU, or cpu.
        before: Arguments of Python's before the script.
        python: The interpreter.
        environment: Further variables.

    Raises:
        AssertionError: It failed, or wrote too few losses; with what it printed.
    """
    written = folder / "losses"
    shutil.rmtree(written, ignore_errors=True)
    written.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [_HERE / "site", _HERE / "stand_ins", _ROOT, _ROOT / "tests/host_cann", os.environ.get("PYTHONPATH", "")]
    variables = {
        **os.environ,
        **{"SCRIPT_DEVICE": device, "SCRIPT_STEPS": str(script.steps), "SCRIPT_LOSSES": str(written)},
        **{"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        **{"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONWARNINGS": "ignore", **environment},
    }
    processes, outputs = [], []
    for rank in range(script.processes):
        words = [word.format(port=port, rank=rank) for word in script.command]
        more = {name: value.format(port=port, rank=rank) for name, value in script.environment.items()}
        process = subprocess.Popen(
            [*python, *before, *words],
            cwd=folder,
            env={**variables, **more},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        processes.append(process)
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = [
        [float(line) for line in path.read_text().split()]
        for path in sorted(written.glob("*.txt"), key=lambda p: p.stem)
    ]
    printed = "\n".join(output[-6_000:] for output in outputs)
    assert [process.returncode for process in processes] == [0] * script.processes, printed
    assert [len(losses) for losses in found] == [script.steps] * script.ranks, printed
    return found
