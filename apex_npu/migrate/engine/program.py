# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Program``: one file as the rules see it, and what they have said of it so far; ``Finding``: a row of a report."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

from .names import Exports, Names
from .source import Edit, Source, UnreadableError, apply_edits, parse, same_elsewhere, same_tree


@dataclass(frozen=True, order=True)
class Finding:
    """The report of a rule on one place. Lines and columns count from 1; columns count characters.

    Example::

        >>> migrate.rewrite("x = x.cuda()").findings[0].after
        '.npu'
    """

    path: str
    line: int
    column: int
    rule: str
    # "changed"; "unsure", applied with --unsure alone; "refused", left for a person; "note"; "kept", by a comment.
    status: str
    end_line: int  # of the character after the last one, as end_column
    end_column: int
    before: str
    after: str | None  # None where nothing takes its place
    message: str  # the reason and the way out; for a change what there is to know about it, if anything


def count(findings: Iterable[Finding], *statuses: str) -> int:
    """How many findings have one of ``statuses``."""
    return sum(finding.status in statuses for finding in findings)


def once(findings: Sequence[Finding]) -> Iterator[Finding]:
    """The findings of a file, with each note at its first place alone, which says how many more there are."""
    notes = Counter((one.rule, one.message) for one in findings if one.status == "note")
    for finding in findings:
        places = notes.pop((finding.rule, finding.message), 0) if finding.status == "note" else 1
        if places > 1:
            yield replace(finding, message=f"{finding.message}; {places - 1} more place{'s' * (places > 2)}")
        elif places:
            yield finding


_A = TypeVar("_A", bound=ast.AST)
_B = TypeVar("_B", bound=ast.AST)
LITERAL = re.compile(r"""([uUrR]?)(\"""|'''|"|')""")
_FROM = re.compile(r"from[ \t\f]+([\w.]+)(?![\w.])")
_KEEP = re.compile(r"#\s*migrate:\s*keep\b")
# Before 3.12 Python gives places inside an f-string that may be wrong.
_EXACT_FSTRINGS = sys.version_info >= (3, 12)
NOT_THE_SAME = "the new text is not the old one with these changes: the file is left. Please report this as a bug"
_UNPLACED = {
    "npu": "its place in the text cannot be told (an f-string before Python 3.12, or pieces): change it by hand",
    "portable": "there is no portable text for it: change it by hand, or use --to npu",
}


@dataclass(frozen=True)
class Draft:
    """What a rule says of a span, before it is settled what else stands or falls with it: what has the same ``links``.

    "changed" without edits: it is right as it is if all that has its links is changed.
    """

    rule: str
    status: str
    start: int
    end: int
    edits: tuple[Edit, ...] = ()
    message: str = ""
    links: frozenset[str] = frozenset()

    def refused(self, message: str) -> Draft:
        """The same, left for a person."""
        return replace(self, status="refused", edits=(), message=message)


@dataclass(frozen=True)
class Options:
    """The options of the rules.

    Example::

        >>> migrate.rewrite('pick("cuda")', options=migrate.Options(unsure=True)).source
        'pick("npu")'
    """

    select: tuple[str, ...] = ("D", "X", "O")  # ids of rules or families that apply
    ignore: tuple[str, ...] = ()  # those that do not
    unsure: bool = False  # apply what is unsure
    force: bool = False  # change files that speak of npu already
    own: tuple[Any, ...] = ()  # a person's rules, as rules/own.py reads them
    similar: bool = False  # use what is only similar to what CUDA has
    owned: frozenset[str] = frozenset()  # names of attributes that the files define themselves
    to: str = "npu"  # or "portable": code that runs on npu, cuda, xpu and the CPU
    amp: str = ""  # the opt_level of an amp that is put in, or takes torch.amp's place
    amp_args: str = ""  # further arguments of amp.initialize, as a program has them
    amp_left: str = ""  # why amp stays out of the program
    factories: frozenset[str] = frozenset()  # module.function of those in other files that make an optimizer, with amp
    exports: Exports = field(default_factory=dict)  # of modules that this file imports names from: which are imports
    data_parallel: str = ""  # "main": the script becomes one for several cards; "other": it is imported by one
    model: str = ""  # the name of the model that is trained on several cards; "": all of them
    parallel_left: str = ""  # why the script stays one for one card

    def has(self, rule: str) -> bool:
        """Whether a rule applies; the rules of amp do together."""
        by_option = {"A": bool(self.amp), "T": bool(self.amp), "R": True, "P": bool(self.data_parallel)}
        chosen = rule.startswith(self.select) and not rule.startswith(self.ignore or ("-",))
        return by_option.get(rule[0], chosen)


