# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tables of ``docs/migrating_cuda.md``, and of the guide in Chinese, made from the rules.

``PYTHONPATH=tests python -m migrate.guide`` writes them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from apex_npu.migrate import rewrite
from apex_npu.migrate.rules.catalogue import RULES, Rule
from apex_npu.migrate.rules.tables import INSTEAD, NEEDS_CUDA, RENAMED, SAME_NAMES

from . import chinese
from .public.table import WAYS, Row, read

GUIDE = Path(__file__).parents[2] / "docs" / "migrating_cuda.md"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _shown(program: str, rule: str) -> str:
    hidden = ("import torch",) if rule == "D113" else ("import torch", "import torch_npu  # noqa: F401")
    lines = [line for line in program.splitlines() if line not in hidden]
    return "<br>".join(f"`{line.strip()}`" for line in lines if line.strip())


def _family(letters: str) -> list[Rule]:
    return [rule for rule in RULES.values() if rule.id[0] in letters and rule.id != "D170"]


def _after(rule: Rule) -> str:
    return str(rewrite(rule.example, options=rule.options).source)


@dataclass
class Tables:
    """The tables in one language: titles by the ids of rules, advice by names, and words by those in English."""

    titles: Mapping[str, str]
    instead: Mapping[str, str]
    needs_cuda: Mapping[str, str]
    words: Mapping[str, str]

    def _word(self, word: str) -> str:
        return self.words.get(word, word)

    def _table(self, heads: Sequence[str], rows: list[list[str]]) -> str:
        lines = [[*map(self._word, heads)], ["---"] * len(heads), *rows]
        return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), ""])

    def table(self, name: str) -> str:
        if name == "rules":
            return self._table(("rule", "what", "before", "after"), [self._example(rule) for rule in _family("DXO")])
        if name in ("amp", "parallel", "advice"):
            rules = _family({"amp": "AT", "parallel": "P", "advice": "N"}[name])
            made = [(rule, "changed" if _after(rule) != rule.example else "reported") for rule in rules]
            rows = [[rule.id, self.titles[rule.id], self._word(did)] for rule, did in made]
            return self._table(("rule", "what", ""), rows)
        if name == "names":
            names = sorted(SAME_NAMES, key=lambda name: (name.lower(), name))
            return textwrap.fill(", ".join(f"`{one}`" for one in names), 120) + "\n"
        if name == "others":
            renamed = [[f"`{old}`", f"`torch.npu.{new}`"] for old, new in RENAMED.items()]
            return self._table(("torch.cuda", "instead"), [*renamed, *_rows(self.instead, INSTEAD)])
        if name == "scripts":
            return self._scripts()
        assert name == "libraries"
        return self._table(("name", "instead"), _rows(self.needs_cuda, NEEDS_CUDA))

    def _example(self, rule: Rule) -> list[str]:
        after = _shown(_after(rule), rule.id) if _after(rule) != rule.example else self._word("reported")
        return [rule.id, self.titles[rule.id], _shown(rule.example, rule.id), after]

    def _scripts(self) -> str:
        rows = read()
        names = dict.fromkeys(row.script for row in rows)
        by_way = {(row.script, row.way): row for row in rows}
        cells = [[f"`{name}`", *(self._cell(by_way.get((name, way))) for way in WAYS)] for name in names]
        return self._table(("script", *WAYS), cells)

    def _cell(self, row: Row | None) -> str:
        if row is None:
            return ""
        counts = f"{row.changed} / {row.left}: " if row.changed else ""
        return counts + (self._word(row.result) if row.result in ("trains", "other losses") else f"`{row.result}`")

    def current(self, text: str) -> str:
        """A guide with its tables as they are now."""
        return _TABLE.sub(lambda found: found[1] + "\n" + self.table(found[2]) + "\n" + found[3], text)


def _rows(texts: Mapping[str, str], names: Mapping[str, str]) -> list[list[str]]:
    return [[f"`{name}`", texts[name]] for name in names]


GUIDES = {
    GUIDE: Tables({rule.id: rule.title for rule in RULES.values()}, INSTEAD, NEEDS_CUDA, {}),
    GUIDE.with_suffix(".zh.md"): Tables(chinese.TITLES, chinese.INSTEAD, chinese.NEEDS_CUDA, chinese.WORDS),
}


if __name__ == "__main__":
    for guide, tables in GUIDES.items():
        guide.write_text(tables.current(guide.read_text(encoding="utf-8")), encoding="utf-8")
