# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A person's rules: what they change, whose rule counts, what is wrong in a file of them."""

import json
import sys

import pytest
from migrate.test_refused import PARALLEL

from apex_npu.__main__ import main
from apex_npu.migrate import Options, plan, rewrite
from apex_npu.migrate.rules.own import Argument, Keep, Refuse, Rename, read_api_list, read_rules

ALL = """
[[rename]]
old = "mylib.to_cuda"
new = "mylib.to_npu"

[[argument]]
call = "torch.utils.data.DataLoader"
keyword = "pin_memory"
new = "False"

[[refuse]]
name = "mylib.kernel"
why = "it is written in CUDA"

[[keep]]
name = "torch.cuda.empty_cache"
"""
ASCENDS = {
    "rules": {
        "ArgsModifyRule": [{"func_name": "mylib.f", "arg_idx": 1, "arg_new": "device"}],
        "FuncNameModifyRule": [{"old_name": "mylib.f", "new_name": "mylib.g"}, {"old_name": "cuda", "new_name": "npu"}],
        "ModuleNameModifyRule": [{"old_name": "ops", "new_name": "npu_ops", "parent_module": "mylib"}],
    }
}


def applied(program, *rules):
    made = rewrite(program, options=Options(own=rules))
    assert rewrite(made.source, options=Options(own=rules)).source == made.source  # a second run changes nothing
    return made.source, [(one.rule, one.status) for one in made.findings]


@pytest.mark.parametrize(
    ("old", "new", "before", "after"),
    [
        ("lib.a", "lib.b", "import lib\nlib.a(lib.a.x, x.a)\n", "import lib\nlib.b(lib.b.x, x.a)\n"),
        ("lib.a", "lib.b", "import lib as l\nl.a(); lib.a()\n", "import lib as l\nl.b(); lib.a()\n"),
        ("lib.a", "lib.b", "from lib import a, c\na()\n", "from lib import b as a, c\na()\n"),
        ("lib.a", "lib.b", "from lib import a as x\nx()\n", "from lib import b as x\nx()\n"),
        ("lib.a", "other.b", "from lib import a\na()\n", "from other import b as a\na()\n"),
        ("lib.a", "other.b", "import lib\nlib.a()\n", "import lib\nimport other\nother.b()\n"),
        ("lib.a", "other.b", "import other, lib\nlib.a()\n", "import other, lib\nother.b()\n"),
        ("lib", "other", "import lib\nlib.a()\n", "import other as lib\nlib.a()\n"),
        ("lib", "other", "from lib.c import a\na()\n", "from other.c import a\na()\n"),
        ("lib.c", "lib.d", "import lib.c\nlib.c.a()\n", "import lib.d\nlib.d.a()\n"),
        ("lib.c", "other.d", "import lib.c as c\nc.a()\n", "import other.d as c\nc.a()\n"),
        (".a", ".b", "x.a().a; a()\n", "x.b().a; a()\n"),
    ],
)
def test_a_name_is_another(old, new, before, after):
    source, found = applied(before, Rename(old, new))
    assert source == after
    assert {one for one in found} == {("R801", "changed")}


@pytest.mark.parametrize(
    ("program", "new", "reason"),
    [
        ("from lib import a, c\na()\n", "other.b", "a statement of its own"),
        ("import lib.a\nlib.a.f()\n", "other.b", "import it under a name (as)"),
        ("import lib; lib.a()\n", "other.b", "import other at the top level first"),
        ("import lib\nother = 1\nlib.a()\n", "other.b", "import other at the top level first"),
    ],
)
def test_a_name_that_is_left(program, new, reason):
    made = rewrite(program, options=Options(own=(Rename("lib.a", new),)))
    assert made.source == program
    assert reason in made.findings[0].message


def test_shadowed_names_stay():
    program = "import lib\ndef f(lib):\n    lib.a()\n"
    assert applied(program, Rename("lib.a", "lib.b")) == (program, [])


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        (Argument("lib.f", "False", keyword="pin"), "lib.f(1, pin=True)", "lib.f(1, pin=False)"),
        (Argument("lib.f", "False", keyword="pin"), "lib.f(1)", "lib.f(1)"),
        (Argument("lib.f", "2 + x", position=1), "lib.f(1, a(3))", "lib.f(1, 2 + x)"),
        (Argument("lib.f", "2", position=1), "lib.f(*a, 1)", "lib.f(*a, 1)"),
        (Argument(".f", "2", position=0), "x.f(1), f(1)", "x.f(2), f(1)"),
    ],
)
def test_an_argument_is_another(rule, before, after):
    assert applied(f"import lib\n{before}\n", rule)[0] == f"import lib\n{after}\n"