class Program:
    """One file: its text, its syntax tree, what its names mean, and what rules have said of it (``drafts``).

    Raises:
        UnreadableError: It does not parse.
    """

    def __init__(self, source: Source, options: Options) -> None:
        self.source, self.options = source, options
        self.tree = source.parse()
        self.names = Names(self.tree, options.exports)
        self.drafts: list[Draft] = []

    def parent(self, node: ast.AST | None) -> ast.AST | None:
        """The node that contains ``node``."""
        return None if node is None else self.names.parents.get(node)

    def dotted(self, node: ast.AST) -> str:
        """The full name of an import that a name, or attributes of a name, refer to; "": they do not."""
        return self.names.dotted(node) or ""

    @overload
    def every(self, one: type[_A], /) -> Iterator[_A]: ...
    @overload
    def every(self, one: type[_A], two: type[_B], /) -> Iterator[_A | _B]: ...
    def every(self, *types: type[ast.AST]) -> Iterator[ast.AST]:
        """The nodes of these types, in the order of the text."""
        return (node for node in self.names.nodes if isinstance(node, types))

    def loaded(self) -> Iterator[ast.Name | ast.Attribute]:
        """The names and attributes that are read."""
        return (node for node in self.every(ast.Name, ast.Attribute) if isinstance(node.ctx, ast.Load))

    def is_called(self, node: ast.AST) -> bool:
        """Whether ``node`` is what a call calls."""
        parent = self.parent(node)
        return isinstance(parent, ast.Call) and parent.func is node

    def report(
        self,
        rule: str,
        status: str,
        span: tuple[int, int] | ast.expr | ast.stmt | ast.alias,
        edits: Iterable[Edit | None] = (),
        message: str = "",
        links: Iterable[str] = (),
        unplaced: str = "",
    ) -> None:
        """Say something of a place. Edits that are None could not be placed: the change is refused, ``unplaced``."""
        made = tuple(edit for edit in edits if edit is not None)
        if len(made) < len(tuple(edits)):
            status, made, message = "refused", (), unplaced or _UNPLACED[self.options.to]
        if not isinstance(span, tuple):
            span = self._reported_span(span)
        self.drafts.append(Draft(rule, status, *span, made, message, frozenset(links)))

    def change(self, rule: str, edit: Edit, message: str = "", links: Iterable[str] = ()) -> None:
        """Say that all of a span is changed."""
        self.report(rule, "changed", (edit.start, edit.end), [edit], message, links)

    def _reported_span(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        around = self._fstring(node)
        return self.source.span(node if around is None or self._is_exact(node) else around)

    def _fstring(self, node: ast.AST) -> ast.JoinedStr | None:
        """The outermost f-string around ``node``, where its places may be wrong."""
        found = None
        at: ast.AST | None = None if _EXACT_FSTRINGS else self.parent(node)
        while isinstance(at, (ast.expr, ast.keyword, ast.comprehension)):
            found = at if isinstance(at, ast.JoinedStr) else found
            at = self.parent(at)
        return found

    def _is_exact(self, node: ast.AST) -> bool:
        """Whether the text at the place of ``node``, which is in an f-string, is that of ``node``."""
        around = self._fstring(node)
        if around is None:
            return True
        if not isinstance(node, ast.expr) or node.end_lineno != node.lineno:
            return False
        outer, (start, end) = self.source.span(around), self.source.span(node)
        try:
            read = parse(f"({self.source.text[start:end]}\n)").body
        except UnreadableError:
            return False
        inside = outer[0] <= start and end <= outer[1]
        return inside and isinstance(read[0], ast.Expr) and _same_but_context(read[0].value, node)

    def rename(self, node: ast.Attribute, name: str) -> Edit | None:
        """Give an attribute another name."""
        end = self.source.span(node)[1]
        start = end - len(node.attr)
        if self.source.text[start:end] != node.attr or not self._is_exact(node):
            return None
        return Edit(start, end, name)

    def rename_module(self, node: ast.ImportFrom, name: str) -> Edit | None:
        """Import the same names from another module."""
        found = _FROM.match(self.source.text, *self.source.span(node))
        return Edit(*found.span(1), name) if found else None

    def method_span(self, node: ast.Attribute) -> tuple[int, int]:
        """The span of the dot and the name."""
        if not self._is_exact(node):
            return self._reported_span(node)
        end = self.source.span(node)[1]
        return self.source.text.rfind(".", 0, end - len(node.attr)), end

    def restring(self, node: ast.Constant, value: str, length: int | None = None) -> Edit | None:
        """Let a string literal have another value, or begin with another text than its first ``length`` characters."""
        assert isinstance(node.value, str)
        start, end = self.source.span(node)
        quote = LITERAL.match(self.source.text, start, end)
        if quote is None or self.source.text[quote.end() : end] != node.value + quote[2] or not self._is_exact(node):
            return None
        value += "" if length is None else node.value[length:]
        return Edit(quote.end(), end - len(quote[2]), value)

    def lines(self, anchor: ast.stmt, lines: Sequence[str], *, before: bool = False) -> Edit:
        """Statements after another one, or before it; four spaces in ``lines`` are one more indentation."""
        source = self.source
        start = source.line_start(anchor.lineno)
        indent = re.match(r"[ \t\f]*", source.text[start:])[0]  # type: ignore[index]
        inner, newline = "\t" if "\t" in indent else "    ", source.newline(anchor.lineno)
        written = [indent + line.replace("    ", inner) for line in lines]
        if before:
            return Edit(start, start, "".join(line + newline for line in written))
        end = source.line_end(anchor.end_lineno or 0)
        return Edit(end, end, "".join(newline + line for line in written))

    def put_into(self, statement: ast.stmt, header: str) -> str:
        """The text between ``statement`` and the beginning of its line after ``header``, of which it is the block."""
        indent = self.source.indent(statement)
        inner = "\t" if "\t" in indent else "    "
        return f"{header}{self.source.newline(statement.lineno)}{indent}{inner}"

    def settle(self) -> None:
        """Decide what is unsure, what a comment keeps, and what stands or falls together."""
        self.drafts = [draft for draft in self.drafts if self.options.has(draft.rule)]
        for number, draft in enumerate(self.drafts):
            status, message = draft.status, draft.message
            if status == "unsure" and self.options.unsure and draft.edits:
                status, message = "changed", ""
            line = self.source.place(draft.start)[0]
            kept = _KEEP.search(self.source.text, self.source.line_start(line), self.source.line_end(line))
            if kept and status != "note":
                status, message = "kept", "a comment says so"
            self.drafts[number] = replace(draft, status=status, message=message)
        while self._fall():
            pass
        self.drafts = [draft for draft in self.drafts if draft.status != "changed" or draft.edits]

    def _fall(self) -> bool:
        """Refuse what is linked to something that stays; whether there was anything."""
        stays = {link: draft for draft in self.drafts if draft.status in ("refused", "kept") for link in draft.links}
        fallen = False
        for number, draft in enumerate(self.drafts):
            cause = next((stays[link] for link in sorted(draft.links) if link in stays), None)
            if draft.status in ("changed", "unsure") and cause is not None:
                line = self.source.place(cause.start)[0]
                self.drafts[number] = draft.refused(
                    f"it is changed together with line {line} ({cause.rule}), which stays as it is"
                )
                fallen = True
        return fallen

    def refuse(self, message: str, concerns: Callable[[Draft], bool], since: int = 0) -> None:
        """Leave for a person what ``concerns`` is true of, among what was said from number ``since`` on."""
        self.drafts[since:] = [one.refused(message) if concerns(one) else one for one in self.drafts[since:]]

    def changes(self) -> list[Draft]:
        """Return the drafts that are to be changed."""
        return [draft for draft in self.drafts if draft.status == "changed"]

    def rewritten(self) -> str:
        """The new text; an UnreadableError where it does not parse, or something else is changed in it."""
        edits = [edit for draft in self.changes() for edit in draft.edits]
        text = apply_edits(self.source.text, edits)
        if not same_elsewhere(self.source, self.tree, edits, text):
            raise UnreadableError("F909", NOT_THE_SAME)
        return text

    def findings(self, path: str) -> list[Finding]:
        """The rows of the report."""
        found = {(draft.rule, draft.start): self._finding(path, draft) for draft in self.drafts}
        return list(once(sorted(found.values())))

    def _finding(self, path: str, draft: Draft) -> Finding:
        text = self.source.text
        after = apply_edits(text, draft.edits, draft.start, draft.end) if draft.edits else None
        line, column = self.source.place(draft.start)
        before = text[draft.start : draft.end]
        if after is None:
            before = before.partition("\n")[0][:200]
        places = (draft.rule, draft.status, *self.source.place(draft.end))
        return Finding(path, line, column, *places, before, after, draft.message)


def _same_but_context(one: ast.expr, other: ast.expr) -> bool:
    for node in (one, other):
        if isinstance(node, (ast.Attribute, ast.Name)) and not isinstance(node.ctx, ast.Load):
            return False
    return same_tree(one, other)
