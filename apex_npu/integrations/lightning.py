# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lightning: ``Trainer(plugins=ApexAmpPrecision("O2"))`` and ``Fabric(plugins=ApexFabricPrecision("O2"))``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from apex_npu import amp
from apex_npu.amp.inspect import adopted_inside, is_retired, policy_of
from apex_npu.backends.requirements import require

require(__name__, "lightning", "2.6.6")

from lightning.fabric.plugins import Precision as FabricPrecision  # noqa: E402
from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeedStrategy  # noqa: E402
from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy  # noqa: E402
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy  # noqa: E402
from lightning.pytorch.plugins import Precision  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy  # noqa: E402

# Each of these strategies has its own mixed precision, for parts of parameters.
_SHARDING = (
    DeepSpeedStrategy,
    FSDPStrategy,
    FabricDeepSpeedStrategy,
    FabricFSDPStrategy,
    FabricModelParallelStrategy,
)
# The names in checkpoints and logs: Lightning's own for the same dtypes.
_NAMES = {"O0": "32-true", "O4": "bf16-mixed", "O5": "bf16-mixed"}


class _Amp:
    """The base of both plugins: initializes amp, finds the optimizers of a backward, saves and loads the loss scale."""

    precision: Any

    def __init__(self, opt_level: str = "O1", **amp_options: Any) -> None:
        super().__init__()
        if amp_options.get("fuse_unscale"):
            raise ValueError(
                "fuse_unscale=True keeps gradients multiplied with the loss scale until step(), but Lightning "
                "clips them with torch's functions before that: leave fuse_unscale out"
            )
        if amp_options.get("combine_ddp"):
            raise ValueError(
                "combine_ddp=True averages gradients, and so does the DistributedDataParallel of Lightning's strategy: "
                "leave combine_ddp out"
            )
        self.amp_options = {"opt_level": opt_level, "verbosity": 0, **amp_options}
        self.precision = _NAMES.get(opt_level, "16-mixed")
        self._initialized: list[ReferenceType[Optimizer]] = []
        self._loaded: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the optimizers themselves, of which a copy finds the copies."""
        return {**vars(self), "_initialized": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        vars(self).update(state, _initialized=list(map(ref, state["_initialized"])))

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that have been initialized, still exist and have their models."""
        existing = [reference() for reference in self._initialized]
        return [optimizer for optimizer in existing if optimizer is not None and not is_retired(optimizer)]

    def _check_strategy(self, strategy: Any) -> None:
        if isinstance(strategy, _SHARDING):
            raise ValueError(
                f"opt_level={self.amp_options['opt_level']!r} does not work with {type(strategy).__name__}, which "
                "keeps parameters or optimizer states of its own: use precision='bf16-mixed' there, or strategy='ddp'"
            )

    def _initialize(self, model: nn.Module, optimizers: Sequence[Optimizer], beside: Sequence[Optimizer] = ()) -> None:
        """Initialize amp for ``optimizers``, which train in addition to those of ``beside``."""
        if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            level = self.amp_options["opt_level"]
            raise ValueError(
                f"LBFGS calls its closure repeatedly, which opt_level={level!r} does not support: use another optimizer"
            )
        if any(policy_of(optimizer) is None for optimizer in optimizers):
            amp.initialize(model, list(optimizers), **self.amp_options)
        self._initialized = [ref(optimizer) for optimizer in dict.fromkeys([*beside, *optimizers])]
        if self._loaded is not None:
            amp.load_state_dict(self._loaded)
            self._loaded = None

    def _trained(self) -> list[Optimizer]:
        """Return the optimizers that the next backward is for: without a discriminator's while that is frozen."""
        known = self.optimizers
        return [o for o in known if any(p.requires_grad for g in o.param_groups for p in g["params"])] or known

    def main_params(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters whose unscaled gradients are clipped."""
        return list(amp.master_params(optimizer))

    def state_dict(self) -> dict[str, Any]:
        """Return ``amp.state_dict()``; empty before amp is initialized."""
        return dict(amp.state_dict()) if self.optimizers else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict()``; before amp is initialized, the state is kept until then."""
        if self.optimizers:
            amp.load_state_dict(state_dict)
        else:
            self._loaded = state_dict


class ApexAmpPrecision(_Amp, Precision):
    """A plugin of Lightning's ``Trainer`` that trains at an ``opt_level`` of amp.

    Clipping, accumulation, checkpoints, DistributedDataParallel and manual optimization work as with Lightning's own
    precisions. Gradients are unscaled before ``on_after_backward``, and are clipped unscaled. Checkpoints have
    float32 weights and the loss scale. Schedules with ``interval="step"`` do not advance after a skipped step.

    Args:
        opt_level: "O0" to "O5".
        **amp_options: Other arguments of ``amp.initialize``.

    Raises:
        ValueError: ``fuse_unscale`` or ``combine_ddp`` is given; in ``fit``, the optimizer is LBFGS, or the strategy
            shards the model (FSDP, DeepSpeed), unless Lightning refuses it first.
    """

    def convert_module(self, module: Any) -> Any:
        """Check the strategy, which calls this before it wraps the module."""
        self._check_strategy(module.trainer.strategy)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Initialize amp after the strategy has made the optimizers."""
        if optimizers:
            self._initialize(getattr(model, "module", model), optimizers)
            for config in lr_schedulers:
                cls: Any = type(config.scheduler)
                is_held = config.reduce_on_plateau or issubclass(cls, _HeldBack)
                if config.interval == "step" and not is_held:
                    config.scheduler.__class__ = _held_back_class(cls)
        return model, optimizers, lr_schedulers

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward in a ``scale_loss`` block."""
        optimizers = self._trained() if optimizer is None else [adopted_inside(optimizer)]
        with amp.scale_loss(tensor, optimizers) as scaled_loss:
            model.backward(scaled_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run backward, hooks and clipping first, then the step, without a closure."""
        loss = closure()
        self._after_closure(model, optimizer)
        if loss is None and model.automatic_optimization and all(p.grad is None for p in self.main_params(optimizer)):
            return None  # training_step has returned None, and earlier micro batches have left nothing to step
        result = optimizer.step(**kwargs)
        return loss if model.automatic_optimization else result


class ApexFabricPrecision(_Amp, FabricPrecision):
    """A plugin of Lightning's ``Fabric`` that trains at an ``opt_level`` of amp.

    ``Fabric.setup`` shows a precision plugin the model without its optimizers, so call this class's ``setup`` first.

    Args:
        opt_level: "O0" to "O5".
        **amp_options: Other arguments of ``amp.initialize``.

    Raises:
        ValueError: ``fuse_unscale`` or ``combine_ddp`` is given; in ``setup``, an optimizer is LBFGS, or the strategy
            shards the model.
    """

    def setup(self, fabric: Any, model: nn.Module, *optimizers: Optimizer) -> tuple[Any, ...]:
        """Move ``model`` to its device, initialize amp, and return the arguments of ``fabric.setup``."""
        self._check_strategy(fabric.strategy)
        self._initialize(fabric.to_device(model), optimizers, beside=self.optimizers)
        return (model, *optimizers)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward in a ``scale_loss`` block."""
        if not self.optimizers:
            raise RuntimeError(
                "ApexFabricPrecision does not know the model and its optimizers: before the first backward, call "
                "model, optimizer = fabric.setup(*precision.setup(fabric, model, optimizer))"
            )
        with amp.scale_loss(tensor, self._trained()) as scaled_loss:
            super().backward(scaled_loss, model, *args, **kwargs)


class _HeldBack:
    """A class to put before that of a schedule, which then does not advance after a skipped step."""

    optimizer: Any

    def step(self, *args: Any, **kwargs: Any) -> Any:
        report = amp.last_step(self.optimizer)
        if report is None or report.applied:
            return super().step(*args, **kwargs)  # type: ignore[misc]
        return None


@cache
def _held_back_class(cls: Any) -> Any:
    return type(cls.__name__, (_HeldBack, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
