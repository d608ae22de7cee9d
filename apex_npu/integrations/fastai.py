# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""fastai: ``Learner(..., opt_func=fused("NpuFusedAdamW"), cbs=ApexAmp("O2"))``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from apex_npu import amp
from apex_npu.amp.inspect import adopted_inside, policy_of
from apex_npu.backends.requirements import require
from apex_npu.integrations.optimizer_names import optimizer_class

require(__name__, "fastai", "2.8.12")

from fastai.callback.core import Callback, CancelStepException  # noqa: E402
from fastai.callback.fp16 import MixedPrecision, NonNativeMixedPrecision  # noqa: E402
from fastai.callback.training import GradientClip  # noqa: E402
from fastai.optimizer import OptimWrapper  # noqa: E402


class _Fused(OptimWrapper):
    """A wrapper of a fused optimizer."""

    def clear_state(self) -> None:
        """Clear the state of the rule, as ``freeze`` does; keep what amp keeps there of float32 values."""
        kept = {p: {"master_param": one["master_param"]} for p, one in self.opt.state.items() if "master_param" in one}
        self.opt.state = defaultdict(dict, kept)


def fused(name: str = "NpuFusedAdamW", **options: Any) -> Callable[..., OptimWrapper]:
    """Return an ``opt_func`` for a Learner that makes an optimizer of ``apex_npu.optimizers``.

    Args:
        name: The name of the optimizer's class.
        **options: Arguments of the optimizer, without ``lr`` and ``weight_decay``, which the Learner gives.

    Raises:
        ValueError: There is no such optimizer.
    """
    return partial(_Fused, opt=optimizer_class(name), **options)


class ApexAmp(Callback):
    """Train a Learner at an ``opt_level`` of amp, with an optimizer of torch.optim or ``fused``.

    A step that is skipped is cancelled, as with fastai's own mixed precision: callbacks see ``after_cancel_step``.

    Args:
        opt_level: "O0" to "O5".
        clip: The largest norm of the gradients, which are clipped unscaled.
        **amp_options: Other arguments of ``amp.initialize``.

    Raises:
        ValueError: In ``fit``: the Learner has fastai's own mixed precision as well; its optimizer is fastai's, or
            LBFGS; or it has ``GradientClip`` with ``fuse_unscale``.
    """

    order = MixedPrecision.order

    def __init__(self, opt_level: str = "O1", clip: float | None = None, **amp_options: Any) -> None:
        super().__init__()
        self.clip = clip
        self.amp_options = {"opt_level": opt_level, "verbosity": 0, **amp_options}
        self._block: AbstractContextManager[Tensor] | None = None

    def before_fit(self) -> None:
        """Initialize amp, unless an earlier ``fit`` has initialized it for this optimizer."""
        optimizer = getattr(self.learn.opt, "opt", None)
        _check(self.learn.cbs, self.learn.opt, optimizer, self.amp_options)
        if policy_of(optimizer) is None:
            amp.initialize(self.learn.model, optimizer, **self.amp_options)

    def before_backward(self) -> None:
        """Scale the loss."""
        self._block = amp.scale_loss(self.learn.loss_grad, adopted_inside(self.learn.opt))
        self.learn.loss_grad = self._block.__enter__()

    def after_backward(self) -> None:
        """Unscale and check the gradients."""
        block, self._block = self._block, None
        if block is not None:  # no callback has cancelled the backward before ``before_backward``
            block.__exit__(None, None, None)

    def before_step(self) -> None:
        """Clip the gradients, or cancel the step if it is skipped."""
        optimizer = self.learn.opt.opt
        if amp.will_skip(optimizer):
            optimizer.step()
            raise CancelStepException
        if self.clip is not None:
            optimizer.clip_optimizer_grad_norm_fused(self.clip)

    def after_cancel_fit(self) -> None:
        """Forget a block that an interrupted backward has left open."""
        self._block = None


def _check(callbacks: Any, wrapper: Any, optimizer: Any, options: dict[str, Any]) -> None:
    level = options["opt_level"]
    for callback in callbacks:
        if isinstance(callback, (MixedPrecision, NonNativeMixedPrecision)):
            raise ValueError(
                f"{type(callback).__name__} (to_fp16(), to_bf16()) and opt_level={level!r} are two kinds of mixed "
                "precision at once: call learn.to_fp32(), or take ApexAmp away"
            )
        if isinstance(callback, GradientClip) and options.get("fuse_unscale"):
            raise ValueError(
                "GradientClip would clip gradients that fuse_unscale=True keeps multiplied with the loss scale: "
                "take it away, and use ApexAmp(..., clip=max_norm)"
            )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"opt_level={level!r} needs an optimizer of torch, and this Learner has fastai's {type(wrapper).__name__}: "
            'pass opt_func=fused("NpuFusedAdamW"), or partial(OptimWrapper, opt=torch.optim.AdamW)'
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"LBFGS needs a closure, which opt_level={level!r} does not take: use another optimizer")
