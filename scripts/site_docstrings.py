# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""For mkdocstrings: reads docstrings as the project writes them.

``::`` at the end of a line, reStructuredText's way to begin a block of code, and double backticks become Markdown's.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_BLOCK = re.compile(r"^(?P<indent> *)(?P<lead>\S.*)?::\n\n(?P<code>(?:(?P=indent) +\S.*\n|\n)+)", flags=re.MULTILINE)


def _fenced(found: re.Match[str]) -> str:
    indent, lead = found["indent"], found["lead"]
    lines = found["code"].strip("\n").splitlines()
    depth = min(len(line) - len(line.lstrip()) for line in lines if line)
    code = "\n".join(indent + line[depth:] for line in lines)
    language = "pycon" if ">>>" in code else "text"
    heading = "" if lead is None else f"{indent}**{lead}**\n\n" if lead == "Example" else f"{indent}{lead}:\n\n"
    return f"{heading}{indent}```{language}\n{code}\n{indent}```\n\n"


class ReadDocstrings(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite that of ``obj``."""
        if obj.docstring is not None:
            text = _BLOCK.sub(_fenced, obj.docstring.value + "\n")
            obj.docstring.value = re.sub(r"``([^`\n]+)``", r"`\1`", text)
