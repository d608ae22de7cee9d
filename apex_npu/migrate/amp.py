# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules that put amp into a program: all that it takes, or nothing. ``training.py`` tells what the program does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from .findings import Finding
from .ours import UNNAMED, name_of
from .program import Program
from .rules import RULES
from .source import Edit
from .tables import TRAINERS
from .targets import replaced
from .torch_amp import TorchAmp
from .training import Backward, Made, Training, UnclearError, alone, around, body_of, function_of, is_argument, text

LEVELS = ("O1", "O2", "O4", "O5")
_OF_BFLOAT16 = {"O1": "O4", "O2": "O5"}
_OURS = re.compile(r"apex(_npu)?\.amp(\..*)?|apex(_npu)?\.fp16_utils(\..*)?")
_WRAPPER = re.compile(r"(torch|apex|apex_npu)\..*(DistributedDataParallel|DataParallel)|torch\.compile")
_SHARDED = re.compile(r"torch\.distributed\..*(FullyShardedDataParallel|fully_shard|distribute_\w+|parallelize_module)")
_CLIP = re.compile(r"torch\.nn\.utils\.(clip_grad\.)?clip_grad_(norm|value)_?")
_BCE = re.compile(r"torch\.nn\.(modules\.loss\.)?BCELoss")
_NOT_GIVEN = {"models", "optimizers", "opt_level", "enabled", "num_losses", "fuse_unscale"} | {
    *("combine_ddp", "process_group", "overflow_group", "cast_model_type", "ddp_reduce_dtype", "cast_model_outputs")
}
_MOVES = ("to", "cuda", "npu", "half", "float", "double", "bfloat16", "type")


def check(program: Program) -> None:
    """Say what the rules for amp find."""
    if not program.options.amp:
        return
    has_amp = _has_amp(program)
    if has_amp is not None:
        program.report("A350", "note", has_amp, message=RULES["A350"].message)
        return
    before = len(program.drafts)
    try:
        _Insertion(program).report()
    except UnclearError as error:
        del program.drafts[before:]
        program.report(error.rule, "refused", error.node, message=error.reason, links=["amp"])
    if program.options.amp_left:
        for number, draft in enumerate(program.drafts[before:], before):
            if draft.status != "refused":
                message = f"amp stays out of the program: {program.options.amp_left}"
                program.drafts[number] = replace(draft, status="refused", edits=(), message=message)


def arguments_of_initialize() -> frozenset[str]:
    """What else ``amp.initialize`` can be given, read from its source: nothing is imported.

    Left out are what the rules give, and what asks for another loop than they write: losses with scales of their own,
    gradients that stay scaled, averages over processes.
    """
    source = Path(__file__).parents[1].joinpath("amp", "frontend.py").read_text(encoding="utf-8")
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    given = next(node.args for node in functions if node.name == "initialize")
    return frozenset(one.arg for one in (*given.args, *given.kwonlyargs)) - _NOT_GIVEN


def why_left(files: Iterable[Sequence[Finding]]) -> str:
    """Why amp cannot be put into a program as a whole, by the findings of its files; "": it can, or is not to be."""
    found = [finding for findings in files for finding in findings if finding.rule[0] in "AT"]
    rules = [finding.rule for finding in found if finding.status == "changed"]
    left = next((one for one in found if one.status in ("refused", "kept")), None)
    if left is not None and rules:
        return f"{left.path}:{left.line} ({left.rule}): {left.message}"
    if "A350" in [finding.rule for finding in found] and rules:
        return "a part of it has amp already"
    if rules and "A301" not in rules:
        return "no optimizer is made here by a class that is known"
    if rules and not {"A302", "T402"} & {*rules}:
        return "no backward is seen"
    return "optimizers are made in several files" if rules.count("A301") > 1 else ""


def drop_covered(program: Program) -> None:
    """Forget what other rules say of text that is removed with torch.amp."""
    spans = [
        (edit.start, edit.end)
        for draft in program.changes()
        if draft.rule[0] == "T"
        for edit in draft.edits
        if edit.end
    ]
    program.drafts = [
        draft
        for draft in program.drafts
        if draft.rule[0] == "T" or not any(start <= draft.start < draft.end <= end for start, end in spans)
    ]


