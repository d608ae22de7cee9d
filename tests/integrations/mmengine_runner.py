# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What MMEngine trains in tests: a model, its data, and a Runner."""

import itertools

import torch
from devices import DEVICE
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from apex_npu.integrations import mmengine

assert mmengine
_NUMBERS = itertools.count()  # MMEngine keeps its experiments by name

DISTRIBUTED = {
    "launcher": "pytorch",
    "env_cfg": {"dist_cfg": {"backend": "gloo"}},
    # torch refuses the device_ids that it has by default for a model on the CPU.
    "cfg": {"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None}},
}


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
        self.factor = 1.0

    def forward(self, inputs, targets, mode):
        return {"loss": nn.functional.mse_loss(self.net(inputs).float(), targets) * self.factor}


def loader(distributed):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32 * (2 if distributed else 1), 6, generator=generator)
    data = TensorDataset(inputs, inputs[:, :2].sin() + 0.5)
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False) if distributed else None)


def weights(model):
    return torch.cat([value.flatten().cpu() for name, value in model.state_dict().items() if "net." in name])


def run(wrapper, folder, epochs=1, distributed=False, **options):
    """The Runner, after ``epochs`` of four steps."""
    runner = Runner(
        Model(),
        str(folder),
        loader(distributed),
        train_cfg={"by_epoch": True, "max_epochs": epochs},
        optim_wrapper=wrapper,
        experiment_name=f"test_{next(_NUMBERS)}",
        log_level="ERROR",
        randomness={"seed": 0},
        default_hooks={"logger": None, "checkpoint": {"type": "CheckpointHook", "interval": 1}},
        **(DISTRIBUTED if distributed else {}),
        **options,
    )
    runner.model.to(DEVICE)
    runner.train()
    return runner