def test_refused_and_listed_names():
    program = "import torch, lib\nfrom lib.c import d\ntorch.nn.X(1)\nlib.kernel()\nd()\n"
    rules = (Refuse("lib.kernel", "why not"), Refuse("torch.nn.X", "", listed=True), Refuse("lib.c", "all of it"))
    made = rewrite(program, options=Options(own=rules))
    assert made.source == program
    assert [(one.line, one.rule, one.message.rpartition(": ")[2]) for one in made.findings] == [
        (2, "R803", "all of it"),
        (3, "D170", "torch.nn.X is in the list of APIs that are not supported"),
        (4, "R803", "why not"),
        (5, "R803", "all of it"),
    ]


def test_a_persons_rules_come_before_others():
    program = (
        "import torch\ntorch.cuda.empty_cache(); torch.cuda.seed(); x.cuda()\nfrom torch.cuda import Event\nEvent()\n"
    )
    rules = (Keep("torch.cuda.empty_cache"), Keep("torch.cuda.Event"), Rename(".cuda", ".to_device"))
    source, found = applied(program, *rules)
    assert "torch.cuda.empty_cache(); torch.npu.seed(); x.to_device()\nfrom torch.cuda import Event\n" in source
    assert ("R804", "kept") in found


SCALED = """import torch
from torch.cuda.amp import autocast
model = torch.nn.Linear(2, 1)
opt = torch.optim.Adam(model.parameters())
scaler = torch.cuda.amp.GradScaler()
for x in data:
    with autocast():
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
"""
SAMPLED = PARALLEL + "torch.save(epoch, path)\n"


@pytest.mark.parametrize(
    "rule",
    [
        Rename(".unscale_", ".unscale_all"),
        Rename("torch.cuda.amp.autocast", "mylib.cast"),
        Argument(".step", "opt.inner", position=0),
        Refuse(".unscale_", "why not"),
        Keep(".unscale_"),
    ],
)
def test_what_goes_together_is_not_changed_by_halves(rule):
    without = rewrite(SCALED, options=Options(ignore=("O",), own=(rule,)))
    made = rewrite(SCALED, options=Options(amp="O1", ignore=("O",), own=(rule,)))
    assert made.source == without.source
    assert {one.status for one in made.findings if one.rule[0] in "AT"} == {"refused"}


@pytest.mark.parametrize("name", ["torch.save", "torch.utils.data.DataLoader"])
def test_what_is_kept_keeps_a_script_for_one_card(name):
    options = {"data_parallel": "main", "ignore": ("O",)}
    assert rewrite(SAMPLED, options=Options(**options)).source != SAMPLED
    made = rewrite(SAMPLED, options=Options(**options, own=(Keep(name),)))
    assert made.source == SAMPLED
    assert "R804" in [one.rule for one in made.findings]
    # What changes the arguments of the call beside it goes with it.
    other = Argument("torch.utils.data.DataLoader", "16", position=1)
    both = rewrite(SAMPLED, options=Options(**options, own=(other,))).source
    assert "DataLoader(points, 16, sampler=" in both


