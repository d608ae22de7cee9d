# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""setup.py builds the extension, or prints in one line why it does not."""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import apex_npu

ROOT = Path(__file__).parents[1]
pytest.importorskip("setuptools")


@pytest.fixture
def setup_py(monkeypatch):
    """setup.py as a module, with a default environment."""
    spec = importlib.util.spec_from_file_location("apex_npu_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("APEX_NPU_NO_EXT", "APEX_NPU_WHEEL", "CXX", "DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    return module


def run_setup(*args: str, **variables: str) -> str:
    """What ``python setup.py`` prints, stderr included, with status 0."""
    command = [sys.executable, "setup.py", *args]
    environment = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_an_old_setuptools_is_named_with_the_way_out():
    script = "import setuptools, runpy; setuptools.__version__ = '65.5.0'; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    needed = re.search(r"setuptools>=(\d+)", (ROOT / "pyproject.toml").read_text()).group(1)
    assert done.returncode == 1
    assert done.stderr == (
        f"setup.py: setuptools {needed} or newer is needed, and this is 65.5.0: pip install --upgrade setuptools\n"
    )


def test_sources_are_relative(setup_py):
    assert "csrc/bindings.cpp" in setup_py.sources()


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_skipped_on_request(setup_py, monkeypatch, capsys, value):
    monkeypatch.setenv("APEX_NPU_NO_EXT", value)
    monkeypatch.setattr(sys, "argv", ["setup.py", "bdist_wheel"])
    assert setup_py.options() == {"version": apex_npu.__version__}
    assert capsys.readouterr().out == "apex_npu: no C++ extension, nothing will be fused: APEX_NPU_NO_EXT is set.\n"


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_not_skipped_on_request(setup_py, monkeypatch, value):
    monkeypatch.setenv("APEX_NPU_NO_EXT", value)
    assert setup_py.skip_reason() != "APEX_NPU_NO_EXT is set"


def test_skipped_without_a_compiler(setup_py, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler found" in setup_py.skip_reason()


def test_skipped_when_the_chosen_compiler_is_missing(setup_py, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/g++ -m64")
    assert "CXX=/nonexistent/g++ -m64 is not there" in setup_py.skip_reason()


def test_skipped_without_sources(setup_py, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "no C++ source" in setup_py.skip_reason()


def test_skipped_without_python_headers(setup_py, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_py, "find_compiler", lambda: "c++")
    monkeypatch.setattr(setup_py.sysconfig, "get_path", lambda _: str(tmp_path))
    assert "python3-dev" in setup_py.skip_reason()


@pytest.mark.parametrize("command", ["egg_info", "dist_info", "sdist", "--version"])
def test_metadata_needs_neither_torch_nor_a_compiler(setup_py, monkeypatch, command):
    monkeypatch.setattr(sys, "argv", ["setup.py", command])
    monkeypatch.setitem(sys.modules, "torch", None)
    assert setup_py.options() == {"version": apex_npu.__version__}


def test_a_wheel_to_be_published_is_named_for_its_torch(setup_py, monkeypatch):
    monkeypatch.setenv("APEX_NPU_WHEEL", "1")
    monkeypatch.setattr(setup_py, "skip_reason", lambda: None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu126")
    assert setup_py.version() == f"{apex_npu.__version__}+torch2.13.0.cu126"
    monkeypatch.setattr(setup_py, "skip_reason", lambda: "no compiler")  # a wheel for any torch
    assert setup_py.version() == apex_npu.__version__


def test_wheels_are_built_for_the_pythons_that_are_tested():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no parser of TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pythons = re.findall(r"cp3(\d+)-manylinux_x86_64", project["tool"]["cibuildwheel"]["build"])
    (matrix,) = re.findall(r'python: \["3\.10".*?\]', (ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    assert re.findall(r"3\.(\d+)", matrix) == pythons
    # The two homes of an exclusion.
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    exclusions = "--exclude 'libtorch*.so' --exclude 'libc10*.so'"
    assert exclusions in project["tool"]["cibuildwheel"]["repair-wheel-command"]
    assert exclusions in makefile
    assert "--group {project}/pyproject.toml:build" in project["tool"]["cibuildwheel"]["before-build"]


@pytest.mark.slow
def test_built_where_a_backend_of_torch_has_no_driver(setup_py, tmp_path):
    if (reason := setup_py.skip_reason()) is not None:
        pytest.skip(reason)
    (tmp_path / "without_driver.py").write_text("raise ImportError('libascend_hal.so')\n", encoding="utf-8")
    about = tmp_path / "without_driver-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: without-driver\nVersion: 1\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[torch.backends]\nnone = without_driver:load\n", encoding="utf-8")
    # A command that compiles nothing, after the options have been made, which needs torch.
    variables = {"PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "APEX_NPU_NO_EXT": ""}
    assert "without_driver" not in run_setup("-q", "build_scripts", **variables)


# In a process of its own: another test may have imported distutils before setuptools, which replaces parts of it.
BUILDS = """
import sys
import setuptools
import torch
from torch.utils import cpp_extension

sys.path.insert(0, ".")
import setup

cpp_extension.is_ninja_available = lambda: sys.argv[1] == "ninja"
for torch.__version__ in ("2.6.0", "2.13.0"):
    command = setuptools.Distribution(setup.build_options()).get_command_obj("build_ext")
    command.ensure_finalized()
    print(command.force, command.build_temp)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["ninja", "distutils"])
def test_nothing_that_another_torch_has_left_is_taken(tool):
    environment = {**os.environ, "CXX": "c++"}
    for name in ("APEX_NPU_NO_EXT", "APEX_NPU_WHEEL", "DEBUG"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", BUILDS, tool], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    forced, folders = zip(*(line.split(" ", 1) for line in done.stdout.splitlines()), strict=True)
    assert forced == ("True", "True")
    assert len(set(folders)) == 2


def test_missing_torch_is_said_with_the_way_out(setup_py, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match=r"--no-build-isolation.*APEX_NPU_NO_EXT=1"):
        setup_py.build_options()


def test_build_without_extension(tmp_path):
    printed = run_setup("build", "--build-base", str(tmp_path), APEX_NPU_NO_EXT="1")
    assert "APEX_NPU_NO_EXT is set" in printed
    built = {path.name for path in (tmp_path / "lib" / "apex_npu").iterdir()}
    assert {"__init__.py", "py.typed", "_C.pyi"} <= built
    assert not any(name.endswith((".so", ".pyd", ".torch_version")) for name in built)
    assert (tmp_path / "lib" / "apex_npu" / "doctor" / "published.csv").is_file()


def test_sdist_holds_the_sources(tmp_path):
    run_setup("egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"csrc/bindings.cpp", "setup.py", "apex_npu/py.typed", "LICENSE"} <= names
    assert all(path.relative_to(ROOT).as_posix() in names for path in ROOT.glob("csrc/**/*.h"))
    # Its tests and its site read them.
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*"), ROOT / "CITATION.cff"]
    assert [path.name for path in pages if path.relative_to(ROOT).as_posix() not in names] == []
    assert not any(name.endswith((".so", ".torch_version")) for name in names)


@pytest.mark.slow
def test_a_failed_compilation_names_the_way_out(setup_py, tmp_path):
    if setup_py.skip_reason():
        pytest.skip(setup_py.skip_reason())
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'broken compiler' >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    command = [sys.executable, "setup.py", "build", "--build-base", str(tmp_path / "build")]
    environment = {**os.environ, "CXX": str(broken), "CC": str(broken)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "APEX_NPU_NO_EXT=1" in done.stderr.splitlines()[-1]
