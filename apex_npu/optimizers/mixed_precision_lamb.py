# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""NVIDIA Apex's FusedMixedPrecisionLamb: LAMB with float32 masters, and learning rate and step count on the device.

https://github.com/NVIDIA/apex, apex/optimizers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from apex_npu.fusion import MASTER_PARAM, Run
from apex_npu.ops import LOW_PRECISION, Call
from apex_npu.optimizers.base import ParamGroup
from apex_npu.optimizers.checks import as_number, check_no_amsgrad
from apex_npu.optimizers.nvidia import FusedLAMB, on_masters
from apex_npu.optimizers.state_dicts import count_in_group
from apex_npu.optimizers.state_formats import StateDtype
from apex_npu.optimizers.whole_norms import NormOptimizer


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB with float32 masters on flat buffers, with NVIDIA Apex's arguments; the rule is ``FusedLAMB``'s.

    Parameters of ``reduced_precision_dtype`` have masters in their state (``master_param``), which are stepped instead.
    A weight that was written since the last step is copied to its master. ``reduced_precision_dtype`` may be set after
    construction, before the first step.

    The learning rate of each parameter group is a float32 tensor, and its step count an int32 tensor of shape (1,).
    Both are on the device of the parameters, so that no step waits for the host. ``step(grad_scaler=scaler)`` uses the
    scale and the overflow flag of ``scaler``; ``scaler.step(optimizer)`` does the same. Parameters that ``fully_shard``
    has sharded are refused; ``FusedLAMB`` supports them.

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        step: Initial step count, for the correction of both moments.
        bias_correction: Correct both moments for their start.
        betas: β₁ and β₂, each in [0, 1).
        eps: Added to the denominator.
        weight_decay: Decay.
        amsgrad: Must be False.
        adam_w_mode: Add the decay to the direction instead of to the gradient.
        grad_averaging: Multiply gradients by 1 − β₁ before they are added to m.
        max_grad_norm: Norm of all gradients above which they are scaled down, one for all groups.
        use_nvlamb: Also adapt the steps of parameters without weight decay.
        reduced_precision_dtype: The dtype whose parameters have masters: torch.float16, torch.bfloat16 or None.
        capturable: Count steps on the device, so that a CUDA graph can capture a step. No effect on a CPU.
        fuse_grad_scaler: Let ``torch.amp.GradScaler.step`` leave unscaling and the overflow check to the step.
        state_dtype: The dtype of the states: torch.bfloat16 or ``"int8"``, for all or by name. None: float32.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.
        RuntimeError: ``amsgrad`` is true.

    Example::

        >>> half = model.bfloat16()
        >>> optimizer = optimizers.FusedMixedPrecisionLamb(half.parameters(), reduced_precision_dtype=torch.bfloat16)
        >>> optimizer.zero_grad()
        >>> half(input.bfloat16()).square().mean().backward()
        >>> optimizer.step()
    """

    supports_capture = True
    optional_states: ClassVar[tuple[str, ...]] = (MASTER_PARAM,)  # NVIDIA's state dicts lack them

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
        *,
        capturable: bool = True,
        fuse_grad_scaler: bool | None = None,
        state_dtype: StateDtype = None,
    ) -> None:
        check_no_amsgrad("FusedMixedPrecisionLamb", amsgrad)
        if reduced_precision_dtype not in (None, torch.float32, *LOW_PRECISION):
            raise ValueError(
                "FusedMixedPrecisionLamb: reduced_precision_dtype must be torch.float16, torch.bfloat16 or None, got "
                f"{reduced_precision_dtype!r}"
            )
        self.reduced_precision_dtype = reduced_precision_dtype
        defaults = {
            "lr": lr,
            "step": step,
            "step_offset": step,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "adam_w_mode": adam_w_mode,
            "use_nvlamb": use_nvlamb,
        }
        # Not FusedLAMB.__init__, whose arguments differ.
        NormOptimizer.__init__(
            self,
            params,
            defaults,
            fuse_grad_scaler=fuse_grad_scaler,
            capturable=capturable,
            state_dtype=state_dtype,
        )

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        super().validate(group)
        for name in ("step", "step_offset"):
            if not 0 <= as_number(name, group[name]) < float("inf") or not float(group[name]).is_integer():
                raise ValueError(f"Invalid {name}: {group[name]} ({name} must be a count)")

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters. Their learning rate and step count become tensors on their device."""
        super().add_param_group(param_group)
        _put_beside(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``state_dict``. In NVIDIA's state dicts each group has one step count."""
        if "param_groups" in state_dict:
            groups = [{"step_offset": 0, **group} for group in state_dict["param_groups"]]
            state_dict = {**state_dict, "param_groups": groups}
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            count_in_group(self, group)
            _put_beside(group)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of ``FusedOptimizer`` and the dtype of the parameters that have masters."""
        return {**super().__getstate__(), "reduced_precision_dtype": self.reduced_precision_dtype}

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """Return the names of the first and second moment, and of masters if a parameter has one."""
        mastered = any(map(self._is_mastered, group["params"]))
        return ("exp_avg", "exp_avg_sq", MASTER_PARAM) if mastered else ("exp_avg", "exp_avg_sq")

    def _is_mastered(self, param: Tensor | int) -> bool:
        # The groups of a state dict have numbers.
        dtype = param.dtype if isinstance(param, Tensor) else None
        return dtype in LOW_PRECISION and dtype == self.reduced_precision_dtype

    def before_updates(self, runs: list[tuple[Run, ParamGroup]]) -> None:
        """Compute the norm as ``FusedLAMB`` does, and set the step count of each group, as NVIDIA's optimizer does."""
        super().before_updates(runs)
        for run, group in runs:
            group["step"] = torch.as_tensor(_step_of(run, group), dtype=torch.int32, device=run.param.device).reshape(1)

    def call(self, run: Run, group: ParamGroup) -> Call:
        """Bind the op of the rule to ``run``, with its arguments."""
        call = super().call(run, group)
        return on_masters(run, call) if MASTER_PARAM in self.state_names(group) else call

    def _options(self, run: Run, group: ParamGroup) -> dict[str, Any]:
        return {**super()._options(run, group), "step": _step_of(run, group)}


def _step_of(run: Run, group: ParamGroup) -> Any:
    offset = group["step_offset"]
    return run.step + offset if offset else run.step


def _put_beside(group: ParamGroup) -> None:
    """Make the learning rate and the step count of ``group`` separate tensors on the device of its parameters."""
    device = next((p.device for p in group["params"]), torch.device("cpu"))
    group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).reshape(()).clone()
    group["step"] = torch.as_tensor(group["step"], dtype=torch.int32, device=device).reshape(1).clone()
    group["step_offset"] = int(group["step_offset"])
