# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules of ``--data-parallel``: make a script for one card train on several. They make all the changes or none.

The new script still runs on one card by itself. Under ``torchrun`` each process uses one card.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from apex_npu.migrate.amp.changes import COMBINE, check_moves, place_of
from apex_npu.migrate.amp.training import Training
from apex_npu.migrate.engine.program import PARALLEL, Program, UnclearError
from apex_npu.migrate.engine.source import Edit
from apex_npu.migrate.engine.syntax import argument, constant, is_told, keywords, last_name, method_of, text
from apex_npu.migrate.rules.targets import replaced, target_of, torch_name

from .loaders import ELSEWHERE, UNSEEDED, Loaders, unseeded
from .wrapped import unwrap, unwrap_arguments

_OURS = ("torch.distributed.init_process_group", "torch.utils.data.distributed.DistributedSampler")
_SAMPLERS = (*_OURS, "torch.utils.data.DistributedSampler")
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
_INDEXED = ("set_device", "set_device_index")
_CARDS = ("torch.cuda.device", "torch.npu.device", "torch.accelerator.device_index")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_EXITS = ("sys.exit", "os._exit", "exit", "quit")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check(program: Program) -> None:
    """Report what the rules for several cards find."""
    role = program.options.data_parallel
    if role:
        convert = _convert if role == "main" else _convert_part
        has_amp = any("amp" in draft.links for draft in program.drafts)
        links = [PARALLEL, "amp"] if has_amp and role == "main" else [PARALLEL]
        program.all_or_none(convert, links, "P604")


def _convert(program: Program) -> None:
    done = next(_parallel(program), None)
    if done is not None:
        program.note("P601", done, "it already trains on several cards")
        return
    first, torch = next(iter([*program.tree.body, *ast.parse("pass").body])), torch_name(program)
    if torch is None:
        raise UnclearError(first, "P601", "torch is not imported by its name at the top level")
    put = Training(program)
    if not put.made:
        raise UnclearError(first, "P604", "no optimizer is made here, so the model is unclear")
    model = program.options.model
    if model and not any(model in made.models for made in put.made):
        raise UnclearError(first, "P604", f"no optimizer gets {model}.parameters()")
    _check_cards(program)
    _check_visible(program)
    _enter(program, torch)
    _sample(put, torch)
    _average(put, torch)
    _guard_saves(program)
    _leave(program, torch)
    _check_before_group(program)


def _convert_part(program: Program) -> None:
    """Apply the rules to a file that the script imports."""
    for node in program.every(ast.Call):
        if method_of(node)[1] == "backward":
            raise UnclearError(node, "P602", f"{ELSEWHERE}: put both into the script of --data-parallel")
    for call, is_split in unseeded(program):
        if is_split:
            program.note("P602", call, UNSEEDED)
    unwrap_arguments(program)
    _guard_saves(program)


def _check_before_group(program: Program) -> None:
    """Refuse statements before the one at which the processes join, if they need or call changed code."""
    block = program.parent(_start(program))
    if not isinstance(block, ast.If):
        return
    source, body = program.source, program.tree.body
    early = body[: body.index(block)]
    made = [draft for draft in program.changes() if draft.rule in ("P602", "P603", "P604", "P605") and draft.edits]
    made += [draft for draft in program.changes() if draft.rule == "A301" and PARALLEL in draft.links]
    holders = [next(one for one in body[::-1] if source.span(one)[0] <= draft.start) for draft in made]
    found = {one.name for one in holders if isinstance(one, _DEFINITIONS)}
    calls = {one: {last_name(call.func) for call in ast.walk(one) if isinstance(call, ast.Call)} for one in body}
    while grown := {one.name for one in body if isinstance(one, _DEFINITIONS) and calls[one] & found} - found:
        found |= grown
    for one in early:
        if not isinstance(one, _DEFINITIONS) and (one in holders or calls[one] & found):
            raise UnclearError(one, "P601", "it runs before the processes join: move it into the block of __main__")


