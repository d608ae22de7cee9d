# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``run --device npu``: run a script and rewrite its modules on import. No file changes.

Lines keep their numbers, so tracebacks are right. ``linecache`` has the new text for ``inspect.getsource`` and for
compilers of functions. Only modules below the script's folder are rewritten.
"""

from __future__ import annotations

import ast
import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from apex_npu.migrate.engine.program import Finding, Options, count
from apex_npu.migrate.engine.source import Source, apply_edits
from apex_npu.migrate.files import reports
from apex_npu.migrate.files.programs import exports
from apex_npu.migrate.rewriting import TRIGGER, rewrite, rewrite_part

# The variable that passes a ``Run`` as JSON to processes that the script spawns.
SPAWNED = "APEX_NPU_RUN"
_NO_CUDA = re.compile(
    "not compiled with CUDA|CUDA is not available|ATen_cuda library|NVIDIA driver|not linked with cuda"
)
_WORD = re.compile(r"\A(-{1,2}[\w-]+=)?(cuda(?=(:\d+)?\Z)|nccl\Z)")
_OF_NPU = {"cuda": "npu", "nccl": "hccl"}


def npu_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a script with npu, npu:N and hccl for the words cuda, cuda:N and nccl."""
    return [_WORD.sub(lambda found: (found[1] or "") + _OF_NPU[found[2]], argument) for argument in arguments]


@dataclass(frozen=True)
class Run:
    """The script or module to run, and the settings for it."""

    script: str  # a file, or the name of a module
    is_module: bool = False
    also: tuple[str, ...] = ()  # packages in other folders to rewrite as well
    unsure: bool = True  # also apply unsure changes
    force: bool = False  # also rewrite files that already name npu
    changes: str = ""  # the .csv, .json or .sarif file to which the process writes its findings when it ends

    @property
    def folder(self) -> Path:
        """The folder whose modules are rewritten."""
        return Path.cwd() if self.is_module else Path(self.script).resolve().parent


class Rewriter(importlib.abc.MetaPathFinder):
    """A finder that rewrites modules below a folder on import. ``findings`` has the findings so far."""

    def __init__(self, folder: Path, settings: Run | None = None) -> None:
        self.folder = folder.resolve()
        self.settings = settings or Run("")
        self.findings: list[Finding] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return Python's spec of a source file below the folder, with a loader that rewrites it, or None."""
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        file = Path(spec.origin).resolve()
        ours = self.folder in file.parents and "site-packages" not in file.relative_to(self.folder).parts
        if not ours and not f"{fullname}.".startswith(tuple(f"{package}." for package in self.settings.also)):
            return None
        spec.loader = _Loader(fullname, spec.origin, self)
        spec.cached = None
        return spec

    def compile(self, data: bytes, path: str) -> CodeType:
        """Return the code of a rewritten program, with the line numbers of the old one."""
        unsure, force = self.settings.unsure, self.settings.force
        others = exports(Path(path), data) if TRIGGER.search(data) else {}
        options = Options(("D", "X251"), ("D113",), unsure=unsure, force=force, exports=others)
        rewritten = rewrite_part(data, path, options)
        self.findings += rewritten.findings
        if not rewritten.edits:
            return compile(data, path, "exec", dont_inherit=True)
        source, tree = Source(data), ast.parse(rewritten.source)
        _without_lines(tree, sorted(source.place(edit.start)[0] for edit in rewritten.edits if "\n" in edit.text))
        text = apply_edits(source.text, [edit for edit in rewritten.edits if "\n" not in edit.text])
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        return compile(tree, path, "exec", dont_inherit=True)

    def tell(self) -> None:
        """Print what is left for a person and how much has changed; write all findings to the file ``changes``."""
        findings = sorted(set(self.findings))
        left = [finding for finding in findings if finding.status in ("refused", "unsure")]
        files = {finding.path for finding in findings if finding.status == "changed"}
        lines = [
            *reports.lines(left),
            f"{count(findings, 'changed')} places in {len(files)} files were rewritten for npu",
        ]
        print("\n".join(f"apex_npu: {line}" for line in lines), file=sys.stderr)
        if self.settings.changes:
            try:
                Path(self.settings.changes).write_bytes(reports.write_report(self.settings.changes, findings))
            except OSError as error:
                print(f"apex_npu: {self.settings.changes} cannot be written ({error.strerror})", file=sys.stderr)


