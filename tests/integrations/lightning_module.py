# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What Lightning trains in tests: a module, its data, and how it is trained."""

import logging
import warnings

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from apex_npu import amp
from apex_npu.integrations.lightning import ApexFabricPrecision

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))


def loader(count=8):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * count, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :2].sin() + 0.5), batch_size=8)


def weights(module):
    return torch.cat([value.flatten() for value in module.state_dict().values()])


class Module(LightningModule):
    def __init__(self, kind, schedule=False, overflow_at=None):
        super().__init__()
        self.net, self.kind, self.schedule, self.overflow_at = network(), kind, schedule, overflow_at
        self.losses = []

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss * float("inf") if batch_idx == self.overflow_at else loss

    def configure_optimizers(self):
        optimizer = self.kind(self.net.parameters(), lr=0.05)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(module, ckpt_path=None, give_trainer=False, batches=8, **options):
    """The losses of ``module``, or its Trainer, and ``module``."""
    defaults = {"accelerator": "cpu", "devices": 1, "max_steps": 8, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(**{**defaults, **quiet, **options})
    trainer.fit(module, loader(batches), ckpt_path=ckpt_path, weights_only=False)
    return (trainer if give_trainer else module.losses), module


def fabric_run(kind, level=None, clip=None, steps=8, save=None, load=None, **options):
    """The losses, and the model."""
    precision = ApexFabricPrecision(level) if level else None
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision, **options)
    model = network()
    optimizer = kind(model.parameters(), lr=0.05)
    given = (model, optimizer) if precision is None else precision.setup(fabric, model, optimizer)
    wrapped, optimizer = fabric.setup(*given)
    state = {"model": wrapped, "optimizer": optimizer, "precision": precision, "step": 0}
    if load:
        fabric.load(load, state)
    losses = []
    for i, (inputs, targets) in enumerate(fabric.setup_dataloaders(loader())):
        if not state["step"] <= i < steps:
            continue
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(wrapped, optimizer, **clip)
        optimizer.step()
        losses.append(loss.item())
    if save:
        fabric.save(save, {**state, "step": steps})
    if level and clip:
        assert amp.last_step(optimizer).applied
    return losses, wrapped
