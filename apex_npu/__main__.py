# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu``: ``run``, ``compare``, ``migrate``, ``patch``, ``convert``, ``doctor``, ``bench``.

``COMMANDS`` is the table of all commands. A package that adds one defines its ``Command``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from collections.abc import Sequence

from apex_npu._cli.command_line import HELP, Argument, Command, parse, split_rest
from apex_npu._cli.options import EXPLAIN_OVERFLOWS, OPTIONS, TRACE, Option
from apex_npu.compat import install_as_apex
from apex_npu.compat.pipeline.commands import PATCH
from apex_npu.doctor.bench_command import BENCH
from apex_npu.doctor.command import DOCTOR
from apex_npu.doctor.compare_command import COMPARE
from apex_npu.export.command import CONVERT
from apex_npu.migrate.files.command import MIGRATE

PROGRAM = "python -m apex_npu"
# The training frameworks whose integration has something to register.
HOSTS = ("deepspeed", "mmengine", "timm", "transformers")
ABOUT = (
    "Mixed precision and fused optimizers for PyTorch on npu, cuda and cpu. COMMAND --help lists the options of a "
    "command. With several processes: torchrun --nproc-per-node 8 -m apex_npu run script.py"
)


def _argument(option: Option) -> Argument:
    return Argument(option.name, option.help, metavar=option.metavar, bare=option.bare, flag=option.metavar is None)


def _check(options: argparse.Namespace) -> None:
    """Check the values of the options, and that there is something to run, before anything is set.

    Raises:
        ValueError: One is wrong; the text says which.
    """
    for host in options.host or ():
        if host not in HOSTS:
            raise ValueError(f"--host {host}: nothing is registered for it; give one of {', '.join(HOSTS)}")
    after = options.explain_overflows
    if after is not None and (not after.isdecimal() or int(after) < 1):
        raise ValueError(f"--explain-overflows={after}: N is a positive integer")
    if options.replay and after is None:
        raise ValueError("--replay goes with --explain-overflows")
    if options.profile is not None:
        first, _, last = options.profile.partition(":")
        if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
            raise ValueError(f"--profile {options.profile}: give A:B, from step A, counted from 0, to before step B")
    elif options.trace:
        raise ValueError("--trace goes with --profile")
    for option, step in (("gradient-range", options.gradient_range), ("check-operators", options.check_operators)):
        if step is not None and not step.isdecimal():
            raise ValueError(f"--{option} {step}: give a step, counted from 0")
    if options.record is not None:
        step, _, path = options.record.partition(":")
        if not (step.isdecimal() and path):
            raise ValueError(f"--record {options.record}: give STEP:FILE, a step, counted from 0, and a file")
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            raise ValueError(f"--record {options.record}: there is no folder {os.path.dirname(path)!r}")
        if options.check_operators is not None and int(options.check_operators) == int(step):
            raise ValueError(
                f"--record and --check-operators cannot look at the same step, {step}: run the script twice"
            )
    if options.device not in (None, "npu"):
        raise ValueError(f"--device {options.device}: scripts for CUDA are rewritten for npu")
    if not options.device and (options.also or options.changes or options.force_files or options.no_unsure):
        raise ValueError("--also, --changes, --force-files and --no-unsure go with --device npu")
    if not options.rest:
        raise ValueError(f"a {'module' if options.m else 'script'} is missing")
    if not options.m and not os.path.exists(options.rest[0]):
        raise ValueError(f"can't open file {options.rest[0]!r}: no such file")


