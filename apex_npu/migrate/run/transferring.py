# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``apex_npu.transfer``: replace this process by one that runs its script under ``run --device npu``."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from .running import is_active

_COMMAND = "python -m apex_npu run --device npu"
# Options of the interpreter that take a value.
_WITH_VALUE = "XW"
_LONG_WITH_VALUE = "--check-hash-based-pycs"


def split_command(command: Sequence[str]) -> tuple[list[str], str, str]:
    """Return the interpreter's options in a command line, how it starts a program ("", "-m", "-c"), and the program.

    Example::

        >>> split_command(["python", "-uX", "dev", "-m", "train", "--lr", "1"])
        (['-u', '-X', 'dev'], '-m', 'train')
    """
    options: list[str] = []
    words = iter(command[1:])
    for word in words:
        if word == "-" or not word.startswith("-"):
            return options, "", word
        if word.startswith("--"):
            options += [word, next(words, "")] if word == _LONG_WITH_VALUE else [word]
            continue
        for place, letter in enumerate(word[1:], 1):
            if letter in _WITH_VALUE:
                options += [f"-{letter}", word[place + 1 :] or next(words, "")]
                break
            if letter in "mc":
                return options, f"-{letter}", word[place + 1 :] or next(words, "")
            options.append(f"-{letter}")
    return options, "", ""


def _replacement(main: ModuleType) -> list[str]:
    """Return the command that replaces this process."""
    file = getattr(main, "__file__", None)
    if file is None or not os.path.isfile(file) or hasattr(sys, "ps1"):
        raise RuntimeError(
            "apex_npu.transfer: there is no script that can be started again. In a notebook or a REPL, rewrite "
            f"the code instead: python -m apex_npu migrate notebook.ipynb; a script runs with {_COMMAND} train.py"
        )
    options, way, name = split_command(sys.orig_argv)
    spec = getattr(main, "__spec__", None)
    module = "" if spec is None else spec.name.removesuffix(".__main__")
    is_started = _is_file(name, file) if way == "" else way == "-m" and name.removesuffix(".__main__") == module
    if not (is_started and _is_file(sys.argv[0], file)):
        script = sys.argv[0]
        raise RuntimeError(
            f"apex_npu.transfer: {script} was started by another program: start it with {_COMMAND} {script}"
        )
    if not _is_first_statement(Path(file).read_bytes()):
        raise RuntimeError(
            f"apex_npu.transfer: import it in {file}, as the first statement, by itself: what runs before it would run "
            f"twice. Or leave it out, and start the script with {_COMMAND} {file}"
        )
    started = ["-m", name] if way else [name]
    return [sys.executable, *options, "-m", "apex_npu", "run", "--device", "npu", *started, *sys.argv[1:]]


def _is_file(name: str, file: str) -> bool:
    return os.path.exists(name) and os.path.samefile(name, file)


def _is_first_statement(source: bytes) -> bool:
    """Return whether a program first imports ``apex_npu.transfer``. A docstring and ``__future__`` may come before."""
    body = ast.parse(source).body
    is_text = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    rest = (node for node in body[is_text:] if getattr(node, "module", "") != "__future__")
    first = ast.unparse(next(rest, ast.Pass()))
    return (
        re.fullmatch(r"import apex_npu\.transfer( as \w+)?|from apex_npu import transfer( as \w+)?", first) is not None
    )


def transfer() -> None:
    """Replace this process, unless it already rewrites its imports."""
    if not is_active():
        command = _replacement(sys.modules["__main__"])
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, command)
