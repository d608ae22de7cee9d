# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Choose between C++ and pure torch after import, when the package has chosen already."""

from __future__ import annotations

import sys

import pytest

from apex_npu.fusion import many_tensors, many_tensors_torch, storage, storage_torch

NAMES = [name for name in storage.__all__ if hasattr(storage_torch, name)]


def use_pure_torch_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what ``apex_npu`` and the calling test have of ``storage.py`` by its implementation in pure torch."""
    caller = sys._getframe(1).f_globals["__name__"]
    replaced = {name: (getattr(storage, name), getattr(storage_torch, name)) for name in NAMES}
    name = "lost_and_kept"  # which looks into tables of slots
    replaced[name] = getattr(many_tensors, name), getattr(many_tensors_torch, name)
    for module in [m for n, m in sys.modules.items() if n == caller or n.split(".")[0] == "apex_npu"]:
        for name, (chosen, other) in replaced.items():
            if vars(module).get(name) is chosen:
                monkeypatch.setattr(module, name, other)
