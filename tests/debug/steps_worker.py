# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps of two processes that are recorded and profiled. Run in two processes; the arguments are names of functions."""

import copy
import io
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions would keep as a default argument
from devices import DEVICE
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.debug.comparison.recorded import load
from apex_npu.debug.script import ProfilePart, RecordPart, ScriptSteps

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from common import average, main

OPTIONS = (
    {"opt_level": "O1", "combine_grad": True, "combine_ddp": True},
    {"opt_level": "O2", "combine_grad": True, "combine_ddp": True},
    {"opt_level": "O2", "combine_grad": True, "combine_ddp": True, "fuse_unscale": True},
    {"opt_level": "O2"},  # in DistributedDataParallel
)


def set_up(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2)).to(DEVICE)
    exact = copy.deepcopy(model).double().cpu()
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, loss_scale=128.0, verbosity=0, **options)
    called = model if "combine_ddp" in options else nn.parallel.DistributedDataParallel(model)

    def iterate(i):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
        optimizer.zero_grad()
        model.zero_grad()
        with amp.scale_loss(called(x.to(DEVICE)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return x

    return model, exact, iterate


def shared_folder():
    """One that rank 0 makes for all."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return Path(found[0])


def gradients_are_the_averages():
    for options in OPTIONS:
        model, exact, iterate = set_up(**options)
        for i in range(3):  # from the second on, averages come while backward runs
            path = shared_folder() / "step.pt"
            with amp.debug.record(path, model) as recorded:
                x = iterate(i)
            exact.zero_grad()
            exact(x.double()).square().mean().backward()
            rows = {row.module: row for row in recorded.rows if row.kind == "gradient"}
            for name, param in exact.named_parameters():
                expected = average(param.grad)
                error = (rows[name].exact.reshape(expected.shape) - expected).norm() / expected.norm()
                assert error < 2e-3, (options, i, name, error)
            own = path if dist.get_rank() == 0 else Path(f"{path}.rank1")
            assert len(load(own).rows) == len(recorded.rows)
        amp.shutdown()


def each_has_its_table():
    rank = dist.get_rank()
    for options in OPTIONS[1::2]:
        _, _, iterate = set_up(**options)
        folder = shared_folder()
        parts = [ProfilePart(2, 4, str(folder / "traces")), RecordPart(1, str(folder / "a.pt"))]
        with redirect_stdout(io.StringIO()) as said:
            ScriptSteps(parts)
            for i in range(5):
                iterate(i)
        profile = parts[0]._profile
        phases = {phase.name: phase for phase in profile.phases}
        assert str(profile).startswith("2 steps of ")
        assert said.getvalue().count("2 steps of ") == said.getvalue().count("--record: step 1") == (rank == 0)
        assert ("amp.all_reduce" in phases) is ("combine_ddp" in options)
        if DEVICE.type == "cpu":  # where these are few: the averages, and the wait for them, are apart
            assert phases["amp.unscale_and_check"].operators <= 2
        dist.barrier()
        names = sorted(path.name.partition(".1")[0] for path in (folder / "traces").iterdir())
        assert names == ["rank0", "rank1"]
        assert sorted(path.name for path in folder.glob("a.pt*")) == ["a.pt", "a.pt.rank1"]
        amp.shutdown()


def script(rank, world, store):
    """What ``torch.multiprocessing.spawn`` calls: the script ends before the last step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    _, _, iterate = set_up(**OPTIONS[1])
    for i in range(3):
        iterate(i)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "STORE" in os.environ:
        main(globals())
    else:
        torch.multiprocessing.spawn(script, (2, sys.argv[1]), nprocs=2)
