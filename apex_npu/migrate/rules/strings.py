# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Device rules for strings: names of devices, composed names, the backend, tensor types, environment variables."""

from __future__ import annotations

import ast
import re

from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.syntax import constant, last_name

from .device import LOOKED_UP, missing, without
from .tables import DEVICE_ARGUMENTS, DEVICE_KEYWORDS, ENVIRONMENT
from .targets import SEARCHES, target_of

_DEVICE = re.compile(r"cuda(:\d*)?")
_COMPOSED = re.compile(r"cuda:(%[dsi]|\{\w*\})")
_TYPE = re.compile(r"torch\.cuda\.(\w+(?:Tensor|Storage))")
_NAME = re.compile(r"torch\.cuda(\.\w+)*")
_MODULES = ("torch.cuda.", "torch.npu.")
_BACKENDS = re.compile(r"\w+:\w+(,\w+:\w+)*")
_VARIABLE = re.compile(r"(CUDA|NCCL|CUBLAS|CUDNN|TORCH_NCCL)_[A-Z0-9_]+")
_FSTRING = re.compile(r"""([fF][rR]?|[rR][fF])(\"""|'''|"|')(cuda)(?=:\{)""")

_IN_PIECES = "the string is in several pieces: write it as one"


def check(program: Program) -> None:
    """Report what the rules for strings find."""
    devices, texts = Devices(program), []
    for node in program.every(ast.Constant, ast.JoinedStr):
        if isinstance(node, ast.JoinedStr):
            _fstring(program, node)
        elif isinstance(node.value, str) and not isinstance(program.parent(node), (ast.Expr, ast.JoinedStr)):
            texts.append((node, node.value))
            if _DEVICE.fullmatch(node.value):
                devices.follow(node)
    for node, text in texts:
        _text(program, devices, node, text)


def _text(program: Program, devices: Devices, node: ast.Constant, text: str) -> None:
    target, parent = target_of(program), program.parent(node)
    composed = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add) and parent.left is node
    if _COMPOSED.fullmatch(text) or (text == "cuda:" and composed):
        edit = target.device(program, node)
        program.report("D107", "changed", node, [edit], refusal="" if edit else _IN_PIECES)
    elif _DEVICE.fullmatch(text):
        _device(program, devices, node)
    elif found := _TYPE.fullmatch(text):
        if missing([found[1]]) is not None:
            program.refuse("D151", node, without(found[1]))
        else:
            program.report("D108", "changed", node, [target.device(program, node, "torch.")])
    elif _NAME.fullmatch(text) and isinstance(parent, ast.Call):
        program.refuse("D153", node, LOOKED_UP.format(repr(text)))
    if text == "nccl" or (_BACKENDS.fullmatch(text) and "cuda:nccl" in text.split(",")):
        key = isinstance(parent, ast.Subscript) or (isinstance(parent, ast.Dict) and node in parent.keys)
        status, message = ("unsure", "this key may be a name of the program's own") if key else ("changed", "")
        program.report("D109", status, node, [target.backend(program, node)], message)
    elif text in ENVIRONMENT and target.is_npu:
        program.report("D112", "changed", node, [program.restring(node, ENVIRONMENT[text])])
    elif _VARIABLE.fullmatch(text):
        program.note("D112", node, f"{text} has no effect on npu")


def _device(program: Program, devices: Devices, node: ast.Constant) -> None:
    parent = program.parent(node)
    called = parent.func if isinstance(parent, ast.Call) and node in parent.args[1:2] else None
    if isinstance(called, ast.Name) and called.id in ("getattr", "hasattr", "setattr"):
        return  # D153
    edit = target_of(program).device(program, node)
    if edit is None:
        program.refuse("D107", node, _IN_PIECES)
    elif devices.is_place(node):
        program.report("D105", "changed", node, [edit])
    else:
        program.report("D106", "unsure", node, [edit], "this may be the name of a device; --unsure changes it")


def _fstring(program: Program, node: ast.JoinedStr) -> None:
    first = node.values[0] if node.values else None
    if len(node.values) != 2 or constant(first) != "cuda:":
        return
    start, end = program.source.span(node)
    found = _FSTRING.match(program.source.text, start, end)
    if found is None or isinstance(program.parent(node), ast.FormattedValue):
        program.refuse("D107", node, _IN_PIECES)
        return
    edit = target_of(program).fstring(program, node, found.span(3))
    program.report("D107", "changed", (start, found.end(3)), [edit])


def _speaks_of_device(name: object) -> bool:
    return isinstance(name, str) and "device" in name.lower()


