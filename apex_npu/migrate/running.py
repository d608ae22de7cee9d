# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``run --device npu``: a script whose modules are rewritten as they are imported. No file changes.

Lines keep their numbers, so tracebacks are right; ``linecache`` has the new text, so that ``inspect.getsource`` and
what compiles functions see it. Modules elsewhere than below the script's folder stay as they are, and find an NPU.
"""

from __future__ import annotations

import ast
import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from . import reports
from .findings import Finding, count
from .program import Options
from .rewriting import TRIGGER, examined, owned_names, unreadable
from .source import UnreadableError, apply_edits

# Read by processes that the script spawns: the script, or "-m" and the module, as one text.
SCRIPT = "APEX_NPU_RUN"
_WORD = re.compile(r"(?P<option>-{1,2}[\w-]+=)?(?P<word>cuda(:\d+)?|nccl)")


def npu_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of a script in which the words cuda, cuda:N and nccl are those of npu."""
    new = []
    for argument in arguments:
        found = _WORD.fullmatch(argument)
        word = found["word"].replace("cuda", "npu").replace("nccl", "hccl") if found else argument
        new.append((found["option"] or "") + word if found else argument)
    return new


class Rewriter(importlib.abc.MetaPathFinder):
    """Imports modules below a folder, rewritten.

    Attributes:
        folder: The folder.
        findings: What was changed and left so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.findings: list[Finding] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Python's own spec of a source file below the folder, with a loader that rewrites."""
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader) or not self._is_ours(spec.origin or ""):
            return None
        spec.loader = _Loader(fullname, spec.origin or "", self)
        spec.cached = None
        return spec

    def _is_ours(self, origin: str) -> bool:
        inside = Path(origin).resolve()
        return self.folder in inside.parents and "site-packages" not in inside.relative_to(self.folder).parts

    def compile(self, data: bytes, path: str) -> CodeType:
        """The code of a program after the rules, with the lines of the old one."""
        tree: ast.Module | bytes = data
        if TRIGGER.search(data):
            options = Options(("D",), ("D113",), unsure=True, owned=owned_names(data))
            try:
                program = examined(data, options)
                self.findings += program.findings(path)
                edits = [edit for draft in program.changes() for edit in draft.edits if "\n" not in edit.text]
                text = apply_edits(program.source.text, edits)
                program.rewritten()
                tree = ast.fix_missing_locations(program.tree)
                linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
            except UnreadableError as error:
                self.findings.append(unreadable(path, error.rule, error.reason, error.line))
        return compile(tree, path, "exec", dont_inherit=True)

    def tell(self) -> None:
        """Print what was left for a person, and how much was changed."""
        left = sorted(finding for finding in self.findings if finding.status == "refused")
        files = {finding.path for finding in self.findings if finding.status == "changed"}
        lines = [*reports.lines(left), f"{count(self.findings, 'changed')} places in {len(files)} files ran as npu's"]
        print("\n".join(f"apex_npu: {line}" for line in lines), file=sys.stderr)


class _Loader(SourceFileLoader):
    """Loads a source file, rewritten. Bytecode is neither read nor written: it would be that of the old text."""

    def __init__(self, name: str, path: str, rewriter: Rewriter) -> None:
        super().__init__(name, path)
        self.rewriter = rewriter

    def get_code(self, fullname: str) -> CodeType:
        """Compile the rewritten program."""
        return self.rewriter.compile(self.get_data(self.path), self.path)


class _SpawnedSpec(ModuleSpec):
    """By the name of this spec spawned processes import the script; its package is the script's own."""

    def __init__(self, package: str) -> None:
        super().__init__("apex_npu.migrate.spawned", None)
        self._package = package

    @property
    def parent(self) -> str:
        """What relative imports begin from."""
        return self._package


def start(script: str, *, is_module: bool, names: dict[str, Any], tells: bool = True) -> None:
    """Run a script or module, rewritten, in the namespace ``names``.

    Raises:
        ModuleNotFoundError: There is no torch_npu, or no such module.
    """
    importlib.import_module("torch_npu")
    folder = Path.cwd() if is_module else Path(script).resolve().parent
    rewriter = Rewriter(folder)
    sys.meta_path.insert(0, rewriter)
    if tells:
        atexit.register(rewriter.tell)
    package, path = "", script
    if is_module:
        spec = importlib.util.find_spec(script)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{script}.__main__")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module named {script}, or it is a package without __main__")
        package, path = spec.parent or "", spec.origin
        sys.argv[0] = path
    os.environ[SCRIPT] = f"-m {script}" if is_module else os.path.abspath(script)
    code = rewriter.compile(Path(path).read_bytes(), path)
    names.update(__file__=path, __package__=package if is_module else None, __spec__=_SpawnedSpec(package))
    exec(code, names)


def run(script: str, *, is_module: bool) -> None:
    """Run a script or module as ``__main__``, with the arguments in ``sys.argv``."""
    arguments = npu_arguments(sys.argv[1:])
    if arguments != sys.argv[1:]:
        print(f"apex_npu: the script's arguments are {' '.join(arguments)}", file=sys.stderr)
        sys.argv[1:] = arguments
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    start(script, is_module=is_module, names=vars(main))