def _without_lines(tree: ast.Module, added: list[int]) -> None:
    """Give nodes the line numbers that they had before a line was added after each line of ``added``."""
    after = [line + number for number, line in enumerate(added, 1)]
    for node in ast.walk(tree) if added else ():
        for name in ("lineno", "end_lineno"):
            if hasattr(node, name):
                line = getattr(node, name)
                setattr(node, name, line - bisect_right(after, line))


class _Loader(SourceFileLoader):
    """A loader that rewrites a source file. It neither reads nor writes bytecode, which would be of the old text."""

    def __init__(self, name: str, path: str, rewriter: Rewriter) -> None:
        super().__init__(name, path)
        self.rewriter = rewriter

    def get_code(self, fullname: str) -> CodeType:
        """Compile the rewritten program."""
        return self.rewriter.compile(self.get_data(self.path), self.path)


class _SpawnedSpec(ModuleSpec):
    """The spec of the script. By its name spawned processes import the script; its package is that of the script."""

    def __init__(self, package: str) -> None:
        super().__init__("apex_npu.migrate.run.spawned", None)
        self._package = package

    @property
    def parent(self) -> str:
        """The package that relative imports start from."""
        return self._package


def check(settings: Run) -> None:
    """Raise a ValueError for settings that would only fail at the end, or have no effect."""
    if settings.changes:
        reports.write_report(settings.changes, [])
        if not Path(settings.changes).parent.is_dir():
            raise ValueError(f"--changes {settings.changes}: there is no folder {Path(settings.changes).parent}")
    for package in settings.also:
        if package in sys.modules:
            raise ValueError(f"--also {package}: it was imported before the script")
        try:
            known = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            known = False
        if not known:
            raise ValueError(f"--also {package}: there is no package of this name")


def _located(settings: Run) -> tuple[str, str]:
    """Return the package and the file of a script or module. The file is "" if there is none."""
    if not settings.is_module:
        return "", settings.script
    spec = importlib.util.find_spec(settings.script)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{settings.script}.__main__")
    return ("", "") if spec is None else (spec.parent or "", spec.origin or "")


def tell_rounding(settings: Run) -> None:
    """Print where a script or module computes on weights that amp keeps in 16 bits. Its modules are not read.

    Of the processes of a launcher, only that with RANK=0 prints.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    _, path = _located(settings)
    try:
        findings = rewrite(Path(path).read_bytes(), path, Options(("X251",))).findings
    except OSError:
        return  # running it raises the error
    for line in reports.lines([one for one in findings if (one.rule, one.status) == ("X251", "refused")]):
        print(f"apex_npu: {line}", file=sys.stderr)


def start(settings: Run, names: dict[str, Any], *, tells: bool = True) -> None:
    """Rewrite a script or module and run it in the namespace ``names``.

    Raises:
        ModuleNotFoundError: torch_npu or the module does not exist.
    """
    importlib.import_module("torch_npu")
    rewriter = Rewriter(settings.folder, settings)
    sys.meta_path.insert(0, rewriter)
    if tells:
        atexit.register(rewriter.tell)
    package, path = _located(settings)
    if not path:
        raise ModuleNotFoundError(f"no module named {settings.script}, or it is a package without __main__")
    sys.argv[0] = path if settings.is_module else sys.argv[0]
    script = settings.script if settings.is_module else os.path.abspath(settings.script)
    os.environ[SPAWNED] = json.dumps({**asdict(settings), "script": script})
    code = rewriter.compile(Path(path).read_bytes(), path)
    spec_of_script = _SpawnedSpec(package)
    names.update(__file__=path, __package__=package if settings.is_module else None, __spec__=spec_of_script)
    try:
        exec(code, names)
    except Exception as error:
        if tells and _NO_CUDA.search(str(error)):
            # The places that are left are the likely cause, so they are printed before the traceback.
            atexit.unregister(rewriter.tell)
            rewriter.tell()
        raise


def start_spawned(names: dict[str, Any]) -> None:
    """Run the script of the parent process in the namespace ``names``."""
    values = json.loads(os.environ[SPAWNED])
    start(Run(**{**values, "also": tuple(values["also"])}), names, tells=False)


def run(settings: Run) -> None:
    """Run a script or module as ``__main__``, with the arguments in ``sys.argv``."""
    arguments = npu_arguments(sys.argv[1:])
    if arguments != sys.argv[1:]:
        print(f"apex_npu: the script's arguments are {' '.join(arguments)}", file=sys.stderr)
        sys.argv[1:] = arguments
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    start(settings, vars(main))
