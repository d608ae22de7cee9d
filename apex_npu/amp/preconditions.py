# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``initialize`` refuses, before it changes anything. Each function raises what ``initialize`` documents."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from apex_npu.amp.optimizer_adapter import check_adoptable
from apex_npu.amp.policy import Policy
from apex_npu.amp.ranks import check_group
from apex_npu.amp.session import current, settings
from apex_npu.fusion import is_sharded, wraps_tensors
from apex_npu.ops import LOW_PRECISION


def check_incoming(models: list[nn.Module], optimizers: list[Optimizer]) -> None:
    """Refuse models that cannot be converted, or have been wrapped, and optimizers that cannot be adopted."""
    for model in models:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise RuntimeError(
                f"Incoming model is an instance of {type(model).__name__}. Parallel wrappers should only be applied "
                "AFTER the model has been returned from amp.initialize"
            )
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if nn.parameter.is_lazy(tensor):
                raise RuntimeError(
                    f"parameter {name} has no shape yet; run the model once on a batch before amp.initialize, so that "
                    "its lazy modules know theirs"
                )
            if tensor.dtype in LOW_PRECISION and not settings.accept_low_precision_models:
                raise RuntimeError(
                    f"Found param {name} with type {tensor.dtype}, expected torch.float32. When using amp.initialize, "
                    "you do not need to call .half() or .bfloat16() on your model before passing it, no matter what "
                    "optimization level you choose; drop that call"
                )
    if len({id(o) for o in optimizers}) != len(optimizers):
        raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
    for optimizer in optimizers:
        check_adoptable(optimizer)


def check_groups(policy: Policy, process_group: Any, overflow_group: Any, *, enabled: bool) -> tuple[Any, Any]:
    """The process groups to be used, the default one filled in."""
    if policy.combine_ddp:
        if not enabled:
            raise RuntimeError(
                "combine_ddp=True with enabled=False would train each process by itself; for data parallel training "
                "without mixed precision use opt_level='O0'"
            )
        process_group = check_group(process_group, "process_group", "combine_ddp=True")
    elif process_group is not None:
        raise RuntimeError(
            "process_group says who averages gradients under combine_ddp=True; leave it out without that"
        )
    if enabled and overflow_group is not None:
        check_group(overflow_group, "overflow_group", "overflow_group")
    return process_group, overflow_group


def check_nothing_averages(models: list[nn.Module]) -> None:
    """Refuse parallel wrappers inside of models, which would average what combine_ddp averages."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
                raise RuntimeError(
                    f"{name} is an instance of {type(module).__name__}, which averages gradients itself; leave it out "
                    "with combine_ddp=True"
                )


def check_plain(optimizers: list[Optimizer]) -> None:
    """Refuse parameters that combine_grad cannot give a place in flat memory."""
    for param in (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]):
        if wraps_tensors(param):
            raise RuntimeError(
                f"combine_grad=True puts gradients into flat memory, but a parameter of shape {tuple(param.shape)} is "
                f"a {type(param.data).__name__}, which wraps other tensors; leave combine_grad out"
            )


def check_sharded(policy: Policy, overflow_group: Any, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
    """Refuse what cannot be done to parameters of which each process has a part (DTensor)."""
    of_models = [p for model in models for p in model.parameters()]
    of_optimizers = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    if not any(map(is_sharded, of_models + of_optimizers)):
        return
    if policy.model_dtype is not None:
        raise RuntimeError(
            f"opt_level {policy.opt_level} casts the model, whose parameters are sharded over processes (DTensor): "
            "fully_shard keeps copies that would not follow. Use O1 or O4, or fully_shard's MixedPrecisionPolicy"
        )
    for optimizer in optimizers:
        fused = getattr(optimizer, "is_npu_fused_optimizer", False)
        if fused and any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps sharded parameters (DTensor) only without amp, which wants their "
                "gradients whole in flat memory; use torch.optim's optimizer of the same rule with amp, or "
                "fully_shard's MixedPrecisionPolicy instead of amp"
            )
    if policy.loss_scale == "dynamic" and overflow_group is None:
        raise RuntimeError(
            "parameters are sharded over processes (DTensor), each of which sees the overflow of its own part alone: "
            "pass overflow_group=, the group of the processes that share the model, or a static loss_scale"
        )


def check_devices(device_types: list[str]) -> None:
    """Refuse tensors without memory, and a place inside of an autocast block."""
    if "meta" in device_types:
        raise RuntimeError(
            "models and optimizers must have their memory when they are passed to amp.initialize, got tensors on the "
            "meta device; call model.to_empty(device=...) and initialise the weights first"
        )
    former = current()
    ours = former is not None and former.policy.patch_torch_functions
    for device_type in device_types:
        if torch.is_autocast_enabled(device_type) and not ours:
            raise RuntimeError(
                f"amp.initialize was called inside torch.autocast({device_type!r}), whose end would switch amp's casts "
                "off again; call it outside"
            )
