# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The names that scripts import from apex.contrib.optimizers: NVIDIA's distributed optimizers, over ``fully_shard``.

NVIDIA's optimizers average gradients and shard their state themselves. Here ``fully_shard`` does both with DTensors, so
these classes keep only the update rules and NVIDIA's arguments. The arguments that control communication have no
effect. Source: https://github.com/NVIDIA/apex, apex/contrib/optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from apex_npu.fusion.shards import is_sharded
from apex_npu.optimizers import FusedAdam, FusedLAMB

__all__ = ["DistributedFusedAdam", "DistributedFusedLAMB"]


class _OnShards:
    """A mixin for optimizers whose parameters are DTensors."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Raises:
            TypeError: A trainable parameter is a plain tensor: its gradients would not be shared between processes.
        """
        super().add_param_group(param_group)  # type: ignore[misc]
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        for p in groups[-1]["params"]:
            if p.requires_grad and not is_sharded(p):
                del groups[-1]
                raise TypeError(
                    f"{type(self).__name__} was given a plain parameter of shape {tuple(p.shape)}; it only steps "
                    "parameters that fully_shard has sharded. Before making the optimizer, write: "
                    "from torch.distributed.fsdp import fully_shard; "
                    "for layer in model.children(): fully_shard(layer); fully_shard(model)"
                )

    def clip_grad_norm(self, max_norm: float, parameters: Any = None, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all parameters by their norm over all processes; return the norm before clipping.

        Raises:
            ValueError: ``parameters`` is given and differs from the optimizer's parameters.
        """
        own = [p for group in self.param_groups for p in group["params"]]  # type: ignore[attr-defined]
        given = own if parameters is None else [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if {id(p) for p in given} != {id(p) for p in own}:
            raise ValueError(
                f"{type(self).__name__}.clip_grad_norm clips all parameters of the optimizer, got {len(given)} of "
                f"{len(own)}; use torch.nn.utils.clip_grad_norm_ to clip some of them"
            )
        norm: Tensor = self.clip_optimizer_grad_norm_fused(max_norm, norm_type)  # type: ignore[attr-defined]
        return norm


class DistributedFusedAdam(_OnShards, FusedAdam):
    """``FusedAdam`` on parameters that ``fully_shard`` has sharded, with the arguments of NVIDIA's optimizer.

    The state and the parameters are float32. ``communication`` takes NVIDIA's other arguments, which have no effect:
    ``fully_shard`` and its policy decide how processes communicate.

    Raises:
        ValueError: A value is out of range, or asks for state of another precision.
        TypeError: A value is not a number, a parameter is a plain tensor, or an argument is unknown.
        RuntimeError: ``amsgrad`` is True.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        dtype: torch.dtype = torch.float32,
        *,
        store_param_remainders: bool = False,
        with_scaled_states: bool = False,
        capturable: bool = False,
        **communication: Any,
    ) -> None:
        _check_known(self, communication, _OF_ADAM)
        asked = {"dtype": dtype, "store_param_remainders": store_param_remainders}
        asked["with_scaled_states"] = with_scaled_states
        if [*asked.values()] != [torch.float32, False, False]:
            raise ValueError(f"{type(self).__name__} keeps float32 state of float32 parameters: leave out {asked}")
        super().__init__(
            params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad, capturable=capturable
        )


class DistributedFusedLAMB(_OnShards, FusedLAMB):
    """``FusedLAMB`` on parameters that ``fully_shard`` has sharded, with the arguments of NVIDIA's optimizer.

    ``communication`` takes NVIDIA's other arguments, which have no effect. With ``step_supports_amp_scaling``, a
    GradScaler passes its scale to the step.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number, a parameter is a plain tensor, or an argument is unknown.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        adam_w_mode: bool = True,
        use_nvlamb: bool = False,
        step_supports_amp_scaling: bool = True,
        **communication: Any,
    ) -> None:
        _check_known(self, communication, _OF_LAMB)
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
            fuse_grad_scaler=step_supports_amp_scaling,
        )


# NVIDIA's arguments about communication and buffers.
_OF_ADAM = (
    "grad_sync_dtype param_sync_dtype device process_group distributed_process_group redundant_process_group "
    "average_grad_sync overlap_grad_sync overlap_param_sync bucket_cap_mb pipeline_size contiguous_param_buffer "
    "contiguous_grad_buffer store_params nccl_ub"
)
_OF_LAMB = (
    "overlap_reductions dwu_group_size dwu_num_blocks dwu_num_chunks dwu_num_rs_pg dwu_num_ar_pg dwu_num_ag_pg "
    "fused_norm e5m2_allgather verbose clip_after_ar full_ar set_param_views_to_flat_buffer skip_allgather fuse_scale "
    "param_order nccl_allgather_channels"
)


def _check_known(optimizer: Any, given: dict[str, Any], known: str) -> None:
    for name in given.keys() - set(known.split()):
        raise TypeError(f"{type(optimizer).__name__}() got an unexpected keyword argument {name!r}")