def _parameter(arguments: ast.arguments, default: ast.AST) -> str | None:
    """Return the name of the parameter that has this default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(positional[::-1], arguments.defaults[::-1], strict=False)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return next((one.arg for one, value in [*pairs, *keywords] if value is default), None)


class Devices:
    """The places of a program that hold a device, as far as names and called functions show."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._names: set[str] = set()  # the variables that are assigned the name of a device

    def follow(self, node: ast.expr) -> None:
        """Record the variables that ``node`` is assigned to, if it is the name of a device."""
        at: ast.AST | None = node
        if not self.is_place(node):
            return
        while isinstance(at, (ast.Constant, ast.IfExp, ast.BoolOp)):
            at = self.program.parent(at)
        if isinstance(at, ast.Assign):
            self._names.update(filter(None, map(last_name, at.targets)))
        call = self.program.parent(at) if isinstance(at, ast.keyword) else None
        if isinstance(call, ast.Call) and last_name(call.func) == "add_argument":
            flags = [flag for flag in map(constant, call.args) if isinstance(flag, str)]
            self._names.update(flag.lstrip("-").replace("-", "_") for flag in flags)

    def is_place(self, node: ast.expr) -> bool:
        """Return whether the string ``node`` is in a place that holds a device."""
        parent = self.program.parent(node)
        if isinstance(parent, ast.IfExp) and node is not parent.test:
            other = parent.orelse if node is parent.body else parent.body
            if constant(other) == "cpu" or self._asks_for_cuda(parent.test):
                return True
        elif isinstance(parent, ast.Dict):
            around = self.program.parent(parent)
            key = parent.keys[parent.values.index(node)] if node in parent.values else None
            if _speaks_of_device(constant(key)):
                return True
            if node in parent.keys and not (isinstance(around, ast.keyword) and around.arg in DEVICE_KEYWORDS):
                return False
        elif not isinstance(parent, (ast.BoolOp, ast.Tuple, ast.List, ast.Set, ast.Starred)):
            return self._holds_device(parent, node)
        return self.is_place(parent)

    def _holds_device(self, parent: ast.AST | None, at: ast.AST) -> bool:
        if isinstance(parent, ast.keyword):
            return self._is_keyword(parent)
        if isinstance(parent, ast.Call):
            return self._is_argument(parent, at)
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            around = self.program.parent(parent)
            gate = isinstance(around, ast.If) and self._asks_for_cuda(around.test)
            return gate or any(map(self._has_device, targets))
        if isinstance(parent, ast.arguments):
            return _speaks_of_device(_parameter(parent, at))
        if isinstance(parent, ast.Return):
            return _speaks_of_device(getattr(self.program.names.scope(parent).node, "name", None))
        if isinstance(parent, ast.Compare):
            return any(self._has_device(one) for one in (parent.left, *parent.comparators) if one is not at)
        return False

    def _has_device(self, node: ast.AST | None) -> bool:
        """Return whether the names in an expression show that it is a device or a device type."""
        if isinstance(node, ast.Call):
            inside = node.func.value if isinstance(node.func, ast.Attribute) else None
            return any(map(self._has_device, (node.func, inside, *node.args[:1])))
        if isinstance(node, ast.Subscript):
            return self._has_device(node.value) or _speaks_of_device(constant(node.slice))
        name = last_name(node)
        return name == "type" or name in self._names or _speaks_of_device(name)

    def _asks_for_cuda(self, test: ast.expr) -> bool:
        return any((self.program.dotted(node)).startswith(_MODULES) for node in ast.walk(test))

    def _is_keyword(self, keyword: ast.keyword) -> bool:
        call = self.program.parent(keyword)
        if _speaks_of_device(keyword.arg) or keyword.arg in DEVICE_KEYWORDS:
            return True
        if not isinstance(call, ast.Call):
            return False
        if keyword.arg in ("default", "choices", "const"):
            return last_name(call.func) == "add_argument" or self._has_flag(call.args)
        return keyword.arg == "type" and self.program.dotted(call.func) == "torch.device"

    def _is_argument(self, call: ast.Call, argument: ast.AST) -> bool:
        if argument is call.func:
            return False
        dotted, name = self.program.dotted(call.func), last_name(call.func)
        place = call.args.index(argument)  # type: ignore[arg-type]
        if dotted in DEVICE_ARGUMENTS:
            return DEVICE_ARGUMENTS[dotted] == place
        if dotted.startswith(_MODULES) or name == "to" or _speaks_of_device(name):
            return True
        if isinstance(call.func, ast.Attribute) and self._has_device(call.func.value):
            return name in SEARCHES
        return self._has_flag(call.args[:place])

    def _has_flag(self, arguments: list[ast.expr]) -> bool:
        return any(_speaks_of_device(constant(one)) for one in arguments)
