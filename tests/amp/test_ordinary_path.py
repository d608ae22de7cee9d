# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""No file of a rare feature takes part in an ordinary iteration."""

import sys
from pathlib import Path

import pytest
import torch
from devices import DEVICE
from small_programs import initialize, step_on
from torch import nn

from apex_npu import _extension, optimizers

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="an ordinary step on the CPU is looked at"),
    pytest.mark.skipif(_extension.extension is None, reason="one with the extension is looked at"),
]

FUSED = optimizers.NpuFusedAdam
RARE = {
    *("fused_unscale.py", "pending_step.py", "grad_sync.py", "data_parallel.py"),
    *("capture.py", "graph_runs.py", "failed_steps.py", "scaler_argument.py"),
    *("shard_grads.py", "sharding.py", "fully_sharded.py", "part_sums.py"),
}


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("cls", [FUSED, torch.optim.Adam])
def test_what_is_rare_is_not_on_the_way(cls, level):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = initialize(model, cls(model.parameters(), lr=1e-3), level, loss_scale=None)
    called = set()
    for profile in (None, None, None, lambda frame, *_: called.add(Path(frame.f_code.co_filename))):
        loss = model(torch.randn(8, 64)).float().square().mean()
        sys.setprofile(profile)
        try:
            step_on(loss, optimizer)
        finally:
            sys.setprofile(None)
    # Of gradients that are not fused the part to be unscaled is asked for, which is the whole.
    rare = RARE | {"shards.py"} if cls is FUSED else RARE
    assert not {path.name for path in called if "apex_npu" in path.parts} & rare
