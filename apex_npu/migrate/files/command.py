# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu migrate``: print a report or a diff, change files in place, or write a copy.

All files change, or none. In place, the old contents must be in git or are written to ``FILE.orig``.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from apex_npu._cli.command_line import Commands, add_command, did_you_mean, fail
from apex_npu._cli.tables import show
from apex_npu.migrate.amp.check import LEVELS, arguments_of_initialize
from apex_npu.migrate.engine.program import Options, count
from apex_npu.migrate.rules.catalogue import RULES
from apex_npu.migrate.rules.own import read_api_list, read_rules
from apex_npu.migrate.rules.targets import TARGETS

from . import reports
from .planning import FileChange, git, is_skipped, plan


def _run(options: argparse.Namespace) -> int:
    """Report, then write. Return 0, or 1 if something is left for a person, or 2 for an error."""
    try:
        if options.list_rules:
            print("\n".join(f"{rule.id}  {rule.title}" for rule in RULES.values()))
            return 0
        if options.explain:
            if options.explain not in RULES:
                hint = did_you_mean(options.explain, RULES)
                raise ValueError(f"there is no rule {options.explain}: --list-rules lists them{hint}")
            print(reports.explanation(RULES[options.explain]))
            return 0
        return _migrate(options)
    except ValueError as error:
        return fail(options, error)


