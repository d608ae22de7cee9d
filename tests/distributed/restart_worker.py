# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A training that torchrun restarts from the last checkpoint after a fault.

Started by torchrun; the arguments are a folder, and the step in whose backward rank 1 is killed (-1: in none).
"""

import copy
import os
import shutil
import signal
import sys
from pathlib import Path

import processes
import torch
import torch.distributed as dist
from common import data, mlp, use_small_buckets
from devices import DEVICE, communication_backend

from apex_npu import amp, optimizers

STEPS = 8
OVERFLOW_AT = 2


def snapshot(model, optimizer):
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()})


def save(state, path):
    """Whole or not at all, whenever this process ends."""
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def train(folder, fatal_step):
    rank = dist.get_rank()
    model = mlp()
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level="O2",
        loss_scale="dynamic",
        dynamic_init_scale=2.0**10,
        scale_window=3,
        combine_grad=True,
        combine_ddp=True,
        verbosity=0,
    )
    first, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=DEVICE, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])
        first = state["step"] + 1
        if rank == 0:
            shutil.copy(checkpoint, folder / f"resumed_{state['step']}.pt")
    restarted = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(first, STEPS):
        x = data(step, 0, rank)
        if step == OVERFLOW_AT and rank == 1:
            x[0, 0] = torch.inf
        if step == fatal_step and rank == 1 and not restarted:
            # Between two layers: some buckets are on their way then.
            model[2].bias.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            save({**snapshot(model, optimizer), "step": step}, checkpoint)
            save({**snapshot(model, optimizer), "step": step}, folder / f"step_{step}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(communication_backend(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
    use_small_buckets()
    train(Path(sys.argv[1]), int(sys.argv[2]))
    dist.barrier()
    processes.leave()
