# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``plan``: find the files and compute their changes. Nothing is written."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apex_npu.migrate.engine.program import PARALLEL, Finding, Options
from apex_npu.migrate.engine.source import UnreadableError
from apex_npu.migrate.rewriting import Rewritten, concerns, owned_names, rewrite, rewrite_part, unreadable

from .notebooks import rewrite_notebook
from .programs import exports, factories, left_out, with_imports

_SKIPPED = {".git", ".hg", ".svn", "__pycache__", "build", "node_modules", "site-packages"}
_OTHERS = re.compile(r".*\.(sh|bash|ya?ml|json|cfg|ini|toml)|Dockerfile.*|.*requirements.*\.txt")
_CUDA_LINE = re.compile(r"CUDA_VISIBLE_DEVICES|\bcuda\b|\bcuda:\d|\bnccl\b|\bapex\b")
# Larger files are data. They are not searched.
_MAX_OTHER = 1_000_000


@dataclass(frozen=True)
class Target:
    """A file: its path below ``root``, which is a folder that the user gave, or the folder of a file that they gave."""

    root: Path
    path: str

    @property
    def file(self) -> Path:
        """The whole path."""
        return self.root / self.path

    @property
    def shown(self) -> str:
        """The path in reports."""
        return os.path.normpath(self.file)

    def read(self) -> bytes:
        """Return the contents. Raise an OSError for links and named pipes as well."""
        if not stat.S_ISREG(self.file.lstat().st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(self.file))
        return self.file.read_bytes()


@dataclass(frozen=True)
class FileChange:
    """A file with its old and its new content."""

    target: Target
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Plan:
    """The result of ``plan``: the changed files, the findings by path and line, and the number of files read."""

    files: tuple[FileChange, ...]
    findings: tuple[Finding, ...]
    read: int


def plan(
    paths: Sequence[str | Path],
    options: Options | None = None,
    exclude: Sequence[str] = (),
    data_parallel: str | Path | None = None,
) -> Plan:
    """Apply the rules to files, and to the .py and .ipynb files of folders. Nothing is written.

    Args:
        paths: Files and folders. Links are not followed. In a git checkout, files that git ignores are skipped.
        options: Which rules apply, and how.
        exclude: Patterns of paths below the folders, or of file names, to skip.
        data_parallel: A script among the files to make train on several cards.

    Raises:
        ValueError: A path does not exist, or is a link.
    """
    found = [target for given in paths for target in _targets(Path(given), exclude)]
    contents: dict[Target, bytes] = {}
    findings: list[Finding] = []
    for target in dict.fromkeys(found):
        try:
            contents[target] = target.read()
        except OSError as error:
            findings.append(unreadable(target.shown, UnreadableError("F906", str(error))))
    programs = {Path(target.shown): target for target in contents if _is_program(target.path)}
    work = _Work({path: contents[target] for path, target in programs.items()}, options or Options())
    if data_parallel is not None:
        work.choose_script(Path(data_parallel))
    for path, data in work.programs.items():
        if concerns(data, work.options[path]):
            work.again(path)
    work.leave_one_card()
    if work.general.amp:
        work.settle_amp()
        work.leave_one_card()
    changes = []
    for path, rewritten in work.done.items():
        findings.extend(rewritten.findings)
        if rewritten.source != work.programs[path]:
            assert isinstance(rewritten.source, bytes)
            changes.append(FileChange(programs[path], work.programs[path], rewritten.source))
    for target in contents.keys() - programs.values():
        findings.extend(_other(target, contents[target]))
    return Plan(tuple(changes), tuple(sorted(findings)), len(contents))


