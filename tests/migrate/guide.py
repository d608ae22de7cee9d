# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tables of ``docs/migrating_cuda.md``, made from the rules: ``PYTHONPATH=tests python -m migrate.guide``."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from apex_npu.migrate.rules import AMP_RULES, APEX_RULES, DEVICE_RULES, OPTIMIZER_RULES
from apex_npu.migrate.tables import INSTEAD, NEEDS_CUDA, RENAMED, SAME_NAMES

GUIDE = Path(__file__).parents[2] / "docs" / "migrating_cuda.md"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _shown(program: str, rule: str) -> str:
    hidden = ("import torch",) if rule == "D113" else ("import torch", "import torch_npu  # noqa: F401")
    lines = [line for line in program.splitlines() if line not in hidden]
    return "<br>".join(f"`{line.strip()}`" for line in lines if line.strip())


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *rows, ""])


def table(name: str) -> str:
    if name == "rules":
        rows = [
            f"| {rule.id} | {rule.title} | {_shown(rule.before, rule.id)} | "
            f"{_shown(rule.after, rule.id) if rule.after != rule.before else 'reported'} |"
            for rule in (*DEVICE_RULES, *APEX_RULES, *OPTIMIZER_RULES)
        ]
        return _table("| rule | what | before | after |", rows)
    if name == "amp":
        rows = [
            f"| {rule.id} | {rule.title} | {'changed' if rule.after != rule.before else 'reported'} |"
            for rule in AMP_RULES
        ]
        return _table("| rule | what | |", rows)
    if name == "names":
        names = sorted(SAME_NAMES, key=lambda name: (name.lower(), name))
        return textwrap.fill(", ".join(f"`{one}`" for one in names), 120) + "\n"
    if name == "others":
        renamed = [f"| `{old}` | `torch.npu.{new}` |" for old, new in RENAMED.items()]
        return _table("| torch.cuda | instead |", [*renamed, *(f"| `{old}` | {new} |" for old, new in INSTEAD.items())])
    assert name == "libraries"
    return _table("| name | instead |", [f"| `{old}` | {new} |" for old, new in NEEDS_CUDA.items()])


def current(text: str) -> str:
    """The guide with its tables as they are now."""
    return _TABLE.sub(lambda found: found[1] + "\n" + table(found[2]) + "\n" + found[3], text)


if __name__ == "__main__":
    GUIDE.write_text(current(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
