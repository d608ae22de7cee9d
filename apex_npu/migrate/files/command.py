# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu migrate``: a dry run with a report, a diff, files in place, or a copy."""

from __future__ import annotations

import argparse
import ast
import signal
import sys
from pathlib import Path
from types import FrameType

from apex_npu._cli.command_line import Argument, Command
from apex_npu._cli.tables import show
from apex_npu.compat.pipeline.errors import PipelineError
from apex_npu.migrate.amp.check import LEVELS, arguments_of_initialize
from apex_npu.migrate.engine.program import Options, count
from apex_npu.migrate.rules.catalogue import RULES, Rule
from apex_npu.migrate.rules.own import read_api_list, read_rules
from apex_npu.migrate.rules.targets import TARGETS

from . import reports
from .planning import Plan, plan
from .writing import write_copy, write_in_place


def _run(options: argparse.Namespace) -> int:
    """Report, then write: 0 if nothing is left for a person, 1 if something is, 2 if it cannot be done."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if options.list_rules:
            print("\n".join(f"{rule.id}  {rule.title}" for rule in RULES.values()))
            return 0
        if options.explain:
            print(reports.explanation(_rule(options.explain)))
            return 0
        return _migrate(options)
    except (PipelineError, ValueError) as error:
        print(f"apex_npu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("apex_npu: interrupted; all files are as they were, or all are changed", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _rule(name: str) -> Rule:
    if name not in RULES:
        raise ValueError(f"there is no rule {name}: --list-rules lists them")
    return RULES[name]


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


def _level(text: str) -> str:
    if text not in LEVELS:
        raise argparse.ArgumentTypeError(f"there is no level {text} to put in: give one of {', '.join(LEVELS)}")
    return text


def _amp_args(text: str) -> str:
    """Arguments of ``amp.initialize``, as a program has them: names that it takes, and literals."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not call.keywords or ast.unparse(call.func) != "f":
            raise ValueError("no arguments by name")
        given = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give names and literals, as loss_scale=128.0 ({error})") from None
    unknown = [name for name in given if name not in arguments_of_initialize()]
    if unknown:
        known = ", ".join(sorted(arguments_of_initialize()))
        raise argparse.ArgumentTypeError(f"{unknown[0]} cannot be given here; amp.initialize takes {known}")
    return text


def _migrate(options: argparse.Namespace) -> int:
    if options.model and not options.data_parallel:
        raise ValueError("--model goes with --data-parallel")
    if not options.paths and not options.data_parallel:
        raise ValueError("a path is missing: python -m apex_npu migrate PATH...")
    if options.write and options.out:
        raise ValueError("--write changes files in place, --out writes a copy: give one of them")
    if options.out and len(options.paths) > 1:
        raise ValueError("--out copies one folder or file: give one path")
    if options.report:
        reports.write_report(options.report, [])
    if options.to not in TARGETS:
        raise ValueError(f"--to {options.to}: give one of {', '.join(TARGETS)}")
    if options.amp_args and not options.amp:
        raise ValueError("--amp-args goes with --amp")
    own = [rule for path in options.rules or () for rule in read_rules(path)]
    own += [rule for path in options.api_list or () for rule in read_api_list(path)]
    chosen = Options(
        options.select,
        options.ignore,
        options.unsure,
        options.force,
        similar=options.similar,
        own=tuple(own),
        to=options.to,
        amp=options.amp or "",
        amp_args=options.amp_args or "",
        model=options.model or "",
    )
    script = options.data_parallel
    made = plan(options.paths or [script], chosen, options.exclude or (), script)
    if options.report:
        _save(options.report, reports.write_report(options.report, made.findings))
    if options.diff:
        sys.stdout.write(reports.unified_diff(made))
    left = options.q or options.diff
    shown = [finding for finding in made.findings if not left or finding.status in ("refused", "unsure")]
    head, rows = reports.table(shown)
    show(reports.lines(shown), head, rows, file=sys.stderr if options.diff else None)
    if options.write:
        write_in_place(made.files, allow_dirty=options.allow_dirty, backup=options.backup)
    elif options.out:
        write_copy((options.paths or [options.data_parallel])[0], made.files, options.out)
    print(reports.summary(made, written=bool(options.write or options.out)), file=sys.stderr if options.diff else None)
    return _status(made, check=options.check)


def _save(path: str, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise PipelineError(f"{path} cannot be written ({error.strerror}); nothing has been changed") from error


def _status(made: Plan, *, check: bool) -> int:
    left = count(made.findings, "refused", "unsure")
    return int(bool(left or (check and made.files)))


MIGRATE = Command(
    "migrate",
    "rewrite training scripts for CUDA and apex, so that they run on npu",
    _run,
    (
        Argument(
            "paths", "files, or folders that are searched for .py and .ipynb", type=Path, metavar="PATH", many=True
        ),
        Argument("--diff", "print a unified diff in place of the report", flag=True),
        Argument("--write", "change files in place: all of them or none", flag=True),
        Argument("--out", "write a copy with the changes, a new folder", type=Path, metavar="DIR"),
        Argument("--check", "exit status 1 if something would change", flag=True),
        Argument(
            "--select",
            "rules or families that apply; default: D,X,O",
            type=_chosen,
            metavar="D,X201",
            default=("D", "X", "O"),
        ),
        Argument("--ignore", "rules or families that do not", type=_chosen, metavar="RULES", default=()),
        Argument("--to", "npu, or portable: for npu, cuda, xpu and cpu", metavar="npu|portable", default="npu"),
        Argument("--amp", "put amp in, or in torch.amp's place, at O1, O2, O4 or O5", type=_level, metavar="O1"),
        Argument(
            "--amp-args",
            "further arguments of amp.initialize",
            type=_amp_args,
            metavar="'loss_scale=128.0'",
        ),
        Argument("--data-parallel", "make a script for one card one for several", type=Path, metavar="MAIN"),
        Argument("--model", "with --data-parallel: the one model that is trained so", metavar="NAME"),
        Argument("--unsure", "also apply what is unsure", flag=True),
        Argument("--similar", "also apply what is only similar", flag=True),
        Argument("--rules", "more rules, .toml or .json (repeatable)", metavar="FILE", many=True),
        Argument("--api-list", "report uses of names that a list has, .json (repeatable)", metavar="FILE", many=True),
        Argument("--report", "write all findings; the name ends with .csv, .json or .sarif", metavar="FILE"),
        Argument("--explain", "print a rule with its example", metavar="RULE"),
        Argument("--list-rules", "print all rules", flag=True),
        Argument("--exclude", "skip paths, as in '*/data/*' (repeatable)", metavar="GLOB", many=True),
        Argument("--allow-dirty", "with --write: also files that are not committed in git", flag=True),
        Argument("--backup", "with --write: keep FILE.orig, and allow the same", flag=True),
        Argument("--force", "also change files that speak of npu already", flag=True),
        Argument("-q", "print only what is left for a person", flag=True),
    ),
    usage=("[--diff] [--write] [--out DIR] PATH...",),
)
