# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run a script under ``run --device npu`` if its first statement is ``import apex_npu.transfer``.

The process is replaced by ``python -m apex_npu run --device npu``, with the interpreter's options and the script's
arguments; nothing is patched. In the new process, and in the processes that the script spawns, the import does nothing.

Raises:
    RuntimeError: There is no script to start (a REPL, a notebook, ``python -c``), or the import is not its first
        statement. The message says what to call instead.

Example::

    import apex_npu.transfer  # noqa: F401

    import torch

    x = torch.ones(2).cuda()  # on npu:0
"""

from __future__ import annotations

import ast
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from apex_npu.migrate.run.running import Rewriter

_COMMAND = "python -m apex_npu run --device npu"
# The ends of the interpreter's options whose value is the next word.
_WITH_VALUE = ("X", "W", "--check-hash-based-pycs")


def _started(main: ModuleType, file: str) -> tuple[list[str], list[str]] | None:
    """Return the interpreter's options and what it was told to run; None if another program has started ``main``."""
    words = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    spec = getattr(main, "__spec__", None)
    if not words or not _is_file(sys.argv[0], file):
        return None
    if spec is None:
        options, program = words[:-1], words[-1:]
        is_started = _is_file(program[0], file)
    else:
        last = len(words) - 1 if words[-1].startswith("-") else len(words) - 2  # -mtrain, or -m train
        flag, module = "".join(words[last:]).removesuffix(".__main__"), spec.name.removesuffix(".__main__")
        options, program = [*words[:last], flag.removesuffix(f"m{module}")], ["-m", module]
        is_started = flag.endswith(f"m{module}")
    values = [word for before, word in pairwise(["", *options]) if not before.endswith(_WITH_VALUE)]
    is_started &= all(word.startswith("-") for word in values)
    return ([word for word in options if word != "-"], program) if is_started else None


def _replacement(main: ModuleType) -> list[str]:
    """Return the command that replaces this process."""
    file = getattr(main, "__file__", None)
    if file is None or not os.path.isfile(file) or hasattr(sys, "ps1"):
        raise RuntimeError(
            "apex_npu.transfer: there is no script that can be started again. In a notebook or a REPL, rewrite "
            f"the code instead: python -m apex_npu migrate notebook.ipynb; a script runs with {_COMMAND} train.py"
        )
    started = _started(main, file)
    if started is None:
        script = sys.argv[0]
        raise RuntimeError(
            f"apex_npu.transfer: {script} was started by another program: start it with {_COMMAND} {script}"
        )
    if not _is_first_statement(Path(file).read_bytes()):
        raise RuntimeError(
            f"apex_npu.transfer: import it in {file}, as the first statement, by itself: what runs before it would run "
            f"twice. Or leave it out, and start the script with {_COMMAND} {file}"
        )
    options, program = started
    return [sys.executable, *options, "-m", "apex_npu", "run", "--device", "npu", *program, *sys.argv[1:]]


def _is_file(name: str, file: str) -> bool:
    return os.path.exists(name) and os.path.samefile(name, file)


def _is_first_statement(source: bytes) -> bool:
    """Return whether a program first imports ``apex_npu.transfer``. A docstring and ``__future__`` may come before."""
    body = ast.parse(source).body
    is_text = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    rest = (node for node in body[is_text:] if getattr(node, "module", "") != "__future__")
    first = ast.unparse(next(rest, ast.Pass()))
    return bool(re.fullmatch(r"(import apex_npu\.|from apex_npu import )transfer( as \w+)?", first))


if not any(isinstance(finder, Rewriter) for finder in sys.meta_path):
    command = _replacement(sys.modules["__main__"])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)
