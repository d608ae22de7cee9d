# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trainings of 10 steps, against one process that sees the whole batch and against DistributedDataParallel.

Both begin every step with the same parameters: what they round in other ways would come back through the gradients.

Run in several processes; the arguments are names of functions here.
"""

import contextlib
import copy
import itertools

import torch
import torch.distributed as dist
from common import assert_equal_on_all, average, backward, data, main, start
from devices import DEVICE, SATURATES
from torch import nn

from apex_npu import amp, optimizers

STEPS = 10
# What a step may differ by, relative to a parameter's largest element. A gradient differs by a few eps of what computes
# it, and moves a parameter by at most ten times lr, 0.5, of that: one eps, as gradients are smaller than parameters.
TOLERANCE = {"O0": 1e-6, "O1": 1e-3, "O2": 1e-3, "O5": 1e-2}


OPTIMIZERS = {
    "torch": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "fused": lambda p: optimizers.NpuFusedSGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: optimizers.NpuFusedAdam(p, lr=0.01, eps=1e-3),
}


class Net(nn.Module):
    """Everything that makes gradients come late, twice, or not at all."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)
        self.tied = nn.Linear(12, 12)
        self.again = nn.Linear(12, 12)
        self.again.weight = self.tied.weight
        self.branch = nn.Linear(12, 12)  # reached on rank 0 alone, and not always
        self.never = nn.Linear(5, 3)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.last = nn.Linear(12, 2)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, rank=0, step=0):
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.tanh(self.again(torch.tanh(self.tied(x))))
        if rank == 0 and step % 3:
            x = x + torch.tanh(self.branch(x))
        return self.last(torch.tanh(self.frozen(x))) * self.temperature


def net():
    torch.manual_seed(0)
    return Net().to(DEVICE)


def loss_of(model, x, rank, step):
    return model(x, rank, step).float().square().mean()


def grouped(model):
    """Two groups, the second far too small for a bucket of its own."""
    named = dict(model.named_parameters())
    small = [p for name, p in named.items() if name.endswith("bias")]
    return [{"params": [p for name, p in named.items() if not name.endswith("bias")]}, {"params": small}]


def train(level, kind, engine, *, ends=None, accumulate=1, overflow=False, groups=False, **options):
    """All parameters after each step, and how many steps were skipped; ``engine``: alone, combine_ddp or ddp.

    With the ``ends`` of another training's steps each step begins where the other's began.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model = net()
    optimizer = OPTIMIZERS[kind](grouped(model) if groups else model.parameters())
    scale = {"loss_scale": "dynamic", "dynamic_init_scale": 2.0**10} if level != "O5" else {}
    shared = {"combine_ddp": True, "ddp_replica_count": 3} if engine == "combine_ddp" else {}
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, combine_grad=True, verbosity=0, **scale, **shared, **options
    )
    if engine == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    params = [*amp.master_params(optimizer), *model.parameters()]
    course = []
    for step in range(STEPS):
        if ends and step:
            with torch.no_grad():
                torch._foreach_copy_(params, ends[step - 1])
        for micro in range(accumulate):
            last = micro == accumulate - 1
            xs = [data(step, micro, r) for r in range(world)]
            if overflow and step == 5 and micro == 0:
                xs[1][0, 0] = torch.inf
            if engine == "alone":
                # Where a rank does not reach the branch its gradient counts as zeros.
                loss = sum(loss_of(model, x, r, step) for r, x in enumerate(xs)) / world
            else:
                loss = loss_of(wrapped if engine == "ddp" else model, xs[rank], rank, step)
            apart = amp.no_sync if engine == "combine_ddp" and not last else contextlib.nullcontext
            with apart(), amp.scale_loss(loss / accumulate, optimizer) as scaled_loss:
                scaled_loss.backward()
        assert model.never.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        course.append([p.detach().clone() for p in params])
    skipped = amp.last_step(optimizer).skipped_steps
    amp.shutdown()
    return course, skipped


def assert_close(found, expected, tolerance):
    for step, ends in enumerate(zip(found, expected, strict=True)):
        for a, b in zip(*ends, strict=True):
            if a.dtype == torch.float32:  # others are masters, rounded
                difference = (a - b).abs().max() / b.abs().max().clamp(min=1e-3)
                assert difference <= tolerance, (step, difference)


def same_as_alone(cases):
    for level, kind, accumulate, overflow, groups in cases:
        # An input of inf overflows in the forward pass; a block begins by clearing the flag of a chip that saturates.
        overflow = overflow and not SATURATES
        options = {"accumulate": accumulate, "overflow": overflow, "groups": groups}
        expected, skips = train(level, kind, "alone", **options)
        found, skipped = train(level, kind, "combine_ddp", ends=expected, **options)
        assert skipped == skips == int(overflow)
        assert_equal_on_all([torch.cat([p.float().flatten() for p in end]) for end in found])
        assert_close(found, expected, TOLERANCE[level])


def levels():
    same_as_alone(
        [
            ("O0", "torch", 1, False, False),
            ("O0", "adam", 4, True, True),
            ("O1", "fused", 1, True, False),
            ("O2", "fused", 4, True, True),
            ("O2", "torch", 1, True, False),
        ]
    )


def all_levels():
    # Two groups by turns: each level and each optimizer has them.
    cases = itertools.product(("O0", "O1", "O2", "O5"), OPTIMIZERS, (1, 4))
    same_as_alone((*case, False, i // 2 % 2 == 1) for i, case in enumerate(cases))
    same_as_alone(itertools.product(("O0", "O1", "O2"), ("torch", "adam"), (1, 4), (True,), (False,)))


def same_as_ddp():
    for level in ("O0", "O1", "O2"):
        for kind in ("torch", "fused"):
            expected, _ = train(level, kind, "ddp")
            found, _ = train(level, kind, "combine_ddp", ends=expected)
            assert_close(found, expected, TOLERANCE[level])


def unused_parameters():
    rank = dist.get_rank()
    model, optimizer = start(net())
    for step in range(1, 4):
        loss = loss_of(model, data(step, 0, rank), rank, step)
        twin = copy.deepcopy(model)
        loss_of(twin, data(step, 0, rank), rank, step).backward()
        backward(loss, optimizer)
        assert model.never.weight.grad is None
        branch = twin.branch.weight.grad
        if step % 3:
            expected = average(torch.zeros_like(model.branch.weight) if branch is None else branch)
            torch.testing.assert_close(model.branch.weight.grad.cpu().double(), expected, rtol=1e-6, atol=1e-8)
        else:
            assert model.branch.weight.grad is None
        optimizer.zero_grad()


def values_of_rank_0():
    rank = dist.get_rank()
    for level in ("O0", "O2", "O5"):
        model = net()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank * 0.1)
        model.seen.fill_(7 - rank)
        expected = {name: value.clone() for name, value in net().state_dict().items()}
        expected["seen"].fill_(7)
        model, _ = start(model, level=level)
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name]), name
        shown = model.state_dict()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.float(), shown[name], rtol=2.0**-8 if level == "O5" else 2.0**-11, atol=0)
        amp.shutdown()


if __name__ == "__main__":
    main(globals())