class _Work:
    """The programs by path, with the options of each and the result of rewriting it."""

    def __init__(self, programs: Mapping[Path, bytes], options: Options) -> None:
        self.programs = programs
        self.modules = {path: data for path, data in programs.items() if path.suffix != ".ipynb"}
        self.general = replace(options, owned=options.owned.union(*map(owned_names, programs.values())))
        self.options = dict.fromkeys(programs, self.general)
        self.done: dict[Path, Rewritten] = {}

    def again(self, path: Path, **told: Any) -> None:
        """Rewrite the program at ``path`` after changing its options."""
        self.options[path] = options = replace(self.options[path], **told)
        data = self.programs[path]

        def rewrite_cells(program: str) -> Rewritten:
            return rewrite(program, str(path), replace(options, exports=exports(path, program.encode())))

        if path in self.modules:
            self.done[path] = rewrite_part(data, str(path), replace(options, exports=exports(path, data)))
            return
        try:
            self.done[path] = rewrite_notebook(data, str(path), rewrite_cells)
        except UnreadableError as error:
            self.done[path] = Rewritten(data, (unreadable(str(path), error),))

    def findings(self) -> dict[Path, Sequence[Finding]]:
        """Return the findings of each module."""
        return {path: self.done[path].findings for path in self.modules if path in self.done}

    def choose_script(self, main: Path) -> None:
        """Set the options that make the script ``main``, with the files that it imports, train on several cards."""
        script = Path(os.path.normpath(main))
        if script not in self.modules:
            raise ValueError(f"--data-parallel {main}: it is not one of the given Python files")
        for path in with_imports(script, self.modules):
            role = "main" if path == script else "other"
            self.options[path] = replace(self.general, data_parallel=role)

    def settle_amp(self) -> None:
        """Rewrite files again that need optimizers made in other files, or that amp cannot be added to after all."""
        found = self.findings()
        known = factories(self.modules, found)
        self.options = {path: replace(one, factories=known) for path, one in self.options.items()}
        for path in found if known else ():
            if any(one.rule == "A351" for one in found[path]):
                self.again(path)
        for path, reason in left_out(self.modules, self.findings()).items():
            self.again(path, left=self.options[path].left | {"amp": f"amp is not added: {reason}"})

    def leave_one_card(self) -> None:
        """Rewrite a script again for one card if a part of it cannot be changed for several."""
        of_script = [path for path in self.done if self.options[path].data_parallel]
        found = [one for path in of_script for one in self.done[path].findings if one.rule[0] in "PF"]
        left = next((one for one in found if one.status in ("refused", "kept")), None)
        if left is None and any(one.rule == "P601" and one.status == "changed" for one in found):
            return
        reason = f"{left.path}:{left.line} ({left.rule}): {left.message}" if left else "it does so already"
        for path in of_script:
            if any(one.rule[0] == "P" and one.status == "changed" for one in self.done[path].findings):
                told = {PARALLEL: f"the script is not changed to train on several cards: {reason}"}
                self.again(path, left=self.options[path].left | told)


def _is_program(path: str) -> bool:
    return path.endswith((".py", ".pyw", ".ipynb"))


def _targets(path: Path, exclude: Sequence[str]) -> Iterator[Target]:
    """Yield the file ``path``, or the files in the folder ``path``."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and links are not followed: pass the path that it points to")
    if path.is_file():
        yield Target(path.parent, path.name)
        return
    if not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder")
    listed = git(path, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    known = set((listed or "").split("\0")) - {""} or None
    for folder, folders, names in os.walk(path):
        at = Path(folder)
        inner = (name for name in folders if not is_skipped(at / name))
        folders[:] = sorted(name for name in inner if not _excluded(at.relative_to(path) / name, exclude))
        for name in sorted(names):
            relative = at.relative_to(path) / name
            wanted = _is_program(name) or _OTHERS.fullmatch(name)
            if not wanted or (at / name).is_symlink() or _excluded(relative, exclude):
                continue
            if known is None or relative.as_posix() in known:
                yield Target(path, relative.as_posix())


def is_skipped(folder: Path) -> bool:
    """Return whether the search and a copy leave out a folder."""
    return folder.name in _SKIPPED or (folder / "pyvenv.cfg").exists()


def _excluded(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path.as_posix(), one) or fnmatch.fnmatch(path.name, one) for one in patterns)


def git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints in ``folder``, or None if it fails. Programs that git's configuration names do not run."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    except OSError:
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def _other(target: Target, data: bytes) -> Iterator[Finding]:
    if len(data) > _MAX_OTHER:
        return
    lines = enumerate(data.decode("utf-8", "replace").splitlines(), 1)
    places = [(number, line, found) for number, line in lines if (found := _CUDA_LINE.search(line))]
    for number, line, found in places[:1]:
        hint = " (npu: ASCEND_RT_VISIBLE_DEVICES)" if found[0] == "CUDA_VISIBLE_DEVICES" else ""
        message = f"{line.strip()[:120]}: it is not changed{hint}"
        message += f"; {len(places) - 1} more line{'s' * (len(places) > 2)}" if len(places) > 1 else ""
        column, end = found.start() + 1, found.end() + 1
        yield Finding(target.shown, number, column, "F908", "note", number, end, found[0], None, message)
