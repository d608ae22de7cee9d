# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rank 1 overflows, rank 0 does not. Run in two processes; the arguments are names of functions here."""

import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from debug.planted import marked_lines
from devices import DEVICE
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.debug.overflow import explain

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from common import main

HERE = Path(__file__).name
FINITE = "the gradients of this process are finite"


class Tables(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x)
        h = h * h  # fault: forward
        return self.b(h)


def tables(prepare=lambda model: model, *, watching=(0, 1), steps=2, replay=False, **options):
    """What this process says of the last step; rank 1's batch overflows in forward."""
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **options)
    called = prepare(model)
    handler = Tables()
    logger = logging.getLogger("apex_npu.debug")
    logger.addHandler(handler)
    if dist.get_rank() in watching:
        amp.debug.explain_overflows(after=1, replay=replay)
    for _ in range(steps):
        x = torch.randn(8, 4, device=DEVICE) * (1e4 if dist.get_rank() == 1 else 1)
        optimizer.zero_grad()
        with amp.scale_loss(called(x).float().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert amp.last_step(optimizer).skipped
    amp.debug.explain_overflows(None)
    logger.removeHandler(handler)
    return handler.texts


def names_the_fault(table):
    return "overflow    forward" in table and f"{HERE}:{marked_lines(__file__)['forward']}" in table


def check(found, begins_with):
    (table,) = found
    assert names_the_fault(table), table
    if dist.get_rank() == 1:
        assert "rank 1" not in table
    else:
        own, _, other = table.partition("\n\nrank 1\n")
        assert begins_with(own), table
        assert names_the_fault(other), table
        assert "the batch" not in own


def of_others(own):
    return own.splitlines()[1].startswith("ranks ")


def distributed_data_parallel():
    for options in ({}, {"gradient_as_bucket_view": True}):
        wrap = lambda model, options=options: nn.parallel.DistributedDataParallel(model, **options)  # noqa: E731
        check(tables(wrap), of_others)
        amp.shutdown()


def combine_ddp():
    # Averages may be there when gradients are looked at, or later.
    check(tables(combine_grad=True, combine_ddp=True), lambda own: own.startswith(FINITE) or of_others(own))


def overflow_group():
    check(tables(overflow_group=dist.group.WORLD), lambda own: own.startswith(FINITE))


def replay():
    def own_is_finite(own):
        return "run again, its gradients are finite: the cause is in other processes" in own

    # The skipped step itself, so that one step is enough.
    check(tables(nn.parallel.DistributedDataParallel, steps=1, replay=True), own_is_finite)
    amp.shutdown()
    check(tables(combine_grad=True, combine_ddp=True, steps=1, replay=True), own_is_finite)


def on_one_process():
    explain._PATIENCE_SECONDS = 0.2
    found = tables(overflow_group=dist.group.WORLD, watching=(0,), steps=3)
    assert found == []


if __name__ == "__main__":
    main(globals())
