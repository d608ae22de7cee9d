# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules for names of torch: torch.cuda, its imports, methods of tensors, the profiler, advice (``--select N``).

``HANDLERS`` maps a type of node to the function that is called for it. The names are in ``tables.py``. ``strings.py``
has the rules for strings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from apex_npu.migrate.engine.program import Program
from apex_npu.migrate.engine.source import Edit
from apex_npu.migrate.engine.syntax import constant, keywords, root_of, text

from . import tables
from .tables import SIMILAR
from .targets import OTHER_NAMES, replaced, target_of, torch_import

_DATA_PARALLEL = re.compile(r"torch\.nn\.(parallel\.)?(data_parallel\.)?(DataParallel|data_parallel)")
_PROFILERS = ("torch.autograd.profiler.profile", "torch.profiler.profile", "torch.profiler.profiler.profile")
_ACTIVITY = "torch.profiler.ProfilerActivity.CUDA"
_IF_TRUE = 'write use_device="npu" if it is true, and remove the argument if not'
_USE_ACTIVITIES = "pass activities instead of use_cuda"
_NOT_PORTABLE = "the import is for one device: in portable code write torch.get_device_module(...) or torch.amp instead"
_RANGES = "similar: msprof shows these ranges, NVIDIA's tools do not"
_PROFILE = "similar: its results are files for MindStudio, and it has no key_averages()"
_NPU_ACTIVITY = "use torch_npu.profiler with ProfilerActivity.NPU; --similar does this"
_ONE_PROCESS = "does not run on npu. Start one process per device (torchrun) and wrap with DistributedDataParallel"
_OWN_IS_CUDA = "the program defines is_cuda itself: write is_npu if this is a tensor"
_HAS_NPU = "the class already has the name npu: calls of cuda() become calls of npu()"
_LAST_BATCH = "the last batch may have another shape, for which operators are compiled: drop_last=True drops it"
LOOKED_UP = "{} is looked up or passed on, so its uses are unknown: write the npu name by hand"
# Functions that iterate over a sequence.
_OF_SEQUENCES = ["all", "any", "enumerate", "iter", "len", "list", "map", "max", "min", "sum", "tuple", "zip"]


def missing(parts: list[str], *, similar: bool = False) -> str | None:
    """Return the first part of a name below ``torch.cuda.`` that has no counterpart on npu, or None.

    With ``similar``, a counterpart that is only similar counts as well.
    """
    known = tables.SAME_NAMES.union(tables.RENAMED, tables.SUBMODULES)
    known -= frozenset() if similar else SIMILAR.keys()
    for count, part in enumerate(parts, 1):
        name = ".".join(parts[:count])
        if part not in known:
            return name
        if name not in tables.SUBMODULES:
            return None
        known = tables.SUBMODULES[name]
    return None


def _similar(program: Program) -> bool:
    return program.options.similar and target_of(program).is_npu


def without(name: str) -> str:
    """Return the reason to refuse a name below ``torch.cuda.`` that has no counterpart."""
    instead = tables.INSTEAD.get(name.partition(".")[0])
    return f"torch.cuda.{name} has no counterpart on npu" + (f": {instead}" if instead else "")


def _name(program: Program, node: ast.Attribute | ast.Name) -> None:
    dotted = program.dotted(node)
    inner = isinstance(program.parent(node), ast.Attribute)
    if isinstance(node.ctx, ast.Load) and dotted.removeprefix("torch.profiler.") in tables.PROFILER_NAMES:
        _profiler_name(program, node, dotted)
    if dotted in tables.NOTES:
        rule, message = tables.NOTES[dotted]
        program.note(rule, node, message)
    if inner or not dotted:
        pass
    elif f"{dotted}.".startswith("torch.cuda."):
        _torch_cuda(program, node, dotted.split(".")[2:])
    elif _DATA_PARALLEL.fullmatch(dotted):
        # Only making or subclassing it is refused: isinstance may name the class.
        if program.call_of(node) or isinstance(program.parent(node), ast.ClassDef):
            program.refuse("D150", node, f"{dotted.replace('torch.nn', 'nn')} {_ONE_PROCESS}")
    elif isinstance(node, ast.Attribute):
        _torch(program, node, dotted)
    if isinstance(node, ast.Attribute) and node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
        if "is_cuda" not in program.options.owned:
            for span, edit in target_of(program).is_on(program, node):
                program.report("D104", "changed", span, [edit], links=[f"is_cuda at {program.method_span(node)}"])
        elif not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            program.refuse("D154", program.method_span(node), _OWN_IS_CUDA)


