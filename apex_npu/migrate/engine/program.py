# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Program`` is one file and what the rules have reported on it so far. ``Finding`` is a row of a report."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

from .names import FUNCTIONS, Exports, Names
from .source import Edit, Source, UnreadableError, apply_edits, parse, same_elsewhere, same_tree


@dataclass(frozen=True, order=True)
class Finding:
    """One report of a rule. Lines and columns count from 1; columns count characters."""

    path: str
    line: int
    column: int
    rule: str
    # "changed"; "unsure": changed only with --unsure; "refused": left for a person; "note"; "kept": a comment says so.
    status: str
    end_line: int  # with end_column, the place after the last character
    end_column: int
    before: str
    after: str | None  # the new text; None if the text stays
    message: str  # the reason and how to solve it; for a change a remark, or ""


def count(findings: Iterable[Finding], *statuses: str) -> int:
    """Return how many findings have one of ``statuses``."""
    return sum(finding.status in statuses for finding in findings)


def once(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings of a file, with equal notes merged into the first one, which counts the others."""
    notes = Counter((one.rule, one.message) for one in findings if one.status == "note")
    for finding in findings:
        places = notes.pop((finding.rule, finding.message), 0) if finding.status == "note" else 1
        if places > 1:
            yield replace(finding, message=f"{finding.message}; {places - 1} more place{'s' * (places > 2)}")
        elif places:
            yield finding


_A = TypeVar("_A", bound=ast.AST)
_B = TypeVar("_B", bound=ast.AST)
_T = TypeVar("_T")
Place = tuple[int, int] | ast.expr | ast.stmt | ast.alias
LITERAL = re.compile(r"""([uUrR]?)(\"""|'''|"|')""")
_FROM = re.compile(r"from[ \t\f]+([\w.]+)(?![\w.])")
# The link of all changes that make a script train on several cards.
PARALLEL = "data parallel"
_KEEP = re.compile(r"#\s*migrate:\s*keep\b")
# Before 3.12 Python may give wrong places inside an f-string.
_EXACT_FSTRINGS = sys.version_info >= (3, 12)
NOT_THE_SAME = (
    "the new text differs from the old one in other places: the file is not changed. Please report this as a bug"
)
_UNPLACED = {
    "npu": "its place in the text is unknown (an f-string before Python 3.12, or several strings): change it by hand",
    "portable": "there is no portable code for it: change it by hand, or use --to npu",
}


@dataclass(frozen=True)
class Draft:
    """A report of a rule before ``Program.settle``. Drafts that share one of ``links`` are all applied, or all refused.

    A draft that is "changed" without edits is not reported. It only takes part in this decision.
    """

    rule: str
    status: str
    start: int
    end: int
    edits: tuple[Edit, ...] = ()
    message: str = ""
    links: frozenset[str] = frozenset()

    def refused(self, message: str) -> Draft:
        """Return this draft with the status "refused" and ``message``."""
        return replace(self, status="refused", edits=(), message=message)


@dataclass(frozen=True)
class Options:
    """The options of the rules."""

    select: tuple[str, ...] = ("D", "X", "O")  # apply rules whose id begins with one of these
    ignore: tuple[str, ...] = ()  # do not apply rules whose id begins with one of these
    unsure: bool = False  # also apply unsure changes
    force: bool = False  # also change files that already name npu
    own: tuple[Any, ...] = ()  # the user's rules, read by rules/own.py
    similar: bool = False  # also apply counterparts that are only similar
    owned: frozenset[str] = frozenset()  # attributes, such as is_cuda, that the files define themselves
    to: str = "npu"  # or "portable": code that runs on npu, cuda, xpu and the CPU
    amp: str = ""  # the opt_level at which amp is added, or replaces torch.amp; "": amp is not added
    amp_args: str = ""  # further arguments of amp.initialize, as Python source
    factories: frozenset[str] = frozenset()  # module.function of other files that make an optimizer and initialize amp
    exports: Exports = field(default_factory=dict)  # the imports behind names that this file imports from other files
    data_parallel: str = ""  # "main": make this script train on several cards; "other": such a script imports it
    model: str = ""  # the name of the model to train on several cards; "": all models
    left: dict[str, str] = field(default_factory=dict)  # links of changes that are not made, with the reasons

    def has(self, rule: str) -> bool:
        """Return whether a rule applies. The rules of amp all apply, or none does."""
        by_option = {"A": bool(self.amp), "T": bool(self.amp), "R": True, "P": bool(self.data_parallel)}
        chosen = rule.startswith(self.select) and not rule.startswith(self.ignore or ("-",))
        return by_option.get(rule[0], chosen)


class UnclearError(Exception):
    """A reason to make none of the changes that belong together: the node, the id of the rule, and the message."""

    def __init__(self, node: ast.expr | ast.stmt, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.node, self.rule, self.reason = node, rule, reason


class Program:
    """One file: its text, its syntax tree, its names, and the reports of the rules so far (``drafts``).

    Raises:
        UnreadableError: The file does not parse.
    """

    def __init__(self, source: Source, options: Options) -> None:
        self.source, self.options = source, options
        self.tree = parse(source.text)
        self.names = Names(self.tree, options.exports)
        self.dotted = self.names.dotted
        self.drafts: list[Draft] = []

    def parent(self, node: ast.AST | None) -> ast.AST | None:
        """Return the node that contains ``node``."""
        return None if node is None else self.names.parents.get(node)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain ``node``, the innermost first."""
        at = self.parent(node)
        while at is not None:
            yield at
            at = self.parent(at)

    def function_of(self, node: ast.AST) -> ast.AST:
        """Return the function around ``node``, or the module."""
        return next((one for one in self.around(node) if isinstance(one, FUNCTIONS)), self.tree)

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """Return the statement that contains an expression."""
        return next(one for one in self.around(node) if isinstance(one, ast.stmt))

    def body_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the block that ``statement`` is in, as a list of statements."""
        fields = [value for _, value in ast.iter_fields(self.names.parents[statement])]
        return next(body for body in fields if isinstance(body, list) and any(one is statement for one in body))

    def has_own_lines(self, statement: ast.stmt) -> bool:
        """Return whether the lines of ``statement`` have nothing else but a comment."""
        end = self.source.span(statement)[1]
        after = self.source.text[end : self.source.line_end(statement.end_lineno or 0)].strip()
        return not self.source.indent(statement).strip() and (not after or after.startswith("#"))

    def check_own_lines(self, statement: ast.stmt, rule: str) -> None:
        """Raise an UnclearError for a statement that shares its line with another one."""
        if not self.has_own_lines(statement):
            raise UnclearError(statement, rule, "the statement shares its line: put it on a line of its own")

    def is_argument(self, node: ast.AST, name: str) -> bool:
        """Return whether ``name`` is an argument of a function around ``node`` and has no other binding there."""
        home = self.names.scope(node).find(name)
        if home is None or not isinstance(home.node, FUNCTIONS) or len(home.bindings[name]) > 1:
            return False
        given = home.node.args
        return any(one.arg == name for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))

    @overload
    def every(self, one: type[_A], /) -> Iterator[_A]: ...
    @overload
    def every(self, one: type[_A], two: type[_B], /) -> Iterator[_A | _B]: ...
    def every(self, *types: type[ast.AST]) -> Iterator[ast.AST]:
        """Yield the nodes of these types, in the order of the text."""
        return (node for node in self.names.nodes if isinstance(node, types))

    def loaded(self) -> Iterator[ast.Name | ast.Attribute]:
        """Yield the names and attributes that the program reads."""
        return (node for node in self.every(ast.Name, ast.Attribute) if isinstance(node.ctx, ast.Load))

    def call_of(self, node: ast.AST) -> ast.Call | None:
        """Return the call whose function ``node`` is, or None."""
        parent = self.parent(node)
        return parent if isinstance(parent, ast.Call) and parent.func is node else None

    def written(self, node: ast.expr) -> str:
        """Return an expression as the program writes it."""
        return self.source.text[slice(*self.source.span(node))]

    def report(
        self,
        rule: str,
        status: str,
        span: Place,
        edits: Iterable[Edit | None] = (),
        message: str = "",
        links: Iterable[str] = (),
        refusal: str = "",
    ) -> None:
        """Add a report on a span. It is refused for the reason ``refusal``, or if an edit is None, without a place."""
        made = tuple(edit for edit in edits if edit is not None)
        if not refusal and len(made) < len(tuple(edits)):
            refusal = _UNPLACED[self.options.to]
        if refusal:
            status, made, message = "refused", (), refusal
        if not isinstance(span, tuple):
            span = self._reported_span(span)
        self.drafts.append(Draft(rule, status, *span, made, message, frozenset(links)))

    def change(self, rule: str, edit: Edit, message: str = "", links: Iterable[str] = ()) -> None:
        """Report the change ``edit`` of its whole span."""
        self.report(rule, "changed", (edit.start, edit.end), [edit], message, links)

    def note(self, rule: str, place: Place, message: str) -> None:
        """Report a note."""
        self.report(rule, "note", place, message=message)

    def refuse(self, rule: str, place: Place, message: str, links: Iterable[str] = ()) -> None:
        """Report what is left for a person, with the reason."""
        self.report(rule, "refused", place, message=message, links=links)

    def all_or_none(self, apply: Callable[[Program], _T], links: Sequence[str], rule: str = "") -> _T | None:
        """Return ``apply(self)``, and link the changes that it reports.

        If it raises UnclearError, report only that, with the first link. An error of another family gets ``rule``.
        """
        before = len(self.drafts)
        try:
            result = apply(self)
        except UnclearError as error:
            del self.drafts[before:]
            own = error.rule if error.rule[0] == (rule or error.rule)[0] else rule
            self.refuse(own, error.node, error.reason, links[:1])
            return None
        self.drafts[before:] = [replace(one, links=one.links.union(links)) for one in self.drafts[before:]]
        return result

    def _reported_span(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        around = self._fstring(node)
        return self.source.span(node if around is None or self._is_exact(node) else around)

    def _fstring(self, node: ast.AST) -> ast.JoinedStr | None:
        """Return the outermost f-string around ``node`` if Python may give wrong places inside it, else None."""
        found = [] if _EXACT_FSTRINGS else [one for one in self.around(node) if isinstance(one, ast.JoinedStr)]
        return found[-1] if found else None

    def _is_exact(self, node: ast.AST) -> bool:
        """Return whether the place of ``node`` is right: the text there parses to an equal node."""
        around = self._fstring(node)
        if around is None:
            return True
        if not isinstance(node, ast.expr) or node.end_lineno != node.lineno:
            return False
        outer, (start, end) = self.source.span(around), self.source.span(node)
        try:
            read = ast.parse(f"({self.source.text[start:end]}\n)", mode="eval").body
        except (SyntaxError, ValueError):
            return False
        return outer[0] <= start and end <= outer[1] and same_tree(read, node)

    def rename(self, node: ast.Attribute, name: str) -> Edit | None:
        """Return an edit that renames an attribute, or None if its place is unknown."""
        end = self.source.span(node)[1]
        start = end - len(node.attr)
        if self.source.text[start:end] != node.attr or not self._is_exact(node):
            return None
        return Edit(start, end, name)

    def rename_module(self, node: ast.ImportFrom, name: str) -> Edit | None:
        """Return an edit that imports the same names from the module ``name``, or None if its place is unknown."""
        found = _FROM.match(self.source.text, *self.source.span(node))
        return Edit(*found.span(1), name) if found else None

    def method_span(self, node: ast.Attribute) -> tuple[int, int]:
        """Return the span of an attribute's dot and name."""
        if not self._is_exact(node):
            return self._reported_span(node)
        end = self.source.span(node)[1]
        return self.source.text.rfind(".", 0, end - len(node.attr)), end

    def restring(self, node: ast.Constant, value: str, length: int | None = None) -> Edit | None:
        """Return an edit that replaces the value of a string literal, or its first ``length`` characters."""
        assert isinstance(node.value, str)
        start, end = self.source.span(node)
        quote = LITERAL.match(self.source.text, start, end)
        if quote is None or self.source.text[quote.end() : end] != node.value + quote[2] or not self._is_exact(node):
            return None
        value += "" if length is None else node.value[length:]
        return Edit(quote.end(), end - len(quote[2]), value)

    def lines(self, anchor: ast.stmt, lines: Sequence[str], *, before: bool = False) -> Edit:
        """Return an edit that adds lines after or before a statement. Four spaces in ``lines`` indent by one level."""
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
        """Return the text to insert before ``statement`` to make it the block of ``header``."""
        indent = self.source.indent(statement)
        inner = "\t" if "\t" in indent else "    "
        return f"{header}{self.source.newline(statement.lineno)}{indent}{inner}"

    def settle(self) -> None:
        """Decide which drafts apply: unsure ones, lines that a comment keeps, and drafts that are linked."""
        self.drafts = [draft for draft in self.drafts if self.options.has(draft.rule)]
        for number, draft in enumerate(self.drafts):
            status, message = draft.status, draft.message
            if status == "unsure" and self.options.unsure and draft.edits:
                status, message = "changed", ""
            line = self.source.place(draft.start)[0]
            kept = _KEEP.search(self.source.text, self.source.line_start(line), self.source.line_end(line))
            if kept and status != "note":
                status, message = "kept", "a comment keeps it"
            self.drafts[number] = replace(draft, status=status, message=message)
        while self._fall():
            pass
        self.drafts = [draft for draft in self.drafts if draft.status != "changed" or draft.edits]

    def _fall(self) -> bool:
        """Refuse drafts that are linked to a refused or kept one. Return whether there were any."""
        left = self.options.left
        stays = {link: draft for draft in self.drafts if draft.status in ("refused", "kept") for link in draft.links}
        fallen = False
        for number, draft in enumerate(self.drafts):
            cause = next((stays[link] for link in sorted(draft.links) if link in stays), None)
            reason = next((left[link] for link in sorted(draft.links) if link in left), "")
            if cause is not None and not reason:
                line = self.source.place(cause.start)[0]
                reason = f"it would be changed together with line {line} ({cause.rule}), which stays as it is"
            if draft.status in ("changed", "unsure") and reason:
                self.drafts[number] = draft.refused(reason)
                fallen = True
        return fallen

    def refuse_drafts(self, drafts: list[Draft], message: str) -> None:
        """Refuse some of the drafts."""
        self.drafts = [one.refused(message) if one in drafts else one for one in self.drafts]

    def changes(self) -> list[Draft]:
        """Return the drafts with the status "changed"."""
        return [draft for draft in self.drafts if draft.status == "changed"]

    def edits(self) -> list[Edit]:
        """Return the edits of the drafts with the status "changed"."""
        return [edit for draft in self.changes() for edit in draft.edits]

    def rewritten(self) -> str:
        """Return the new text. Raise an UnreadableError if it does not parse or differs elsewhere from the old one."""
        edits = self.edits()
        text = apply_edits(self.source.text, edits)
        if not same_elsewhere(self.source, self.tree, edits, text):
            raise UnreadableError("F909", NOT_THE_SAME)
        return text

    def findings(self, path: str) -> list[Finding]:
        """Return the rows of the report."""
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
