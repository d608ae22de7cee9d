# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The fused optimizers by the names of their classes, as training frameworks configure them."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT

from apex_npu import optimizers


class HostMuon(optimizers.NpuFusedMuon):
    """``NpuFusedMuon`` for programs that configure one learning rate and one weight decay for all parameters.

    Muon steps matrices, with steps of the size of AdamW's. AdamW steps all other parameters, and the matrices in groups
    with timm's ``use_fallback``.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate of groups that do not set it.
        betas: The betas of AdamW.
        eps: The eps of both rules.
        weight_decay: The weight decay of groups that do not set it.
        adjust_lr_fn: The scaling of Muon's learning rate: "original", "match_rms_adamw" or "spectral_unclamped".
        **options: Other arguments of ``NpuFusedMuon``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adjust_lr_fn: str | None = "match_rms_adamw",
        **options: Any,
    ) -> None:
        given: list[Any] = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        shared = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        rules = (False if group.get("use_fallback") else "auto" for group in groups)
        groups = [{**shared, "use_muon": rule, **group} for rule, group in zip(rules, groups, strict=True)]
        super().__init__(groups, lr, weight_decay, adjust_lr_fn=adjust_lr_fn, **options)


def optimizer_classes() -> dict[str, type[optimizers.FusedOptimizer]]:
    """Return all fused optimizers, by the names of their classes."""
    named = {name: getattr(optimizers, name) for name in optimizers.__all__}
    return {
        name: cls
        for name, cls in named.items()
        if isinstance(cls, type) and issubclass(cls, optimizers.FusedOptimizer) and cls is not optimizers.FusedOptimizer
    }


def optimizer_class(name: str) -> type[optimizers.FusedOptimizer]:
    """Return the fused optimizer of this name.

    Raises:
        ValueError: There is no such optimizer; the message lists those that exist.
    """
    known = optimizer_classes()
    if name not in known:
        raise ValueError(f"apex_npu.optimizers has no optimizer {name!r}; it has {', '.join(sorted(known))}")
    return known[name]
