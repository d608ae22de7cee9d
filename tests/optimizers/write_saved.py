# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes the files of ``saved_0_1``: optimizers as version 0.1 saves them, for ``test_saved.py`` to load.

    PYTHONPATH=. python tests/optimizers/write_saved.py FOLDER

Run once, with the version that the folder is named after.
"""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apex_npu import optimizers

SHAPES = ((3, 5), (7,), (), (2, 3, 2))
# Name of the file → class, options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Adadelta": ("NpuFusedAdadelta", {"lr": 0.5}),
    "Adagrad": ("FusedAdagrad", {"lr": 0.1}),
    "Adam": ("NpuFusedAdam", {"lr": 0.1}),
    "Adam-amsgrad": ("NpuFusedAdam", {"lr": 0.1, "amsgrad": True, "fuse_grad_scaler": True, "capturable": True}),
    "AdamP": ("NpuFusedAdamP", {"lr": 0.1}),
    "AdamW": ("NpuFusedAdamW", {"lr": 0.1}),
    "BertAdam": ("NpuFusedBertAdam", {"lr": 0.1, "warmup": 0.1, "t_total": 100}),
    "Lamb": ("NpuFusedLamb", {"lr": 0.1, "use_global_grad_norm": True}),
    "RMSprop": ("NpuFusedRMSprop", {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "RMSpropTF": ("NpuFusedRMSpropTF", {"lr": 0.1, "momentum": 0.9}),
    "SGD": ("NpuFusedSGD", {"lr": 0.1, "momentum": 0.9}),
    "SGD-plain": ("NpuFusedSGD", {"lr": 0.1}),
    "FusedAdam": ("FusedAdam", {"lr": 0.1}),
    "FusedLAMB": ("FusedLAMB", {"lr": 0.1}),
    "FusedSGD": ("FusedSGD", {"lr": 0.1, "momentum": 0.9}),
    "NovoGrad": ("FusedNovoGrad", {"lr": 0.1}),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same each time."""
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give_gradients(params: list[Tensor], step: int) -> None:
    """Those of a step; one parameter has none in the first, so that counts differ."""
    torch.manual_seed(100 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape).to(p.dtype)
        p.grad = None if (i == 1 and step == 0) else grad


def written(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What is saved of one: state dict, a pickle of parameters and optimizer, the parameters now and a step later."""
    dtype = torch.float16 if name == "NpuFusedSGD" and options.get("momentum") else torch.float32
    params = parameters(dtype)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]
    optimizer = getattr(optimizers, name)(groups, **options)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    optimizer.zero_grad()
    saved = {
        "params": [p.detach().clone() for p in params],
        "state_dict": copy.deepcopy(optimizer.state_dict()),
        "pickle": pickle.dumps((params, optimizer)),
    }
    give_gradients(params, 3)
    optimizer.step()
    return {**saved, "next_params": [p.detach().clone() for p in params]}


def main() -> None:
    """Write all."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for file, (name, options) in CASES.items():
        torch.save(written(name, options), folder / f"{file}.pt")


if __name__ == "__main__":
    main()
