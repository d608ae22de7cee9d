# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Command`` and ``Argument``: command lines as tables of data, which argparse reads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

HELP = ("-h", "--help")


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
        metavar = self.metavar if self.bare is None else f"={self.metavar}"
        if self.many:
            several = {"action": "append"} if self.name.startswith("-") else {"nargs": "*"}
        added = parser.add_argument(
            self.name, type=self.type, metavar=metavar, default=self.default, help=self.help, **several
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


def parse(
    commands: Sequence[Command], program: str | None, description: str, arguments: Sequence[str]
) -> argparse.Namespace:
    """The chosen command's ``run`` and the values of its arguments; argparse exits where these are wrong."""
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
        one.set_defaults(run=command.run, refuse=one.error)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # parse_args shows the usage of the program, and not of the command
        options.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def split_rest(command: Command, arguments: Sequence[str]) -> argparse.Namespace | None:
    """The values of a command that ``passes_rest``, with ``rest``: what comes after its own options.

    Returns:
        None: Help is asked for.

    Raises:
        ValueError: An option is unknown, lacks its value, is given twice without being ``many``, or is out of order;
            the text says which.
    """
    places = {argument.name: place for place, argument in enumerate(command.arguments)}
    parser = argparse.ArgumentParser(add_help=False)
    for argument in command.arguments:
        argument.add_to(parser)
    rest, given, next_place = list(arguments), [], 0
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, assigned, value = word.partition("=")
        if word in HELP:
            return None
        if name not in places or (assigned and command.arguments[places[name]].flag):
            raise ValueError(f"unknown option {word!r}")
        argument = command.arguments[places[name]]
        if places[name] < next_place:
            raise ValueError(f"{name} is given twice, or out of order")
        if not (assigned or argument.flag or argument.bare is not None):
            if rest and rest[0] in HELP:
                return None
            value = rest.pop(0) if rest and not rest[0].startswith("-") else ""
            assigned, word = "=", f"{name}={value}"
        if assigned and not value:
            raise ValueError(f"{name} needs a value, {argument.metavar}")
        given.append(word)
        next_place = places[name] + (not argument.many)
    return parser.parse_args(given, argparse.Namespace(rest=rest))
