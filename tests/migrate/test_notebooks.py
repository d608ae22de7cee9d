# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Notebooks: cells are one program; outputs, metadata and the form of the JSON stay byte for byte."""

import json

import pytest
from migrate import golden

from apex_npu.migrate import Options, plan, rewrite

# --data-parallel takes no notebooks.
CASES = [case for case in sorted(golden.CASES.glob("*.txt")) if not case.stem.startswith("parallel")]
CELLS = [
    ("code", ["%matplotlib inline\n", "!pip install \\\n", "  torch\n", "import torch"]),
    ("markdown", ["Uses `cuda`: x.cuda()\n"]),
    (
        "code",
        "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\nprint('\u00e9\\t\U0001f600'); x.cuda()",
    ),
    ("code", ["%%bash\n", "echo cuda"]),
    ("code", ["%%time\n", "y = x.cuda()\n", "x?\n"]),
    ("code", []),
]


def notebook(cells, **style):
    made = [{"cell_type": kind, "metadata": {"a": 1.50}, "source": source} for kind, source in cells]
    made[0]["outputs"] = [{"text": ["cuda\n"], "data": 1e3}]
    return json.dumps({"nbformat": 4, "cells": made, "metadata": {}}, **style)


@pytest.mark.parametrize("style", [{"indent": 1}, {"indent": None, "ensure_ascii": False}, {"indent": "\t"}])
def test_only_code_changes(tmp_path, style):
    path = tmp_path / "n.ipynb"
    before = notebook(CELLS, **style)
    path.write_text(before, encoding="utf-8")
    made = plan([path])
    new = json.loads(made.files[0].after)
    expected = json.loads(before)
    cells = expected["cells"]
    cells[0]["source"][3:] = ["import torch\n", "import torch_npu  # noqa: F401"]
    cells[2]["source"] = cells[2]["source"].replace("cuda", "npu")
    cells[4]["source"][1] = "y = x.npu()\n"
    assert new == expected
    assert made.files[0].after.decode() == notebook([(c["cell_type"], c["source"]) for c in cells], **style)
    lines = before.splitlines()
    for finding in made.findings:
        text = lines[finding.line - 1][finding.column - 1 :]
        assert text.startswith(finding.before)
        assert finding.message.startswith("cell ")
    path.write_bytes(made.files[0].after)
    assert plan([path]).files == ()


LIKE_COMMANDS = [
    "x = x.cuda()  # on the GPU, right?\n",
    "print('%s has %d devices'\n      % (torch.cuda.get_device_name(), torch.cuda.device_count()))\n",
    "for i in range(3):  # enough?\n    x = x.cuda()\n",
    "total = x.cuda().sum() \\\n    % 7\n",
    'text = """\n%s?\n!s\n""" + str(x.cuda())\n',
    "'what? =%s' % x.cuda()\n",
]
COMMANDS = [
    "!nvidia-smi 'cuda\n",
    "files = !ls \\\n  cuda\n",
    "files[0] = %sql cuda (\n",
    "for i in range(3):\n    %env CUDA_VISIBLE_DEVICES=0\n",
    "x.cuda?\n",
    "print(x.cuda(),\n      2)??\n",
    "?x.cuda\n",
]


SEVERAL_LINES = """import torch
from torch.cuda.amp import (
    autocast,
    GradScaler,  # \u00e9
)
from torch.optim import (
    AdamW,
)
from apex.optimizers import (FusedSGD,
                             FusedAdam)

model = torch.nn.Linear(2, 2).cuda()
opt = torch.optim.AdamW(
    model.parameters(),
    lr=1e-3,
    fused=True,
)
scaler = GradScaler()
for i in range(2):
    opt.zero_grad()
    with autocast():
        loss = model(
            torch.ones(4, 2).cuda()
        ).square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
print("\u00e9")
from torch.optim import SGD"""


@pytest.mark.parametrize("style", [{"indent": 1}, {"indent": None, "ensure_ascii": False}, {"indent": "\t"}])
@pytest.mark.parametrize("options", [Options(), Options(amp="O1")], ids=["", "amp"])
def test_changes_of_several_lines(tmp_path, style, options):
    lines = SEVERAL_LINES.splitlines(keepends=True)
    for source in (lines, SEVERAL_LINES, [SEVERAL_LINES], [*SEVERAL_LINES]):
        (tmp_path / "n.ipynb").write_text(notebook([("code", source), ("code", [])], **style), encoding="utf-8")
        made = plan([tmp_path], options)
        new = made.files[0].after.decode()
        program = rewrite(SEVERAL_LINES, options=options).source
        found = json.loads(new)["cells"][0]["source"]
        assert "".join(found) == program
        assert program.count("npu") > 3
        assert isinstance(found, type(source))
        if source is lines:
            assert found == program.splitlines(keepends=True)
            assert new == notebook([("code", found), ("code", [])], **style)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_cell_becomes_what_a_file_becomes(tmp_path, case):
    before, after = golden.before_and_after(case)
    path = tmp_path / "n.ipynb"
    path.write_text(notebook([("code", before.splitlines(keepends=True))]), encoding="utf-8")
    made = plan([path], golden.options_of(before))
    new = made.files[0].after if made.files else path.read_bytes()
    assert "".join(json.loads(new)["cells"][0]["source"]) == after


def planned_cell(tmp_path, source):
    (tmp_path / "n.ipynb").write_text(notebook([("code", "import torch\nx = torch.ones(2)"), ("code", source)]))
    made = plan([tmp_path])
    assert {finding.status for finding in made.findings} == {"changed"}
    return json.loads(made.files[0].after)["cells"][1]["source"]


@pytest.mark.parametrize("code", LIKE_COMMANDS)
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_only_commands_stay(tmp_path, code, command):
    changed = code.replace("cuda", "npu")
    assert planned_cell(tmp_path, code + command + code) == changed + command + changed


@pytest.mark.parametrize("code", ["x = x.cuda()", "y = %timeit x.cuda()", "x.cuda(); y = 1  # ?"])
def test_code_that_is_timed_changes(tmp_path, code):
    line = code if "%" in code else f"%time {code}"
    assert planned_cell(tmp_path, f"!ls\n    \n{line}\nx.cuda()\n") == f"!ls\n    \n{line}\nx.cuda()\n".replace(
        "cuda", "npu"
    )


@pytest.mark.parametrize(
    "line", ["%timeit -n 10 x.cuda()", "%time for y in x: y.cuda()", "%time x.cuda?", "%times x.cuda()"]
)
def test_what_is_timed_and_not_one_statement_stays(tmp_path, line):
    assert planned_cell(tmp_path, f"{line}\nx.cuda()\n") == f"{line}\nx.npu()\n"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("cuda", "F901"),
        ('{"cells": [1], "cuda": 2}', "F901"),
        ('{"cells": "cuda"}', "F901"),
        ("[" * 100_000 + '"cuda"', "F901"),
        (notebook([("code", ["x\n", "y.cuda()\n", 1])]), "F901"),
        (notebook([("code", "x = ("), ("code", "y.cuda()")]), "F901"),
        (notebook([("code", "from apex.optimizers import ("), ("code", "FusedAdam)  # cuda")]), "F901"),
    ],
)
def test_what_is_no_notebook(tmp_path, text, rule):
    path = tmp_path / "n.ipynb"
    path.write_text(text)
    made = plan([path])
    assert made.files == ()
    assert [finding.rule for finding in made.findings] == [rule]
