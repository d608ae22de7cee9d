# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""accelerate: ``ApexAccelerator``, whose ``prepare`` initializes amp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apex_npu import amp
from apex_npu.amp.inspect import adopted_inside, is_retired, policy_of
from apex_npu.backends.requirements import require

require(__name__, "accelerate", "1.10")

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_NPU)


class ApexAccelerator(Accelerator):
    """An ``Accelerator`` for training at an ``opt_level`` of amp.

    ``prepare`` initializes amp for the models and optimizers that it is given together, before it wraps them.
    ``backward``, ``accumulate``, ``clip_grad_norm_``, ``clip_grad_value_``, ``save_state`` and ``load_state`` work as
    with accelerate's own mixed precision. Gradients are clipped unscaled.
    ``optimizer_step_was_skipped`` reports overflows, and prepared schedules do not advance after one.

    Args:
        *args: Arguments of ``Accelerator``.
        opt_level: "O0" to "O5".
        amp_options: Other arguments of ``amp.initialize``.
        **kwargs: Keyword arguments of ``Accelerator``.

    With ``FullyShardedDataParallelPlugin(fsdp_version=2)``, ``prepare`` shards the model first, by
    ``amp.fsdp_policy(opt_level)`` if the plugin has no policy.

    Raises:
        ValueError: ``mixed_precision`` is set, or the distributed type is neither a single process, nor
            DistributedDataParallel, nor FSDP2.
    """

    _amp_options: dict[str, Any]

    def __init__(
        self, *args: Any, opt_level: str = "O1", amp_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        _check(self, opt_level, amp_options or {})
        self._amp_options = {"opt_level": opt_level, **(amp_options or {})}

    @classmethod
    def adopt(cls, accelerator: Accelerator, opt_level: str = "O1", **amp_options: Any) -> ApexAccelerator:
        """Turn an ``Accelerator`` that a library has created into an ``ApexAccelerator``, in place.

        Args:
            accelerator: An accelerator that has not prepared an optimizer yet.
            opt_level: "O0" to "O5".
            **amp_options: Other arguments of ``amp.initialize``.

        Returns:
            ``accelerator``.

        Raises:
            ValueError: The constructor would refuse the arguments, or an optimizer has been prepared.
        """
        if accelerator._optimizers:
            raise ValueError(
                f"adopt(opt_level={opt_level!r}) was called on an Accelerator that has prepared an optimizer "
                "already: call adopt before prepare"
            )
        _check(accelerator, opt_level, amp_options)
        kind = type(accelerator)
        if not issubclass(kind, cls):
            accelerator.__class__ = cls if issubclass(cls, kind) else type(kind.__name__, (cls, kind), {})
        assert isinstance(accelerator, ApexAccelerator)
        accelerator._amp_options = {"opt_level": opt_level, **amp_options}
        return accelerator

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Initialize amp for the models and optimizers, and prepare all objects as ``Accelerator.prepare`` does.

        Optimizers that have been passed to ``amp.initialize`` are not initialized again.

        Raises:
            ValueError: An optimizer is given without a model, or needs a closure.
        """
        models, optimizers = _of_type(nn.Module, args), _of_type(torch.optim.Optimizer, args)
        if self.is_fsdp2:
            return self._prepare_sharded(models, optimizers, args, kwargs)
        if optimizers:
            self._initialize(models, optimizers)
        return super().prepare(*args, **kwargs)

    def _prepare_sharded(self, models: list[nn.Module], optimizers: list[Any], args: Any, kwargs: Any) -> Any:
        """Shard the model first, since this replaces its parameters, and then initialize amp."""
        level = self._amp_options["opt_level"]
        new = [o for o in map(adopted_inside, optimizers) if policy_of(o) is None]
        if new:
            _check_new(models, optimizers, new, level)
        plugin = self.state.fsdp_plugin
        plugin.mixed_precision_policy = plugin.mixed_precision_policy or amp.fsdp_policy(level)
        result = super().prepare(*args, **kwargs)
        prepared = _of_type(torch.optim.Optimizer, result if isinstance(result, (list, tuple)) else (result,))
        if new:
            self._initialize(_of_type(nn.Module, result), [wrapper.optimizer for wrapper in prepared])
            for wrapper in prepared:  # it holds the step of its optimizer, which amp has replaced
                wrapper.__init__(wrapper.optimizer, device_placement=False, scaler=self.scaler)
        return result

    def _initialize(self, models: list[nn.Module], optimizers: Sequence[Any]) -> None:
        inner = list(map(adopted_inside, optimizers))
        new = [o for o in inner if policy_of(o) is None]
        if new:
            _check_new(models, inner, new, self._amp_options["opt_level"])
            for model in models if self.device_placement else []:
                model.to(self.device)
            amp.initialize(models, inner, **self._amp_options)
        # Optimizers that were prepared before free_memory(), or by an earlier accelerator, keep their former scaler.
        prepared = [o.scaler for o in optimizers if isinstance(getattr(o, "scaler", None), amp.AmpScaler)]
        if prepared:
            self.scaler = prepared[0]
        elif self._optimizers and self.scaler is not None:
            self.scaler.optimizers = [*(o for o in self.scaler.optimizers if not is_retired(o)), *inner]
        else:
            self.scaler = amp.AmpScaler(inner)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of ``optimizer``, or of all prepared optimizers.

        Raises:
            RuntimeError: DistributedDataParallel has not averaged the gradients yet, as in its ``no_sync``.
        """
        given = self._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            self.scaler.unscale_(one)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of the unscaled gradients of ``amp.masters_of(parameters)``, and return the norm."""
        self.unscale_gradients()
        return super().clip_grad_norm_(amp.masters_of(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip the elements of the unscaled gradients of ``amp.masters_of(parameters)``."""
        self.unscale_gradients()
        super().clip_grad_value_(amp.masters_of(parameters), clip_value)


def _of_type(kind: type[Any], given: Sequence[Any]) -> list[Any]:
    return [value for value in given if isinstance(value, kind)]


def _check(accelerator: Accelerator, opt_level: str, options: dict[str, Any]) -> None:
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"mixed_precision={accelerator.mixed_precision!r} and opt_level={opt_level!r} are two kinds of mixed "
            "precision at once: leave mixed_precision at 'no', or use a plain Accelerator"
        )
    if accelerator.distributed_type not in _PLAIN and not accelerator.is_fsdp2:
        raise ValueError(
            f"opt_level={opt_level!r} does not work with {accelerator.distributed_type}, which keeps parameters or "
            "optimizer states of its own: use a plain Accelerator with mixed_precision='bf16' there, or "
            "FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if options.get("combine_ddp") and accelerator.num_processes > 1:
        raise ValueError(
            "combine_ddp=True averages gradients, and so does DistributedDataParallel, which prepare() puts around "
            "models: leave combine_ddp out"
        )


def _check_new(models: list[nn.Module], optimizers: list[Any], new: list[Any], opt_level: str) -> None:
    name = type(new[0]).__name__
    if not models:
        raise ValueError(
            f"prepare() was given {name} without its model: at opt_level={opt_level!r} they are initialized "
            "together, so pass both to one call"
        )
    if len(new) < len(optimizers):
        raise ValueError(
            f"prepare() was given {name} and an optimizer that has been passed to amp.initialize: pass all of them "
            "there, or none"
        )
    if any(isinstance(o, torch.optim.LBFGS) for o in new):
        raise ValueError(
            "LBFGS needs a closure, which a loss scale does not support: use another optimizer at "
            f"opt_level={opt_level!r}"
        )
