# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lets every launch of a step fail in turn, tries again, and prints what came of it as lines of JSON.

``failed_launches_worker.py LEVEL NAME...``: the second of three steps fails; LEVEL is ``plain`` or one of amp's.
"""

import json
import sys
import warnings

import host_cann

host_cann.install()

import torch  # noqa: E402
from torch import nn  # noqa: E402

from apex_npu import amp  # noqa: E402
from apex_npu.optimizers import NpuFusedAdam, NpuFusedAdamP, NpuFusedAdamW, NpuFusedLamb, NpuFusedSGD  # noqa: E402

OPTIMIZERS = {
    "SGD": lambda params: NpuFusedSGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: NpuFusedAdam(params, lr=0.01),
    "AdamW": lambda params: NpuFusedAdamW(params, lr=0.01),
    "Lamb": lambda params: NpuFusedLamb(params, lr=0.01),
    "AdamP": lambda params: NpuFusedAdamP(params, lr=0.01),
    "torch.optim.SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
}
# A device's error for a launch: an exception in its cores.
CORE_EXCEPTION = 507015


def start(make, level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).npu()
    optimizer = make(model.parameters())
    if level == "plain":
        return model, optimizer
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0)


def backward(model, optimizer, step, level):
    optimizer.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).npu()
    loss = model(x).float().square().mean()
    if level == "plain":
        loss.backward()
        return
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def values(model, optimizer):
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.detach().float().cpu() for p in (*model.parameters(), *stepped)]


def run(make, level, failing=None):
    """Values after three steps, and the error of the second if its launch ``failing`` has failed."""
    model, optimizer = start(make, level)
    said = None
    for step in range(3):
        backward(model, optimizer, step, level)
        torch.npu.synchronize()
        if step == 1 and failing is not None:
            host_cann.fail_after(failing, "aclnn", CORE_EXCEPTION)
            try:
                optimizer.step()
                torch.npu.synchronize()
                host_cann.fail_after(0, "none of them")
                break
            except RuntimeError as error:
                said = str(error)
        optimizer.step()
    found = values(model, optimizer)
    amp.shutdown()
    return found, said


level, *names = sys.argv[1:]
warnings.simplefilter("ignore")
for name in names:
    expected, _ = run(OPTIMIZERS[name], level)
    for failing in range(100):
        found, said = run(OPTIMIZERS[name], level, failing)
        if said is None:
            break
        repeated = all(map(torch.equal, found, expected))
        print(json.dumps({"name": name, "launch": failing, "repeated": repeated, "said": said}), flush=True)
