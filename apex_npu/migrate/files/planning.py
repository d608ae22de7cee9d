# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``plan``: which files there are, and what becomes of each. Files are read, nothing is written."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from apex_npu.compat.pipeline import files
from apex_npu.compat.pipeline.errors import PipelineError
from apex_npu.migrate.engine.program import Finding, Options
from apex_npu.migrate.engine.source import UnreadableError
from apex_npu.migrate.rewriting import Rewritten, concerns, owned_names, rewrite, rewrite_part, unreadable
from apex_npu.migrate.rules.catalogue import RULES

from .notebooks import rewrite_notebook
from .programs import exports, factories, left_out, with_imports

_SKIPPED = {".git", ".hg", ".svn", "__pycache__", "build", "node_modules", "site-packages"}
_OTHERS = re.compile(r".*\.(sh|bash|ya?ml|json|cfg|ini|toml)|Dockerfile.*|.*requirements.*\.txt")
_CUDA_LINE = re.compile(r"CUDA_VISIBLE_DEVICES|\bcuda\b|\bcuda:\d|\bnccl\b|\bapex\b")
_MAX_OTHER = 1_000_000
# Below this many files a second process costs more than it saves.
_FEW = 40


@dataclass(frozen=True)
class Target:
    """A file: its path below a folder that was given, or below the folder of a file that was given."""

    root: Path
    path: str

    @property
    def shown(self) -> str:
        """The path in reports."""
        return os.path.normpath(self.root / self.path)


@dataclass(frozen=True)
class FileChange:
    """A file with its old and its new content."""

    target: Target
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Plan:
    """What becomes of some files.

    Attributes:
        files: Those that change.
        findings: In the order of paths and lines.
        read: How many files were read.
    """

    files: tuple[FileChange, ...]
    findings: tuple[Finding, ...]
    read: int


def plan(
    paths: Sequence[str | Path],
    options: Options | None = None,
    exclude: Sequence[str] = (),
    jobs: int = 1,
    data_parallel: str | Path | None = None,
) -> Plan:
    """Apply the rules to files, and to the .py and .ipynb files of folders. Nothing is written.

    Args:
        paths: Files and folders. Links are not followed; in a git checkout, what git ignores is skipped.
        options: Which rules apply, and how.
        exclude: Patterns of paths below the folders, or of names, that are skipped.
        jobs: How many processes share the work.
        data_parallel: A script among the files that becomes one for several cards.

    Raises:
        PipelineError: A path does not exist, or is a link.

    Example::

        >>> plan = migrate.plan(["."])
        >>> plan.files
        ()
    """
    found = [target for path in paths for target in _targets(Path(path), exclude)]
    contents: dict[Target, bytes] = {}
    findings: list[Finding] = []
    for target in dict.fromkeys(found):
        try:
            contents[target] = files.read(target.root, target.path) or b""
        except PipelineError as error:
            findings.append(unreadable(target.shown, "F906", str(error)))
    programs = {target: data for target, data in contents.items() if _is_program(target.path)}
    options = options or Options()
    options = replace(options, owned=options.owned.union(*map(owned_names, programs.values())))
    by_path = {target.shown: target for target in programs}
    chosen = dict.fromkeys(by_path, options)
    if data_parallel is not None:
        chosen.update(_several_cards(Path(data_parallel), programs, options))
    work = [(shown, programs[by_path[shown]], one) for shown, one in chosen.items()]
    work = [one for one in work if concerns(*one[1:])]
    done = {shown: new for (shown, *_), new in zip(work, _all_rewritten(work, jobs), strict=True)}
    if data_parallel is not None:
        done.update(_one_card(work, done, chosen))
    if options.amp:
        chosen, again = _with_factories(programs, done, chosen)
        done.update(again)
        done.update(_without_amp(programs, dict(done), chosen))
    if data_parallel is not None:
        done.update(_one_card(work, done, chosen))
    changes = []
    for shown, rewritten in done.items():
        findings.extend(rewritten.findings)
        if rewritten.source != programs[by_path[shown]]:
            assert isinstance(rewritten.source, bytes)
            changes.append(FileChange(by_path[shown], programs[by_path[shown]], rewritten.source))
    for target in contents.keys() - programs.keys():
        findings.extend(_other(target, contents[target]))
    return Plan(tuple(changes), tuple(sorted(findings)), len(contents))


def _with_factories(
    programs: Mapping[Target, bytes], done: Mapping[str, Rewritten], options: Mapping[str, Options]
) -> tuple[dict[str, Options], dict[str, Rewritten]]:
    """Files whose optimizers come from functions of other files, rewritten with the knowledge of these."""
    modules = {Path(target.shown): data for target, data in programs.items() if target.path.endswith(".py")}
    findings = {path: done[str(path)].findings for path in modules if str(path) in done}
    known = factories(modules, findings)
    chosen = {shown: replace(one, factories=known) for shown, one in options.items()}
    unknown = [path for path, found in findings.items() if any(one.rule == "A351" for one in found)]
    again = unknown if known else []
    return chosen, {str(path): _rewritten((str(path), modules[path], chosen[str(path)])) for path in again}


