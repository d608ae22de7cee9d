# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where the host CANN's libraries are built, once, and what is said where they cannot be; no compiler is needed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from host_cann import BuildError, build


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for what a build needs to know of torch and torch_npu, and a cache of its own."""
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


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no no-such-compiler on PATH.*install g\+\+"):
        build._compiler()


def test_no_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"torch_npu is not installed.*pip install --no-deps torch_npu"):
        build._package("torch_npu")


def test_sources_are_packaged(tmp_path: Path) -> None:
    package = Path(build.__file__).parent
    assert list((package / "csrc").glob("ops_*.cpp"))
    assert (package / "dtypes.txt").is_file()


def test_too_late(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch_npu'] = sys; import host_cann; host_cann.install()"
    paths = str(Path(build.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": paths}, capture_output=True, text=True)
    assert "torch_npu has been imported already" in done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr
