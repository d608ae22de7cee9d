# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Functions for a patched Apex (``patch/``): they decide which of its modules this package replaces."""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

from apex_npu.compat.finder import OldModules, forget_modules
from apex_npu.compat.table import APEX

__all__ = ["SERVED", "is_served", "serve"]

# Modules that upstream serves: packages that hold more than this one's, the module for detecting kernels (amp_C), and
# optimizers that shard plain parameters, which this package's do not.
_UPSTREAMS = {"apex", "apex.contrib", "apex.multi_tensor_apply", "apex.optimizers", "change_data_ptr"}
_UPSTREAMS_INSIDE = ("apex.multi_tensor_apply.", "apex.contrib.optimizers")
SERVED = {old: ours for old, ours in APEX.items() if old not in _UPSTREAMS and not old.startswith(_UPSTREAMS_INSIDE)}
_PACKAGES = [old for old in SERVED if old.count(".") == 1]


def is_served(name: str) -> bool:
    """Return whether this package serves the module ``name``, or a package that contains it."""
    return name in SERVED or any(name.startswith(f"{package}.") for package in _PACKAGES)


def serve(apex_file: str) -> None:
    """Serve modules of the Apex whose ``__init__.py`` is ``apex_file`` from now on; serve none if it fails.

    Raises:
        ImportError: Two copies of this package conflict, or a module of this package does not import.
    """
    _check_copies(Path(apex_file).resolve().parents[1])
    with ExitStack() as undo:
        if not any(isinstance(finder, OldModules) and finder.modules is SERVED for finder in sys.meta_path):
            finder = OldModules(SERVED)
            sys.meta_path.insert(0, finder)
            undo.callback(sys.meta_path.remove, finder)
            undo.callback(forget_modules, [name for name in SERVED if name not in sys.modules])
        for package in _PACKAGES:
            importlib.import_module(package)
        undo.pop_all()


def _check_copies(folder: Path) -> None:
    """Raise if the apex in ``folder`` carries this package and another copy was installed over it or imported first."""
    record = next(folder.glob("apex-*+ascend.dist-info/RECORD"), None)
    if record is None or "\napex_npu/__init__.py," not in f"\n{record.read_text(encoding='utf-8')}":
        return
    way_out = "Uninstall both (pip uninstall apex apex_npu) and install the one you want"
    ours = Path(__file__).resolve().parents[2]
    if ours != folder:
        raise ImportError(
            f"the apex in {folder} carries apex_npu, but another apex_npu, in {ours}, was imported first. {way_out}"
        )
    try:
        other = metadata.distribution("apex_npu")
    except metadata.PackageNotFoundError:
        return
    if Path(str(other.locate_file(""))).resolve() == folder:
        raise ImportError(
            f"the apex in {folder} carries apex_npu, and apex_npu {other.version} is installed there by itself as "
            f"well: each has overwritten files of the other. {way_out}"
        )
