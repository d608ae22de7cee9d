# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Adagrad with the signature of NVIDIA Apex."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.fusion import Run
from apex_npu.ops import Call, adagrad_
from apex_npu.optimizers.base import FusedOptimizer, FusedOptions, ParamGroup
from apex_npu.optimizers.checks import check_bools, check_non_negative

# Options of torch.optim.Adagrad's groups. NVIDIA's optimizer has no arguments for them.
_OF_TORCH = {"lr_decay": 0.0, "initial_accumulator_value": 0.0}


class FusedAdagrad(FusedOptimizer):
    """Adagrad on flat buffers, with NVIDIA Apex's arguments and rule.

    ::

        g ← g + weight_decay · p                       unless adagrad_w_mode
        h ← h + g²
        p ← p − lr · (g / (sqrt(h) + eps) [+ weight_decay · p  if adagrad_w_mode])

    Duchi et al. 2011, https://jmlr.org/papers/v12/duchi11a.html. State: ``step``, ``sum`` h (shape and dtype of the
    parameter, float32 for float16 and bfloat16). Groups also have ``lr_decay`` and ``initial_accumulator_value``, both
    0, because torch.optim.Adagrad reads them in a state dict. A state dict of torch.optim.Adagrad sets them.

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: L2 penalty, or decoupled decay.
        set_grad_none: Default of ``zero_grad(set_to_none=...)``.
        adagrad_w_mode: Decouple the decay.
        options: See ``FusedOptions``. ``fuse_grad_scaler`` is by default the value of ``capturable``.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.

    Example::

        >>> optimizer = optimizers.FusedAdagrad(model.parameters(), lr=1e-2)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    elementwise = True
    encodable_states: ClassVar[tuple[str, ...]] = ("sum",)
    supports_capture = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        options.setdefault("fuse_grad_scaler", None)
        defaults = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "adagrad_w_mode": adagrad_w_mode,
            **_OF_TORCH,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``. Add torch's options, which the groups of Apex's FusedAdagrad lack."""
        super().__setstate__(state)
        for group in (self.defaults, *self.param_groups):
            for name, value in _OF_TORCH.items():
                group.setdefault(name, value)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        check_non_negative(group, "lr", "eps", "weight_decay", *_OF_TORCH)
        check_bools(group, "adagrad_w_mode")

    def initial_state(self, name: str, group: ParamGroup) -> float:
        """Return ``initial_accumulator_value``, as in torch.optim.Adagrad."""
        return float(group["initial_accumulator_value"])

    def learning_rate(self, run: Run, group: ParamGroup) -> float | Tensor:
        """Return ``group["lr"]``, reduced by ``lr_decay`` as in torch.optim.Adagrad."""
        lr = super().learning_rate(run, group)
        return lr / (1.0 + (run.step - 1.0) * group["lr_decay"]) if group["lr_decay"] else lr

    def call(self, run: Run, group: ParamGroup) -> Call:
        """Bind the op of the rule to ``run``, with its arguments."""
        return adagrad_.bind(
            run.param,
            run.scaled_grad,
            run.stored("sum"),
            lr=self.learning_rate(run, group),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["adagrad_w_mode"],
            grad_scale=run.grad_scale,
            found_inf=run.found_inf,
            encoding=run.encoding,
        )