def _run(options: argparse.Namespace) -> int:
    """Run ``options.rest``, a script or with ``-m`` a module, and its arguments."""
    try:
        _check(options)
    except ValueError as error:
        return _fail(str(error))
    name = options.rest[0]
    if options.device:
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            return _fail(f"--device npu needs torch_npu ({error})")
        from apex_npu.migrate.run import running

        also, unsure = tuple(options.also or ()), not options.no_unsure
        changes = os.path.abspath(options.changes) if options.changes else ""
        settings = running.Run(name, options.m, also, unsure, options.force_files, changes)
    if options.trace:
        try:
            os.makedirs(options.trace, exist_ok=True)
        except OSError as error:
            return _fail(f"--trace {options.trace}: no folder can be made there ({error.strerror})")
    # These are read when amp is imported.
    if options.explain_overflows is not None and options.replay:
        options.explain_overflows += ",replay"
    if options.trace:
        options.trace = os.path.abspath(options.trace)
    if options.record is not None:
        step, _, path = options.record.partition(":")
        options.record = f"{step}:{os.path.abspath(path)}"
    for option in OPTIONS:
        value = getattr(options, option.attribute)
        if value or (option is TRACE and options.profile):  # without a trace, whatever the environment says
            os.environ[option.variable] = "1" if value is True else value or ""
    sys.argv = options.rest
    # As Python does for a script, and before the search for another apex; run_path does it for folders and archives.
    if not options.m and os.path.isfile(name) and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(name))
    try:
        if options.device:
            running.check(settings)
        install_as_apex(force=options.force)
        for host in options.host or ():
            importlib.import_module(f"apex_npu.integrations.{host}").register()
    except (RuntimeError, ValueError, ImportError) as error:
        print(f"apex_npu: {error}", file=sys.stderr)
        return 2
    if options.device:
        running.run(settings)
    elif options.m:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")
    return 0


RUN = Command(
    "run",
    "run a script in which the name apex is apex_npu",
    _run,
    (
        Argument("--force", "even where another package called apex is installed", flag=True),
        Argument(
            "--host",
            f"register the fused optimizers with a training framework: {', '.join(HOSTS)} (repeatable)",
            metavar="NAME",
            many=True,
        ),
        _argument(EXPLAIN_OVERFLOWS),
        Argument(
            "--replay",
            "with --explain-overflows: run the skipped step once more, rather than watch the next one",
            flag=True,
        ),
        *(_argument(option) for option in OPTIONS if option is not EXPLAIN_OVERFLOWS),
        Argument("--device", "rewrite what is written for CUDA for npu, in memory, as it is imported", metavar="npu"),
        Argument(
            "--also",
            "with --device: rewrite this package, too, outside the script's folder (repeatable)",
            metavar="PACKAGE",
            many=True,
        ),
        Argument("--changes", "with --device: write all findings; .csv, .json or .sarif", metavar="FILE"),
        Argument("--force-files", "with --device: also rewrite files that speak of npu already", flag=True),
        Argument("--no-unsure", "with --device: leave what is unsure", flag=True),
        Argument("-m", "run a module rather than a file", flag=True),
    ),
    usage=(
        "[--force] [--host NAME]... [--explain-overflows[=N] [--replay]] [--profile A:B [--trace DIR]] "
        "[--gradient-range STEP] [--check-operators STEP] [--record STEP:FILE] [--model-report] "
        "[--device npu [OPTIONS]] script.py [arguments]",
        "[the same options] -m module [arguments]",
    ),
    passes_rest=True,
)
COMMANDS = (RUN, COMPARE, MIGRATE, PATCH, CONVERT, DOCTOR, BENCH)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what ``arguments`` say; without any, those of the command line, as the program ``apex-npu`` does.

    Returns:
        The exit status, where the script, or help, did not end with one itself: 0, or 2 if there is nothing to run.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    name, rest = (arguments[0] if arguments else None), arguments[1:]
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None and name not in HELP:
        return _fail("a command is missing" if name is None else f"unknown command {name!r}", COMMANDS)
    if command is not None and command.passes_rest:
        try:
            own = split_rest(command, rest)
        except ValueError as error:
            return _fail(str(error))
        if own is not None:
            return command.run(own)
        arguments = [command.name, "--help"]
    options = parse(COMMANDS, PROGRAM, ABOUT, arguments)
    status: int = options.run(options)
    return status


def _fail(reason: str, commands: Sequence[Command] | None = None) -> int:
    """Print ``reason``, and how ``commands`` are called, or ``run``."""
    commands = commands or (RUN,)
    calls = [f"{PROGRAM} {command.name} {usage}" for command in commands for usage in command.usage]
    name = "COMMAND" if len(commands) > 1 else commands[0].name
    usage = "usage: " + "\n       ".join(calls)
    print(f"apex_npu: {reason}\n{usage}\n{PROGRAM} {name} --help lists the options", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
