# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What two processes find. Run in both; prints the verdict of each check, and goes on with the next one.

A check does all that the processes do together first, and asserts then, so that a failure leaves none waiting.
"""

import copy
import json
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from devices import DEVICE
from known_faults.common import (
    WITH_MASTERS,
    Weights,
    assert_values,
    backward,
    right_or_refused,
    start,
    values,
    vector,
)
from torch import nn

from apex_npu import amp
from apex_npu.parallel import convert_syncbn_model

DDP = nn.parallel.DistributedDataParallel
CHECKS = {}


def check(*cases):
    def add(function):
        CHECKS.update({"-".join([function.__name__, *map(str, case)]): (function, case) for case in cases or [()]})
        return function

    return add


def gathered(tensors):
    """What both have, in the order of ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, values(tensors))
    return found


def assert_equal(model, value):
    for found in gathered(model.parameters()):
        assert_values(found, value)


def own_input(rank):
    """Gradients of rank 0 and of rank 1: 1 and 3, whose mean is 2."""
    return vector(*[1.0 + 2.0 * rank] * 3)


def train(model, optimizer, forward=None, steps=1):
    for _ in range(steps):
        backward((forward or model)(own_input(dist.get_rank())), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def parallel(model, params=None, level="O1", kind="combine_grad"):
    options = {} if kind == "combine_grad" else {"combine_grad": True}
    return start(model, params, kind, level, combine_ddp=True, **options)


# ---------------------------------------------------------------------------------------------------------- combine_ddp


@check(("O1",), ("O2",))
def gradients_are_averaged(level):
    model, optimizer = parallel(Weights(10.0), level=level)
    train(model, optimizer)
    assert_equal(model, 8.0)


@check(("O0", "fused"), ("O1", "combine_grad"), ("O1", "fused"), ("O2", "combine_grad"), ("O2", "fused"))
def combine_ddp_taken_back_by_the_script(level, kind):
    model, optimizer = parallel(Weights(10.0), level=level, kind=kind)
    optimizer.combine_ddp = False
    optimizer.accelerate = False
    train(model, optimizer)
    assert_values(gathered(model.parameters())[dist.get_rank()], 9.0 - 2.0 * dist.get_rank())


@check(("O1",), ("O2",))
def parameters_of_no_model_keep_their_values(level):
    rank = dist.get_rank()
    model = Weights(10.0)
    classes = nn.Parameter(torch.full((3,), 20.0 + rank, device=DEVICE))
    parallel(model, [*model.parameters(), classes], level=level)
    assert_values(gathered([classes])[rank], 20.0 + rank)


@check(("O1",), ("O2",))
def shards_of_unequal_length_run(level):
    rank = dist.get_rank()
    model = Weights(10.0)
    classes = nn.Parameter(torch.full((3 + rank,), 20.0, device=DEVICE))
    other = torch.optim.SGD([classes], lr=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"combine_grad": True, "combine_ddp": True, "loss_scale": 64.0, "verbosity": 0}
    model, (optimizer, other) = amp.initialize(model, [optimizer, other], opt_level=level, **options)
    other.combine_ddp = other.accelerate = False
    loss = model(own_input(rank)) + (classes * (rank + 1.0)).sum()
    with amp.scale_loss(loss, [optimizer, other]) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    other.step()
    assert_values(model.parameters(), 8.0)
    assert_values([classes], 19.0 - rank)


# --------------------------------------------------------------------------------------------- DistributedDataParallel


@check(*[(level, kind) for level in ("O1", *WITH_MASTERS) for kind in ("torch", "fused")])
def ddp_after_initialize(level, kind):
    model, optimizer = start(Weights(10.0), kind=kind, level=level)
    train(model, optimizer, DDP(model))
    assert_equal(model, 8.0)


@check(*[(level, kind) for level in ("O0", "O1", "O2", "O3", "O5") for kind in ("torch", "fused")])
def initialize_inside_of_ddp(level, kind):
    model = Weights(10.0)
    wrapped = DDP(model)

    def act():
        _, optimizer = start(model, kind=kind, level=level)
        train(model, optimizer, wrapped)

    right_or_refused(act, lambda _: assert_equal(model, 8.0), model.parameters())


def accumulate(level, kind, *, delay):
    """One step over two blocks, the first of them where DDP does not synchronise."""
    model, optimizer = start(Weights(10.0), kind=kind, level=level)
    wrapped = DDP(model)
    x = own_input(dist.get_rank())

    def act():
        with wrapped.no_sync():
            backward(wrapped(x), optimizer, delay_unscale=delay)
        backward(wrapped(x), optimizer)
        optimizer.step()

    right_or_refused(act, lambda _: assert_equal(model, 6.0), model.parameters())


@check(*[(level, kind) for level in ("O1", *WITH_MASTERS) for kind in ("torch", "fused", "fuse_unscale")])
def no_sync_with_delay_unscale(level, kind):
    accumulate(level, kind, delay=True)


@check(*[(level, kind) for level in ("O1", *WITH_MASTERS) for kind in ("torch", "fused", "fuse_unscale")])
def no_sync(level, kind):
    accumulate(level, kind, delay=False)


# ------------------------------------------------------------------------------------------------- batch norms


@check()
def batch_norms_are_synchronised():
    rank = dist.get_rank()
    whole = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(2)) * 3 + 1
    plain = nn.BatchNorm1d(3)
    norm = convert_syncbn_model(copy.deepcopy(plain)).to(DEVICE)
    expected = plain(whole.flatten(0, 1)).view_as(whole)[rank]
    found = norm(whole[rank].to(DEVICE))
    found.square().sum().backward()
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(norm.running_mean.cpu(), plain.running_mean)
    torch.testing.assert_close(norm.running_var.cpu(), plain.running_var)


def main(names):
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if DEVICE.type == "npu":
        torch.npu.set_device(0)
    backend = "gloo" if DEVICE.type == "cpu" else "cpu:gloo,npu:hccl"
    store = dist.FileStore(os.environ["STORE"], world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    for name in names or CHECKS:
        function, case = CHECKS[name]
        failure = None
        try:
            function(*case)
        except Exception as error:
            failure = [type(error).__name__, traceback.format_exc()]
        amp.shutdown()
        print("verdict", json.dumps([name, failure]), flush=True)
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group, and end an interpreter that is tearing down with an abort


if __name__ == "__main__":
    main(sys.argv[1:])