def _torch(program: Program, node: ast.Attribute, dotted: str) -> None:
    if dotted in ("torch.Tensor.cuda", "torch.nn.Module.cuda"):
        program.report("D103", "changed", program.method_span(node), target_of(program).move(program, node, None))
    elif dotted == "torch.distributed.is_nccl_available":
        edit = program.rename(node, "is_hccl_available") if target_of(program).is_npu else None
        program.report("D109", "changed", node, [edit])
    elif dotted.startswith(_ACTIVITY) and not _similar(program):
        program.refuse("D110", node, _NPU_ACTIVITY)
    elif f"{dotted}.".startswith(tables.NO_EFFECT):
        program.note("D155", node, f"{dotted} has no effect on npu")
    elif dotted in tables.NEEDS_CUDA:
        program.refuse("D152", node, f"{dotted} needs CUDA: {tables.NEEDS_CUDA[dotted]}")


def _torch_cuda(program: Program, node: ast.Attribute | ast.Name, parts: list[str]) -> None:
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return
    root = root_of(node)
    # A name for a part of torch.cuda changes together with its import or assignment.
    links = [f"name {root.id}"] if isinstance(root, ast.Name) and "." in program.dotted(root) else []
    parent = program.parent(node)
    targets = parent.targets if isinstance(parent, ast.Assign) and parent.value is node else []
    target = targets[0] if len(targets) == 1 and isinstance(targets[0], ast.Name) else None
    links += [f"name {target.id}"] if target is not None else []
    lacking, answer = missing(parts, similar=_similar(program)), tables.ANSWERS.get(".".join(parts), "")
    if lacking is not None:
        program.refuse("D151", node, without(lacking), links)
    elif parts and parts[0] in SIMILAR:
        program.report("D151", "changed", node, target_of(program).name(program, node, parts), _RANGES, links)
    elif not parts and (target is None or program.dotted(target) != "torch.cuda"):
        program.refuse("D153", node, LOOKED_UP.format("torch.cuda"), links)
    elif answer and (call := program.call_of(node)) and (failing := _failing_use(program, call, parts)):
        program.refuse("D156", node, f"{answer}, and {failing}", links)
    else:
        is_type = bool(parts) and parts[0].endswith(("Tensor", "Storage"))
        rule = "D111" if parts[:1] == ["amp"] else "D108" if is_type else "D101"
        program.report(rule, "changed", node, target_of(program).name(program, node, parts), links=links)
        if answer:
            program.note("D156", node, answer)


def _failing_use(program: Program, call: ast.Call, parts: list[str]) -> str:
    """Return how the program uses a result that differs on npu, such that it would fail; "" if no such use is found."""
    for value, parent in _uses_of(program, call):
        line = f"(line {value.lineno}): check for the feature instead, as by is_bf16_supported(), or remove the check"
        if parts == ["get_device_properties"]:
            if isinstance(parent, ast.Attribute) and parent.attr not in tables.NPU_PROPERTIES:
                return f"{parent.attr} is used {line}"
        elif _takes_apart(parent, value):
            return f"is unpacked or compared {line}"
    return ""


def _uses_of(program: Program, call: ast.Call) -> Iterator[tuple[ast.expr, ast.AST | None]]:
    """Yield a call and the uses of names that its result is assigned to, each with its parent."""
    at: ast.AST | None = call
    names: set[str] = set()
    while at is call or isinstance(at, (ast.IfExp, ast.BoolOp, ast.NamedExpr)):
        assert isinstance(at, ast.expr)
        names |= {at.target.id} if isinstance(at, ast.NamedExpr) else set()
        yield at, program.parent(at)
        at = program.parent(at)
    names |= {text(target) for target in getattr(at, "targets", [])} - {""}
    for one in program.loaded() if names else ():
        if text(one) in names:
            scopes = [program.names.scope(each).find(text(one).partition(".")[0]) for each in (one, call)]
            if scopes[0] is scopes[1] or "." in text(one):
                yield one, program.parent(one)


