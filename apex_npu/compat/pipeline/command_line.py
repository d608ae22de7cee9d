# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Command`` and ``Argument``: command lines as tables of data, which argparse reads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Argument:
    """One argument of a command.

    Attributes:
        name: Of an option with its dashes ("--out"); of what is given by its place without ("folder").
        help: What it is for.
        flag: An option without a value: True where it is given.
        type: Makes the value of the text.
        metavar: What stands for the value in the help.
        default: The value of an option that is not given.
        required: An option that has to be given.
        bare: The value of an option that is given without one; with one it is ``--name=value``.
        many: What is given by its place may be given any number of times; an option may be repeated.
    """

    name: str
    help: str | None = None
    flag: bool = False
    type: Callable[[str], Any] = str
    metavar: str | None = None
    default: Any = None
    required: bool = False
    bare: Any = None
    many: bool = False

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Let ``parser`` accept it."""
        if self.flag:
            parser.add_argument(self.name, action="store_true", help=self.help)
            return
        several: dict[str, Any] = {} if self.bare is None else {"nargs": "?", "const": self.bare}
        if self.many:
            several = {"action": "append"} if self.name.startswith("-") else {"nargs": "*"}
        added = parser.add_argument(
            self.name, type=self.type, metavar=self.metavar, default=self.default, help=self.help, **several
        )
        added.required |= self.required


@dataclass(frozen=True)
class Command:
    """A command: what it is called, what it accepts, what it does.

    Attributes:
        name: The word after the program.
        help: One line on what it does.
        run: Does it, given the values of the arguments; returns the exit status. Imports what it needs itself.
        arguments: In the order of the help.
        usage: How it is called, without the program, in one line for each way.
        passes_rest: From the first argument without a dash on, all belongs to what the command runs, as ``rest``.
    """

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    arguments: tuple[Argument, ...] = ()
    usage: tuple[str, ...] = ()
    passes_rest: bool = False


def parser_of(commands: Sequence[Command], program: str | None, description: str) -> argparse.ArgumentParser:
    """A parser whose result has the chosen command's ``run``, and the values of its arguments."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    chosen = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in commands:
        calls = [f"{program} {command.name} {usage}" for usage in command.usage]
        one = chosen.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            usage="\n       ".join(calls) if command.passes_rest else None,
            epilog="Options come in this order, before what is run." if command.passes_rest else None,
        )
        for argument in command.arguments:
            argument.add_to(one)
        one.set_defaults(run=command.run)
    return parser


def split_rest(command: Command, arguments: Sequence[str]) -> argparse.Namespace:
    """The values of a command that ``passes_rest``, with ``rest``: what comes after its own options.

    Raises:
        ValueError: An option is unknown, given twice without being ``many``, or out of order; the text says which.
    """
    names = [argument.name for argument in command.arguments]
    flags = {argument.name for argument in command.arguments if argument.flag or argument.bare is not None}
    with_value = {argument.name for argument in command.arguments if argument.bare is not None}
    many = {argument.name for argument in command.arguments if argument.many}
    parser = argparse.ArgumentParser(add_help=False)
    for argument in command.arguments:
        argument.add_to(parser)
    count = 0
    while count < len(arguments) and arguments[count].startswith("-"):
        name, assigned, _ = arguments[count].partition("=")
        if name not in names or (assigned and name not in with_value):
            known = any(arguments[count] == argument.name for argument in command.arguments)
            usage = " or ".join(command.usage)
            raise ValueError(
                f"{name} is given twice, or out of order: {usage}" if known else f"unknown option {arguments[count]!r}"
            )
        names = names[names.index(name) + (name not in many) :]
        count += 1 if name in flags else 2
    return parser.parse_args(arguments[:count], argparse.Namespace(rest=list(arguments[count:])))
