# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the workers of this folder share: how they meet, small models, and averages by another way."""

import copy
import functools
import os
import sys
import tempfile
from pathlib import Path

import processes
import torch
import torch.distributed as dist
from devices import DEVICE
from small_programs import backward, step_on  # noqa: F401 (for the workers)
from torch import nn

from apex_npu import amp
from apex_npu.amp import frontend
from apex_npu.distributed.grad_reducer import ReduceOptions


def data(step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(8, 6, generator=generator).to(DEVICE)


def loss_on(x):
    return lambda model: model(x).float().square().mean()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).to(DEVICE)


def start(model, optimizer=None, level="O0", **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"combine_grad": True, "combine_ddp": True, "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **options)


def mean_of(values):
    return torch.stack([v.double() for v in values]).mean(0)


def average(tensor):
    """Over all ranks, in double precision, by another way than the one that is tested."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, tensor.detach().cpu().double())
    return mean_of(found)


def local_grads(model, loss_of_model):
    """What backward gives without amp, on a copy."""
    twin = copy.deepcopy(model)
    loss_of_model(twin).backward()
    return [None if p.grad is None else p.grad for p in twin.parameters()]


def assert_averages(model, locals_, **tolerance):
    for p, local in zip(model.parameters(), locals_, strict=True):
        torch.testing.assert_close(p.grad.cpu().double(), average(local), **{"rtol": 1e-6, "atol": 1e-7, **tolerance})


def assert_equal_on_all(tensors):
    for t in tensors:
        first = t.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, t)


def folder_of_all():
    """One on disk, the same on all processes, which is deleted with that of the store."""
    folder = [tempfile.mkdtemp(dir=Path(os.environ["STORE"]).parent) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    return folder[0]


def use_small_buckets():
    """Of a size that fits these models."""
    frontend.ReduceOptions = functools.partial(ReduceOptions, min_bucket_nbytes=512)


def main(checks):
    """Meet the other processes, then run those of ``checks`` that the command line names."""
    processes.join()
    use_small_buckets()
    for name in sys.argv[1:]:
        checks[name]()
        amp.shutdown()
    processes.leave()
