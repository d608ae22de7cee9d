# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Programs that would get amp or several processes, but for one change: they do not, and it is named."""

import pytest

from apex_npu.migrate import Options, rewrite
from apex_npu.migrate.files import reports
from apex_npu.migrate.rules.catalogue import RULES

PARALLEL = """import torch
model = torch.nn.Linear(2, 1)
opt = torch.optim.Adam(model.parameters())
data = torch.utils.data.DataLoader(points, 8)
for epoch in range(3):
    for x in data:
        loss = model(x).sum()
        loss.backward()
        opt.step()
"""
TRAINING = """import torch
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in data:
    loss = model(x).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCALED = """import torch
args = parse()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler(enabled=args.amp)
for x in data:
    loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
OPTIONS = {
    PARALLEL: Options(data_parallel="main", ignore=("O",)),
    TRAINING: Options(amp="O1", ignore=("O",)),
    SCALED: Options(amp="O1", ignore=("O", "D")),
}
VISIBLE = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\n"
SPLIT = "from torch.utils.data import random_split\npoints, others = random_split(all_points, [8, 2])\n"
FSDP = "from torch.distributed.fsdp import FullyShardedDataParallel\nmodel = FullyShardedDataParallel(model)\n"
BCE = "criterion = torch.nn.BCELoss()\nfor x in data:\n    "
ITERABLE = "class Lines(torch.utils.data.IterableDataset):\n    pass\npoints = Lines()\n"
TWICE = 'with torch.autocast("cuda"):\n    with torch.autocast("cuda"):\n        y = 1\n'
# What a part of the program becomes, or what follows it; the place, the rule and words of what is said.
CHANGES = {
    PARALLEL: [
        ("import torch", VISIBLE + "import torch", "2:12 P601 CUDA_VISIBLE_DEVICES"),
        ("data = ", "model.cuda(args.gpu)\ndata = ", "4:1 P601 model.cuda(args.gpu)"),
        ("data = ", "model = torch.nn.DataParallel(model)\ndata = ", "4:9 P604 remove DataParallel"),
        ("for epoch", "with torch.cuda.device(0): pass\nfor epoch", "5:6 P601 torch.cuda.device(0)"),
        ("points, 8", "points, 8, sampler=weighted", "4:8 P602 a sampler"),
        ("points, 8", "points, batch_sampler=batches", "4:8 P602 a batch_sampler"),
        ("points, 8", "load(), 8", "4:8 P602 the dataset"),
        ("data = ", ITERABLE + "data = ", "4:13 P602 the IterableDataset"),
        ("model = ", SPLIT + "model = ", "3:18 P602 generator"),
        ("data = torch.utils.data.DataLoader(points, 8)\n", "", "7:9 P602 a DataLoader"),
        (PARALLEL[PARALLEL.index("    for x") :], "    train_one_epoch(model, data, opt)\n", "4:8 P602 another file"),
        ("points, 8)\nfor epoch in range(3)", "points, 8, shuffle=True)\nwhile not done()", "5:1 P603 range"),
        (
            "data = torch.utils.data.DataLoader(points, 8)\nfor epoch in range(3):",
            "for epoch in range(3):\n    data = torch.utils.data.DataLoader(points, 8)",
            "5:5 P603 the loop over epochs",
        ),
        ("for epoch", "model.to(device)\nfor epoch", "5:1 P604 model is moved"),
        ("for epoch", "x = model.to(0)\nfor epoch", "5:5 P601 model.to(0)"),
        ("for epoch", "x = model.to(device=0)\nfor epoch", "5:5 P601 model.to(device=0)"),
        ("for epoch", "x = torch.zeros(2, device=0)\nfor epoch", "5:5 P601 torch.zeros(2, device=0)"),
        ("", "print(model.weight)\n", "10:7 P604 model.weight"),
        ("", "with open('a.pt', 'wb') as f:\n    torch.save(model.state_dict(), f)\n", "11:5 P605 an open file"),
        ("", "torch.save(model.state_dict(), 'last.pt'); opt.step()\n", "10:1 P605 a line of its own"),
        ("", "both = [model, opt]\nstate = {'model': model}\ntorch.save(state, 'a.pt')\n", "11:19 P604 state is saved"),
    ],
    TRAINING: [
        ("SGD(model.parameters(), 0.1)", "LBFGS(model.parameters())", "2:13 A353 LBFGS"),
        ("torch.optim.SGD(model.parameters(), 0.1)", "getattr(torch.optim, name)(net)", "7:5 A351 optimizer is made"),
        ("opt", "if resume:\n    optimizer = load()\nelse:\n    opt", "5:5 A351 optimizer is also assigned"),
        ("for x in data:\n    loss = model(x)", BCE + "loss = compute(criterion, model(x))", "5:20 A354 a BCELoss"),
        ("SGD(model", "SGD(trainer.model", "2:13 A352 trainer.model"),
        ("for x", "model = model.to(device)\nfor x", "3:9 A352 model is moved"),
        ("for x", "penalty = torch.autograd.grad(loss, inputs)\nfor x", "3:11 A353 torch.autograd.grad"),
        ("for x", FSDP + "for x", "4:9 A354 sharded"),
        ("for x", "from accelerate import Accelerator\nrunner = Accelerator()\nfor x", "4:10 A354 accelerate"),
        ("\n    optimizer.zero_grad()\n    ", "; ", "4:28 A353 a line of its own"),
    ],
    SCALED: [
        ("enabled=args.amp", "enabled=next(switches)", "4:10 A355 enabled="),
        ("amp.GradScaler(enabled=args.amp)", "cuda.amp.GradScaler(2.0**10)", "4:10 A355 --amp-args"),
        ("", "other = torch.amp.GradScaler(init_scale=2.0)\n", "10:9 A355 --amp-args"),
        ("", "print(scaler.get_scale())\n", "10:7 A355 get_scale"),
        ("", "train(model, scaler)\n", "10:14 A355 passed on"),
        ("", 'cast = torch.autocast("cuda")\n', "10:8 A355 a with statement"),
        ("", 'with torch.autocast("cuda", dtype=chosen): pass\n', "10:6 A355 the dtype"),
        ("", 'with torch.autocast("cuda", enabled=flag): pass\n', "10:6 A355 enabled="),
        (
            "",
            'with torch.autocast("cuda"):\n    loss.backward()\n    optimizer.step()\n',
            "11:5 A355 backward is",
        ),
        ("", TWICE, "11:5 A355 autocast is inside"),
    ],
}


CASES = [pytest.param(program, *change, id=change[-1]) for program in CHANGES for change in CHANGES[program]]


@pytest.mark.parametrize(("program", "old", "new", "said"), CASES)
def test_a_change_that_keeps_a_program_as_it_is(program, old, new, said):
    changed = program.replace(old, new, 1) if old else program + new
    made = rewrite(changed, options=OPTIONS[program])
    assert made.source == rewrite(changed, options=Options(ignore=OPTIONS[program].ignore)).source
    place, rule, words = said.split(" ", 2)
    (found,) = (one for one in made.findings if one.status == "refused" and one.rule != "D150")
    assert (f"{found.line}:{found.column}", found.rule) == (place, rule)
    assert words in found.message
    assert "It refuses:" in reports.explanation(RULES[rule])


@pytest.mark.parametrize("program", OPTIONS)
def test_without_a_change_they_are_converted(program):
    made = rewrite(program, options=OPTIONS[program])
    assert made.source != program
    assert {finding.status for finding in made.findings} == {"changed"}