def _chosen(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if not any(rule.startswith(name) for rule in RULES):
            raise argparse.ArgumentTypeError(f"there is no rule or family {name}: --list-rules lists them")
        if name[0] in "ATP":
            raise argparse.ArgumentTypeError(
                f"{name}: the rules of amp apply together, with --amp, those for several cards with --data-parallel"
            )
    return names


def _amp_args(text: str) -> str:
    """Check the value of ``--amp-args``: keyword arguments of ``amp.initialize`` with literal values."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not call.keywords or ast.unparse(call.func) != "f":
            raise ValueError("no keyword arguments")
        given = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: pass keyword arguments with literal values, such as loss_scale=128.0 ({error})"
        ) from None
    unknown = [name for name in given if name not in arguments_of_initialize()]
    if unknown:
        known = ", ".join(sorted(arguments_of_initialize()))
        raise argparse.ArgumentTypeError(f"{unknown[0]} is not allowed here; allowed are {known}")
    return text


def _migrate(options: argparse.Namespace) -> int:
    script, paths = options.data_parallel, options.paths or [options.data_parallel]
    for wrong, reason in (
        (options.model and not script, "--model needs --data-parallel"),
        (paths == [None], "a path is missing"),
        (options.write and options.out, "--write changes files in place, --out writes a copy: give one of them"),
        (options.out and len(paths) > 1, "--out copies one folder or file: give one path"),
        (options.amp_args and not options.amp, "--amp-args needs --amp"),
    ):
        if wrong:
            raise ValueError(reason)
    if options.report:
        reports.write_report(options.report, [])
    own = [rule for path in options.rules for rule in read_rules(path)]
    own += [rule for path in options.api_list for rule in read_api_list(path)]
    given = {name: getattr(options, name) for name in ("unsure", "force", "similar", "to", "amp", "model")}
    given |= {"own": tuple(own), "amp_args": options.amp_args or ""}
    made = plan(paths, Options(options.select, options.ignore, **given), options.exclude, script)
    if options.report:
        try:
            Path(options.report).write_bytes(reports.write_report(options.report, made.findings))
        except OSError as error:
            raise ValueError(
                f"{options.report} cannot be written ({error.strerror}); nothing has been changed"
            ) from error
    if options.diff:
        sys.stdout.write(reports.unified_diff(made))
    left = options.q or options.diff
    shown = [finding for finding in made.findings if not left or finding.status in ("refused", "unsure")]
    head, rows = reports.table(shown)
    show(reports.lines(shown), head, rows, file=sys.stderr if options.diff else None)
    if options.write:
        _write_in_place(made.files, allow_dirty=options.allow_dirty, backup=options.backup)
    elif options.out:
        write_copy(paths[0], made.files, options.out)
    print(reports.summary(made, written=bool(options.write or options.out)), file=sys.stderr if options.diff else None)
    return int(bool(count(made.findings, "refused", "unsure") or (options.check and made.files)))


def add_parser(commands: Commands) -> None:
    """Add the command."""
    help = "rewrite training scripts for CUDA and apex, so that they run on npu"
    parser = add_command(commands, "migrate", _run, help)
    parser.set_defaults(amp="", model="", rules=[], api_list=[], exclude=[])
    add = parser.add_argument
    add("paths", type=Path, metavar="PATH", nargs="*", help="files, or folders that are searched for .py and .ipynb")
    add("--diff", action="store_true", help="print a unified diff instead of the report")
    add("--write", action="store_true", help="change files in place: all of them or none")
    add("--out", type=Path, metavar="DIR", help="write a copy with the changes to a new folder")
    add("--check", action="store_true", help="exit with status 1 if something would change")
    every = ("D", "X", "O")
    add("--select", type=_chosen, metavar="D,X201", default=every, help="apply these rules or families; default: D,X,O")
    add("--ignore", type=_chosen, metavar="RULES", default=(), help="do not apply these rules or families")
    add("--to", choices=TARGETS, default="npu", help="the devices of the new code; portable: npu, cuda, xpu and cpu")
    add("--amp", choices=LEVELS, help="add amp, or replace torch.amp by it, at this opt_level")
    add("--amp-args", type=_amp_args, metavar="'loss_scale=128.0'", help="more arguments of amp.initialize")
    add("--data-parallel", type=Path, metavar="MAIN", help="make a script for one card also train on several")
    add("--model", metavar="NAME", help="with --data-parallel: the one model that is trained on several cards")
    add("--unsure", action="store_true", help="also apply unsure changes")
    add("--similar", action="store_true", help="also use counterparts that are only similar")
    add("--rules", action="append", metavar="FILE", help="add rules from a .toml or .json file (repeatable)")
    add("--api-list", action="append", metavar="FILE", help="report uses of the names in a .json file (repeatable)")
    add("--report", metavar="FILE", help="write all findings to a .csv, .json or .sarif file")
    add("--explain", metavar="RULE", help="print a rule with its example")
    add("--list-rules", action="store_true", help="print all rules")
    add("--exclude", action="append", metavar="GLOB", help="skip paths, for instance '*/data/*' (repeatable)")
    add("--allow-dirty", action="store_true", help="with --write: also change files that are not committed in git")
    add("--backup", action="store_true", help="with --write: keep the old FILE as FILE.orig; allows the same files")
    add("--force", action="store_true", help="also change files that already name npu")
    add("-q", action="store_true", help="print only what is left for a person")


def _write_in_place(changes: Sequence[FileChange], *, allow_dirty: bool, backup: bool) -> None:
    """Write the new content of every file, or raise a ValueError and change none. Permissions stay the same."""
    if not (allow_dirty or backup):
        _check_committed(changes)
    try:
        for change in changes:
            path = change.target.file
            if change.target.read() != change.before:
                raise ValueError(f"{change.target.shown} has been edited since it was read: nothing has been changed")
            if not os.access(path, os.W_OK):
                raise ValueError(f"{change.target.shown} is read-only: nothing has been changed")
            if backup and os.path.lexists(f"{path}.orig"):
                raise ValueError(f"{change.target.shown}.orig exists: move it away, nothing has been changed")
        _replace(changes, backup)
    except OSError as error:
        raise ValueError(
            f"{error.filename} cannot be written ({error.strerror}): nothing has been changed. Look at the free space "
            "and at the permissions of the folder"
        ) from error


def _replace(changes: Sequence[FileChange], backup: bool) -> None:
    """Write all contents beside the files first, so that only renames remain. After an error, undo those done."""
    beside: list[Path] = []
    try:
        for change in changes:
            path = change.target.file
            news = {path.with_name(f".{path.name}.apex_npu-new"): change.after}
            for one, content in (news | {Path(f"{path}.orig"): change.before} if backup else news).items():
                beside.append(one)
                one.write_bytes(content)
                shutil.copymode(path, one)
        for change in changes:
            path = change.target.file
            os.replace(path.with_name(f".{path.name}.apex_npu-new"), path)
    except BaseException:
        for change in changes:
            if change.target.file.read_bytes() == change.after:
                change.target.file.write_bytes(change.before)
        for one in beside:
            one.unlink(missing_ok=True)
        raise


def _check_committed(changes: Sequence[FileChange]) -> None:
    for root in dict.fromkeys(change.target.root for change in changes):
        paths = [change.target.path for change in changes if change.target.root == root]
        options = ("--porcelain", "-z", "--ignored", "--untracked-files=all")
        listed = git(root, "status", *options, "--", *(f":(literal){path}" for path in paths))
        if listed != "":
            first = (listed or "??").partition("\0")[0]
            below = (git(root, "rev-parse", "--show-prefix") or "").removesuffix("\n")  # git counts from its top folder
            name = next((path for path in paths if f"{below}{path}" == first[3:]), paths[0])
            what = "is not in git" if first[:2] in ("??", "!!") else "has changes that are not committed"
            raise ValueError(
                f"{root / name} {what}: commit first, or pass --backup or --allow-dirty; nothing has been changed"
            )


def write_copy(source: Path, changes: Sequence[FileChange], out: Path) -> None:
    """Copy the file or folder ``source`` to the new folder ``out``, with the new contents.

    Raises:
        ValueError: ``out`` exists, is inside ``source``, or cannot be written. Nothing has been written to it.
    """
    if os.path.lexists(out):
        raise ValueError(f"{out} exists: give the name of a new folder")
    if source.resolve() in out.resolve().parents and source.is_dir():
        raise ValueError(f"{out} is inside {source}: give a folder elsewhere")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".apex_npu-", dir=out.parent) as folder:
            staged = Path(folder, "copy")
            if source.is_dir():
                shutil.copytree(source, staged, symlinks=True, ignore=_not_copied)
            else:
                staged.mkdir()
                shutil.copy(source, staged)
            for change in changes:
                path = staged / change.target.path
                mode = path.stat().st_mode
                path.unlink()  # it may be read-only
                path.write_bytes(change.after)
                path.chmod(stat.S_IMODE(mode))
            staged.rename(out)
    except (OSError, shutil.Error) as error:
        raise ValueError(f"{out} cannot be written ({error}); look at the free space and permissions") from error


def _not_copied(folder: str, names: list[str]) -> set[str]:
    """Return the names that a copy leaves out: folders that the search skips, named pipes, sockets and devices."""
    paths = [path for path in (Path(folder, name) for name in names) if not path.is_symlink()]
    return {path.name for path in paths if (is_skipped(path) if path.is_dir() else not path.is_file())}