def _parallel(program: Program) -> Iterator[ast.expr]:
    """Yield the names that show that a script already trains on several cards."""
    for node in program.every(ast.Name, ast.Attribute):
        dotted = program.dotted(node)
        wraps = dotted.startswith(("torch.", "apex")) and dotted.rpartition(".")[2] in _WRAPPERS
        if wraps and dotted.endswith(".DataParallel"):
            raise UnclearError(node, "P604", "remove DataParallel first: each process has one card")
        if wraps or dotted in _SAMPLERS:
            yield node


def _check_cards(program: Program) -> None:
    """Refuse devices with a number, since each process uses another card."""
    for node in program.every(ast.Constant, ast.Call):
        text = str(constant(node))
        is_numbered = text.startswith(("cuda:", "npu:")) and text != "cuda:0"
        if is_numbered or (isinstance(node, ast.Call) and _gets_card(program, node)):
            selects = f"{ast.unparse(node)[-60:]} selects a card, but every process has its own"  # models may be long
            raise UnclearError(node, "P601", f"{selects}: write the device without its number")


def _gets_card(program: Program, call: ast.Call) -> bool:
    """Return whether a call gets the number of a card."""
    dotted, name = program.dotted(call.func), call.func.attr if isinstance(call.func, ast.Attribute) else ""
    module = call.func.value if isinstance(call.func, ast.Attribute) else None
    owner = program.dotted(module.func) if isinstance(module, ast.Call) else ""
    given = [one.value for one in call.keywords if one.arg == "device"]
    numbered = [*call.args[:1], *given]
    return (
        (dotted.startswith("torch.") and dotted.rpartition(".")[2] in _INDEXED)
        or (dotted in _CARDS or (name == "device" and owner == "torch.get_device_module"))
        or (dotted == "torch.device" and len(call.args) + len(call.keywords) > 1)
        or (name in ("cuda", "npu") and not dotted and bool(numbered) and type(constant(numbered[0])) is not bool)
        or int in [type(constant(one)) for one in (numbered if name == "to" or dotted == "torch.device" else given)]
    )


def _check_visible(program: Program) -> None:
    """Refuse a script that limits all processes to one and the same card by a variable."""
    for node in program.every(ast.Constant):
        if node.value not in _VISIBLE:
            continue
        parent = program.parent(node)
        value: ast.AST | None = None
        if isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store):
            value = getattr(program.parent(parent), "value", None)
        elif isinstance(parent, ast.Call) and last_name(parent.func) in ("setdefault", "putenv"):
            value = parent.args[-1]
        elif isinstance(parent, ast.Dict) and node in parent.keys:
            value = parent.values[parent.keys.index(node)]
        if value is not None and "," not in str(constant(value)):
            raise UnclearError(node, "P601", f"{node.value} gives every process the same card: set it in the shell")


def _enter(program: Program, torch: str) -> None:
    """Add the lines that make a process join the others, before the first statement."""
    bound = program.names.module.bindings.get("os", [])
    if any(binding != "os" for binding in bound) or (not bound and program.names.is_taken("os")):
        raise UnclearError(program.tree.body[0], "P601", "the name os means something else here")
    anchor = _start(program)
    if program.source.indent(anchor).strip():
        raise UnclearError(anchor, "P601", "the first statement shares its line: put it on a line of its own")
    program.change("P601", program.lines(anchor, target_of(program).group_lines(torch), before=True))


def _leave(program: Program, torch: str) -> None:
    """Destroy the process group after the last statement, as torch requires to end its threads and communicators."""
    last = program.body_of(_start(program))[-1]
    called = last.value if isinstance(last, ast.Expr) else None
    if isinstance(last, ast.Raise) or (isinstance(called, ast.Call) and text(called.func) in _EXITS):
        program.note("P607", last, "the script exits here: call torch.distributed.destroy_process_group() before that")
        return
    there, destroyed = (f"{torch}.distributed.{name}()" for name in ("is_initialized", "destroy_process_group"))
    program.change("P607", program.lines(last, [f"if {there}:", f"    {destroyed}"]))


