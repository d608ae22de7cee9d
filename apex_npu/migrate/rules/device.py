# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Device rules for names: torch.cuda, its imports, methods of tensors, classes with ``cuda()`` of their own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.source import Edit
from apex_npu.migrate.engine.syntax import text

from .catalogue import RULES
from .tables import (
    ANSWERS,
    INSTEAD,
    NEEDS_CUDA,
    NO_EFFECT,
    NPU_PROPERTIES,
    OTHER_LIBRARIES,
    RENAMED,
    SAME_NAMES,
    SIMILAR,
    SUBMODULES,
)
from .targets import target_of

_DATA_PARALLEL = re.compile(r"torch\.nn\.(parallel\.)?(data_parallel\.)?(DataParallel|data_parallel)")
_OTHER_NAMES = RENAMED | {name: new for name, (new, _) in SIMILAR.items()}
_NOT_PORTABLE = "it names a device: portable code writes torch.get_device_module(...), or torch.amp, where it is used"
_RANGES = "similar: msprof shows these ranges, tools of NVIDIA's do not"
# Functions that take a sequence apart.
_OF_SEQUENCES = frozenset(
    {"all", "any", "enumerate", "iter", "len", "list", "map", "max", "min", "sum", "tuple", "zip"}
)
_PROFILERS = ("torch.autograd.profiler.profile", "torch.profiler.profile", "torch.profiler.profiler.profile")


def check(program: Program) -> None:
    """Say what the rules for names find."""
    for node in program.names.nodes:
        if isinstance(node, (ast.Attribute, ast.Name)):
            parent = program.parent(node)
            if not (isinstance(parent, ast.Attribute)):
                _name(program, node, program.names.dotted(node))
            if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
                _is_cuda(program, node)
        elif isinstance(node, ast.Call):
            _call(program, node)
        elif isinstance(node, ast.Import):
            _import(program, node)
        elif isinstance(node, ast.ImportFrom):
            _import_from(program, node)
        elif isinstance(node, ast.ClassDef):
            _class(program, node)


def missing(parts: list[str], *, similar: bool = False) -> str | None:
    """Of a name after ``torch.cuda.``, as its parts, the part without a counterpart; None where there is one.

    With ``similar``, a counterpart that is only similar is one.
    """
    if similar and parts and parts[0] in SIMILAR:
        return ".".join(parts[:2]) if len(parts) > 1 and parts[1] not in SIMILAR[parts[0]][1] else None
    for count in range(len(parts)):
        module = ".".join(parts[:count])
        names = SUBMODULES.get(module) if module else None
        known = names if names is not None else {*SAME_NAMES, *RENAMED, *(() if module else SUBMODULES)}
        if parts[count] not in known:
            return ".".join(parts[: count + 1])
        if ".".join(parts[: count + 1]) not in SUBMODULES:
            return None
    return None


def _similar(program: Program) -> bool:
    return program.options.similar and target_of(program).imports


def _without(name: str) -> str:
    instead = INSTEAD.get(name.partition(".")[0])
    return RULES["D151"].message.format(f"torch.cuda.{name}") + (f": {instead}" if instead else "")


def _rule_of(parts: list[str]) -> str:
    if parts[:1] == ["amp"]:
        return "D111"
    return "D108" if parts and parts[0].endswith(("Tensor", "Storage")) else "D101"


def _name(program: Program, node: ast.Attribute | ast.Name, dotted: str | None) -> None:
    if dotted is None:
        return
    parts = dotted.split(".")
    if parts[:2] == ["torch", "cuda"]:
        _torch_cuda(program, node, parts[2:])
    elif isinstance(node, ast.Attribute):
        _torch(program, node, dotted)
    elif _DATA_PARALLEL.fullmatch(dotted):
        _data_parallel(program, node, dotted)


