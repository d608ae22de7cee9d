# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Builds of the host CANN's libraries, once per version, and the errors where they fail; no compiler is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from host_cann import BuildError, build, installation


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stubs for the properties of torch and torch_npu that a build reads, and a separate cache."""
    for name in ("torch", "torch_npu"):
        (tmp_path / name / "include/third_party/acl/inc").mkdir(parents=True)
    monkeypatch.setattr(build, "_package", lambda name: tmp_path / name)
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(build, "_compiler", lambda: [sys.executable])
    monkeypatch.setenv("HOST_CANN_BUILD", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Builds that have been made, each of one file that is there only when it is finished."""
    made: list[Path] = []

    def libraries(self: build._Builder) -> Path:
        self.out.mkdir()
        time.sleep(0.2)
        (self.out / "libascendcl.so").write_text("finished")
        made.append(self.out)
        return self.out

    monkeypatch.setattr(build._Builder, "libraries", libraries)
    return made


def test_built_once(packages: Path, builds: list[Path]) -> None:
    first = build.build()
    assert first.parent == packages / "cache"
    assert (first / "libascendcl.so").read_text() == "finished"
    assert build.build() == first
    assert len(builds) == 1
    assert not list(first.parent.glob("building-*"))


def test_the_default_is_the_users_cache(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOST_CANN_BUILD")
    monkeypatch.setenv("XDG_CACHE_HOME", str(packages / "elsewhere"))
    assert build._cache() == packages / "elsewhere/host_cann"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build._cache() == Path.home() / ".cache/host_cann"


def test_other_versions_are_built_beside(packages: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.build()
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "2.0")
    assert build.build() != first
    assert len(builds) == 2


@pytest.mark.parametrize(("of_strings", "newer"), [("RKNSt7__cxx1112basic_stringIcE", True), ("RKSs", False)])
def test_strings_are_those_that_torch_is_built_with(
    packages: Path, monkeypatch: pytest.MonkeyPatch, of_strings: str, newer: bool
) -> None:
    """Wheels of torch 2.6 have the std::string before C++11's; libstdc++ exports functions of both."""
    names = {f"_ZN3c106detail23torchCheckFailEPKcS2_j{of_strings}", "_ZGTtNSt11logic_errorC1ERKNSt7__cxx1112basic"}
    monkeypatch.setattr(build, "_symbols", lambda which, *files: names)
    assert build._has_newer_strings(packages / "torch") is newer


def test_two_at_once_build_once(packages: Path, builds: list[Path]) -> None:
    threads = [threading.Thread(target=build.build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def test_a_build_that_fails_leaves_nothing(packages: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def libraries(self: build._Builder) -> Path:
        self.out.mkdir()
        raise BuildError("out of disk")

    with monkeypatch.context() as patch:
        patch.setattr(build._Builder, "libraries", libraries)
        with pytest.raises(BuildError, match="out of disk"):
            build.build()
    assert not [path for path in (packages / "cache").iterdir() if path.is_dir()]
    assert (build.build() / "libascendcl.so").is_file()


def test_what_a_killed_build_leaves_is_removed(packages: Path, builds: list[Path]) -> None:
    cache = packages / "cache"
    mine = cache / f"building-{build._digest(build._compiler())}-killed"
    others = cache / "building-0123456789abcdef-running"
    for folder in (mine, others):
        (folder / "libraries").mkdir(parents=True)
    build.build()
    assert not mine.exists()
    assert others.exists()  # of other sources or versions, which another process may be building


def test_a_cache_that_cannot_be_written(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (packages / "file").touch()
    monkeypatch.setenv("HOST_CANN_BUILD", str(packages / "file/cache"))
    with pytest.raises(BuildError, match=r"file/cache .*HOST_CANN_BUILD"):
        build.build()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no-such-compiler.*g\+\+"):
        build._compiler()


def test_no_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="pip install --no-deps torch_npu"):
        build._package("torch_npu")


def test_sources_are_packaged(tmp_path: Path) -> None:
    project = Path(__file__).parents[1] / "host_cann"
    copy = tmp_path / "host_cann"
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        packaged = {name for name in wheel.namelist() if name.startswith("host_cann/")}
    package = copy / "host_cann"
    assert packaged == {str(path.relative_to(copy)) for path in package.rglob("*") if path.is_file()}


def test_a_file_of_dtypes_is_found_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOST_CANN_DTYPES", "some.txt")
    installation._set_dtypes()
    assert os.environ["HOST_CANN_DTYPES"] == str(tmp_path / "some.txt")
    monkeypatch.setenv("HOST_CANN_DTYPES", "1")
    installation._set_dtypes()
    assert Path(os.environ["HOST_CANN_DTYPES"]).read_text().startswith("aclnn")


def test_no_file_of_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_CANN_DTYPES", "nowhere.txt")
    with pytest.raises(FileNotFoundError, match=r"HOST_CANN_DTYPES='nowhere.txt': "):
        installation._set_dtypes()


@pytest.mark.parametrize("by_name", [False, True])
def test_the_folder_of_builds_is_the_same_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    monkeypatch.setattr(installation, "_libraries", {})
    monkeypatch.setattr(installation, "_load", lambda built: None)
    monkeypatch.setattr(installation.build, "build", lambda: tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_GLOBAL_LOG_LEVEL"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("HOST_CANN_BUILD", "here")
    monkeypatch.chdir(tmp_path)
    installation.install("there" if by_name else None)
    assert os.environ["HOST_CANN_BUILD"] == str(tmp_path / ("there" if by_name else "here"))


def test_too_late(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch_npu'] = sys; import host_cann; host_cann.install()"
    paths = str(Path(build.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": paths}, capture_output=True, text=True)
    assert "torch_npu has been imported already" in done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr
