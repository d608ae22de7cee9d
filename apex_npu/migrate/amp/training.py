# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Analyse the training loop of a program: its optimizers and their models, and the steps that follow a backward."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from apex_npu.migrate.engine.names import Scope
from apex_npu.migrate.engine.program import Program, UnclearError
from apex_npu.migrate.engine.syntax import LOOPS, argument, constant, given_to, method_of, text
from apex_npu.migrate.rules.targets import name_of

from .torch_amp import TorchAmp

_OPTIMIZER = re.compile(
    r"torch\.optim\.((?!lr_scheduler|swa_utils)\w+\.)?[A-Z]\w*|apex(_npu)?\.optimizers\.(?!WarmupLR|FusedEMA)(\w+\.)?[A-Z]\w*"
)
_INITIALIZE = re.compile(r"apex(_npu)?\.amp\.initialize")
# Methods that move or cast a module, and return it.
MOVES = ("to", "cuda", "npu", "half", "float", "double", "bfloat16", "type")
# Methods that only modules have.
_OF_MODULES = (*MOVES[:5], "parameters", "named_parameters", "modules", "children", "eval")
_NOT_WHOLE = "the model is {}: amp needs a whole model that has a name"
_OF_BFLOAT16 = {"O1": "O4", "O2": "O5"}


@dataclass(frozen=True)
class Made:
    """An optimizer that the program makes: the call of its class, whose result is assigned to ``target``.

    Names are strings as the program writes them.
    """

    call: ast.Call
    statement: ast.Assign
    target: str
    models: tuple[str, ...]
    parts: tuple[str, ...]  # the models, or modules in them, whose parameters() it gets


@dataclass(eq=False)
class Backward:
    """A statement that calls ``backward``, and the calls of ``step`` that follow before the next backward."""

    call: ast.Call
    statement: ast.Expr
    steps: list[ast.Call] = field(default_factory=list)


class Training:
    """The training loop of a file: its optimizers with their models, its backwards with their steps, its torch.amp.

    Raises:
        UnclearError: The rules cannot find out which model, optimizer or step belongs to which.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.source = program, program.source
        self.torch_amp = TorchAmp(program)
        self.scalers = self.torch_amp.scalers
        self.level = program.options.amp
        if self.torch_amp.is_bfloat16:
            self.level = _OF_BFLOAT16.get(self.level, self.level)
        self.casts_model = self.level in ("O2", "O5")
        self.amp = name_of(program, "amp") or ""
        self.calls = [*program.every(ast.Call)]
        # Calls of ``amp.initialize`` that the program already has.
        self.initializing = [call for call in self.calls if _INITIALIZE.fullmatch(program.dotted(call.func))]
        self.cleared = {method_of(call)[0] for call in self._methods("zero_grad")} - {""}
        self.made = [self._made(call) for call in self.calls if _OPTIMIZER.fullmatch(program.dotted(call.func))]
        self.targets = {one.target for one in self.made}
        self._check_made()
        self.backwards = list(self._backwards())
        self._follow_steps()

    @property
    def combines(self) -> bool:
        """True if amp averages gradients over processes: every optimizer is fused, and amp is always enabled."""
        options = self.program.options
        given = "combine_" in options.amp_args
        if options.data_parallel != "main" or self.torch_amp.enabled or given:
            return False
        fused = {one.start for one in self.program.drafts if one.rule == "O501" and one.status == "changed"}
        calls = [one.call for one in self.made]
        made = {self.source.span(call.func)[0]: self.program.dotted(call.func) for call in calls}
        starts = {start for start, name in made.items() if not name.startswith("apex_npu.optimizers.NpuFused")}
        left = any(one.rule == "O501" and one.status == "refused" for one in self.program.drafts)
        return starts <= fused and not left and options.has("O501")

    def put_after(self, rule: str, anchor: ast.stmt, statements: list[str], links: Iterable[str] = ()) -> None:
        """Insert the lines ``statements`` after the statement ``anchor``."""
        if self.torch_amp.holds(anchor):
            raise UnclearError(anchor, "A355", "it is inside of autocast, which is removed")
        self.program.change(rule, self.program.lines(anchor, statements), links=links)

    def _methods(self, name: str) -> Iterator[ast.Call]:
        return (call for call in self.calls if isinstance(call.func, ast.Attribute) and call.func.attr == name)

    def offset(self, node: ast.expr | ast.stmt) -> int:
        """Return the offset where ``node`` begins."""
        return self.program.source.span(node)[0]

    def _made(self, call: ast.Call) -> Made:
        program, statement = self.program, self.program.parent(call)
        if text(call.func).endswith("LBFGS"):
            raise UnclearError(call, "A353", "LBFGS computes gradients inside of step, which amp does not support")
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not text(statement.targets[0]):
            raise UnclearError(call, "A351", "the optimizer is not assigned to a name: assign it first")
        program.check_own_lines(statement, "A351")
        if any(isinstance(one, LOOPS) for one in program.around(call)):
            raise UnclearError(call, "A351", "an optimizer is made in a loop: make it outside of the loop")
        parts = tuple(dict.fromkeys(self._parts(call)))
        models = tuple(dict.fromkeys(self._model_of(part, call) for part in parts))
        return Made(call, statement, text(statement.targets[0]), models, parts)

    def _parts(self, call: ast.Call) -> Iterator[str]:
        """Yield the modules whose ``parameters()`` the optimizer gets."""
        given = argument(call, 0, "params")
        if isinstance(given, ast.Name):
            home, stores = self.scope_of(call, given.id), self.assigned(given.id, call)
            if home is None or len(stores) != 1 or len(home.bindings[given.id]) != 1:
                raise UnclearError(call, "A352", f"the model of the parameters {given.id} is unclear")
            given = stores[0].value
        found = [] if given is None else [node for node in ast.walk(given) if isinstance(node, ast.Call)]
        methods = [node.func for node in found if isinstance(node.func, ast.Attribute)]
        named = [one.value for one in methods if one.attr in ("parameters", "named_parameters")]
        for model in named:
            if text(model) in ("", "self"):
                raise UnclearError(call, "A352", _NOT_WHOLE.format(ast.unparse(model)))
            yield text(model)
        if not named:
            raise UnclearError(call, "A352", "the model of its parameters is unclear")

    def _model_of(self, part: str, call: ast.Call) -> str:
        """Return the model that contains the module ``part``, or is that module: a name, or an attribute of self."""
        names = part.split(".")
        count = 1 + (names[0] == "self")
        model = ".".join(names[:count])
        if model != part and not self._is_module(model, call):
            raise UnclearError(call, "A352", _NOT_WHOLE.format(part))
        return model

    def _is_module(self, name: str, node: ast.AST) -> bool:
        """Return whether the program uses ``name``, as it is bound at ``node``, as a module."""
        home = self.scope_of(node, name)
        for call in self.calls:
            owner, method = method_of(call)
            used = text(call.func) == name or (owner == name and method in _OF_MODULES)
            if used and (name.startswith("self.") or self.scope_of(call, name) is home):
                return True
        values = [one.value for one in self.assigned(name, node)]
        methods = (one.func.attr for one in values if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute))
        return any(method in MOVES for method in methods)

    def scope_of(self, node: ast.AST, name: str) -> Scope | None:
        """Return the scope that binds the name, or the first name of an attribute."""
        return self.program.names.scope(node).find(name.partition(".")[0])

    def _check_made(self) -> None:
        """Refuse a name that is also assigned another optimizer, and an optimizer made by a function called twice."""
        for one in self.made:
            home = self.scope_of(one.statement, one.target)
            ours = sum(other.target == one.target and self.is_same(other, one.statement) for other in self.made)
            if "." in one.target:
                named = [node for node in self.program.every(ast.Attribute) if text(node) == one.target]
                stored = [self.program.parent(node) for node in named if isinstance(node.ctx, ast.Store)]
                number = sum(not _gets_none(statement) for statement in stored)
            else:
                assert home is not None
                number = sum(not isinstance(binding, ast.Constant) for binding in home.bindings[one.target])
                number -= self._given_back(one)
            if number != ours:
                raise UnclearError(one.statement, "A351", f"{one.target} is also assigned elsewhere")
            self._check_called_once(one)

    def _given_back(self, one: Made) -> int:
        """Return how often the result of ``amp.initialize`` is assigned to the optimizer's name."""
        statements = [at for at in map(self.program.parent, self.initializing) if isinstance(at, ast.Assign)]
        targets = [node for at in statements for target in at.targets for node in ast.walk(target)]
        return sum(text(node) == one.target and self.is_same(one, node) for node in targets)

    def _check_called_once(self, one: Made) -> None:
        function = self.program.function_of(one.statement)
        name = getattr(function, "name", "")
        owner = self.program.parent(function)
        name = owner.name if name == "__init__" and isinstance(owner, ast.ClassDef) else name
        # The call of a method does not call a function of the same name.
        is_method = isinstance(owner, ast.ClassDef)
        written = {call: text(call.func) for call in self.calls if name}
        calls = [one for one, at in written.items() if name in (at, at.rpartition(".")[2] if is_method else at)]
        if len(calls) > 1 or any(isinstance(at, LOOPS) for call in calls for at in self.program.around(call)):
            raise UnclearError(one.statement, "A351", f"{name}() makes an optimizer, and is called several times")

    def _backwards(self) -> Iterator[Backward]:
        for call in sorted(self._methods("backward"), key=self.offset):
            statement = self.program.parent(call)
            assert isinstance(call.func, ast.Attribute)
            if self.program.dotted(call.func) or not isinstance(statement, ast.Expr):
                raise UnclearError(call, "A353", "amp needs loss.backward() as a statement by itself")
            self.program.check_own_lines(statement, "A353")
            yield Backward(call, statement)

    def _follow_steps(self) -> None:
        """Assign to each backward the steps that follow in its function, up to the first backward after a step."""
        steps = [call for call in self._methods("step") if self._steps(call)]
        for function in {self.program.function_of(one.call) for one in self.backwards}:
            run: list[Backward] = []
            events = [*((one.call, one) for one in self.backwards), *((call, None) for call in steps)]
            here = [event for event in events if self.program.function_of(event[0]) is function]
            for call, begins in sorted(here, key=lambda event: self.offset(event[0])):
                if begins is not None:
                    run = [begins] if run and run[-1].steps else [*run, begins]
                else:
                    for backward in run:
                        backward.steps.append(call)
        stepped = {text(self.stepped(call)) for one in self.backwards for call in one.steps}
        for backward in self.backwards:
            if not backward.steps:
                raise UnclearError(backward.call, "A353", "no step of an optimizer follows in this function")
            own = {text(self.stepped(call)) for call in backward.steps}
            if not own >= stepped | self.targets and not all(self._is_cleared(name, backward) for name in own):
                reason = "scaled gradients of other losses may remain: call zero_grad() between their step and this"
                raise UnclearError(backward.call, "A353", reason)

    def _is_cleared(self, name: str, backward: Backward) -> bool:
        """Return whether ``zero_grad`` clears an optimizer's gradients before a backward and those it adds up with."""
        function, at = self.program.function_of(backward.call), self.offset(backward.call)
        first = min(self.offset(one.call) for one in self.backwards if one.steps and one.steps[0] is backward.steps[0])
        events = (call for call in self._methods("step") if self.program.function_of(call) is function)
        ends = [self.offset(call) for call in events if self.offset(call) < at and self._steps(call)]
        calls = (call for call in self._methods("zero_grad") if self.program.function_of(call) is function)
        cleared = {method_of(call)[0] for call in calls if max(ends, default=0) <= self.offset(call) < first}
        made = [one for one in self.made if one.target == name]
        parts = {part for one in made for part in one.parts if not {part, self._model_of(part, one.call)} & cleared}
        loops = [one for one in ast.walk(function) if isinstance(one, ast.For) and text(one.target) in cleared]
        return name in cleared or (bool(made) and not parts) or any(self._is_known_list(one.iter) for one in loops)

    def _steps(self, call: ast.Call) -> bool:
        """Return whether ``call`` steps an optimizer and not a learning rate scheduler."""
        name = method_of(call)[0]
        if name in self.scalers:
            if len(call.args) != 1 or call.keywords or not text(call.args[0]):
                raise UnclearError(call, "A353", "the scaler steps something else than an optimizer that has a name")
            return True
        last = name.rpartition(".")[2].lower()
        if name not in self.targets | self.cleared and ("opt" not in last or "sched" in last):
            if any("opt" in text(one).lower() for one in call.args):
                raise UnclearError(call, "A355", f"{name} may be a GradScaler: make it in this file")
            return False
        if call.args or call.keywords:
            raise UnclearError(call, "A353", "step gets a closure, which amp does not support")
        return True

    def stepped(self, call: ast.Call) -> ast.expr:
        """Return the optimizer of ``optimizer.step()``, or of ``scaler.step(optimizer)``."""
        assert isinstance(call.func, ast.Attribute)
        return call.args[0] if text(call.func.value) in self.scalers else call.func.value

    def stepped_by(self, backward: Backward) -> str:
        """Return the source of the argument of ``scale_loss`` that names the optimizers."""
        names = dict.fromkeys(self._optimizer(call, backward) for call in backward.steps)
        lists = [name for name, is_list in names if is_list]
        if lists and len(names) > 1:
            raise UnclearError(backward.call, "A353", "a list of optimizers and single ones are stepped after it")
        plain = [name for name, _ in names]
        return plain[0] if len(plain) == 1 else f"[{', '.join(plain)}]"

    def _optimizer(self, call: ast.Call, backward: Backward) -> tuple[str, bool]:
        """Return the optimizer that ``call`` steps and False, or the list that a loop after backward steps and True."""
        program, node = self.program, self.stepped(call)
        loops = (one for one in program.around(call) if isinstance(one, ast.For) and text(one.target) == text(node))
        loop = next(loops, None)
        if loop is None:
            self._check_known(call, text(node))
        elif not self._is_known_list(loop.iter):
            raise UnclearError(call, "A353", "the loop does not go over a list of optimizers that has a name")
        if loop is None or loop in program.around(backward.call):
            return text(node), False
        return text(loop.iter), True

    def _is_known_list(self, node: ast.expr) -> bool:
        name = text(node)
        if name and self.program.is_argument(node, name):
            return True
        values = [one.value for one in self.assigned(name, node)]
        listed = values[0].elts if len(values) == 1 and isinstance(values[0], (ast.List, ast.Tuple)) else []
        return bool(listed) and all(text(one) in self.targets for one in listed)

    def _check_known(self, call: ast.Call, name: str) -> None:
        """Refuse the step of an optimizer that is neither made in this file nor an argument."""
        values = [one.value for one in self.assigned(name, call) if not _gets_none(one)]
        known = bool(values) and all(map(self._is_factory_call, values))
        if "." in name:
            passed = (self.program.is_argument(one, text(one)) or text(one) in self.targets for one in values)
            known |= bool(values) and all(passed)
        else:
            home = self.program.names.scope(call).find(name)
            known &= len(values) == len(home.bindings[name] if home else ())
        known |= any(one.target == name and self.is_same(one, call) for one in self.made)
        if not known and not self.program.is_argument(call, name):
            raise UnclearError(call, "A351", f"it is unclear where {name} is made")

    def _is_factory_call(self, value: ast.expr) -> bool:
        """Return whether ``value`` calls a function that makes an optimizer and returns it."""
        if not isinstance(value, ast.Call):
            return False
        if ".".join(self.program.dotted(value.func).split(".")[-2:]) in self.program.options.factories:
            return True
        makers = {self.program.function_of(one.statement): one.target for one in self.made}
        named = {getattr(function, "name", ""): (function, target) for function, target in makers.items()}
        function, target = named.get(text(value.func), (None, ""))
        returns = [] if function is None else [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
        return bool(returns) and all(one is not None and text(one) == target for one in returns)

    def assigned(self, name: str, node: ast.AST) -> list[ast.Assign]:
        """Return the assignments to an attribute, or to a name as it is bound at ``node``."""
        found = [one for one in self.program.every(ast.Assign) if name in map(text, one.targets)]
        home = self.scope_of(node, name)
        return [one for one in found if "." in name or self.scope_of(one, name) is home]

    def passed(self, name: str, node: ast.AST) -> list[tuple[ast.Call, ast.expr]]:
        """Return the calls of the function around ``node`` that has the argument ``name``, and the values they pass."""
        home = self.program.names.scope(node).find(name)
        function = None if home is None else home.node
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return []
        owner = self.program.parent(function)
        makes = isinstance(owner, ast.ClassDef) and function.name == "__init__"
        called = owner.name if isinstance(owner, ast.ClassDef) and makes else function.name
        calls = [call for call in self.calls if text(call.func).rpartition(".")[2] == called]
        given = [(call, given_to(function, call)) for call in calls]
        return [(call, values[name]) for call, values in given if name in values]

    def values(self, name: str, node: ast.AST) -> list[ast.expr]:
        """Return the values that calls pass for an argument ``name``, or that are assigned to another ``name``."""
        if "." not in name and self.program.is_argument(node, name):
            return [given for _, given in self.passed(name, node)]
        return [one.value for one in self.assigned(name, node)]

    def is_same(self, one: Made, node: ast.AST) -> bool:
        """Return whether the name of the optimizer ``one`` refers to it at ``node`` as well."""
        return "." in one.target or self.scope_of(node, one.target) is self.scope_of(one.statement, one.target)


def _gets_none(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Assign) and constant(node.value) is None