def test_rules_of_both_forms(tmp_path):
    (tmp_path / "r.toml").write_text(ALL)
    if sys.version_info >= (3, 11):
        assert read_rules(str(tmp_path / "r.toml")) == (
            Rename("mylib.to_cuda", "mylib.to_npu"),
            Argument("torch.utils.data.DataLoader", "False", keyword="pin_memory"),
            Refuse("mylib.kernel", "it is written in CUDA"),
            Keep("torch.cuda.empty_cache"),
        )
    (tmp_path / "r.json").write_text(json.dumps(ASCENDS))
    ascends = (
        Argument("mylib.f", "device", position=1),
        Rename("mylib.f", "mylib.g"),
        Rename(".cuda", ".npu"),
        Rename("mylib.ops", "mylib.npu_ops"),
    )
    assert read_rules(str(tmp_path / "r.json")) == ascends
    (tmp_path / "r.json").write_text(json.dumps(ASCENDS["rules"]))
    assert read_rules(str(tmp_path / "r.json")) == ascends
    (tmp_path / "l.json").write_text(json.dumps({"op_list": {"torch.nn.X": "why"}}))
    assert read_api_list(str(tmp_path / "l.json")) == (Refuse("torch.nn.X", "why", listed=True),)
    (tmp_path / "l.json").write_text('["torch.nn.X"]')
    assert read_api_list(str(tmp_path / "l.json")) == (Refuse("torch.nn.X", "", listed=True),)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("r.json", "{", "r.json: it is not valid JSON: Expecting property name"),
        ("r.json", "[]", "r.json: it has no tables"),
        ("r.json", '{"renames": []}', "unknown rules 'renames'; allowed are rename, argument"),
        ("r.json", '{"rename": {}}', "rename must be a list of rules: write [[rename]]"),
        ("r.json", '{"rename": [1]}', "rename number 1 must be a table"),
        ("r.json", '{"rename": [{"old": "a", "nwe": "b"}]}', "number 1: unknown key 'nwe'; allowed are new, old"),
        ("r.json", '{"rename": [{"old": "a"}]}', "number 1: the key 'new' is missing"),
        ("r.json", '{"rename": [{"old": "a", "new": 1}]}', "new must be a string, got 1"),
        ("r.json", '{"rename": [{"old": "a b", "new": "b"}]}', "a name must be written as mylib.function"),
        ("r.json", '{"rename": [{"old": "a", "new": ".b"}]}', "both methods"),
        ("r.json", '{"rename": [{"old": "a", "new": "a.b"}]}', "a second run would change it again"),
        ("r.json", '{"argument": [{"call": "a", "new": "1"}]}', "one of position and keyword"),
        ("r.json", '{"argument": [{"call": "a", "new": "1 +", "position": 0}]}', "must be a Python expression"),
        ("r.json", '{"argument": [{"call": "a", "new": "1", "position": -1}]}', "at least 0, got -1"),
        ("r.json", '{"argument": [{"call": "a", "new": "1", "position": true}]}', "position must be an integer"),
        ("r.json", '{"argument": [{"call": "a", "new": "1", "keyword": 1}]}', "keyword must be a string, got 1"),
        ("r.json", '{"refuse": [{"name": "a"}]}', "the key 'why' is missing"),
        ("r.json", '{"refuse": [{"name": "a", "why": ["b"]}]}', "why must be a string, got ['b']"),
        ("r.json", '{"FuncNameModifyRule": [{"old_name": "a"}]}', "the key 'new_name' is missing"),
        ("r.json", '{"FuncNameModifyRule": [{"old_name": 1, "new_name": "b"}]}', "old_name must be a string, got 1"),
        ("r.json", '{"ArgsModifyRule": [{"func_name": "a", "arg_new": "1"}]}', "the key 'arg_idx' is missing"),
        ("r.yaml", "", "must end with .toml or .json"),
        ("nosuch.json", None, "it cannot be read"),
        pytest.param(
            *("r.toml", "[[rename]\n", "it is not valid TOML"),
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="there is no tomllib"),
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, capsys, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    (tmp_path / "a.py").write_text("x.cuda()\n")
    assert main(["migrate", "--rules", str(tmp_path / name), "--write", "--allow-dirty", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "a.py").read_text() == "x.cuda()\n"


def test_toml_needs_a_python_that_reads_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tomllib", None)
    (tmp_path / "r.toml").write_text(ALL)
    with pytest.raises(ValueError, match=r"r\.toml.*3\.11.*JSON"):
        read_rules(str(tmp_path / "r.toml"))


@pytest.mark.parametrize("text", ["1", '{"ops": {}}', '{"op_list": {"a b": ""}}'])
def test_a_wrong_list(tmp_path, text):
    (tmp_path / "l.json").write_text(text)
    with pytest.raises(ValueError, match="op_list"):
        read_api_list(str(tmp_path / "l.json"))


def test_the_command(tmp_path, capsys):
    (tmp_path / "r.json").write_text(json.dumps({"rename": [{"old": "lib.a", "new": "lib.b"}]}))
    (tmp_path / "l.json").write_text('["lib.c"]')
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a.py").write_text("import lib\nlib.a()\nlib.c()\n")
    given = ["--rules", str(tmp_path / "r.json"), "--api-list", str(tmp_path / "l.json")]
    assert main(["migrate", *given, str(tmp_path / "tree")]) == 1
    printed = capsys.readouterr().out
    assert "R801 changed  .a -> .b" in printed or "R801 changed  lib.a -> lib.b" in printed
    assert "D170 refused  lib.c is in the list" in printed
    assert plan([tmp_path / "tree"]).findings == ()
