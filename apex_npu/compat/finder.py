# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The finder that imports modules under the old names of ``table.py``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import cast

from apex_npu.compat.table import ALIASES

__all__ = ["MARK", "OldModules", "forget_modules", "serve_aliases"]

# An attribute of each module of this package that stands under one of Apex's names.
MARK = "__apex_npu__"
# Modules that are imported by name only: as an attribute of the package, this name is something else.
_NO_ATTRIBUTE = {"apex.amp._amp_state"}
# Modules run by ``python -m``: Python warns if their package has already imported them.
_PROGRAMS = {"apex.parallel.multiproc"}


class OldModules(MetaPathFinder, Loader):
    """A finder for ``modules``, a map of old names to modules of this package, whose public names it shows.

    A module under an old name has no submodules but those in ``modules``.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the old names, and None for others."""
        if fullname not in self.modules:
            return None
        return ModuleSpec(fullname, self, is_package=any(self._children(fullname)))

    def exec_module(self, module: ModuleType) -> None:
        """Fill ``module``, and import its submodules, since old scripts use many of them as attributes."""
        old = module.__name__
        ours = importlib.import_module(self.modules[old])
        public = getattr(ours, "__all__", None)
        if public is None:
            public = [n for n, value in vars(ours).items() if n[0] != "_" and not isinstance(value, ModuleType)]
        vars(module).update({name: getattr(ours, name) for name in public})
        vars(module).update({"__all__": public, "__doc__": ours.__doc__, "__file__": ours.__file__, MARK: True})
        if module.__spec__ is not None:
            module.__spec__.origin = ours.__file__
        for child in self._children(old):
            if child in _PROGRAMS:
                continue
            name = child.rpartition(".")[2]
            attribute = vars(module).get(name)
            importlib.import_module(child)
            if child in _NO_ATTRIBUTE:
                vars(module)[name] = attribute

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of our module, for ``python -m``."""
        name = self.modules[fullname]
        spec = importlib.util.find_spec(name)
        return cast(InspectLoader, cast(ModuleSpec, spec).loader).get_code(name)

    def _children(self, old: str) -> list[str]:
        return [other for other in self.modules if other.rpartition(".")[0] == old]


def serve_aliases() -> None:
    """Make modules of this package importable under the shorter names in ``table.py``."""
    if not any(isinstance(finder, OldModules) and finder.modules is ALIASES for finder in sys.meta_path):
        sys.meta_path.append(OldModules(ALIASES))


def forget_modules(modules: Iterable[str]) -> None:
    """Remove ``modules`` from the imported modules, so that they are imported anew on request."""
    for name in modules:
        sys.modules.pop(name, None)