def _takes_apart(parent: ast.AST | None, value: ast.expr) -> bool:
    """Return whether the expression around a value fails, or changes its result, if the value is None."""
    if isinstance(parent, ast.Compare):
        return not all(isinstance(one, (ast.Is, ast.IsNot)) for one in parent.ops)
    if isinstance(parent, ast.Call):
        return value in parent.args and isinstance(parent.func, ast.Name) and parent.func.id in _OF_SEQUENCES
    if isinstance(parent, ast.Assign):
        return any(isinstance(target, (ast.Tuple, ast.List)) for target in parent.targets)
    return isinstance(parent, (ast.Subscript, ast.Starred, ast.BinOp, ast.For, ast.comprehension, ast.Attribute))


def _profiler_name(program: Program, node: ast.Attribute | ast.Name, dotted: str) -> None:
    """With ``--similar``, rename a name of torch.profiler in a program that records CUDA's activity."""
    uses = {one: program.dotted(one) for one in program.loaded()} if _similar(program) else {}
    around = uses.get(program.parent(node), "")  # type: ignore[call-overload]
    longer = around.removeprefix("torch.profiler.") in tables.PROFILER_NAMES
    if _ACTIVITY not in uses.values() or longer or not dotted.startswith("torch.profiler."):
        return
    call = program.call_of(node)
    refusal = "" if torch_import(program) else "torch is not imported at the top level"
    if call is not None and {"use_cuda", "use_device"} & keywords(call).keys():
        refusal = _USE_ACTIVITIES
    edit = replaced(
        program, node, f"torch_npu.profiler.{tables.PROFILER_NAMES[dotted.removeprefix('torch.profiler.')]}"
    )
    program.report("D110", "changed", node, [edit], _PROFILE, ["profiler"], refusal)


def _call(program: Program, node: ast.Call) -> None:
    called, dotted = node.func, program.dotted(node.func)
    if isinstance(called, ast.Attribute) and called.attr == "cuda" and not dotted.startswith("torch."):
        root = called.value
        while isinstance(root, (ast.Attribute, ast.Call, ast.Subscript)):
            root = root.func if isinstance(root, ast.Call) else root.value
        library = program.dotted(root).partition(".")[0]
        start, end = program.method_span(called)
        if library in tables.OTHER_LIBRARIES:
            program.refuse("D103", (start, end), f"{library} is a library with its own arrays")
        else:
            edits = target_of(program).move(program, called, node)
            end = max([end, *(edit.end for edit in edits if edit is not None)])
            program.report("D103", "changed", (start, end), edits)
    elif dotted in _PROFILERS:
        for keyword in node.keywords:
            if keyword.arg == "use_cuda":
                span = program.source.span(keyword)
                refusal = "" if constant(keyword.value) is True else _IF_TRUE
                refusal = _USE_ACTIVITIES if dotted.startswith("torch.profiler.") else refusal
                edit = Edit(*span, f"use_device={target_of(program).profiled}")
                program.report("D110", "changed", span, [edit], refusal=refusal)
    elif isinstance(called, ast.Name) and called.id in ("getattr", "hasattr", "setattr", "eval", "exec"):
        code = called.id in ("eval", "exec")
        match, pattern = (re.search, r"\bcuda\b") if code else (re.fullmatch, r"cuda|is_cuda")
        for one in node.args[:2]:
            if match(pattern, str(constant(one))):
                program.refuse("D153", node, LOOKED_UP.format(repr(constant(one))))
    if dotted in tables.DATA_LOADERS:
        given = keywords(node)
        if constant(given.get("pin_memory", ast.Constant(False))):
            program.note("N701", given["pin_memory"], "it works on npu; remove it if the host runs out of memory")
        if None not in given and not constant(given.get("drop_last", ast.Constant(False))):
            program.note("N702", node, _LAST_BATCH)
    elif isinstance(called, ast.Attribute) and called.attr == "long" and not node.args:
        program.note("N703", program.method_span(called), tables.INT64)


def _needs_cuda(program: Program, node: ast.stmt | ast.alias, name: str) -> bool:
    for library, instead in tables.NEEDS_CUDA.items():
        if f"{name}.".startswith(f"{library}."):
            program.refuse("D152", node, f"{library} needs CUDA: {instead}")
            return True
    return False


