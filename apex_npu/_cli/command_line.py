# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The parser of commands. Each command has a function ``add_parser`` in its own package."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from .options import ALONE

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return the end of an error message with the known name nearest to a wrong one; empty if no name is near.

    Example::

        >>> did_you_mean("o2", ["O1", "O2"])
        "; did you mean 'O2'?"
    """
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(given).lower(), names, 1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


class Parser(argparse.ArgumentParser):
    """argparse's parser without abbreviated options. Errors name the nearest valid value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(value, action.choices)
            raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(action.choices)}{hint}")


def add_command(commands: Commands, name: str, run: Callable[[argparse.Namespace], int], help: str) -> Parser:
    """Add a command. ``run`` gets the options and returns the exit status."""
    parser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
    parser.set_defaults(run=run, parser=parser)
    return parser


def run_command(parser: Parser, arguments: Sequence[str]) -> int:
    """Run the command that ``arguments`` select. Wrong arguments exit with status 2.

    The command ends quietly, with the status of SIGPIPE, if the program that reads its output has ended (``| head``).
    SIGTERM does the same as Ctrl-C, so that no temporary file stays. Signals of a script are its own.
    """
    # argparse would take the next word as the value.
    valued = [f"{word}={ALONE[word]}" if word in ALONE else word for word in arguments]
    options, unknown = parser.parse_known_args(valued)
    if rest := getattr(options, "command", None):
        options.command = list(arguments[-len(rest) :])  # the words of the script, unchanged
    if unknown:
        hint = did_you_mean(unknown[0].partition("=")[0], re.findall(r"--[a-z-]+", options.parser.format_help()))
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if not rest and sys.stdout is None:  # closed, as by >&-
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    run: Callable[[argparse.Namespace], int] = options.run
    if rest:
        return run(options)
    in_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere Python sets no handler
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if in_main_thread else None
    try:
        status = run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at its end
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("apex_npu: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return status


def fail(options: argparse.Namespace, reason: object) -> int:
    """Print why a command cannot do its work, and return its exit status."""
    print(f"{options.parser.prog}: error: {reason}", file=sys.stderr)
    return 2