def _start(program: Program) -> ast.stmt:
    """Return the first statement that runs when the script is started, and not when it is imported."""
    for node in program.tree.body:
        if isinstance(node, ast.If) and any(getattr(one, "id", "") == "__name__" for one in ast.walk(node.test)):
            return node.body[0]
    removed = [(one.start, one.end) for one in program.changes() if one.rule[0] == "T"]
    seen = False
    for node in program.tree.body:
        seen |= isinstance(node, (ast.Import, ast.ImportFrom)) and "torch" in ast.unparse(node)
        start = program.source.span(node)[0]
        covered = any(begin <= start < end for begin, end in removed)
        if seen and not isinstance(node, (ast.Import, ast.ImportFrom, *_DEFINITIONS)) and not covered:
            return node
    raise UnclearError(program.tree.body[-1], "P601", "the file has no statement that runs when it is started")


def _sample(put: Training, torch: str) -> None:
    """Give each process a part of the training data."""
    program = put.program
    loaders = Loaders(put)
    _check_splits(program, loaders)
    for call in loaders.made:
        _sample_one(program, call, torch)
    for loop, name in loaders.epochs:
        anchor = loop.body[0]
        for made in put.assigned(name, loop):
            if loop in program.around(made):
                raise UnclearError(made, "P603", "the DataLoader is made in the loop over epochs: make it before")
        if program.source.indent(anchor).strip() or not isinstance(loop.target, ast.Name):
            raise UnclearError(loop, "P603", "write the loop over epochs with one variable, and its block on new lines")
        lines = [
            f"if isinstance({name}.sampler, {torch}.utils.data.DistributedSampler):",
            f"    {name}.sampler.set_epoch({loop.target.id})",
        ]
        program.change("P603", program.lines(anchor, lines, before=True))
    for call in loaders.others:
        program.note("P602", call, "every process reads all of these data")
    for call in loaders.counted():
        program.note("P602", call, "each process has a part of these data: check what is divided by this length")


def _check_splits(program: Program, loaders: Loaders) -> None:
    """Refuse data that each process splits for itself."""
    near = {program.tree, *(program.function_of(call) for call in loaders.made)}
    for call, is_split in unseeded(program):
        shuffled = [*call.args[:1], *(one.value for one in call.keywords)] if last_name(call.func) == "shuffle" else []
        if is_split or any(text(one) in loaders.sampled for one in shuffled):
            raise UnclearError(call, "P602", UNSEEDED)
        if program.function_of(call) in near and not any(isinstance(one, ast.For) for one in program.around(call)):
            program.note("P602", call, UNSEEDED)


def _sample_one(program: Program, call: ast.Call, torch: str) -> None:
    given = keywords(call)
    for name in ("sampler", "batch_sampler"):
        if name in given or len(call.args) > 3:
            raise UnclearError(call, "P602", f"it has a {name}: let that select a part of the data for each process")
    if not is_told(call):
        raise UnclearError(call, "P602", "its arguments are unknown: * or **")
    dataset, shuffle, source = argument(call, 0, "dataset"), argument(call, 2, "shuffle"), program.source
    if dataset is None or not text(dataset):
        raise UnclearError(call, "P602", "assign the dataset to a name first: the sampler also needs it")
    shuffled = "" if shuffle is None else program.written(shuffle)
    if "\n" in shuffled:
        raise UnclearError(call, "P602", "its argument shuffle is on several lines")
    there = f"{torch}.distributed.is_initialized()"
    part = f"{torch}.utils.data.DistributedSampler({text(dataset)}, shuffle={shuffled or 'False'})"
    edits: list[Edit] = []
    if shuffle is not None and constant(shuffle):
        asked = "" if constant(shuffle) is True else f"{shuffled} and " if text(shuffle) else f"({shuffled}) and "
        edits.append(replaced(program, shuffle, f"{asked}not {there}"))
    last = max([*call.args, *(one.value for one in call.keywords)], key=lambda one: source.span(one)[1])
    end = source.span(last)[1]
    while source.text[end : end + 1] == ")" and end + 1 < source.span(call)[1]:
        end += 1  # parentheses around the last argument
    edits.append(Edit(end, end, f", sampler={part} if {there} else None"))
    message = "each process keeps the batch size, so the total grows: check the batch size and the learning rate"
    for edit in edits:
        program.change("P602", edit, message if edit is edits[-1] else "")
    program.report("P602", "changed", call.func)  # a comment that keeps the name keeps all