def _import(program: Program, node: ast.Import) -> None:
    for alias in node.names:
        if _needs_cuda(program, alias, alias.name) or not f"{alias.name}.".startswith("torch.cuda."):
            continue
        parts, start = alias.name.split(".")[2:], program.source.span(alias)[0]
        refusal = _import_refusal(program, [parts], alias if alias.asname else None)
        is_similar = bool(parts) and parts[0] in SIMILAR
        below = [OTHER_NAMES.get(part, part) for part in parts]
        new = ".".join(["torch_npu.npu", *below]) if below and alias.asname else "torch.npu"
        end = start + len(alias.name)
        edit = Edit(start, end, new) if program.source.text[start:end] == alias.name else None
        links = [f"name {alias.asname}"] if alias.asname else []
        program.report("D102", "changed", alias, [edit], _RANGES if is_similar else "", links, refusal)


def _import_from(program: Program, node: ast.ImportFrom) -> None:
    module = "" if node.level else node.module or ""
    if _needs_cuda(program, node, module):
        return
    for alias in node.names:
        _needs_cuda(program, alias, f"{module}.{alias.name}")
        if f"{module}.{alias.name}" == "torch.cuda":
            name, span = alias.asname or alias.name, program.source.span(alias)
            edit, refusal = Edit(*span, f"npu as {name}"), _import_refusal(program, [], alias)
            program.report("D102", "changed", span, [edit], links=[f"name {name}"], refusal=refusal)
    if f"{module}.".startswith("torch.cuda."):
        _from_torch_cuda(program, node, module.split(".")[2:])


def _from_torch_cuda(program: Program, node: ast.ImportFrom, parts: list[str]) -> None:
    names = [[*parts, alias.name] for alias in node.names]
    refusal = _import_refusal(program, names)
    if not refusal and parts and parts[0] in SIMILAR:
        refusal = without(parts[0])  # mstx is a class: nothing is imported from it
    edits = [program.rename_module(node, "torch_npu.npu." + ".".join(parts) if parts else "torch.npu")]
    for alias in node.names:
        if not parts and alias.name in OTHER_NAMES:
            new = f"{OTHER_NAMES[alias.name]} as {alias.asname or alias.name}"
            edits.append(Edit(*program.source.span(alias), new))
    links = [f"name {alias.asname or alias.name}" for alias in node.names]
    ranges = _RANGES if any(name[0] in SIMILAR for name in names) else ""
    program.report("D102", "changed", node, edits, ranges, links, refusal)


def _import_refusal(program: Program, names: list[list[str]], alias: ast.alias | None = None) -> str:
    """Return why an import of ``names`` below torch.cuda, which binds the name of ``alias``, stays; else return ""."""
    if not target_of(program).is_npu:
        return _NOT_PORTABLE
    found = (missing(name, similar=_similar(program)) for name in names)
    lacking = next((name for name in found if name is not None), None)
    if lacking is not None:
        return "import the names one by one, not by *" if lacking.endswith("*") else without(lacking)
    bound = (alias.asname or alias.name) if alias else ""
    meanings = program.names.meanings(bound, program.names.scope(alias)) if alias else set()
    both = " or ".join(sorted(meaning or "something else" for meaning in meanings))
    return f"{bound} is {both} here: import them under two names" if len(meanings) > 1 else ""


def _class(program: Program, node: ast.ClassDef) -> None:
    """Give a class with a method ``cuda`` the same method under the name npu."""
    methods = {one.name: one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
    if "cuda" not in methods or not target_of(program).is_npu or "npu = cuda" in map(ast.unparse, node.body):
        return
    assigned = [target for one in node.body if isinstance(one, ast.Assign) for target in one.targets]
    edit = program.lines(methods["cuda"], ["npu = cuda"])
    if "npu" in {*methods, *map(text, assigned)}:
        program.refuse("D114", (edit.start, edit.end), _HAS_NPU)
    else:
        program.change("D114", edit)


HANDLERS = {
    ast.Attribute: _name,
    ast.Name: _name,
    ast.Call: _call,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.ClassDef: _class,
}
