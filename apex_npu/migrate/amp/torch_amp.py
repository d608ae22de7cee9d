# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules that replace torch.amp by amp: they remove the scaler and the blocks of autocast."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from apex_npu.migrate.engine.names import imported
from apex_npu.migrate.engine.program import Program, UnclearError
from apex_npu.migrate.engine.source import Edit, apply_edits, without
from apex_npu.migrate.engine.syntax import constant, given_to, keywords, text
from apex_npu.migrate.rules.targets import replaced

_PREFIX = r"torch(_npu)?\.(cuda\.|npu\.)?(amp\.)?(autocast_mode\.|grad_scaler\.)?"
_AUTOCAST, _SCALER = re.compile(_PREFIX + "autocast"), re.compile(_PREFIX + "GradScaler")
# Functions without side effects that always return the same value.
_ASKS = re.compile(r"torch\.([\w.]+\.)?is_\w+")
_SIMPLE = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp),
    *(ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop),
)


class TorchAmp:
    """The uses of torch.amp in a program.

    ``enabled`` is the source of the expression that enables torch.amp; it is "" if torch.amp is always enabled.

    Raises:
        UnclearError: amp cannot replace one of the uses.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.is_bfloat16, self.enabled = program, False, ""
        self.switch: ast.expr | None = None
        self._removed: dict[int, list[ast.stmt]] = {}  # the removed statements by the id of their block
        uses = [*program.loaded()]
        self.made = [self._made(node) for node in uses if _SCALER.fullmatch(program.dotted(node))]
        self.scalers = frozenset(text(statement.targets[0]) for statement in self.made)
        self.scalers |= {name for name, _ in self._passed()}
        self.passed = {node for _, node in self._passed()}
        self.blocks = [self._block(node) for node in uses if _AUTOCAST.fullmatch(program.dotted(node))]
        calls = [item.context_expr for _, item in self.blocks]
        # With bfloat16 amp does not scale the loss, so the scaler's own enabled makes no difference.
        for call in calls if self.is_bfloat16 else [*(made.value for made in self.made), *calls]:
            assert isinstance(call, ast.Call)
            self._enable(call)
        self.uses = [node for node in uses if text(node) in self.scalers]

    def _passed(self) -> list[tuple[str, ast.expr]]:
        """Return the arguments of this file's functions that are a scaler: their names, and the values passed."""
        functions: dict[str, list[ast.FunctionDef]] = {}
        for node in self.program.every(ast.FunctionDef):
            if isinstance(self.program.parent(node), ast.Module):
                functions.setdefault(node.name, []).append(node)
        found: list[tuple[str, ast.expr]] = []
        for call in self.program.every(ast.Call):
            defined = functions.get(call.func.id, []) if isinstance(call.func, ast.Name) else []
            if len(defined) == 1 and not any(isinstance(one, ast.Starred) for one in call.args):
                found += [one for one in given_to(defined[0], call).items() if text(one[1]) in self.scalers]
        return found

    def _made(self, node: ast.expr) -> ast.Assign:
        call = self.program.parent(node)
        statement = self.program.parent(call)
        if not isinstance(call, ast.Call) or not isinstance(statement, ast.Assign) or not text(statement.targets[0]):
            raise UnclearError(node, "A355", "the scaler is not assigned to a name")
        settings = keywords(call).keys() - {"device", "enabled"}
        if len(statement.targets) > 1 or len(call.args) > (not self._is_for_cuda(call)) or settings:
            reason = "the scaler has settings: pass them to amp by --amp-args, and remove them here"
            raise UnclearError(node, "A355", reason)
        return statement

    def _block(self, node: ast.expr) -> tuple[ast.With, ast.withitem]:
        call = self.program.parent(node)
        item = self.program.parent(call)
        block = self.program.parent(item)
        if not isinstance(call, ast.Call) or not isinstance(item, ast.withitem) or not isinstance(block, ast.With):
            raise UnclearError(node, "A355", "autocast is not used in a with statement")
        if item.optional_vars is not None or keywords(call).keys() - {"device_type", "dtype", "enabled"}:
            raise UnclearError(node, "A355", "autocast has a name (as), or settings that amp does not have")
        given = keywords(call)
        device = next(iter([] if self._is_for_cuda(call) else call.args), given.get("device_type"))
        if constant(device) == "cpu":
            raise UnclearError(node, "A355", "autocast is for the CPU")
        if len(call.args) > 1:
            raise UnclearError(node, "A355", "pass the arguments of autocast by keyword")
        dtype = self.program.dotted(given["dtype"]) if "dtype" in given else "torch.float16"
        if dtype not in ("torch.float16", "torch.half", "torch.bfloat16"):
            raise UnclearError(node, "A355", "the dtype of autocast is unclear")
        self.is_bfloat16 |= dtype == "torch.bfloat16"
        return block, item

    def _is_for_cuda(self, call: ast.Call) -> bool:
        """Return whether the class is from torch.cuda.amp. Its first argument is then ``enabled``, not the device."""
        dotted = self.program.dotted(call.func)
        return ".cuda." in dotted or ".npu." in dotted

    def _enable(self, call: ast.Call) -> None:
        given = [one.value for one in call.keywords if one.arg == "enabled"]
        for value in given or (call.args if self._is_for_cuda(call) else []):
            if constant(value) is True:
                continue
            if not self._is_simple(value) or self.enabled not in ("", ast.unparse(value)):
                raise UnclearError(call, "A355", "enabled= is computed, or differs: pass one variable everywhere")
            self.enabled, self.switch = ast.unparse(value), value

    def _is_simple(self, value: ast.expr) -> bool:
        """Return whether an expression can be moved: it has no side effects."""
        if isinstance(value, ast.Constant):
            return False
        nodes = [*ast.walk(value)]
        called = [one for one in nodes if isinstance(one, ast.Call)]
        asks = (_ASKS.fullmatch(self.program.dotted(one.func)) and not (one.args or one.keywords) for one in called)
        return all(isinstance(one, _SIMPLE) or one in called for one in nodes) and all(asks)

    def moved(self) -> tuple[str, list[str]]:
        """Return the expression that enables amp, with the changes of other rules, and the links of these changes."""
        assert self.switch is not None
        program, (start, end) = self.program, self.program.source.span(self.switch)
        statuses = ("changed", "unsure") if program.options.unsure else ("changed",)
        drafts = [one for one in program.drafts if start <= one.start and one.end <= end and one.status in statuses]
        drafts = [one for one in drafts if program.options.has(one.rule)]
        written = apply_edits(program.source.text, [edit for one in drafts for edit in one.edits], start, end)
        links = [link for one in drafts for link in one.links]
        written = " ".join(written.split()) if "\n" in written else written
        return f"({written})" if isinstance(self.switch, (ast.Compare, ast.BoolOp)) else written, links

    def report(self, amp: str) -> None:
        """Report the changes, except for ``scaler.scale(loss).backward()``, which ``changes.scale`` changes."""
        program = self.program
        for made in self.made:
            self._remove("T401", made)
        for node in self.uses:
            method = program.parent(node)
            call = program.parent(method)
            statement = program.parent(call)
            name = method.attr if isinstance(method, ast.Attribute) else ""
            if node in self.passed:
                program.report("T407", "changed", node, [replaced(program, node, "None")])
                continue
            if not isinstance(call, ast.Call) or call.func is not method:
                raise UnclearError(node, "A355", "the scaler is passed on")
            if name in ("update", "unscale_") and isinstance(statement, ast.Expr):
                self._remove("T404", statement)
            elif name == "step":
                (start, end), (first, last) = program.source.span(call), program.source.span(call.args[0])
                edits = [Edit(start, first, ""), Edit(last, end, ".step()")]
                program.report("T403", "changed", call, edits)
            elif name in ("state_dict", "load_state_dict"):
                program.report("T405", "changed", node, [replaced(program, node, amp)])
            elif name != "scale" or not isinstance(statement, ast.Attribute) or statement.attr != "backward":
                raise UnclearError(node, "A355", f"amp has no counterpart of the scaler's {name}, as it is used here")
        for block, item in self.blocks:
            self._remove_item(block, item)
        for statement in program.every(ast.ImportFrom):
            moved = all(_AUTOCAST.fullmatch(name) or _SCALER.fullmatch(name) for name in imported(statement))
            if moved and program.has_own_lines(statement):
                self._remove("T401", statement)

    def _remove(self, rule: str, statement: ast.stmt) -> None:
        program, source = self.program, self.program.source
        program.check_own_lines(statement, "A353")
        body = program.body_of(statement)
        gone = self._removed.setdefault(id(body), [])
        gone.append(statement)
        start, end = source.span(statement)
        if len(gone) == len(body):
            program.report(rule, "changed", statement, [Edit(start, end, "pass")])
            return
        if source.line_end(statement.end_lineno or 0) == end:
            start, end = source.line_start(statement.lineno), end + len(source.newline(statement.end_lineno or 0))
        program.change(rule, Edit(start, min(end, len(source.text)), ""))

    def _remove_item(self, block: ast.With, item: ast.withitem) -> None:
        program, source = self.program, self.program.source
        if self.holds(block):
            raise UnclearError(block, "A355", "autocast is inside of autocast")
        if len(block.items) > 1:
            ends = [source.span(one.optional_vars or one.context_expr)[1] for one in block.items]
            spans = [(source.span(one.context_expr)[0], end) for one, end in zip(block.items, ends, strict=True)]
            for edit in without(source, spans, [one is item for one in block.items]):
                program.change("T406", edit)
            return
        edits = list(self._dedented(block))
        program.report("T406", "changed", (edits[0].start, edits[-1].end), edits)

    def _dedented(self, block: ast.With) -> Iterator[Edit]:
        """Yield edits that remove the first line of a block and dedent the others, except lines inside a string."""
        source = self.program.source
        start, outer, indent = source.span(block)[0], source.indent(block), source.indent(block.body[0])
        header = source.place(source.span(block.items[-1].context_expr)[1])[0]
        rest = source.text[source.span(block.items[-1].context_expr)[1] : source.line_end(header)].strip()
        if not re.fullmatch(r":\s*(#.*)?", rest) or not indent.startswith(outer):
            raise UnclearError(block, "A355", "the block of autocast shares a line, or has an unusual layout")
        end = start + source.text[start:].index("#") if "#" in rest else source.line_start(header + 1)
        yield Edit(start if "#" in rest else source.line_start(block.lineno), end, "")
        texts = [one for one in ast.walk(block) if isinstance(one, (ast.Constant, ast.JoinedStr))]
        kept = {line for one in texts for line in range(one.lineno + 1, (one.end_lineno or 0) + 1)}
        for line in range(header + 1, (block.end_lineno or 0) + 1):
            begin = source.line_start(line)
            if line not in kept and source.text.startswith(indent, begin, source.line_end(line)):
                yield Edit(begin + len(outer), begin + len(indent), "")

    def holds(self, node: ast.AST) -> bool:
        """Return whether ``node`` is in a block of autocast."""
        blocks = [block for block, _ in self.blocks]
        return any(one is block for one in self.program.around(node) for block in blocks)
