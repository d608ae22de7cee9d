# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fails, with file and line, where prose uses a word that is not in the register of PyTorch's documentation.

Prose is all of a text file; of Python and C++ sources it is comments and string literals, so docstrings and messages,
but no names (before Python 3.12 an f-string with the code in it). ``make lint`` runs this.
"""

from __future__ import annotations

import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("apex_npu", "csrc", "docs", "benchmarks", "examples", "scripts", "patch")
FILES = ("README*", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")
# Neither data nor diffs, whose lines are another project's.
SUFFIXES = (".py", ".pyi", ".cpp", ".h", ".md", ".sh", ".toml")
WORDS = re.compile(r"\b(behind|lies?|nobody|anew|whoever|somebody)\b", re.IGNORECASE)
# Files, each with what may stay in it: a pattern.
EXCEPTIONS = {
    "scripts/check_words.py": WORDS.pattern,
    "csrc/fused_optim/adamp_cpu.cpp": "lie one behind the other",
    "csrc/fused_optim/grad_slots.cpp": "where it lies",
}

PYTHON_PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
# Character literals are matched for the sake of '"'.
CPP_PROSE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The pieces of ``path`` that are prose, each with the number of its first line."""
    if path.suffix in (".py", ".pyi"):
        with tokenize.open(path) as file:
            for token in tokenize.generate_tokens(file.readline):
                if token.type in PYTHON_PROSE:
                    yield token.start[0], token.string
        return
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".cpp", ".h"):
        for match in CPP_PROSE.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, match[0]
    else:
        yield 1, text


def findings(path: Path, exception: str = "(?!)") -> Iterator[tuple[int, str]]:
    """Line and word of each finding; what matches ``exception`` is none."""
    for first, text in prose(path):
        allowed = [match.span() for match in re.finditer(exception, text)]
        for match in WORDS.finditer(text):
            if not any(begin <= match.start() < end for begin, end in allowed):
                yield first + text.count("\n", 0, match.start()), match[0]


def main() -> int:
    """Print every finding; 1 if there is one."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    paths = [path for path in paths if path.suffix in SUFFIXES or path.name == "Dockerfile"]
    paths += [path for name in FILES for path in ROOT.glob(name)]
    failed = False
    for path in sorted(paths):
        name = path.relative_to(ROOT).as_posix()
        for line, word in findings(path, EXCEPTIONS.get(name, "(?!)")):
            failed = True
            print(f"{name}:{line}: {word!r}: use the plain technical term")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