def _torch_cuda(program: Program, node: ast.Attribute | ast.Name, parts: list[str]) -> None:
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        at = at.value
    # A name that stands for a part of torch.cuda is an import's or an assignment's, and changes with it.
    links = [f"name {at.id}"] if isinstance(at, ast.Name) and "." in (program.names.dotted(at) or "") else []
    target = _assigned(program, node)
    links += [f"name {target.id}"] if target is not None else []
    lacking = missing(parts, similar=_similar(program))
    if lacking is not None:
        program.report("D151", "refused", node, message=_without(lacking), links=links)
        return
    if parts and parts[0] in SIMILAR:
        edits = target_of(program).name(program, node, parts)
        program.report("D151", "changed", node, edits, _RANGES, links)
        return
    if not parts and (target is None or program.names.dotted(target) != "torch.cuda"):
        program.report("D153", "refused", node, message=RULES["D153"].message.format("torch.cuda"), links=links)
        return
    answer = ANSWERS.get(".".join(parts), "")
    failing = _failing_use(program, node, parts) if answer else ""
    if failing:
        program.report("D156", "refused", node, message=f"{answer}, and {failing}", links=links)
        return
    program.report(_rule_of(parts), "changed", node, target_of(program).name(program, node, parts), links=links)
    if answer:
        program.report("D156", "note", node, message=answer)


def _failing_use(program: Program, node: ast.expr, parts: list[str]) -> str:
    """What a program does with the answer of a function that an NPU has no such answer to; "": nothing is seen."""
    for value, parent in _uses_of(program, program.parent(node)):
        line = f"(line {value.lineno}): ask for what the check is for, as is_bf16_supported() does, or leave it out"
        if parts == ["get_device_properties"]:
            if isinstance(parent, ast.Attribute) and parent.attr not in NPU_PROPERTIES:
                return f"{parent.attr} is used {line}"
        elif _takes_apart(parent, value):
            return f"is unpacked or compared {line}"
    return ""


def _uses_of(program: Program, node: ast.AST | None) -> Iterator[tuple[ast.expr, ast.AST | None]]:
    """A call, and the names that it is assigned to where they are used, each with the node around it."""
    if not isinstance(node, ast.Call):
        return
    at: ast.AST | None = node
    names: set[str] = set()
    while at is node or isinstance(at, (ast.IfExp, ast.BoolOp, ast.NamedExpr)):
        assert isinstance(at, ast.expr)
        names |= {at.target.id} if isinstance(at, ast.NamedExpr) else set()
        yield at, program.parent(at)
        at = program.parent(at)
    names |= {text(target) for target in getattr(at, "targets", [])} - {""}
    for one in program.names.nodes if names else ():
        if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Load) and text(one) in names:
            scopes = [program.names.scope(each).find(text(one).partition(".")[0]) for each in (one, node)]
            if scopes[0] is scopes[1] or "." in text(one):
                yield one, program.parent(one)


def _takes_apart(parent: ast.AST | None, value: ast.expr) -> bool:
    """Whether the expression around a value fails, or is false, where it is None in place of two numbers."""
    if isinstance(parent, ast.Compare):
        return not all(isinstance(one, (ast.Is, ast.IsNot)) for one in parent.ops)
    if isinstance(parent, ast.Call):
        return value in parent.args and isinstance(parent.func, ast.Name) and parent.func.id in _OF_SEQUENCES
    if isinstance(parent, ast.Assign):
        return any(isinstance(target, (ast.Tuple, ast.List)) for target in parent.targets)
    return isinstance(parent, (ast.Subscript, ast.Starred, ast.BinOp, ast.For, ast.comprehension, ast.Attribute))


def _assigned(program: Program, node: ast.expr) -> ast.Name | None:
    """The one name that ``node`` is assigned to, if it is."""
    parent = program.parent(node)
    if isinstance(parent, ast.Assign) and parent.value is node and len(parent.targets) == 1:
        return parent.targets[0] if isinstance(parent.targets[0], ast.Name) else None
    return None


def _torch(program: Program, node: ast.Attribute, dotted: str) -> None:
    if dotted in ("torch.Tensor.cuda", "torch.nn.Module.cuda"):
        program.report("D103", "changed", program.method_span(node), target_of(program).move(program, node, None))
    elif dotted == "torch.distributed.is_nccl_available":
        program.report("D109", "changed", node, [target_of(program).nccl_check(program, node)])
    elif dotted.startswith("torch.profiler.ProfilerActivity.CUDA") and not _similar(program):
        program.report("D110", "refused", node, message=RULES["D110"].message)
    elif dotted == "torch.version.cuda":
        program.report("D156", "note", node, message="it is None on npu")
    elif _DATA_PARALLEL.fullmatch(dotted):
        _data_parallel(program, node, dotted)
    elif any(dotted == name or dotted.startswith(f"{name}.") for name in NO_EFFECT):
        program.report("D155", "note", node, message=RULES["D155"].message.format(dotted))
    elif dotted in NEEDS_CUDA:
        program.report("D152", "refused", node, message=RULES["D152"].message.format(dotted, NEEDS_CUDA[dotted]))


