# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How many kernels a step launches on a simulated npu, beside the model's own, and how often it waits.

Run in several processes; the arguments are names of functions here.
"""

import torch
from common import main
from devices import DEVICE, SIMULATOR
from torch import nn

from apex_npu import amp, optimizers


class Scaled(nn.Module):
    """``count`` parameters, which backward hands gradients to one by one."""

    def __init__(self, count):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(40) for _ in range(count))

    def forward(self, x):
        for weight in self.weights:
            x = x * weight
        return x.sum()


def launched(call):
    with SIMULATOR.count() as counted:
        call()
    return counted.launches, counted.syncs


def beside_the_model(count, level, loss_scale):
    """Launches and syncs of a step of ``count`` parameters, without those of forward and backward."""
    model = Scaled(count).to(DEVICE)
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=level,
        loss_scale=loss_scale,
        combine_grad=True,
        combine_ddp=True,
        ddp_replica_count=1,
        verbosity=0,
    )
    x = torch.ones(40, device=DEVICE)

    def model_alone():
        # As in the block: scaled, and the last sum widened.
        (model(x).float() * 2.0).backward()

    def step():
        with amp.scale_loss(model(x), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    launches, syncs = launched(step)
    own, _ = launched(model_alone)
    amp.shutdown()
    return launches - own, syncs


def independent_of_the_number_of_parameters():
    """Gathering is one launch for each bucket, and all is the same for 8 parameters and for 72."""
    for level, constant in (("O0", 12), ("O2", 14)):
        for loss_scale, reads in (("dynamic", 2), (64.0, 0)):
            for count in (8, 72):
                launches, syncs = beside_the_model(count, level, loss_scale)
                # With a dynamic scale the flag of overflow, which blocks keep, is read; so is what other processes say.
                assert launches == constant, (level, loss_scale, count, launches)
                assert syncs == reads


if __name__ == "__main__":
    main(globals())
