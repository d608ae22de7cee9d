# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One of two processes that MMEngine's Runner trains a model on, each on its own half of the data."""

import os
import sys
from pathlib import Path

import processes
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
os.environ.update(LOCAL_RANK=str(rank))
dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], 2), rank=rank, world_size=2)

from integrations.mmengine_runner import run, weights  # noqa: E402

from apex_npu import amp  # noqa: E402

FOLDER = Path(os.environ["FOLDER"])


def trained(level, **options):
    name, kind = ("NpuFusedSGD", "ApexOptimWrapper") if level else ("SGD", "OptimWrapper")
    wrapper = {"type": kind, "optimizer": {"type": name, "lr": 0.1}, **options}
    if level:
        wrapper |= {"opt_level": level, "loss_scale": None, "verbosity": 0}
    mine = weights(run(wrapper, FOLDER / f"{level}{len(options)}", distributed=True).model)
    found = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(found, mine)
    assert torch.equal(*found), (level, options)
    amp.shutdown()
    return mine


def check_levels(**options):
    expected = trained(None, **options)
    for level in ("O1", "O2", "O4", "O5"):
        found = trained(level, **options)
        assert (found - expected).norm() < (2e-3 if level in ("O1", "O2") else 1e-2) * expected.norm(), level


def check_accumulated():
    check_levels(accumulative_counts=2)


for name in sys.argv[1:]:
    globals()[f"check_{name}"]()
processes.leave()
