# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu run``: run a script in which the name apex means apex_npu."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from functools import partial
from importlib import import_module

from apex_npu._cli.command_line import Commands, add_command, fail
from apex_npu._cli.options import OPTIONS, checked, of_environment
from apex_npu.compat import install_as_apex

from .running import Run, check, run, tell_rounding

# The training frameworks with an integration that registers optimizers.
HOSTS = ("deepspeed", "mmengine", "timm", "transformers")


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "run", _run, "run a script in which the name apex is apex_npu")
    parser.usage = "%(prog)s [OPTIONS] script.py [ARGUMENTS]\n       %(prog)s [OPTIONS] -m module [ARGUMENTS]"
    parser.add_argument("-m", action="store_true", help="run a module instead of a file")
    parser.add_argument("--force", action="store_true", help="even if another package apex is installed")
    host = "register the optimizers with this training framework (repeatable)"
    parser.add_argument("--host", action="append", choices=HOSTS, help=host)
    looks = parser.add_argument_group("what is printed about the steps of the script")
    for name, metavar, help in (
        ("explain-overflows", "[=N]", "the operator that overflows, after N skipped steps in a row (default 2)"),
        ("profile", "A:B", "how much time the parts of a step take, from step A, counted from 0, to before step B"),
        ("trace", "DIR", "with --profile: also write a trace to this folder"),
        ("gradient-range", "STEP", "what float16 loses of the gradients of this step"),
        ("check-operators", "STEP", "how far the operators of this step are from float64"),
        ("record", "STEP:FILE", "write the tensors of this step to a file, for the command compare"),
    ):
        looks.add_argument(f"--{name}", type=partial(checked, name.replace("-", "_")), metavar=metavar, help=help)
    looks.add_argument("--replay", action="store_true", help="with --explain-overflows: run the skipped step again")
    looks.add_argument("--model-report", action="store_const", const="1", help="what each opt_level makes of the model")
    cuda = parser.add_argument_group("scripts for CUDA")
    cuda.add_argument("--device", choices=["npu"], help="rewrite code for CUDA when it is imported, in memory")
    cuda.add_argument("--also", action="append", metavar="PACKAGE", help="rewrite this package as well (repeatable)")
    cuda.add_argument("--changes", metavar="FILE", help="write all findings to a .csv, .json or .sarif file")
    cuda.add_argument("--force-files", action="store_true", help="also rewrite files that already name npu")
    cuda.add_argument("--no-unsure", action="store_true", help="do not apply unsure changes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script or module, and its arguments")


def _check(options: argparse.Namespace) -> None:
    """Exit with an error if options contradict each other. Nothing has been set before."""
    error, record = options.parser.error, options.record
    if options.replay and not options.explain_overflows:
        error("--replay needs --explain-overflows")
    if options.trace and not options.profile:
        error("--trace needs --profile")
    if not options.device and (options.also or options.changes or options.force_files or options.no_unsure):
        error("--also, --changes, --force-files and --no-unsure need --device npu")
    if record:
        step, _, path = record.partition(":")
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            error(f"--record {record}: there is no folder {os.path.dirname(path)!r}")
        if options.check_operators and int(options.check_operators) == int(step):
            error(f"--record and --check-operators cannot look at the same step, {step}: run the script twice")
        options.record = f"{step}:{os.path.abspath(path)}"
    if not options.command:
        error(f"a {'module' if options.m else 'script'} is missing")
    if not options.m and not os.path.exists(options.command[0]):
        error(f"can't open file {options.command[0]!r}: no such file")


def _run(options: argparse.Namespace) -> int:
    """Run ``options.command``."""
    options.command = options.command[options.command[:1] == ["--"] :]
    _check(options)
    name = options.command[0]
    try:
        if options.device:
            import_module("torch_npu")
        if options.trace:
            os.makedirs(options.trace, exist_ok=True)
    except ImportError as error:
        return fail(options, f"--device npu needs torch_npu ({error})")
    except OSError as error:
        return fail(options, f"--trace {options.trace}: no folder can be made there ({error.strerror})")
    changes = os.path.abspath(options.changes) if options.changes else ""
    settings = Run(name, options.m, tuple(options.also or ()), not options.no_unsure, options.force_files, changes)
    if options.profile:  # --trace decides about the trace, and the environment does not
        options.trace = os.path.abspath(options.trace) if options.trace else ""
    if options.replay:
        options.explain_overflows = f"{options.explain_overflows.partition(',')[0]},replay"
    try:
        asked = of_environment() | {name: text for name in OPTIONS if (text := getattr(options, name)) is not None}
    except ValueError as error:
        return fail(options, error)
    variables = {OPTIONS[name][0]: text for name, text in asked.items()}
    for variable in variables:
        os.environ.pop(variable, None)  # amp would read it on import
    sys.argv = options.command
    # Python does this for a script, and the search for another apex needs it. run_path does it for folders and zips.
    if not options.m and os.path.isfile(name) and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(name))
    try:
        if options.device:
            check(settings)
        install_as_apex(force=options.force)
        for host in options.host or ():
            import_module(f"apex_npu.integrations.{host}").register()
    except (RuntimeError, ValueError, ImportError) as error:
        return fail(options, error)
    os.environ.update(variables)  # for processes that the script spawns
    if any(asked.values()):
        import_module("apex_npu.debug.script").look(asked)
    if options.device:
        run(settings)
        return 0
    tell_rounding(settings)
    if options.m:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")
    return 0
