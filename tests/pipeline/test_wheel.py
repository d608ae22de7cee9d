# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/build.sh: wheels that install, train and go without a trace; and what it refuses."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from pipeline import synthetic
from pipeline.environments import ROOT, Environment, run, script
from pipeline.lifecycle import live_through

from apex_npu.compat.pipeline.patching import patch


def can_compile() -> bool:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import setup; sys.exit(setup.skip_reason() is not None)"
    return run(sys.executable, "-c", program, cwd=ROOT).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("era", [pytest.param("2025", marks=pytest.mark.sweep), "2020", "master"])  # 2025: see below
def test_a_wheel_without_the_extension(tmp_path, era):
    tree = synthetic.write(tmp_path / "upstream", synthetic.files(era))
    wheel = live_through(tree, tmp_path, APEX_NPU_NO_EXT="1")
    assert Path(str(wheel.filename)).name == "apex-0.1+ascend-py3-none-any.whl"
    names = set(wheel.namelist())
    assert {"apex/__init__.py", "apex_npu/__init__.py", "apex_npu/LICENSE", "change_data_ptr.py"} <= names
    assert f"apex_npu/compat/pipeline/patch/{era}/npu.patch" in names
    assert not [name for name in names if name.startswith(("apex/amp", "apex/parallel", "apex/normalization"))]
    assert "apex/optimizers/fused_sgd.py" not in names
    metadata = wheel.read("apex-0.1+ascend.dist-info/METADATA").decode()
    assert "Requires-Dist: torch>=2.6\n" in metadata


@pytest.mark.sweep  # it compiles the extension again
def test_a_wheel_with_the_extension_is_for_one_python_and_hardened(tmp_path):
    if not can_compile():
        pytest.skip("no compiler")
    tree = synthetic.write(tmp_path / "upstream", synthetic.files("2025"))
    work = tmp_path / "a folder with spaces"
    work.mkdir()
    wheel = live_through(tree, tmp_path, TMPDIR=str(work))
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert Path(str(wheel.filename)).name == f"apex-0.1+ascend-{python}-{python}-{platform}.whl"
    assert wheel.read("apex_npu/_C.torch_version").decode().strip() == torch.__version__
    (name,) = (name for name in wheel.namelist() if name.startswith("apex_npu/_C.") and name.endswith(".so"))
    check_hardening(Path(wheel.extract(name, tmp_path)))


def test_the_extension_that_is_in_use_is_hardened():
    from apex_npu._extension import extension

    if extension is None or extension.__file__ is None:
        pytest.skip("no extension")
    check_hardening(Path(extension.__file__))


def check_hardening(library: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")

    def readelf(*options: str) -> str:
        return subprocess.run(
            ["readelf", "-W", *options, str(library)], check=True, capture_output=True, text=True
        ).stdout

    assert "GNU_RELRO" in readelf("--program-headers")
    (stack,) = (line for line in readelf("--program-headers").splitlines() if "GNU_STACK" in line)
    assert "RWE" not in stack
    assert "BIND_NOW" in readelf("--dynamic")
    assert "RPATH" not in readelf("--dynamic")
    assert "__stack_chk_fail" in readelf("--dyn-syms")
    assert ".symtab" not in readelf("--section-headers")  # stripped


@pytest.fixture
def environment(tmp_path) -> Environment:
    return Environment(tmp_path / "an environment")


def refused(environment: Environment, tmp_path: Path, *options: str, **variables: str) -> str:
    wheels = tmp_path / "wheels"
    arguments = (f"--python={environment.python}", f"--wheel-dir={wheels}", *options)
    done = script("build", *arguments, cwd=tmp_path, **{"APEX_NPU_NO_EXT": "1", **variables})
    assert done.returncode != 0
    assert not list(wheels.glob("*"))
    assert not list(Path(variables.get("TMPDIR", tmp_path / "none")).glob("apex_npu-build.*"))
    return done.stderr


def add_dist_info(environment: Environment, version: str = "9.9") -> None:
    info = environment.site / f"apex_npu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apex_npu\nVersion: {version}\n")


def test_what_is_missing_is_said_before_anything_is_built(environment, tmp_path):
    said = refused(environment, tmp_path, APEX_NPU_NO_EXT="", CXX="/nonexistent/c++")
    assert "no C++ compiler found (CXX=/nonexistent/c++ is not there)" in said
    assert "APEX_NPU_NO_EXT=1" in said
    (environment.site / "borrowed.pth").unlink()
    assert "needs torch 2.6 or newer, and has none" in refused(environment, tmp_path)
    environment.python = Path("/nonexistent/python")
    assert "--python" in refused(environment, tmp_path)
    for option in ("--fast", "--source"):
        assert script("build", option, cwd=tmp_path).returncode == 2


@pytest.mark.slow
def test_a_failed_build_leaves_nothing(environment, tmp_path):
    (tmp_path / "work").mkdir()
    files = synthetic.files("2025")
    files["setup.py"] = files["setup.py"].replace(
        "version = get", "raise SystemExit('upstream is broken')\nversion = get"
    )
    tree = synthetic.write(tmp_path / "upstream", files)
    (tmp_path / "plain").mkdir()
    said = refused(environment, tmp_path, f"--source={tmp_path / 'plain'}", TMPDIR=str(tmp_path / "work"))
    assert "not a git repository" in said or "git clone failed" in said
    said = refused(environment, tmp_path, f"--source={tree}", TMPDIR=str(tmp_path / "work"))
    assert "the patched Apex did not build, see above" in said
    assert "upstream is broken" in said


def test_two_copies_are_noticed_when_apex_is_imported(environment, tmp_path):
    """As if pip had unpacked the wheel; then another copy of the package is installed over it, or before it."""
    info = environment.site / "apex-0.1+ascend.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1+ascend\n")
    (info / "RECORD").write_text("apex/__init__.py,,\napex_npu/__init__.py,,\n")
    ignored = shutil.ignore_patterns("_C*", "__pycache__")
    shutil.copytree(ROOT / "apex_npu", environment.site / "apex_npu", ignore=ignored)
    (environment.site / "apex").mkdir()
    (environment.site / "apex" / "__init__.py").write_text(
        "from apex_npu.compat.apex_hook import serve; serve(__file__)\n__apex_npu__ = True\n"
    )
    assert environment.run("-c", "from apex import amp").returncode == 0
    before = environment.run("-c", "from apex import amp", PYTHONPATH=str(ROOT)).stderr
    assert f"but another apex_npu, in {ROOT.resolve()}, was imported first" in before
    add_dist_info(environment)
    over = environment.run("-c", "from apex import amp").stderr
    assert "apex_npu 9.9 is installed there by itself as well" in over
    assert "pip uninstall apex apex_npu" in over


@pytest.mark.slow
def test_a_patched_tree_may_be_installed_beside_apex_npu(environment, tmp_path):
    """`python -m apex_npu patch DIR`, then pip: the wheel requires apex_npu and does not bring it."""
    tree = synthetic.write(tmp_path / "upstream", synthetic.files("2025"))
    patch(tree)
    shutil.copytree(ROOT / "apex_npu", environment.site / "apex_npu", ignore=shutil.ignore_patterns("__pycache__"))
    add_dist_info(environment, "0.1.0")
    environment.pip("install", "--no-build-isolation", tree)
    program = (
        "from apex import amp; import importlib.metadata as m; print(m.requires('apex'), amp.initialize.__module__)"
    )
    assert environment.output("-c", program) == "['apex_npu==0.1.0'] apex_npu.amp.frontend\n"
    assert not any((environment.site / "apex").glob("amp*"))
