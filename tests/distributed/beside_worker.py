# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's own ways to train in parallel, around our models and optimizers.

Run in several processes; the arguments are names of functions here.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import average, backward, data, folder_of_all, local_grads, loss_on, main, mlp, step_on
from devices import DEVICE
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from apex_npu import amp, optimizers


def ddp_around_the_model():
    for level in ("O1", "O2"):
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            for combine_grad in (True, False):
                wrap(level, options, combine_grad=combine_grad)
        wrap(level, {"gradient_as_bucket_view": True}, hook=fp16_compress_hook)


def wrap(level, options, *, combine_grad=True, hook=None):
    model = mlp()
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, combine_grad=combine_grad, loss_scale=64.0, verbosity=0
    )
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    for step in range(4):
        loss = loss_on(data(step, 0, dist.get_rank()))
        twin = mlp()
        for p, q in zip(twin.parameters(), amp.master_params(optimizer), strict=True):
            p.data.copy_(q)
        expected = local_grads(twin, loss)
        backward(loss(wrapped), optimizer)
        for p, local in zip(amp.master_params(optimizer), expected, strict=True):
            # Float16 products.
            torch.testing.assert_close(p.grad.cpu().double(), average(local), rtol=2e-2, atol=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    amp.shutdown()


def ddp_without_extension():
    wrap("O1", {})
    for first in (True, False):
        model = mlp()
        optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        if first:
            wrapped = nn.parallel.DistributedDataParallel(model)
            with pytest.raises(RuntimeError, match="needs apex_npu's C\\+\\+ extension"):
                amp.initialize(wrapped.module, optimizer, opt_level="O2", verbosity=0)
        else:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
            with pytest.raises(RuntimeError, match="needs apex_npu's C\\+\\+ extension"):
                nn.parallel.DistributedDataParallel(model)
        amp.shutdown()


class Training:
    """A model wrapped in DistributedDataParallel after amp.initialize; ``state`` is what is saved of all."""

    def __init__(self, level, kind, options, factor=1.0):
        model = nn.Sequential(nn.BatchNorm1d(6), mlp()).to(DEVICE)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor)
        optimizer = kind(model.parameters(), **options)
        scale = {"dynamic_init_scale": 2.0**10, "scale_window": 2}
        model, self.optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **scale)
        self.model = nn.parallel.DistributedDataParallel(model)

    def run(self, steps):
        for step in steps:
            x = data(step, 0, dist.get_rank())
            if step == 1:
                x[0, 0] = torch.inf  # a skipped step: the scale goes down, and up again later
            loss = self.model(x).float().square().mean()
            step_on(loss, self.optimizer)

    def values(self):
        """All state that training depends on, but for batch norm's statistics, which an inf has made invalid."""
        params = [p.detach() for p in amp.master_params(self.optimizer)]
        states = self.optimizer.state_dict()["state"]
        return [*params, *(states[i][name] for i in sorted(states) for name in sorted(states[i]))], amp.state_dict()

    def save(self, folder, by_names):
        dcp.save(self.state(by_names), checkpoint_id=folder)

    def load(self, folder, by_names):
        if not by_names:
            self.run(range(10, 11))  # there has to be state for dcp to load into
        state = self.state(by_names)
        dcp.load(state, checkpoint_id=folder)
        if by_names:
            view = amp.checkpoint_view(self.optimizer)
            set_state_dict(self.model, view, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        else:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])

    def state(self, by_names):
        if not by_names:
            return state_of(self.model, self.optimizer)
        model, states = get_state_dict(self.model, amp.checkpoint_view(self.optimizer))
        return {"model": model, "optimizer": states, "amp": amp.state_dict()}


def checkpoints_beside_ddp():
    """Training resumes bit for bit in new objects, with states keyed by numbers and by names."""
    kinds = (
        (optimizers.NpuFusedAdam, {"lr": 0.01}),
        (optimizers.NpuFusedSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01}),
    )
    for (kind, options), level, by_names in itertools.product(kinds, ("O1", "O2"), (False, True)):
        folder = folder_of_all()
        training = Training(level, kind, options)
        training.run(range(4))
        training.save(folder, by_names)
        training.run(range(4, 7))
        expected, expected_scales = training.values()
        amp.shutdown()
        training = Training(level, kind, {**options, "lr": 0.5}, factor=2.0)
        training.load(folder, by_names)
        training.run(range(4, 7))
        found, scales = training.values()
        amp.shutdown()
        assert scales == expected_scales
        assert len(found) == len(expected) > 0
        for value, same in zip(found, expected, strict=True):
            assert value.dtype == same.dtype
            assert torch.equal(value, same)
            assert value.isfinite().all()


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}


if __name__ == "__main__":
    main(globals())
