# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""timm: the fused optimizers by name, as ``--opt npufusedadamw`` or ``create_optimizer_v2(model, opt="...")``."""

from __future__ import annotations

from typing import Any

from apex_npu import optimizers
from apex_npu.backends.requirements import require
from apex_npu.integrations.optimizer_names import HostMuon

require(__name__, "timm", "1.0.31")

from timm.optim._optim_factory import OptimInfo, default_registry  # noqa: E402

_MOMENTUM: dict[str, Any] = {"has_eps": False, "has_momentum": True}
_BETAS: dict[str, Any] = {"has_betas": True}
_RMSPROP: dict[str, Any] = {"has_momentum": True, "defaults": {"alpha": 0.9}}

# By timm's name: the class, and which of timm's arguments it takes. Defaults are those of timm for the same rule.
_OPTIMIZERS: dict[str, tuple[type[optimizers.FusedOptimizer], dict[str, Any]]] = {
    "npufusedsgd": (optimizers.NpuFusedSGD, {**_MOMENTUM, "defaults": {"nesterov": True}}),
    "npufusedmomentum": (optimizers.NpuFusedSGD, _MOMENTUM),
    "npufusedadam": (optimizers.NpuFusedAdam, _BETAS),
    "npufusedadamw": (optimizers.NpuFusedAdamW, _BETAS),
    "npufusedadamp": (optimizers.NpuFusedAdamP, {**_BETAS, "defaults": {"wd_ratio": 0.01, "nesterov": True}}),
    "npufusedmuon": (HostMuon, {**_BETAS, "has_eps": True}),
    "npufusedlamb": (optimizers.NpuFusedLamb, _BETAS),
    "npufusedadadelta": (optimizers.NpuFusedAdadelta, {}),
    "npufusedrmsprop": (optimizers.NpuFusedRMSprop, _RMSPROP),
    "npufusedrmsproptf": (optimizers.NpuFusedRMSpropTF, _RMSPROP),
    "fusedsgd": (optimizers.FusedSGD, {**_MOMENTUM, "defaults": {"nesterov": True}}),
    "fusedadam": (optimizers.FusedAdam, {**_BETAS, "defaults": {"adam_w_mode": False}}),
    "fusedadamw": (optimizers.FusedAdam, {**_BETAS, "defaults": {"adam_w_mode": True}}),
    "fusedlamb": (optimizers.FusedLAMB, _BETAS),
    "fusednovograd": (optimizers.FusedNovoGrad, {**_BETAS, "defaults": {"betas": (0.95, 0.98)}}),
}


def register() -> None:
    """Put the fused optimizers into timm's registry. Idempotent.

    Their names are those of their classes in lower case, and ``npufusedmomentum`` for SGD without Nesterov's momentum.
    They replace timm's own ``fusedsgd``, ``fusedadam``, ``fusedadamw``, ``fusedlamb`` and ``fusednovograd``, which
    timm takes from an installed Apex and allows on CUDA only. Those of this package run on every device.
    """
    for name, (cls, options) in _OPTIMIZERS.items():
        default_registry._optimizers.pop(name, None)  # registering warns if it overwrites a name
        default_registry.register(OptimInfo(name, cls, f"{cls.__name__} of apex_npu", **options))
