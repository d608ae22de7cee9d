# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Against other people's implementations, where ``make bench-deps`` has installed them."""

import importlib
import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

from apex_npu import optimizers

pytestmark = pytest.mark.sweep  # with `make bench-deps`, which `make test` does not install

SHAPES = [(15, 23), (17,), (16, 1), (8, 3, 3, 3), (30, 2)]


def timm_module(name, monkeypatch):
    """One module of timm without its package's __init__, which needs torchvision."""
    found = importlib.util.find_spec("timm")
    if found is None:
        pytest.skip("timm is not installed: make bench-deps")
    (root,) = found.submodule_search_locations
    for package, path in (("timm", root), ("timm.optim", f"{root}/optim")):
        bare = types.ModuleType(package)
        bare.__path__ = [path]
        monkeypatch.setitem(sys.modules, package, bare)
    return importlib.import_module(f"timm.optim.{name}")


def compare(ours, theirs, steps=100, scale=0.3):
    sets = []
    for make in (ours, theirs):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator) * scale) for shape in SHAPES]
        optimizer = make(params)
        for step in range(steps):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            optimizer.step()
        sets.append(params)
    for p, q in zip(*sets, strict=True):
        # Both compute in float32, in another order.
        assert (p - q).abs().max() <= 5e-6 * q.abs().max()


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"lr": 1e-2, "weight_decay": 0.1, "delta": 0.5}, {"lr": 1e-2, "nesterov": True, "delta": 3.0}],
    ids=str,
)
def test_adamp_by_its_authors(kwargs):
    adamp = pytest.importorskip("adamp", reason="adamp is not installed: make bench-deps")
    compare(lambda p: optimizers.NpuFusedAdamP(p, **kwargs), lambda p: adamp.AdamP(p, **kwargs))


@pytest.mark.parametrize("kwargs", [{"lr": 1e-3, "weight_decay": 0.0}, {"lr": 1e-2, "weight_decay": 0.1}], ids=str)
def test_timms_lamb(kwargs, monkeypatch):
    theirs = timm_module("lamb", monkeypatch).Lamb
    same_rule = {"bias_correction": False, "max_grad_norm": None, "always_adapt": True}  # and norms below 10
    for ours in (optimizers.NpuFusedLamb, optimizers.Lamb):
        compare(lambda p, ours=ours: ours(p, **kwargs), lambda p: theirs(p, **kwargs, **same_rule))


@pytest.mark.parametrize(
    "kwargs",
    [{"lr": 1e-3}, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}, {"lr": 1e-3, "centered": True}],
    ids=str,
)
def test_timms_rmsprop_tf(kwargs, monkeypatch):
    theirs = timm_module("rmsprop_tf", monkeypatch).RMSpropTF
    compare(lambda p: optimizers.NpuFusedRMSpropTF(p, **kwargs), lambda p: theirs(p, **kwargs))