def _has_amp(program: Program) -> ast.stmt | None:
    """The first import of an amp of Apex's form."""
    for node in program.names.nodes:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module or ""]
        if any(_OURS.fullmatch(module) for module in modules):
            assert isinstance(node, ast.stmt)
            return node
    names = (node for node in program.names.nodes if isinstance(node, ast.Attribute))
    used = next((node for node in names if _OURS.fullmatch(program.names.dotted(node) or "")), None)
    return None if used is None else next(one for one in around(program, used) if isinstance(one, ast.stmt))


class _Insertion:
    """amp in one file.

    Raises:
        UnclearError: A part of what it takes cannot be told.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.source = program, program.source
        self.torch_amp = TorchAmp(program)
        self.training = Training(program, self.torch_amp.scalers)
        self.level = program.options.amp
        if self.torch_amp.is_bfloat16:
            self.level = _OF_BFLOAT16.get(self.level, self.level)
        self.casts_model = self.level in ("O2", "O5")
        self.removed: dict[int, list[ast.stmt]] = {}
        self.amp = name_of(program, "amp") or ""

    def report(self) -> None:
        """Say all of it."""
        training, torch_amp = self.training, self.torch_amp
        self._check_libraries()
        if training.made:
            self._initialize()
        elif torch_amp.enabled or torch_amp.is_bfloat16:
            raise UnclearError(torch_amp.blocks[0][0], "A355", "its settings belong to amp.initialize, in another file")
        torch_amp.report(self.amp, self.removed)
        for backward in training.backwards:
            self._scale(backward)
        for call in training.calls:
            name = self.program.names.dotted(call.func) or ""
            if _CLIP.fullmatch(name):
                self._clip(call)
            elif _BCE.fullmatch(name):
                self._loss(call)
            elif name == "torch.nn.functional.binary_cross_entropy":
                self._in_float32(call)
        self._checkpoints()

    def _check_libraries(self) -> None:
        training, names = self.training, self.program.names
        for node in names.nodes:
            if isinstance(node, (ast.Name, ast.Attribute)):
                dotted = names.dotted(node) or ""
                if _SHARDED.fullmatch(dotted):
                    raise UnclearError(node, "A354", "parameters are sharded: use torch's own mixed precision")
                if dotted.partition(".")[0] in TRAINERS and (training.made or training.backwards):
                    raise UnclearError(node, "A354", f"{dotted.partition('.')[0]} trains: use its own mixed precision")
                if dotted in ("torch.autograd.grad", "torch.autograd.backward"):
                    raise UnclearError(node, "A353", f"{dotted} is used, whose gradients amp does not scale")
                used = node.attr if isinstance(node, ast.Attribute) else ""
                if used in ("grad", "share_memory") and self.casts_model and (training.made or training.backwards):
                    raise UnclearError(node, "A354", f"{used} of parameters is used: at this level masters are stepped")
        first = next(iter([*training.made, *training.backwards]), None)
        if first is not None and not self.amp:
            raise UnclearError(first.statement, "A354", UNNAMED)

    def _place(self) -> ast.stmt:
        """The statement that ``initialize`` comes after: the last optimizer, or the ``if`` that chooses one."""
        made, program = sorted(self.training.made, key=lambda one: self.training.offset(one.call)), self.program
        last = made[-1].statement
        bodies = {id(body_of(program, one.statement)) for one in made}
        targets = {one.target for one in made}
        if len(bodies) == 1 and len(targets) == len(made):
            return last
        choices = [[at for at in around(program, one.statement) if isinstance(at, ast.If)] for one in made]
        common = next((at for at in choices[0] if all(at in others for others in choices)), None)
        functions = {function_of(program, one.statement) for one in made}
        bound = self.training.scope_of(last, made[-1].target)
        if bound is not None and any(isinstance(one, ast.Constant) for one in bound.bindings.get(made[-1].target, ())):
            raise UnclearError(last, "A351", f"{made[-1].target} may be None where amp.initialize is called")
        alike = len(targets) == len({one.models for one in made}) == len(functions) == 1
        if common is None or len(bodies) < len(made) or not alike:
            raise UnclearError(last, "A351", "optimizers are made at several places: make them at one")
        parent = program.parent(common)
        while isinstance(parent, ast.If) and parent.orelse == [common] and self._begins(common, "elif"):
            common, parent = parent, program.parent(parent)
        return common

    def _begins(self, node: ast.stmt, word: str) -> bool:
        return self.source.text.startswith(word, self.source.span(node)[0])

    def _initialize(self) -> None:
        program, place = self.program, self._place()
        made: dict[str, Made] = {one.target: one for one in self.training.made}
        models = list(dict.fromkeys(model for one in made.values() for model in one.models))
        wrapped = [model for model in models if self._is_wrapped(model, place)]
        self._check_after(models, place)
        names = [*models, *made]
        home = self.training.scope_of(place, names[0])
        local = all(
            program.names.scope(place) is self.training.scope_of(place, name) for name in names if "." not in name
        )
        assigned = f"{_listed(models)}, {_listed([*made])} = " if home is not None and local and not wrapped else ""
        models = [f'getattr({model}, "module", {model})' if model in wrapped else model for model in models]
        options = [f'opt_level="{self.level}"', *([program.options.amp_args] if program.options.amp_args else [])]
        if self.torch_amp.enabled:
            self._check_bound(place)
            options.append(f"enabled={self.torch_amp.enabled}")
        call = f"{assigned}{self.amp}.initialize({_listed(models)}, {_listed([*made])}, {', '.join(options)})"
        self._behind("A301", place, [call])

    def _check_bound(self, place: ast.stmt) -> None:
        """Refuse an ``enabled`` that is not known yet where ``initialize`` is called."""
        name = self.torch_amp.enabled.partition(".")[0]
        home = self.program.names.scope(place).find(name)
        stored = [node for node in self.program.names.nodes if isinstance(node, ast.Name) and node.id == name]
        ours = [
            node for node in stored if not isinstance(node.ctx, ast.Load) and self.program.names.scope(node) is home
        ]
        late = any(self.training.offset(node) > self.training.offset(place) for node in ours)
        if home is None or (late and home is self.program.names.scope(place)):
            raise UnclearError(place, "A355", f"{self.torch_amp.enabled} is not known where the optimizer is made")

    def _is_wrapped(self, model: str, place: ast.stmt) -> bool:
        """Whether a model can be inside of DistributedDataParallel already."""
        wraps = []
        for node in self.program.names.nodes:
            if isinstance(node, ast.Assign) and model in map(text, node.targets):
                value = node.value
                while (
                    isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _MOVES
                ):
                    value = value.func.value
                name = self.program.names.dotted(value.func) or "" if isinstance(value, ast.Call) else ""
                before = self.training.offset(node) < self.training.offset(place) or "." in model
                wraps += [(node, name)] if _WRAPPER.fullmatch(name) and before else []
        for node, name in wraps:
            if self.casts_model or name == "torch.compile":
                raise UnclearError(node, "A352", f"{model} is wrapped before its optimizer is made: wrap it after")
        return bool(wraps)

    def _check_after(self, models: list[str], place: ast.stmt) -> None:
        """Refuse models that move after ``initialize``, and optimizers that are loaded before it."""
        end = self.source.span(place)[1]
        for call in self.training.calls:
            here = function_of(self.program, call) is function_of(self.program, place)
            owner, method = (
                (text(call.func.value), call.func.attr) if isinstance(call.func, ast.Attribute) else ("", "")
            )
            if here and owner in models and method in _MOVES and self.training.offset(call) > end:
                raise UnclearError(
                    call, "A352", f"{owner} is moved or cast after its optimizer is made: do that before"
                )
            early = method in ("load_state_dict", "step") and self.training.offset(call) < end
            if here and owner in self.training.targets and early:
                raise UnclearError(call, "A351", f"{owner} is used before all optimizers are made")

    def _behind(self, rule: str, anchor: ast.stmt, statements: list[str]) -> None:
        """Put statements after another: the first one, with what belongs to it, on a line of its own."""
        program, source = self.program, self.source
        if self.torch_amp.holds(anchor):
            raise UnclearError(anchor, "A355", "it is inside of autocast, which is taken off")
        indent = source.text[source.line_start(anchor.lineno) : source.span(anchor)[0]]
        newline = source.newline(anchor.lineno)
        offset = source.line_end(anchor.end_lineno or 0)
        inner = "\t" if "\t" in indent else "    "
        lines = "".join(f"{newline}{indent}{line.replace('    ', inner)}" for line in statements)
        edit = program.insert(body_of(program, anchor), anchor, offset, "\n".join(statements), lines, after=1)
        program.report(rule, "changed", (offset, offset), [edit], links=["amp"])

    def _scale(self, backward: Backward) -> None:
        """The block of ``scale_loss`` around a backward."""
        program, source, call, statement = self.program, self.source, backward.call, backward.statement
        assert isinstance(call.func, ast.Attribute)
        loss, rule = call.func.value, "A302"
        if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale":
            if text(loss.func.value) not in self.torch_amp.scalers or len(loss.args) != 1 or loss.keywords:
                raise UnclearError(call, "A355", "the scaler is not made here, but passed on")
            loss, rule = loss.args[0], "T402"
        if self.torch_amp.holds(statement):
            raise UnclearError(call, "A355", "backward is inside of autocast: put it behind the block")
        optimizers = self.training.stepped_by(backward)
        (start, _), (first, last) = source.span(statement), source.span(loss)
        dot = program.method_span(call.func)[0]
        if "\n" in source.text[last:dot] or "\n" in source.text[start:first]:
            raise UnclearError(call, "A353", "the statement is on several lines: write it on one")
        indent = source.text[source.line_start(statement.lineno) : start]
        scaled = "scaled_loss"
        while program.names.is_taken(scaled):
            scaled = f"amp_{scaled}"
        header = f"with {self.amp}.scale_loss(loss, {optimizers}) as {scaled}:"
        inner = "\t" if "\t" in indent else "    "
        behind = f", {optimizers}) as {scaled}:{source.newline(statement.lineno)}{indent}{inner}{scaled}"

        def change_tree() -> None:
            (block,) = ast.parse(f"{header}\n    pass").body
            assert isinstance(block, ast.With)
            assert isinstance(block.items[0].context_expr, ast.Call)
            assert isinstance(call.func, ast.Attribute)
            block.items[0].context_expr.args[0] = loss
            call.func.value = ast.Name(scaled, ast.Load())
            body = body_of(program, statement)
            body[body.index(statement)] = block
            block.body = [statement]

        edits = [Edit(start, first, f"with {self.amp}.scale_loss(", change_tree), Edit(last, dot, behind, lambda: None)]
        program.report(rule, "changed", (start, dot), edits, links=["amp"])

    def _clip(self, call: ast.Call) -> None:
        """Clip the masters' gradients. Without masters the model's are the same."""
        given = [*call.args[:1], *(one.value for one in call.keywords if one.arg == "parameters")]
        lists = given[0] if given and isinstance(given[0], ast.Call) else None
        model = text(lists.func.value) if lists is not None and isinstance(lists.func, ast.Attribute) else ""
        is_all = lists is not None and isinstance(lists.func, ast.Attribute) and lists.func.attr == "parameters"
        steps = [
            backward
            for backward in self.training.backwards
            if function_of(self.program, backward.call) is function_of(self.program, call)
            and self.training.offset(backward.call) < self.training.offset(call)
        ]
        optimizer = self.training.stepped_by(steps[-1]) if steps else ""
        made = [one for one in self.training.made if one.target == optimizer and self.training.is_same(one, call)]
        passed = is_argument(self.program, call, optimizer) and is_argument(self.program, call, model)
        if is_all and model and (any(one.models == (model,) for one in made) or (not made and passed)):
            assert lists is not None
            edit = replaced(self.program, lists, f"{self.amp}.master_params({optimizer})")
            self.program.report("A303", "changed", lists, [edit], links=["amp"])
        elif self.casts_model:
            raise UnclearError(call, "A354", "whose gradients are clipped cannot be told: amp.master_params(optimizer)")

    def _loss(self, call: ast.Call) -> None:
        """Calls of a BCELoss, which takes no half precision: its input in float32."""
        program, at = self.program, _user(self.program, call)
        if isinstance(at, ast.Call):
            self._in_float32(at)
            return
        target = text(at.targets[0]) if isinstance(at, ast.Assign) else ""
        nodes = (node for node in program.names.nodes if isinstance(node, (ast.Name, ast.Attribute)))
        home = self.training.scope_of(call, target)
        uses = [
            node
            for node in nodes
            if text(node) == target and ("." in target or self.training.scope_of(node, target) is home)
        ]
        calls = []
        for node in uses if target else ():
            parent = program.parent(node)
            if isinstance(parent, ast.Call) and parent.func is node:
                calls.append(parent)
            elif isinstance(node.ctx, ast.Load) and not (isinstance(parent, ast.Attribute) and parent.attr in _MOVES):
                raise UnclearError(node, "A354", "a BCELoss is passed on: its calls cannot be seen")
        if not calls:
            raise UnclearError(call, "A354", "the calls of this BCELoss cannot be seen")
        for one in calls:
            self._in_float32(one)

    def _in_float32(self, call: ast.Call) -> None:
        if self.casts_model:
            return  # outputs of the model are float32
        if not call.args or isinstance(call.args[0], ast.Starred):
            raise UnclearError(call, "A354", "which argument of binary_cross_entropy is its input cannot be told")
        given = call.args[0]
        start, end = self.source.span(given)
        done = any(draft.rule == "A306" and draft.start == start for draft in self.program.drafts)
        simple = isinstance(given, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
        if done or self.source.text[start:end].endswith(".float()"):
            return

        def change_tree() -> None:
            call.args[0] = ast.Call(ast.Attribute(given, "float", ast.Load()), [], [])

        edits = [] if simple else [Edit(start, start, "(", lambda: None)]
        edits.append(Edit(end, end, ".float()" if simple else ").float()", change_tree))
        self.program.report("A306", "changed", (start, end), edits, links=["amp"])

    def _checkpoints(self) -> None:
        training, done = self.training, set()
        optimizers = training.targets | training.cleared
        for call in sorted(training.calls, key=training.offset, reverse=True):
            owner, method = (
                (text(call.func.value), call.func.attr) if isinstance(call.func, ast.Attribute) else ("", "")
            )
            if owner in optimizers and method == "state_dict":
                parent = self.program.parent(call)
                if not isinstance(parent, ast.Dict) or parent not in done:
                    self._save(call, parent)
                done.add(parent)
            elif owner in optimizers and method == "load_state_dict" and not self.torch_amp.scalers:
                given = call.args[0] if call.args else None
                statement = self.program.parent(call)
                file = text(given.value) if isinstance(given, ast.Subscript) else ""
                if isinstance(statement, ast.Expr) and alone(self.program, statement) and file:
                    body = (id(body_of(self.program, statement)), file)
                    if body not in done:
                        load = f'    {self.amp}.load_state_dict({file}["amp"])'
                        self._behind("A305", statement, [f'if "amp" in {file}:', load])
                    done.add(body)
                else:
                    self.program.report("A305", "note", call, message=RULES["A305"].message)

    def _save(self, call: ast.Call, parent: ast.AST | None) -> None:
        """``amp.state_dict()`` beside that of an optimizer; a GradScaler's has become it."""
        if self.torch_amp.scalers:
            return
        if isinstance(parent, ast.Dict) and all(
            isinstance(key, ast.Constant) and key.value != "amp" for key in parent.keys
        ):
            at = parent.values.index(call)
            (key, _), (_, end) = self.source.span(parent.keys[at] or call), self.source.span(call)
            line = self.source.line_start(self.source.place(key)[0])
            indent = self.source.text[line:key]
            space = " " if indent.strip() else self.source.newline(self.source.place(key)[0]) + indent
            new = ast.parse(f"{self.amp}.state_dict()", mode="eval").body

            def change_tree() -> None:
                parent.keys.insert(at + 1, ast.Constant("amp"))
                parent.values.insert(at + 1, new)

            edit = Edit(end, end, f',{space}"amp": {self.amp}.state_dict()', change_tree)
            self.program.report("A304", "changed", (end, end), [edit], links=["amp"])
        elif (
            isinstance(parent, ast.Assign)
            and isinstance(parent.targets[0], ast.Subscript)
            and alone(self.program, parent)
        ):
            file = text(parent.targets[0].value)
            if file:
                self._behind("A304", parent, [f'{file}["amp"] = {self.amp}.state_dict()'])
        else:
            self.program.report("A304", "note", call, message=RULES["A304"].message)


def _user(program: Program, call: ast.Call) -> ast.AST | None:
    """What is done with a module that is made: moves to a device left out."""
    at: ast.AST = call
    parent = program.parent(at)
    while isinstance(parent, ast.Attribute) and parent.attr in _MOVES:
        at = program.parent(parent) or parent
        parent = program.parent(at)
    return parent if not isinstance(parent, ast.Call) or parent.func is at else None


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"
