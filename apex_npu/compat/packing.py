# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Support for the ``setup.py`` of a patched Apex: the name and contents of its wheel. Needs setuptools.

With ``APEX_NPU_CARRY=1``, which ``scripts/build.sh`` sets, the wheel carries this copy of apex_npu with its compiled
extension. Otherwise it requires apex_npu to be installed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import setuptools
from setuptools.command.build_py import build_py

import apex_npu
from apex_npu.compat.apex_hook import is_served

__all__ = ["Distribution"]

_PACKAGE = Path(__file__).resolve().parents[1]
# The same as in pyproject.toml, which is not part of an installed package.
_NEEDS = ("torch>=2.6", "numpy")


def _carries() -> bool:
    return os.environ.get("APEX_NPU_CARRY") == "1"


class BuildPy(build_py):
    """A build step that leaves out upstream modules that are never imported, and adds apex_npu if it is bundled."""

    def find_package_modules(self, package: str, package_dir: str) -> list[Any]:
        """Return the modules of a package, without those that apex_npu serves."""
        found = super().find_package_modules(package, package_dir)
        return [entry for entry in found if not is_served(".".join(entry[:2]).removesuffix(".__init__"))]

    def run(self) -> None:
        """Build, and copy apex_npu beside the other packages if it is bundled."""
        super().run()
        if _carries():
            target = Path(self.build_lib) / "apex_npu"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(_PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))


class Distribution(setuptools.Distribution):
    """Upstream's distribution, with ``+ascend`` added to its version."""

    def __init__(self, attrs: dict[str, Any] | None = None) -> None:
        attrs = dict(attrs or {})
        attrs["version"] = f"{attrs['version']}+ascend"
        attrs["py_modules"] = [*attrs.get("py_modules", ()), "change_data_ptr"]
        attrs["cmdclass"] = {**attrs.get("cmdclass", {}), "build_py": BuildPy}
        needs = _NEEDS if _carries() else (f"apex_npu=={apex_npu.__version__}",)
        attrs["install_requires"] = [*attrs.get("install_requires", ()), *needs]
        super().__init__(attrs)

    def has_ext_modules(self) -> bool:
        """Return whether the wheel is for a single Python and platform only."""
        built = any(path.suffix in (".so", ".pyd") for path in _PACKAGE.glob("_C.*"))
        return bool(super().has_ext_modules()) or (_carries() and built)