def _without_amp(
    programs: Mapping[Target, bytes], done: Mapping[str, Rewritten], options: Mapping[str, Options]
) -> Iterator[tuple[str, Rewritten]]:
    """The files of programs that amp cannot be put into as a whole, rewritten without it."""
    modules = {Path(target.shown): data for target, data in programs.items() if target.path.endswith(".py")}
    findings = {path: done[str(path)].findings for path in modules if str(path) in done}
    for path, reason in left_out(modules, findings).items():
        yield str(path), _rewritten((str(path), modules[path], replace(options[str(path)], amp_left=reason)))


def _several_cards(main: Path, programs: Mapping[Target, bytes], options: Options) -> Iterator[tuple[str, Options]]:
    """What the rules are told of a script that is to train on several cards, and of the files that it imports."""
    modules = {Path(target.shown): data for target, data in programs.items() if target.path.endswith(".py")}
    script = Path(os.path.normpath(main))
    if script not in modules:
        raise PipelineError(f"--data-parallel {main}: it is no Python file among those that are given")
    for path in with_imports(script, modules):
        yield str(path), replace(options, data_parallel="main" if path == script else "other")


def _one_card(
    work: list[tuple[str, bytes, Options]], done: Mapping[str, Rewritten], chosen: dict[str, Options]
) -> Iterator[tuple[str, Rewritten]]:
    """The files of a script that cannot be one for several cards as a whole, as they are without that."""
    of_script = [(shown, data) for shown, data, _ in work if chosen[shown].data_parallel]
    found = [one for shown, _ in of_script for one in done[shown].findings if one.rule[0] in "PF"]
    left = next((one for one in found if one.status in ("refused", "kept")), None)
    if left is None and any(one.rule == "P601" and one.status == "changed" for one in found):
        return
    reason = f"{left.path}:{left.line} ({left.rule}): {left.message}" if left else "it trains on several cards already"
    for shown, data in of_script:
        if any(one.rule[0] == "P" and one.status == "changed" for one in done[shown].findings):
            chosen[shown] = replace(chosen[shown], parallel_left=reason)
            yield shown, _rewritten((shown, data, chosen[shown]))


def _all_rewritten(work: list[tuple[str, bytes, Options]], jobs: int) -> Iterator[Rewritten]:
    if jobs < 2 or len(work) < _FEW:
        yield from map(_rewritten, work)
        return
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_rewritten, work, chunksize=8)


def _rewritten(work: tuple[str, bytes, Options]) -> Rewritten:
    shown, data, options = work
    if not shown.endswith(".ipynb"):
        return rewrite_part(data, shown, replace(options, exports=exports(Path(shown), data)))

    def rewrite_cells(program: str) -> Rewritten:
        return rewrite(program, shown, replace(options, exports=exports(Path(shown), program.encode())))

    try:
        return rewrite_notebook(data, shown, rewrite_cells)
    except UnreadableError as error:
        return Rewritten(data, (unreadable(shown, error.rule, error.reason),))


def _is_program(path: str) -> bool:
    return path.endswith((".py", ".pyw", ".ipynb"))


def _targets(path: Path, exclude: Sequence[str]) -> Iterator[Target]:
    """The files that ``path``, which the user gave, stands for."""
    if path.is_symlink():
        raise PipelineError(f"{path} is a link: links are not followed. Give what it points to")
    if path.is_file():
        yield Target(path.parent, path.name)
        return
    if not path.is_dir():
        raise PipelineError(f"{path} is neither a file nor a folder")
    known = _known_to_git(path)
    for folder, folders, names in os.walk(path):
        at = Path(folder)
        inner = (name for name in folders if name not in _SKIPPED and not (at / name / "pyvenv.cfg").exists())
        folders[:] = sorted(name for name in inner if not _excluded(at.relative_to(path) / name, exclude))
        for name in sorted(names):
            relative = at.relative_to(path) / name
            wanted = _is_program(name) or _OTHERS.fullmatch(name)
            if not wanted or (at / name).is_symlink() or _excluded(relative, exclude):
                continue
            if known is None or relative.as_posix() in known:
                yield Target(path, relative.as_posix())


def _excluded(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path.as_posix(), one) or fnmatch.fnmatch(path.name, one) for one in patterns)


def git(folder: Path, *arguments: str) -> str | None:
    """What git prints, run in ``folder`` without programs that its configuration names; None where it fails."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    except OSError:
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def _known_to_git(folder: Path) -> set[str] | None:
    """The files that git tracks or would, or None where that does not matter."""
    listed = git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return set(listed.split("\0")) - {""} or None if listed else None


def _other(target: Target, data: bytes) -> Iterator[Finding]:
    if len(data) > _MAX_OTHER:
        return
    lines = enumerate(data.decode("utf-8", "replace").splitlines(), 1)
    places = [(number, line, found) for number, line in lines if (found := _CUDA_LINE.search(line))]
    for number, line, found in places[:1]:
        hint = " (npu: ASCEND_RT_VISIBLE_DEVICES)" if found[0] == "CUDA_VISIBLE_DEVICES" else ""
        message = RULES["F908"].message.format(line.strip()[:120]) + hint
        message += f"; {len(places) - 1} more line{'s' * (len(places) > 2)}" if len(places) > 1 else ""
        column, end = found.start() + 1, found.end() + 1
        yield Finding(target.shown, number, column, "F908", "note", number, end, found[0], None, message)