def _average(put: Training, torch: str) -> None:
    """Average gradients over the processes: by amp if it is added with fused optimizers, else by torch's DDP."""
    if put.combines:
        call = next((draft for draft in put.program.drafts if draft.rule == "A301"), None)
        if call is not None:
            put.program.note("P604", (call.start, call.end), f"amp.initialize gets {COMBINE.format(torch)}")
            return
    made = put.made
    only = put.program.options.model
    models = [one for one in dict.fromkeys(name for each in made for name in each.models) if only in ("", one)]
    place = _initialized(put) or place_of(put)
    scope = put.program.names.scope(place)
    for model in models:
        if "." not in model and put.scope_of(place, model) is not scope:
            raise UnclearError(place, "P604", f"{model} is not a name of the function that makes its optimizer")
    lines = [f"if {torch}.distributed.is_initialized():"]
    lines += [f"    {model} = {torch}.nn.parallel.DistributedDataParallel({model})" for model in models]
    check_moves(put, models, place)
    for model in models:
        unwrap(put, model, place)
    put.put_after("P604", place, lines)


def _initialized(put: Training) -> ast.stmt | None:
    """Return the statement of the program that already calls ``amp.initialize``, or None."""
    if not put.initializing:
        return None
    call = put.initializing[0]
    statement = put.program.statement_of(call)
    if isinstance(statement, (ast.Assign, ast.Expr)) and statement.value is call:
        return statement
    raise UnclearError(call, "P604", "amp.initialize is part of another statement: make it one of its own")


def _guard_saves(program: Program) -> None:
    """Let only one process call ``torch.save``."""
    torch = torch_name(program)
    for node in program.every(ast.Call):
        if program.dotted(node.func) != "torch.save":
            continue
        statement = program.parent(node)
        if torch is None or not isinstance(statement, ast.Expr):
            raise UnclearError(node, "P605", "torch.save is part of another statement: make it a statement of its own")
        if _is_open(program, node):
            raise UnclearError(node, "P605", "torch.save gets an open file, which every process opens: pass the path")
        start = program.source.span(statement)[0]
        program.check_own_lines(statement, "P605")
        header = f"if not {torch}.distributed.is_initialized() or {torch}.distributed.get_rank() == 0:"
        written = program.put_into(statement, header)
        program.report("P605", "changed", (start, start), [Edit(start, start, written)])
        program.report("P605", "changed", node.func)  # a comment that keeps the name keeps all


def _is_open(program: Program, call: ast.Call) -> bool:
    """Return whether ``torch.save`` writes to a file that the program has opened, and not to a path."""
    to = argument(call, 1, "f")
    if to is None:
        return False
    made = [to]
    for node in program.every(ast.Assign, ast.withitem) if text(to) else ():
        if isinstance(node, ast.Assign):
            made += [node.value] if text(to) in map(text, node.targets) else []
        elif node.optional_vars is not None and text(node.optional_vars) == text(to):
            made.append(node.context_expr)
    names = [last_name(one.func) for one in made if isinstance(one, ast.Call)]
    return any(name in ("open", "fdopen", "BytesIO") or name.endswith("TemporaryFile") for name in names)
