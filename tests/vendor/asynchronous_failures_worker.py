# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lets a launch of a step fail, goes on as a script does that catches errors, and prints what came of it as JSON.

``asynchronous_failures_worker.py PREFIX LAUNCH WHEN``: of the second step the launch of that number, among those whose
operators begin with PREFIX; WHEN is that of ``host_cann.fail_after``.
"""

import json
import os
import sys
import warnings

import host_cann

host_cann.install()

import torch  # noqa: E402
from torch import nn  # noqa: E402

from apex_npu import amp  # noqa: E402
from apex_npu.optimizers import NpuFusedAdam  # noqa: E402

CORE_EXCEPTION = 507015
STEPS = 4

prefix, launch, when = sys.argv[1:]
warnings.simplefilter("ignore")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).npu()
optimizer = NpuFusedAdam(model.parameters(), lr=0.01)
amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", dynamic_init_scale=16.0, verbosity=0)
errors = []


def attempt(part, call):
    try:
        call()
    except RuntimeError as error:
        errors.append([part, str(error)])


def block(step):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).npu()
    with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()


def values():
    return [p.detach().cpu() for p in (*model.parameters(), *amp.master_params(optimizer))]


for step in range(STEPS):
    attempt(f"block {step}", lambda: block(step))  # noqa: B023
    if step == 1:
        torch.npu.synchronize()
        before = values()
        host_cann.fail_after(int(launch), prefix, CORE_EXCEPTION, when=when)
    attempt(f"step {step}", optimizer.step)
    if errors:
        break
    optimizer.zero_grad()
# What the process still does.
attempt("after", torch.npu.synchronize)
attempt("after", torch.npu.synchronize)
computes = torch.full((3,), 2.0).npu().mul(3).cpu().tolist() == [6.0, 6.0, 6.0]
print(
    json.dumps(
        {
            "errors": errors,
            "scale": amp.state_dict()["loss_scaler0"]["loss_scale"],
            "unchanged": all(map(torch.equal, values(), before)),
            "computes": computes,
        }
    ),
    flush=True,
)
os._exit(0)  # a queue that has ended is waited for at exit