def _data_parallel(program: Program, node: ast.expr, dotted: str) -> None:
    """Making one, or a class of them; ``isinstance`` may ask for the class."""
    parent = program.parent(node)
    if (isinstance(parent, ast.Call) and parent.func is node) or isinstance(parent, ast.ClassDef):
        name = dotted.replace("torch.nn", "nn")
        program.report("D150", "refused", node, message=RULES["D150"].message.format(name))


def _is_cuda(program: Program, node: ast.Attribute) -> None:
    if not isinstance(node.ctx, ast.Load):
        return
    if "is_cuda" not in program.options.owned:
        for span, edit in target_of(program).is_on(program, node):
            program.report("D104", "changed", span, [edit], links=[f"is_cuda at {program.method_span(node)}"])
    elif not (isinstance(node.value, ast.Name) and node.value.id == "self"):
        program.report("D154", "refused", program.method_span(node), message=RULES["D154"].message)


def _call(program: Program, node: ast.Call) -> None:
    called = node.func
    dotted = program.names.dotted(called)
    if isinstance(called, ast.Attribute) and called.attr == "cuda" and not (dotted or "").startswith("torch."):
        library = _library(program, called.value)
        if library in OTHER_LIBRARIES:
            message = RULES["D103"].message.format(library)
            program.report("D103", "refused", program.method_span(called), message=message)
        else:
            edits = target_of(program).move(program, called, node)
            start, end = program.method_span(called)
            end = max([end, *(edit.end for edit in edits if edit is not None)])
            program.report("D103", "changed", (start, end), edits)
    elif dotted in _PROFILERS:
        for keyword in node.keywords:
            if keyword.arg == "use_cuda":
                _use_cuda(program, keyword, dotted)
    elif isinstance(called, ast.Name) and called.id in ("getattr", "hasattr", "setattr", "eval", "exec"):
        _looked_up(program, node, called.id)


