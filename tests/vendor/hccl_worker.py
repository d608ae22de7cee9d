# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One process of several that train together over the vendor's ProcessGroupHCCL.

``hccl_worker.py train LEVEL-ENGINE...`` prints a line of JSON for each: its losses, which steps were applied, and a
hash of its parameters. ``hccl_worker.py killed`` loses rank 1 in the middle of its fourth backward and prints what rank
0 says.
"""

import hashlib
import json
import os
import signal
import sys
from datetime import timedelta

import host_cann

host_cann.install()

import processes  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from apex_npu import amp  # noqa: E402
from apex_npu.optimizers import NpuFusedAdam, NpuFusedSGD  # noqa: E402

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BATCH, STEPS, OVERFLOWING_STEP = 16, 8, 3


def start(level, engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).npu()
    if engine == "fully_shard":
        for unit in (model[0], model[2], model):
            fully_shard(unit, mesh=init_device_mesh("npu", (WORLD,)), mp_policy=amp.fsdp_policy(level))
    adam = engine in ("fully_shard", "alone_by_adam")
    optimizer = (
        NpuFusedAdam(model.parameters(), lr=0.01) if adam else NpuFusedSGD(model.parameters(), lr=0.2, momentum=0.9)
    )
    together = {"combine_ddp": engine == "combine_ddp", "combine_grad": engine != "fully_shard"}
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, dynamic_init_scale=2.0**10, verbosity=0, **together
    )
    if engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model, optimizer


def backward(model, optimizer, step):
    """This process's part of the batch; of one step an element is inf, in the part of the last rank."""
    batch = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
    if step == OVERFLOWING_STEP:
        batch[-1, 0] = float("inf")
    part = batch.chunk(WORLD)[RANK].npu()
    loss = (model(part).float() - part[:, :2]).square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    return loss.item()


def train(*ways):
    for way in ways:
        train_one(*way.split("-"))
        amp.shutdown()


def train_one(level, engine):
    model, optimizer = start(level, engine)
    losses, applied = [], []
    for step in range(STEPS):
        losses.append(backward(model, optimizer, step))
        optimizer.step()
        optimizer.zero_grad()
        applied.append(amp.last_step(optimizer).applied)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in amp.master_params(optimizer)]
    values = b"".join(p.detach().cpu().numpy().tobytes() for p in whole)
    print(json.dumps({"losses": losses, "applied": applied, "hash": hashlib.sha256(values).hexdigest()}), flush=True)


def killed():
    model, optimizer = start("O2", "combine_ddp")
    steps = []

    def die(grad):
        if len(steps) == OVERFLOWING_STEP:
            STORE.set("rank 1 is lost", "")
            os.kill(os.getpid(), signal.SIGKILL)

    if RANK == 1:
        model[2].bias.register_hook(die)
    for step in range(OVERFLOWING_STEP + 1):
        if RANK == 0 and step == OVERFLOWING_STEP:
            # Only what waits for a process that is lost has a short limit: the other may be slow before.
            STORE.wait(["rank 1 is lost"], timedelta(seconds=processes.HANG_TIMEOUT))
            host_cann.set_collective_timeout(1)
        try:
            backward(model, optimizer, step)
        except RuntimeError as error:
            print(f"noticed: {error}", flush=True)
            break
        optimizer.step()
        optimizer.zero_grad()
        steps.append(step)


if WORLD > 1:
    torch.npu.set_device(RANK % 2)
    STORE = dist.FileStore(os.environ["STORE"], WORLD)
    dist.init_process_group("hccl", store=STORE, rank=RANK, world_size=WORLD)
globals()[sys.argv[1]](*sys.argv[2:])
sys.stdout.flush()
os._exit(0)  # a group that has lost a process would wait for it
