# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""amp on a chip that has the largest number in place of inf."""

from __future__ import annotations

from typing import Any


def test_gradients_are_unscaled_whether_or_not_one_overflows(run_script: Any) -> None:
    code = """
import host_cann, torch
host_cann.install()
from apex_npu import amp, optimizers

for level in ("O1", "O2"):
    for cls in (torch.optim.SGD, optimizers.NpuFusedSGD):
        model = torch.nn.Module()
        model.scalar = torch.nn.Parameter(torch.tensor(3.0))  # its gradient has no dimensions
        model.vector = torch.nn.Parameter(torch.ones(4))
        model.large = torch.nn.Parameter(torch.ones(4))
        model = model.npu()
        optimizer = cls(model.parameters(), lr=0.5)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale="dynamic", dynamic_init_scale=16.0, verbosity=0
        )
        for factor in (5.0, 1e30):
            optimizer.zero_grad()
            loss = 2.0 * model.scalar.float() + (3.0 * model.vector.float()).sum()
            large = model.large.float().sum()
            large.register_hook(lambda grad: grad * factor * factor)
            with amp.scale_loss(loss + large, optimizer) as scaled_loss:
                scaled_loss.backward()
            scalar, vector, large = amp.master_params(optimizer)
            assert (scalar.grad.item(), vector.grad.tolist()) == (2.0, [3.0] * 4), (level, cls, factor)
            assert amp.will_skip(optimizer) is (factor > 5.0), (level, cls, factor)
            optimizer.step()
            assert scalar.item() == 3.0 - 0.5 * 2.0, (level, cls, factor)
        amp.shutdown()
print("as on the CPU")
"""
    done = run_script(code, HOST_CANN_SOC="Ascend910ProA", TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    assert "as on the CPU" in done.stdout
