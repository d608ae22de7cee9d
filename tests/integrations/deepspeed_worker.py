# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small model in DeepSpeed's engine, with a fused optimizer and with torch's."""

import logging
import os

os.environ.update(LOCAL_RANK="0", CROSS_RANK="0", CROSS_SIZE="1", LOCAL_SIZE="1")
import processes
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], 1), rank=0, world_size=1)
import deepspeed  # noqa: E402
from deepspeed.utils import logger  # noqa: E402
from torch import nn  # noqa: E402

from apex_npu import optimizers  # noqa: E402
from apex_npu.integrations import deepspeed as ours  # noqa: E402

logger.setLevel(logging.ERROR)


def losses(kind, stage, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == torch.bfloat16},
        # DeepSpeed's own Adam is not built here.
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = kind(model.parameters(), lr=0.05)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(8):
        inputs = torch.randn(8, 6, generator=generator)
        loss = nn.functional.mse_loss(engine(inputs.to(dtype)).float(), inputs[:, :2].sin())
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return torch.tensor(found)


def refused(kind):
    try:
        losses(kind, 1, torch.float32)
    except Exception as error:
        return "untested" in str(error).lower() or "supported" in str(error).lower()
    return False


assert refused(optimizers.NpuFusedAdamW)
ours.register()
assert refused(optimizers.NpuFusedLamb)
for stage in (0, 1, 2, 3):
    for dtype in (torch.float32, torch.bfloat16)[: 1 + (stage in (0, 2))]:
        found = losses(optimizers.NpuFusedAdamW, stage, dtype)
        torch.testing.assert_close(found, losses(torch.optim.AdamW, stage, dtype), rtol=1e-5, atol=1e-5)
processes.leave()
