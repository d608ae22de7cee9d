# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the files of one program by their imports, and the names and optimizers that they share.

amp is added to all files of a program, or to none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from apex_npu.migrate.amp.check import why_left
from apex_npu.migrate.engine.names import Names, imported, module_of
from apex_npu.migrate.engine.program import Finding
from apex_npu.migrate.engine.source import tree_of
from apex_npu.migrate.engine.syntax import last_name

# Names through which a file exports torch. Other names are only followed through star imports.
_PASSED_ON = ("*", "torch", "cuda")


def left_out(programs: Mapping[Path, bytes], findings: Mapping[Path, Sequence[Finding]]) -> dict[Path, str]:
    """Return the files that amp cannot be added to, given the findings on all files, each with the reason."""
    said = {path for path, found in findings.items() if any(finding.rule[0] in "AT" for finding in found)}
    if not said:
        return {}
    imports = {path: set(_imports(path, data, programs)) for path, data in programs.items()}
    imported = set().union(*imports.values())
    reasons: dict[Path, str] = {}
    parts = []
    for path in programs:
        # A file that others import is checked together with them, unless the imports form a cycle.
        closure = _closure(path, imports)
        own = said & closure
        if own and (path not in imported or path in set().union(*(imports[one] for one in closure))):
            parts.append(own)
            reason = why_left([findings[one] for one in sorted(own)])
            reasons.update(dict.fromkeys(own, reason) if reason else {})
    while grown := [part for part in parts if part & reasons.keys() and part - reasons.keys()]:
        for part in grown:
            reasons.update(dict.fromkeys(part, reasons[min(part & reasons.keys())]))
    return reasons


def with_imports(main: Path, programs: Mapping[Path, bytes]) -> set[Path]:
    """Return a file and all files that it imports, directly or indirectly."""
    return _closure(main, {path: set(_imports(path, data, programs)) for path, data in programs.items()})


def _closure(path: Path, imports: Mapping[Path, set[Path]]) -> set[Path]:
    found, todo = {path}, [path]
    while todo:
        new = imports[todo.pop()] - found
        found |= new
        todo.extend(new)
    return found


def _imports(path: Path, data: bytes, programs: Mapping[Path, bytes]) -> Iterator[Path]:
    """Yield the files among ``programs`` that a file imports from its own folder or the folders above."""
    for node in ast.walk(tree_of(data)):
        names = imported(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        for name in [module_of(node), *names] if isinstance(node, ast.ImportFrom) else names:
            found = next((option for option in _files(path, name) if option in programs), None)
            if found is not None and found != path:
                yield found


def _files(path: Path, module: str) -> Iterator[Path]:
    """Yield the paths at which the file ``path`` may find a module that it imports: in its folder and those above."""
    name = module.lstrip(".")
    level = len(module) - len(name)
    for folder in path.parents[level - 1 : level] if level else path.parents:
        at = folder.joinpath(*name.split("."))
        if name:
            yield at.with_name(f"{at.name}.py")
        yield at / "__init__.py"


def exports(path: Path, data: bytes, around: frozenset[Path] = frozenset()) -> dict[str, dict[str, str]]:
    """Return the names that a file imports by ``*``, or as torch or cuda, from other files: by module, with meanings.

    The modules are read from the file's folder and the folders above. Other modules are left out.
    """
    path, found = path.absolute(), {}
    for node in ast.walk(tree_of(data)) if b"import" in data else ():
        if not isinstance(node, ast.ImportFrom) or not any(alias.name in _PASSED_ON for alias in node.names):
            continue
        module = module_of(node)
        files = (file for file in _files(path, module) if module.partition(".")[0] != "torch" and file.is_file())
        file = next(files, None)
        if file is not None and file not in around:
            names = _exported(file, around | {path})
            found[module] = {name: meaning or f"{module}.{name}" for name, meaning in names.items()}
    return found


def _exported(file: Path, around: frozenset[Path]) -> dict[str, str | None]:
    """Return the public names of a file, with the full names of the imports that they refer to."""
    try:
        data = file.read_bytes()
    except OSError:
        return {}
    tree = tree_of(data)
    names = Names(tree, exports(file, data, around))
    public = {name for name in names.module.bindings if not name.startswith("_")}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            public = {name for name in names.module.bindings if name in listed}
    meanings = {name: names.meanings(name, names.module) for name in public}
    known = {name: next(iter(found)) if len(found) == 1 else None for name, found in meanings.items()}
    return {name: None if (meaning or ".").startswith(".") else meaning for name, meaning in known.items()}


_LOOPS = (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def factories(programs: Mapping[Path, bytes], findings: Mapping[Path, Sequence[Finding]]) -> frozenset[str]:
    """Return ``module.function`` for functions that initialize amp, return its optimizer, and are called once."""
    placed = [(path, one) for path, found in findings.items() for one in found]
    placed = [(path, one) for path, one in placed if (one.rule, one.status) == ("A301", "changed")]
    makers = [(path, maker) for path, one in placed for maker in _makers(programs[path], one)]
    if not makers:
        return frozenset()
    calls = [name for data in programs.values() for name in _calls(data)]
    return frozenset(f"{path.stem}.{maker}" for path, maker in makers if calls.count(maker) == 1)


def _makers(data: bytes, finding: Finding) -> Iterator[str]:
    """Yield the name of the function around an added ``amp.initialize`` if it only returns that optimizer."""
    targets = (finding.after or "").partition(" = ")[0].split(", ")
    for node in tree_of(data).body:
        if isinstance(node, ast.FunctionDef) and node.lineno <= finding.line <= (node.end_lineno or 0):
            returned = {ast.unparse(one.value) for one in ast.walk(node) if isinstance(one, ast.Return) and one.value}
            if len(returned) == 1 and targets[-1].strip() in returned:
                yield node.name


def _calls(data: bytes) -> Iterator[str]:
    """Yield the last name of each function that is called, and once more for each loop around the call."""
    tree = tree_of(data)
    for around in ast.walk(tree):
        if around is tree or isinstance(around, _LOOPS):
            for node in ast.walk(around):
                if isinstance(node, ast.Call):
                    yield last_name(node.func)
