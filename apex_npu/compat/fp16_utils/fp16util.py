# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Explicit conversion of models to float16, and of masters to float32."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from apex_npu.amp.float32_copies import module_snapshot
from apex_npu.autocast.forward_cast import cast_own_parameters, cast_parameters, is_affine_batch_norm
from apex_npu.compat.flattening import flatten, unflatten

__all__ = [
    "BN_convert_float", "FP16Model", "clip_grad_norm", "convert_module", "convert_network",
    "master_params_to_model_params", "model_grads_to_master_grads", "network_to_half", "prep_param_lists",
    "to_python_float", "tofp16",
]  # fmt: skip

clip_grad_norm = clip_grad_norm_


class tofp16(nn.Module):
    """A layer that casts its input to float16."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input`` in float16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Convert every affine batch norm in ``module`` to float32, in place, and return ``module``."""
    for child in module.modules():
        if is_affine_batch_norm(child):
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return ``network`` in float16 except for affine batch norms, preceded by a layer that casts its input."""
    return nn.Sequential(tofp16(), convert_network(network, torch.float16))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters, gradients and buffers of ``module`` itself, not of its children, in place."""
    cast_own_parameters(module, dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast ``network`` in place, except for its affine batch norms, and return it.

    As in Apex, a batch norm without weights is cast, running statistics included. ``amp.initialize`` leaves both kinds
    in float32.
    """
    undo = ExitStack()
    try:
        for module in network.modules():
            undo.callback(module_snapshot(module))
        cast_parameters(network, dtype, keeps=is_affine_batch_norm)
    except BaseException:
        undo.close()
        raise
    return network


class FP16Model(nn.Module):
    """``network``, converted in place to float16 except for affine batch norms. Inputs are cast, outputs are not."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the network's output for ``inputs`` cast to float16."""
        return self.network(*(input.half() for input in inputs))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return the trainable parameters of ``model``, and float32 masters with their values.

    With ``flat_master``, all parameters have one flat master, whose gradient is zeros.

    Raises:
        TypeError: ``flat_master`` is True and the parameters have several dtypes.
    """
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return model_params, [param.detach().clone().float().requires_grad_() for param in model_params]
    dtypes = {param.dtype for param in model_params}
    if len(dtypes) > 1:
        raise TypeError(
            f"flat_master=True needs parameters of one dtype, got {', '.join(sorted(map(str, dtypes)))}; use "
            "flat_master=False, or FP16_Optimizer"
        )
    master = nn.Parameter(flatten([param.detach() for param in model_params]).float())
    master.grad = torch.zeros_like(master)
    return model_params, [master]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of ``model_params`` to ``master_params``, the two lists of ``prep_param_lists``.

    Where the model has no gradient, the master has none either; a flat master has zeros there.
    """
    if not flat_master:
        for model, master in zip(model_params, master_params, strict=True):
            # Always a copy, even for equal dtypes: clipping the master's gradient must not clip the model's.
            master.grad = None if model.grad is None else model.grad.detach().to(master.dtype, copy=True)
        return
    (master,) = master_params
    if master.grad is None:
        master.grad = torch.empty_like(master)
    for model, part in zip(model_params, unflatten(master.grad, model_params), strict=True):
        part.zero_() if model.grad is None else part.copy_(model.grad)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the values of ``master_params`` to ``model_params``, the two lists of ``prep_param_lists``."""
    values = unflatten(master_params[0], model_params) if flat_master else list(master_params)
    for model, value in zip(model_params, values, strict=True):
        model.copy_(value)


def to_python_float(t: Any) -> Any:
    """Return the single value of a tensor."""
    return t.item() if hasattr(t, "item") else t[0]
