# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How much of the package an ordinary iteration goes through: what a reader of it has to hold.

Counted are distinct code objects of ``apex_npu``, lambdas and comprehensions included, and the files they are in.
"""

import statistics
import sys
import types
from pathlib import Path

import pytest
import torch
from devices import DEVICE
from torch import nn

import apex_npu
from apex_npu import _extension, amp, optimizers

PACKAGE = Path(apex_npu.__file__).parent

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="an ordinary step on the CPU is counted"),
    pytest.mark.skipif(_extension.extension is None, reason="one with the extension is counted"),
]


def code_of(run):
    """The code objects of the package that ``run()`` calls, but for decorators in place of torch's."""
    found = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and path.name != "_torch_private.py":
            found.add(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def iteration(level, cls, **options):
    """The code of a block, of a step, and of clearing gradients, once all is set up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = cls(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)

    def block():
        loss = model(torch.randn(8, 64)).float().square().mean()

        def backward():
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

        return backward

    for _ in range(3):
        block()()
        optimizer.step()
        optimizer.zero_grad()
    return [code_of(run) for run in (block(), optimizer.step, optimizer.zero_grad)]


def size(code):
    return len(code), len({c.co_filename for c in code})


FUSED, ADAM = optimizers.NpuFusedAdam, torch.optim.Adam


@pytest.mark.parametrize(
    ("level", "cls", "options", "block_limit", "step_limit"),
    [
        # The step of remainders goes through what encoded states have; 24 functions in 7 files are the goal.
        ("O2", FUSED, {"combine_grad": True}, (32, 12), (40, 12)),
        ("O5", FUSED, {}, (33, 12), (40, 12)),
        ("O0", FUSED, {}, (16, 5), (33, 8)),
        ("O0", FUSED, {"loss_scale": 128.0}, (28, 10), (34, 9)),
        ("O1", ADAM, {}, (40, 10), (13, 6)),
        # The step of another optimizer brings float32 values up to date, and rounds them.
        ("O2", ADAM, {}, (40, 10), (33, 6)),
    ],
)
def test_an_ordinary_iteration_is_short(level, cls, options, block_limit, step_limit):
    block, step, clear = map(size, iteration(level, cls, **options))
    print(f"{level} {cls.__name__}: block {block}, step {step}, zero_grad {clear} (functions, files)")
    assert all(found <= limit for found, limit in zip((*block, *step), (*block_limit, *step_limit), strict=True))


def test_its_functions_are_short():
    code = set().union(*iteration("O2", FUSED, combine_grad=True))
    lengths = sorted(body_lines(c) for c in code)
    assert statistics.median(lengths) <= 8
    assert sum(length > 40 for length in lengths) <= 4


def body_lines(code):
    """How many lines of a function have code of its own."""
    lines = {line for _, _, line in code.co_lines() if line is not None}
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return len(lines - {line for c in inner for _, _, line in c.co_lines() if line is not None})


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("cls", [FUSED, ADAM])
def test_what_is_rare_is_not_on_the_way(cls, level):
    rare = {"fused_unscale.py", "pending_step.py", "grad_sync.py", "data_parallel.py"}
    rare |= {"capture.py", "graph_runs.py", "failed_steps.py", "scaler_argument.py"}
    rare |= {"shard_grads.py", "sharding.py", "fully_sharded.py", "part_sums.py"}
    if cls is FUSED:  # of gradients that are not fused the part to be unscaled is asked for, which is the whole
        rare.add("shards.py")
    code = set().union(*iteration(level, cls))
    assert not {Path(c.co_filename).name for c in code} & rare
