# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The layouts that upstream has had, and the commit that the patch of each is made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().with_name("patch")
UPSTREAM = "https://github.com/NVIDIA/apex"


@dataclass(frozen=True)
class Era:
    """A layout of upstream. A tree is of this era if it has all files of ``has`` and none of ``lacks``."""

    name: str
    commit: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    @property
    def patch_file(self) -> Path:
        """The path of the era's patch."""
        return FOLDER / self.name / "npu.patch"

    def matches(self, folder: Path) -> bool:
        """Return whether the tree in ``folder`` is of this era."""
        return all((folder / name).is_file() is (name in self.has) for name in (*self.has, *self.lacks))


_AMP, _TRANSFORMER, _OPTIMIZERS = (f"apex/{name}/__init__.py" for name in ("amp", "transformer", "optimizers"))
_MULTI_TENSOR = "apex/multi_tensor_apply/multi_tensor_apply.py"
# A tree is of the first era that matches. Any commit of an era will do if all hunks of the patch fit.
ERAS = (
    # August 2020, the commit that Ascend's patch was made for.
    Era("2020", "4ef930c1c884fdca5f472ab2ce7cb9b505d26c1a", (_AMP, _OPTIMIZERS, _MULTI_TENSOR), (_TRANSFORMER,)),
    # April 2025, the last with apex.amp; also the releases 22.03 to 25.05.
    Era("2025", "e13873debc4699d39c6861074b9a3b2a02327f92", (_AMP, _TRANSFORMER, _MULTI_TENSOR)),
    # July 2026, without apex.amp; also the releases since 25.07.
    Era(
        "master",
        "6424da3b4faa6c8f062da4a48c424fff3f02d42d",
        (_OPTIMIZERS, "apex/normalization/__init__.py", _MULTI_TENSOR),
        (_AMP,),
    ),
)
COMMITS = {era.name: era.commit for era in ERAS}
# The era of a clone of which no commit is asked for.
DEFAULT = "2025"