def _library(program: Program, node: ast.expr) -> str:
    """The package that the first name of an expression is imported from, if it is."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return (program.names.dotted(node) or "").partition(".")[0]


def _use_cuda(program: Program, keyword: ast.keyword, called: str) -> None:
    span = program.source.span(keyword)
    if called.startswith("torch.profiler."):
        program.report("D110", "refused", span, message="give it activities in place of use_cuda")
        return
    if not (isinstance(keyword.value, ast.Constant) and keyword.value.value is True):
        message = 'write use_device="npu" where it is true, and leave the argument out where it is not'
        program.report("D110", "refused", span, message=message)
        return
    program.report("D110", "changed", span, [Edit(*span, f"use_device={target_of(program).profiled()}")])


def _looked_up(program: Program, node: ast.Call, function: str) -> None:
    found = [one.value for one in node.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    pattern = r"\bcuda\b" if function in ("eval", "exec") else r"cuda|is_cuda"
    match = re.search if function in ("eval", "exec") else re.fullmatch
    for one in found:
        if match(pattern, one):
            program.report("D153", "refused", node, message=RULES["D153"].message.format(repr(one)))


def _needs_cuda(program: Program, node: ast.stmt | ast.alias, name: str) -> bool:
    for library, instead in NEEDS_CUDA.items():
        if name == library or name.startswith(f"{library}."):
            program.report("D152", "refused", node, message=RULES["D152"].message.format(library, instead))
            return True
    return False


def _import(program: Program, node: ast.Import) -> None:
    for alias in node.names:
        if _needs_cuda(program, alias, alias.name) or not f"{alias.name}.".startswith("torch.cuda."):
            continue
        parts = alias.name.split(".")[2:]
        links = [f"name {alias.asname}"] if alias.asname else []
        lacking = missing(parts, similar=_similar(program))
        refusal = _without(lacking) if lacking is not None else _two_imports(program, alias) if alias.asname else ""
        refusal = refusal or ("" if target_of(program).imports else _NOT_PORTABLE)
        if refusal:
            program.report("D102", "refused", alias, message=refusal, links=links)
            continue
        is_similar = bool(parts) and parts[0] in SIMILAR
        parts = [SIMILAR[parts[0]][0]] if is_similar else parts
        new = "torch_npu.npu." + ".".join(parts) if parts and alias.asname else "torch.npu"
        start, _ = program.source.span(alias)
        end = start + len(alias.name)
        exact = program.source.text[start:end] == alias.name
        edit = Edit(start, end, new) if exact else None
        program.report("D102", "changed", alias, [edit], _RANGES if is_similar else "", links)


def _two_imports(program: Program, alias: ast.alias) -> str:
    """Why a module is not given another name, where something else has that name, too; else empty."""
    meanings = program.names.meanings(alias.asname or alias.name, program.names.scope(alias))
    if len(meanings) < 2:
        return ""
    both = " or ".join(sorted(meaning or "something else" for meaning in meanings))
    return f"{alias.asname or alias.name} is {both} here: import them by two names"


def _import_from(program: Program, node: ast.ImportFrom) -> None:
    module = "" if node.level else node.module or ""
    if _needs_cuda(program, node, module):
        return
    for alias in node.names:
        _needs_cuda(program, alias, f"{module}.{alias.name}")
    if module == "torch":
        for alias in node.names:
            if alias.name == "cuda":
                _from_torch(program, alias)
    elif module == "torch.cuda" or module.startswith("torch.cuda."):
        _from_torch_cuda(program, node, module)


def _from_torch(program: Program, alias: ast.alias) -> None:
    name = alias.asname or alias.name
    span = program.source.span(alias)
    refusal = _two_imports(program, alias) or ("" if target_of(program).imports else _NOT_PORTABLE)
    edits = [] if refusal else [Edit(*span, f"npu as {name}")]
    program.report("D102", "refused" if refusal else "changed", span, edits, refusal, [f"name {name}"])


def _from_torch_cuda(program: Program, node: ast.ImportFrom, module: str) -> None:
    parts = module.split(".")[2:]
    links = [f"name {alias.asname or alias.name}" for alias in node.names]
    if not target_of(program).imports:
        program.report("D102", "refused", node, message=_NOT_PORTABLE, links=links)
        return
    similar = _similar(program) and not parts  # mstx is a class: nothing is imported from it
    names = [[*parts, alias.name] for alias in node.names]
    lacking = [missing(name, similar=similar) or missing(parts) for name in names]
    if any(name is not None for name in lacking):
        first = next(name for name in lacking if name is not None)
        reason = "import names one by one, rather than all of them" if first.endswith("*") else _without(first)
        program.report("D102", "refused", node, message=reason, links=links)
        return
    edits = [program.rename_module(node, "torch_npu.npu." + ".".join(parts) if parts else "torch.npu")]
    edits += [_renamed(program, alias) for alias in node.names if not parts and alias.name in _OTHER_NAMES]
    ranges = _RANGES if any(name[0] in SIMILAR for name in names) else ""
    program.report("D102", "changed", node, edits, ranges, links)


def _renamed(program: Program, alias: ast.alias) -> Edit:
    return Edit(*program.source.span(alias), f"{_OTHER_NAMES[alias.name]} as {alias.asname or alias.name}")


def _class(program: Program, node: ast.ClassDef) -> None:
    methods = {one.name: one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
    method = methods.get("cuda")
    if method is None or not target_of(program).imports:
        return
    if "npu = cuda" in map(ast.unparse, node.body):
        return
    assigned = [target for one in node.body if isinstance(one, ast.Assign) for target in one.targets]
    edit = program.lines(method, ["npu = cuda"])
    place = edit.start, edit.end
    if "npu" in {*methods, *(target.id for target in assigned if isinstance(target, ast.Name))}:
        program.report("D114", "refused", place, message=RULES["D114"].message)
    else:
        program.report("D114", "changed", place, [edit])
