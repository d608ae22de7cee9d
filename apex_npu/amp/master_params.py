# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""fp32 masters of low-precision model parameters: making the pairs, copying values, and the fp32 face of state dicts.

Masters take the place of the model's parameters in ``optimizer.param_groups``. They hold the fp32 values that the model
had before it was cast, so nothing is lost by casting, saving or loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu.amp.session import master_of
from apex_npu.fusion import low_precision_of
from apex_npu.ops import LOW_PRECISION


@dataclass(frozen=True, eq=False)
class MasterPair:
    """A low-precision model parameter and the fp32 parameter that the optimizer steps in its stead."""

    model_param: Tensor
    master_param: Tensor


def make_masters(optimizer: Optimizer, fp32_values: Mapping[int, Tensor]) -> list[MasterPair]:
    """Put an fp32 master in place of every trainable low-precision parameter of ``optimizer``, state included.

    Args:
        optimizer: Its ``param_groups`` and ``state`` are changed.
        fp32_values: ``id(param)`` → the value it had before it was cast; others are widened from what they have now.
    """
    pairs = []
    for group in optimizer.param_groups:
        for i in low_precision_of(group["params"]):
            param = group["params"][i]
            if not param.requires_grad:
                continue
            value = fp32_values.get(id(param))
            if value is None or value.dtype != torch.float32:
                value = param.detach().float()
            master = nn.Parameter(value)
            if param.grad is not None:
                master.grad = param.grad.detach().float()
            group["params"][i] = master
            if param in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(param)
            pairs.append(MasterPair(param, master))
    return pairs


@torch.no_grad()
def copy_masters_to_model(pairs: list[MasterPair], skipped: Tensor | None = None) -> None:
    """Round every master into its model parameter.

    Args:
        pairs: Which.
        skipped: One number on the device; where it is not 0 nothing is written.
    """
    if skipped is not None:
        for pair in pairs:
            write_unless(skipped, pair.model_param, pair.master_param)
    elif pairs:
        torch._foreach_copy_([p.model_param for p in pairs], [p.master_param for p in pairs])


def write_unless(skipped: Tensor | None, target: Tensor, source: Tensor) -> None:
    """Round ``source`` into ``target``, but where ``skipped``, one number on a device, is there and not 0."""
    if skipped is not None:
        source = torch.where(skipped.to(target.device).reshape(()) != 0, target, source)
    target.copy_(source)


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    own = [*module._parameters.items(), *module._buffers.items()]
    return [(name, t) for name, t in own if t is not None]


def _show_fp32(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """state_dict hook: low-precision entries of this module appear in fp32, exact where there is a master."""
    for name, tensor in _own_tensors(module):
        entry = state_dict.get(prefix + name)
        if isinstance(entry, Tensor) and entry.dtype in LOW_PRECISION and tensor.dtype == entry.dtype:
            master = master_of(tensor)
            # Weights that were changed by hand since the last step (a swapped-in moving average) are what is shown.
            exact = master is not None and torch.equal(master.to(entry.dtype), entry)
            state_dict[prefix + name] = master.detach() if master is not None and exact else entry.float()


@torch.no_grad()
def _fill_masters(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    """load_state_dict hook: masters take the values as they were saved, not as the cast model rounds them."""
    for name, tensor in module._parameters.items():
        master = None if tensor is None else master_of(tensor)
        entry = state_dict.get(prefix + name)
        if master is not None and local_metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                f"load_state_dict(assign=True) would replace {prefix + name}, whose fp32 master the optimizer steps; "
                "load without assign, or before amp.initialize"
            )
        if master is not None and isinstance(entry, Tensor) and entry.shape == master.shape:
            master.copy_(entry)


def give_fp32_state_dict(model: nn.Module) -> list[Any]:
    """Let ``model.state_dict()`` and ``load_state_dict()`` speak fp32, submodules' own included.

    Returns:
        Handles; ``remove()`` on each undoes what this call has done. Modules that had this face already have none.
    """
    handles: list[Any] = []
    for module in model.modules():
        if _show_fp32 in module._state_dict_hooks.values():
            continue  # of an earlier initialize
        handles.append(module.register_state_dict_post_hook(_show_fp32))
        handles.append(module.register_load_state_dict_pre_hook(_fill_masters))
    return handles


def remove_fp32_state_dict(model: nn.Module) -> None:
    """Take that face off again."""
    for module in model.modules():
        for key, hook in list(module._state_dict_hooks.items()):
            if hook is _show_fp32:
                del module._state_dict_hooks[key]
        for key, hook in list(module._load_state_dict_pre_hooks.items()):
            if getattr(hook, "hook", hook) is _fill_masters:  # torch wraps it
                del module._load_state_dict_pre_hooks[key]
