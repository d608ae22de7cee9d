# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Installing, running scripts, and what goes wrong with either: one clear line each, and no crash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import npu_simulator
import pytest
import torch

PACKAGE = Path(npu_simulator.__file__).parent
SOURCE = Path(__file__).parents[1] / "npu_simulator"


def python(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False, env=env, cwd="/"
    )


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1, result  # a Python error: a crash would be negative
    return result.stderr.strip().splitlines()[-1]


def test_install_is_idempotent() -> None:
    assert npu_simulator.installed()
    for _ in range(2):
        assert npu_simulator.install() is True
    with pytest.raises(RuntimeError, match=r"device_count=2 .*device_count=3"):
        npu_simulator.install(device_count=3)
    assert torch.npu.device_count() == 2


def test_number_of_devices_and_bad_numbers() -> None:
    code = """
import npu_simulator, torch
for bad in (0, 17, True, "2"):
    try:
        npu_simulator.install(bad)
    except (TypeError, ValueError) as error:
        print(error)
try:
    npu_simulator.count().__enter__()
except RuntimeError as error:
    print(error)
npu_simulator.install(device_count=5)
npu_simulator.install()
print(torch.npu.device_count(), torch.ones(2, device="npu:4").sum().item())
"""
    result = python("-c", code)
    assert result.stdout.splitlines() == [
        "device_count must be in [1, 16], got 0",
        "device_count must be in [1, 16], got 17",
        "device_count must be an int, got True",
        "device_count must be an int, got '2'",
        "npu_simulator is not installed in this process; call npu_simulator.install() first",
        "5 2.0",
    ]
    assert result.returncode == 0


def test_another_backend_is_there_already() -> None:
    code = (
        "import torch; torch.utils.rename_privateuse1_backend('other'); import npu_simulator; npu_simulator.install()"
    )
    assert "another backend ('other') has taken torch's PrivateUse1" in last_line(python("-c", code))


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ("2.6.0+cpu", f"npu_simulator was built for torch 2.6.0+cpu, and this is torch {torch.__version__}; build it"),
        (None, "npu_simulator has no compiled part in "),
    ],
)
def test_wrong_or_missing_build(tmp_path: Path, note: str | None, message: str) -> None:
    copy = tmp_path / "npu_simulator"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", "_C.torch_version"))
    if note is not None:
        (copy / "_C.torch_version").write_text(note)
    line = last_line(python("-c", "import npu_simulator; npu_simulator.install()", path=tmp_path))
    assert line.startswith(f"ImportError: {message}")
    assert "pip install --no-build-isolation" in line


def test_a_real_torch_npu_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("real = True")
    code = "import npu_simulator; print(npu_simulator.install(), npu_simulator.installed()); import torch_npu"
    result = python("-c", code + "; print(torch_npu.real)", path=tmp_path)
    assert result.stdout.split() == ["False", "False", "True"]
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    result = python("-c", code + "; print(torch_npu.__version__)", path=tmp_path)
    assert result.stdout.split() == ["True", "True", "0.0.0+simulated"]
    assert "libhccl.so: cannot open shared object file" in result.stderr


SCRIPT = """
import sys
import helper
import torch
device = sys.argv[1]
assert __name__ == "__main__"
model = torch.nn.Linear(3, 2).to(device)
assert (torch.cuda if device == "cuda" else torch.npu).is_available()
model(torch.ones(4, 3, device=device)).sum().backward()
print(helper.NAME, sys.argv, model.weight.grad.device, torch.npu.device_count())
"""


@pytest.mark.parametrize(
    ("options", "device", "devices"), [([], "npu", 2), (["--transfer", "--devices", "3"], "cuda", 3)]
)
def test_running_a_script(tmp_path: Path, options: list[str], device: str, devices: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("NAME = 'helper'")
    result = python("-m", "npu_simulator", *options, str(script), device, "--lr", "1")
    assert result.stdout == f"helper {[str(script), device, '--lr', '1']} npu:0 {devices}\n", result.stderr


def test_running_a_script_that_is_not_there() -> None:
    result = python("-m", "npu_simulator", "nothing.py")
    assert result.returncode == 2
    assert "no script at 'nothing.py'" in result.stderr


@pytest.mark.skipif(not (SOURCE / "README.md").is_file(), reason="the simulator's sources are not here")
def test_the_example_of_the_readme_runs() -> None:
    example = (SOURCE / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    for _ in range(5):  # a process may end right after a backward
        result = python("-c", example)
        assert result.returncode == 0, result.stderr
    launches, syncs = result.stdout.split()[:2]
    assert int(launches) > 4
    assert syncs == "0"


@pytest.mark.skipif(not (SOURCE / "setup.py").is_file(), reason="the simulator's sources are not here")
def test_missing_compiler(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    command = [str(source / "setup.py"), "build", "--build-base", str(tmp_path / "build")]
    result = python(*command, CXX="no-such-compiler")
    assert "npu_simulator: no C++ compiler found (CXX=no-such-compiler is not there); install g++" in last_line(result)


@pytest.mark.skipif(not (SOURCE / "setup.py").is_file(), reason="the simulator's sources are not here")
def test_builds_are_cached(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    code = f"import sys; sys.argv = ['setup.py']; sys.path.insert(0, {str(source)!r}); import setup; "
    folder = Path(python("-c", code + f"print(setup.cache_folder({torch.__version__!r}))").stdout.strip())
    assert folder.parent == source / "build" / "cache"
    assert folder.name.startswith(f"torch-{torch.__version__}-")
    folder.mkdir(parents=True)
    built = next(PACKAGE.glob("_C*.so"))
    shutil.copy(built, folder / built.name)
    build = [str(source / "setup.py"), "build", "--build-base", str(tmp_path / "build")]
    result = python(*build, CXX="no-such-compiler")  # which is not called
    assert result.returncode == 0, result.stderr
    assert f"npu_simulator: using {folder / built.name}" in result.stdout
    (note,) = (tmp_path / "build").rglob("_C.torch_version")
    assert note.read_text() == f"{torch.__version__}\n"
    # Another source: another build.
    (source / "csrc" / "npu.h").write_text("// changed")
    assert str(folder) != python("-c", code + f"print(setup.cache_folder({torch.__version__!r}))").stdout.strip()
