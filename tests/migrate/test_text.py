# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Only reported spans change: encodings, line ends, indentation, comments; files that cannot be read, by name."""

import codecs
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_npu.migrate import Options, rewrite
from apex_npu.migrate.engine.source import Edit, Source, apply_edits, parse, same_elsewhere
from apex_npu.migrate.rewriting import TRIGGER

PACKAGES = Path(torch.__file__).parent.parent


def check_invariants(data: bytes, path: str = "t.py", to: str = "npu") -> bool:
    """Whether the program changes; no more than reported, and not a second time."""
    options = Options(to=to)
    rewritten = rewrite(data, path, options)
    assert not [finding for finding in rewritten.findings if finding.rule == "F909"], path
    if rewritten.source == data:
        return False
    source, pieces, at = Source(data), [], 0
    for finding in rewritten.findings:
        if finding.status == "changed":
            start = source.line_start(finding.line) + finding.column - 1
            end = source.line_start(finding.end_line) + finding.end_column - 1
            assert start >= at
            assert source.text[start:end] == finding.before
            pieces += [source.text[at:start], finding.after]
            at = end
    assert source.encode("".join([*pieces, source.text[at:]])) == rewritten.source
    assert rewrite(rewritten.source, path, options).source == rewritten.source, path
    return True


def test_other_statements_than_the_edited_ones_are_compared():
    source = Source("if a:\n    x = 1\ny = 2\n")
    edits = [Edit(10, 11, "z")]
    check = partial(same_elsewhere, source, parse(source.text))
    assert check(edits, apply_edits(source.text, edits))
    assert not check(edits, "if a:\n    z = 1\ny = 3\n")
    assert not check(edits, "if b:\n    z = 1\ny = 2\n")
    assert not check(edits, "if a:\n    z = 1\n    y = 2\n")
    assert not check(edits, "if a:\n    z = (\ny = 2\n")
    assert not check([*edits, Edit(10, 15, "z = 1")], "if a:\n    z = 1\ny = 2\n")


def sources(*folders):
    return [path for folder in folders for path in sorted((PACKAGES / folder).rglob("*.py"))]


@pytest.mark.parametrize("to", ["npu", "portable"])
def test_a_sample_of_torch(to):
    files = [path for path in sources("torch/cuda", "torch/amp", "torch/nn/parallel") if path.stat().st_size < 40_000]
    assert sum(check_invariants(path.read_bytes(), str(path), to) for path in files[::2]) > 4


def check_file(path: Path) -> bool:
    data = path.read_bytes()
    return TRIGGER.search(data) is not None and check_invariants(data, str(path))


@pytest.mark.sweep
def test_all_that_is_installed():
    with ProcessPoolExecutor(os.cpu_count(), get_context("forkserver")) as pool:
        assert sum(pool.map(check_file, sources("."), chunksize=50)) > 200


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends_stay(newline):
    before = newline.join(["import torch", "class A:", "\tdef cuda(self):", "\t\treturn torch.ones(2).cuda()", ""])
    lines = ["import torch", "import torch_npu  # noqa: F401", "class A:", "\tdef cuda(self):"]
    after = newline.join([*lines, "\t\treturn torch.ones(2).npu()", "\tnpu = cuda", ""])
    assert rewrite(before.encode()).source == after.encode()


def test_no_line_end_at_the_end():
    assert rewrite("import torch; x.cuda()").source == "import torch_npu  # noqa: F401\nimport torch; x.npu()"
    assert rewrite("class A:\n  def cuda(self): pass").source == "class A:\n  def cuda(self): pass\n  npu = cuda"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"# coding: latin-1\nx = '\xe9'; y.cuda()\n", b"# coding: latin-1\nx = '\xe9'; y.npu()\n"),
        (codecs.BOM_UTF8 + b"y.cuda()\n", codecs.BOM_UTF8 + b"y.npu()\n"),
        ("é = 'ü€😀'; é.cuda(); z = 'cuda é'\n".encode(), "é = 'ü€😀'; é.npu(); z = 'cuda é'\n".encode()),
        (b"\x0cif 1:\n\ty . \\\n  cuda ( )   # cuda\n", b"\x0cif 1:\n\ty . \\\n  npu ( )   # cuda\n"),
        (b"(y  # a.b\n .cuda()\n)", b"(y  # a.b\n .npu()\n)"),
    ],
)
def test_bytes_outside_the_spans_stay(before, after):
    assert rewrite(before).source == after
    assert check_invariants(before)


@pytest.mark.parametrize(
    ("data", "rule", "words"),
    [
        (b"x = (\ncuda", "F901", "does not parse"),
        (b"import torch.cuda\nprint 'a'\n", "F901", "does not parse"),
        (b"x.cuda(async=True)\n", "F901", "does not parse"),
        (b"# coding: nosuch\nx.cuda()\n", "F903", "encoding"),
        (b"x = '\xff'; x.cuda()\n", "F903", "encoding"),
        (b"x = '\0'; x.cuda()\n", "F901", "does not parse"),
        (b"cuda = " + b"(" * 5_000 + b")" * 5_000, "F901", "does not parse"),
        (b"cuda = " + b"-" * 200_000 + b"1", "F901", "does not parse (too deep)"),
    ],
)
def test_what_cannot_be_read(data, rule, words):
    rewritten = rewrite(data)
    assert rewritten.source == data
    assert [(finding.rule, finding.status) for finding in rewritten.findings] == [(rule, "refused")]
    assert words in rewritten.findings[0].message


def test_deep_expressions_are_read():
    program = "x = " + "+".join(["1"] * 900) + "\ny.cuda()\n"
    assert rewrite(program).source == program.replace("cuda", "npu")


def test_texts_without_a_trigger_are_not_parsed():
    assert rewrite("this is no Python").findings == ()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="places in f-strings are exact")
def test_places_in_an_fstring_are_checked():
    rewritten = rewrite('x = f"""{a}\n  {b.cuda()} {b.cuda()}"""\n')
    assert rewritten.source in ('x = f"""{a}\n  {b.npu()} {b.npu()}"""\n', 'x = f"""{a}\n  {b.cuda()} {b.cuda()}"""\n')
    assert {finding.status for finding in rewritten.findings} <= {"changed", "refused", "note"}


NAMES = st.sampled_from(["torch", "th", "cuda", "c"])
STATEMENTS = st.one_of(
    st.builds("import torch as {}".format, NAMES),
    st.builds("import torch.cuda as {}".format, NAMES),
    st.builds("from torch import cuda as {}".format, NAMES),
    st.builds("{} = {}.cuda".format, NAMES, NAMES),
    st.builds("{}.cuda.synchronize()".format, NAMES),
    st.builds("{}.nvtx.mark('é')".format, NAMES),
    st.builds("{}.CUDAGraph()".format, NAMES),
    st.builds("def f({}={}.cuda): return {}.cuda.Event".format, NAMES, NAMES, NAMES),
    st.builds("class A: {} = 1; x = {}.cuda.Event()".format, NAMES, NAMES),
    st.builds("[{}.cuda.Event for {} in {}.cuda()]".format, NAMES, NAMES, NAMES),
    st.builds("f'cuda:{{{}.cuda.device_count()}}'".format, NAMES),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(STATEMENTS, min_size=1, max_size=6), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_random_programs(statements, newline, ends):
    program = (newline.join(statements) + newline * ends).encode()
    check_invariants(program)
    check_invariants(program, to="portable")
