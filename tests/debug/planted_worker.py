# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The planted faults in two processes, whose gradients are averaged. The arguments are names of functions here."""

import sys
from pathlib import Path

import torch
from debug import planted
from torch import nn

from apex_npu import amp, optimizers

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from common import main


class Parallel(nn.parallel.DistributedDataParallel):
    """With the attributes of the model inside."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def check(wrap, optimizer, **options):
    """Each fault at each level: all fields are right in both processes."""
    for fault in planted.FAULTS:
        for level in fault.levels:
            torch.manual_seed(0)
            model, made, _ = planted.set_up(fault, level, optimizer, **options)
            called = wrap(model)
            with amp.debug.find_overflow(model) as found:
                planted.iterate(fault, called, made)
            expected = fault.at(level)
            said = [{key: getattr(cause, key) for key in expected} for cause in found.causes]
            assert said == [expected], (fault.name, level, str(found))
            del called
            amp.shutdown()


def distributed_data_parallel():
    check(Parallel, torch.optim.SGD)


def combine_ddp():
    check(lambda model: model, optimizers.NpuFusedSGD, combine_grad=True, combine_ddp=True)


if __name__ == "__main__":
    main(globals())
