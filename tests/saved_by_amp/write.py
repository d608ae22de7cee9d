# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Write what a version of apex_npu saves, for the tests of later ones.

For each optimizer and level, after three steps: a pickle of model and optimizer, and the numbers in it. Run it with the
version to be recorded: ``python tests/saved_by_amp/write.py version_0_1``. ``later.pkl.gz`` is of the version whose
``amp`` had a ``device_skip.py``.
"""

import gzip
import pickle
import sys
from pathlib import Path

import torch
from torch import nn

from apex_npu import amp, optimizers

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
FILES = {
    "version_0_1": (
        "NpuFusedSGD",
        "NpuFusedAdam",
        "NpuFusedAdamW",
        "NpuFusedAdamP",
        "NpuFusedBertAdam",
        "NpuFusedAdadelta",
        "NpuFusedLamb",
        "NpuFusedRMSprop",
        "NpuFusedRMSpropTF",
        "Lamb",
    ),
    "later": ("FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad", "SGD"),
}
NAMES = tuple(name for names in FILES.values() for name in names)


def trained(name, level, **options):
    """A model and an optimizer after three steps, the second of them skipped where the loss scale is dynamic."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    more = {"momentum": 0.9} if name.endswith("SGD") else {}
    cls = getattr(optimizers if hasattr(optimizers, name) else torch.optim, name)
    optimizer = cls(model.parameters(), lr=1e-2, **more)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for factor in (1.0, torch.inf if level in ("O1", "O2") else 2.0, 3.0):
        with amp.scale_loss(model(torch.randn(8, 3)).square().mean() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def numbers(model, optimizer):
    """All that a checkpoint has of them, and of the loss scale."""
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    report = amp.last_step(optimizer)
    skips = (report.applied, report.skipped_steps, report.skips_in_a_row)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "masters": masters,
        "amp": amp.state_dict(),
        "skips": skips,
    }


def load():
    """All that has been recorded, by name of the optimizer, level, and whether with ``fuse_unscale``."""
    saved = {}
    for file in FILES:
        with gzip.open(Path(__file__).parent / f"{file}.pkl.gz") as opened:
            saved.update(pickle.load(opened))
    return saved


def main(file):
    saved = {}
    for name in FILES[file]:
        for level in LEVELS:
            for fuse in (False, True) if level == "O2" else (False,):
                pair = trained(name, level, fuse_unscale=fuse)
                saved[name, level, fuse] = (pickle.dumps(pair), numbers(*pair))
    with gzip.open(Path(__file__).parent / f"{file}.pkl.gz", "wb") as opened:
        pickle.dump(saved, opened)


if __name__ == "__main__":
    main(sys.argv[1])
