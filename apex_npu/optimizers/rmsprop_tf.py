# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""RMSprop with the rule of TensorFlow."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.optimizers.base import FusedOptimizer, FusedOptions, ParamGroup
from apex_npu.optimizers.checks import check_bools, check_non_negative
from apex_npu.optimizers.rmsprop import NpuFusedRMSprop


class NpuFusedRMSpropTF(NpuFusedRMSprop):
    """RMSprop on flat buffers with the rule of TensorFlow and timm: eps under the root, and s starts at one.

    ::

        p ← p − weight_decay · p                     if decoupled_decay and lr ≠ 0
        g ← g + weight_decay · p                     unless decoupled_decay
        s ← s + (1 − α) · (g² − s)
        a ← a + (1 − α) · (g − a)                    if centered
        d ← sqrt(s + eps),  or  sqrt(s − a² + eps)    if centered
        b ← momentum · b + lr · g / d;  p ← p − b     with momentum, if lr_in_momentum
        b ← momentum · b + g / d;  p ← p − lr · b     with momentum, else
        p ← p − lr · g / d                           without momentum

    The decoupled decay is not multiplied by ``lr``, as in Ascend's optimizer of this name. At ``lr`` 0 weights do not
    decay: torch.distributed.checkpoint runs a step at 0 to initialize state, which must not change weights.
    https://github.com/huggingface/pytorch-image-models, timm/optim/rmsprop_tf.py. State: that of ``NpuFusedRMSprop``.

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        alpha: Smoothing constant α.
        eps: Added under the root.
        weight_decay: L2 penalty, or decoupled decay.
        momentum: Momentum factor.
        centered: Normalise by the variance rather than the second moment.
        decoupled_decay: Decay the parameter itself.
        lr_in_momentum: Multiply by ``lr`` before the momentum.
        init_square_avg: Initial value of s; Ascend's patch had 0.
        maximize: Ascend the gradient instead.
        options: See ``FusedOptions``. With ``centered`` both averages stay float32.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is not a number.

    Example::

        >>> optimizer = optimizers.NpuFusedRMSpropTF(model.parameters(), lr=1e-2, momentum=0.9)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    eps_inside_sqrt: ClassVar[bool] = True
    torch_options: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
        *,
        init_square_avg: float = 1.0,
        maximize: bool = False,
        **options: Unpack[FusedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
            "decoupled_decay": decoupled_decay,
            "lr_in_momentum": lr_in_momentum,
            "init_square_avg": init_square_avg,
            "maximize": maximize,
        }
        # Not NpuFusedRMSprop.__init__, whose arguments differ.
        FusedOptimizer.__init__(self, params, defaults, **options)

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        super().validate(group)
        check_bools(group, "decoupled_decay", "lr_in_momentum")
        check_non_negative(group, "init_square_avg")

    def initial_state(self, name: str, group: ParamGroup) -> float:
        """Return ``init_square_avg`` for the second moment, else 0."""
        return float(group["init_square_avg"]) if name == "square_avg" else 0.0
