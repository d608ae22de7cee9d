# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The finders that import modules under the old names of ``table.py``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import cast

from apex_npu.compat.table import MOVED

__all__ = ["MARK", "MovedModules", "OldModules", "forget_modules", "serve_moved_modules"]

# An attribute of each module that stands under a name of Apex's and is ours.
MARK = "__apex_npu__"
# Modules that are imported by name alone: as an attribute of its package this name is something else.
_NO_ATTRIBUTE = {"apex.amp._amp_state"}
# Modules that ``python -m`` runs: Python warns of one that its package has imported already.
_PROGRAMS = {"apex.parallel.multiproc"}


class OldModules(MetaPathFinder, InspectLoader):
    """Imports modules under old names: each shows the public names of one of ours, and has no other submodules.

    Args:
        modules: Of each old name, our module.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Say that the old names are ours, and no others."""
        if fullname not in self.modules:
            return None
        return ModuleSpec(fullname, self, is_package=any(self._children(fullname)))

    def exec_module(self, module: ModuleType) -> None:
        """Fill ``module``, and import its submodules: old scripts use many of them as attributes."""
        old = module.__name__
        ours = importlib.import_module(self.modules[old])
        public = getattr(ours, "__all__", None)
        if public is None:
            public = [n for n, value in vars(ours).items() if n[0] != "_" and not isinstance(value, ModuleType)]
        vars(module).update({name: getattr(ours, name) for name in public})
        vars(module).update({"__doc__": ours.__doc__, "__file__": ours.__file__, MARK: True})
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
        """The code of our module: ``python -m`` runs it."""
        return _code(importlib.util.find_spec(self.modules[fullname]))

    def get_source(self, fullname: str) -> str | None:
        """The source of our module."""
        return _source(importlib.util.find_spec(self.modules[fullname]))

    def _children(self, old: str) -> list[str]:
        return [other for other in self.modules if other.rpartition(".")[0] == old]


def _code(spec: ModuleSpec | None) -> CodeType | None:
    return None if spec is None else cast(InspectLoader, spec.loader).get_code(spec.name)


def _source(spec: ModuleSpec | None) -> str | None:
    return None if spec is None else cast(InspectLoader, spec.loader).get_source(spec.name)


class MovedModules(MetaPathFinder, InspectLoader):
    """Imports modules under names that they had before: the module is the same under both names.

    So ``isinstance`` and pickles see one class, whichever name it was imported by.

    Args:
        moved: Of each old name the new one. Submodules have moved with it.
    """

    def __init__(self, moved: Mapping[str, str]) -> None:
        self.moved = moved

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that has moved, by its old name."""
        new = self._new_spec(fullname)
        if new is None:
            return None
        return ModuleSpec(fullname, self, origin=new.origin, is_package=new.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, imported by its new name."""
        module = importlib.import_module(cast(str, self._new_name(spec.name)))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which has run, its own spec back: importing it has replaced that."""
        module.__spec__ = getattr(module.__spec__, "loader_state", None)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the module: ``python -m`` runs it."""
        return _code(self._new_spec(fullname))

    def get_source(self, fullname: str) -> str | None:
        """The source of the module."""
        return _source(self._new_spec(fullname))

    def _new_name(self, fullname: str) -> str | None:
        for old, new in self.moved.items():
            if fullname == old or fullname.startswith(f"{old}."):
                return new + fullname[len(old) :]
        return None

    def _new_spec(self, fullname: str) -> ModuleSpec | None:
        new_name = self._new_name(fullname) if fullname.startswith("apex_npu.") else None
        return None if new_name is None else importlib.util.find_spec(new_name)


def serve_moved_modules() -> None:
    """Let modules of ours be imported by their former names, too."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        # First: by the path of a package that has moved, Python's own would import its submodules a second time.
        sys.meta_path.insert(0, MovedModules(MOVED))


def forget_modules(modules: Iterable[str]) -> None:
    """Let those of ``modules`` that have been imported be imported again when they are asked for."""
    for name in modules:
        sys.modules.pop(name, None)
