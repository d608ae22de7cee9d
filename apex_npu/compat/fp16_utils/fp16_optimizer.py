# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``FP16_Optimizer``: an optimizer with masters and a loss scale, for a model that is already in float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from apex_npu.amp.grad_groups import GradGroup
from apex_npu.amp.optimizer_grads import make_grad_groups
from apex_npu.amp.optimizer_state import inner_optimizer
from apex_npu.compat.amp.scaler import LossScaler
from apex_npu.compat.amp.stash import Aside, set_grads_aside, unscale_and_add
from apex_npu.compat.fp16_utils.fp16util import master_params_to_model_params, model_grads_to_master_grads
from apex_npu.ops import LOW_PRECISION

__all__ = ["FP16_Optimizer"]

# Below this scale, overflows are not due to the scale.
_HOPELESS_SCALE = 2.0**-24
# The attributes in a state dict.
_SAVED = ("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step")


class FP16_Optimizer:
    """An optimizer that steps float32 masters of the low-precision parameters it was given.

    Call ``optimizer.zero_grad()``, ``optimizer.backward(loss)`` instead of ``loss.backward()``, and
    ``optimizer.step()``. In new code, prefer ``amp.initialize(model, optimizer, opt_level="O2")``.

    The parameter groups of ``init_optimizer``, an optimizer or a LARC, will hold the masters. ``dynamic_loss_args`` are
    arguments of ``amp.scaler.LossScaler``. ``verbose`` prints each parameter.

    Raises:
        TypeError: ``init_optimizer`` is not an optimizer, or a parameter is neither in float32 nor in low precision.

    Example::

        >>> network = fp16_utils.network_to_half(model)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> optimizer = fp16_utils.FP16_Optimizer(optimizer, static_loss_scale=128.0, verbose=False)
        >>> optimizer.zero_grad()
        >>> optimizer.backward(loss_fn(network(input).float(), target))
        >>> optimizer.step()
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(inner_optimizer(init_optimizer), Optimizer):
            raise TypeError(f"init_optimizer must be a torch optimizer, got {type(init_optimizer).__name__}")
        for group in init_optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and param.dtype not in LOW_PRECISION and param.dtype != torch.float32:
                    raise TypeError(
                        "Wrapped parameters must be in torch.float32, torch.float16 or torch.bfloat16, received one of "
                        f"shape {tuple(param.shape)} in {param.dtype}; cast the model with network_to_half or .half()"
                    )
        self.verbose = verbose
        self.optimizer = init_optimizer
        self.dynamic_loss_scale = dynamic_loss_scale
        scale, args = ("dynamic", dynamic_loss_args or {}) if dynamic_loss_scale else (static_loss_scale, {})
        self.loss_scaler = LossScaler(scale, **args)
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm_
        self._make_masters()
        # The gradients set aside while backward() without update_master_grads leaves scaled ones; None otherwise.
        self._aside: Aside | None = None
        # True if a gradient added up since the last clear holds inf or nan.
        self._spoiled = False

    def _make_masters(self) -> None:
        # Per group: the parameters that have masters, these masters, and the trainable float32 parameters.
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        state: Any = self.optimizer.state
        for i, group in enumerate(self.optimizer.param_groups):
            low = [p for p in group["params"] if p.requires_grad and p.dtype in LOW_PRECISION]
            masters: list[Tensor] = [nn.Parameter(p.detach().float()) for p in low]
            master_of = dict(zip(map(id, low), masters, strict=True))
            wide = [p for p in group["params"] if id(p) not in master_of and p.requires_grad]
            group["params"][:] = [master_of.get(id(p), p) for p in group["params"]]
            for param, master in zip(low, masters, strict=True):
                if param in state:
                    state[master] = state.pop(param)
            self.fp16_groups.append(low)
            self.fp32_from_fp16_groups.append(masters)
            self.fp32_from_fp32_groups.append(wide)
            self.maybe_print(f"FP16_Optimizer processing param group {i}:")
            for param in (*low, *wide):
                self.maybe_print(f"FP16_Optimizer received {param.dtype} with {param.size()}")
        self.all_fp16_params = [p for group in self.fp16_groups for p in group]
        self.all_fp32_from_fp16_params = [p for group in self.fp32_from_fp16_groups for p in group]
        self.all_fp32_from_fp32_params = [p for group in self.fp32_from_fp32_groups for p in group]
        # Casts existing state to the masters' dtype.
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def _grad_groups(self) -> list[GradGroup]:
        return make_grad_groups([p for group in self.optimizer.param_groups for p in group["params"]], [])

    def maybe_print(self, msg: str) -> None:
        """Print ``msg`` if ``verbose`` was set."""
        if self.verbose:
            print(msg)

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of the model and the masters, to zero or to None."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        for param in self.all_fp16_params:
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad = param.grad.detach().zero_()
        self._aside = None
        self._spoiled = False

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Scale the loss in float32, run backward, and call ``update_master_grads``. Gradients of several calls add up.

        With ``update_master_grads=False`` gradients stay scaled for further calls. Call that method before ``step``.
        """
        if self._aside is None:
            self._aside = set_grads_aside(self._grad_groups())
            for param in self.all_fp16_params:
                param.grad = None
        (loss.float() * self.loss_scaler.loss_scale()).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Unscale the gradients, copy them to the masters, check for inf and nan, and update the scale."""
        self.loss_scaler.clear_overflow_state()
        model_grads_to_master_grads(self.all_fp16_params, self.all_fp32_from_fp16_params)
        unscale_and_add(self._grad_groups(), self._aside or {}, self.loss_scaler)
        self._aside = None
        self.overflow = self._spoiled = self.loss_scaler.update_scale() or self._spoiled

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the masters' gradients by their common norm, and return the norm, or −1 after an overflow."""
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        return -1 if self.overflow else self.clip_grad_norm(stepped, max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model; after an overflow do neither.

        A ``closure`` calls this object's ``zero_grad`` and ``backward``. It is called again while gradients overflow.
        """
        if closure is None:
            if self.overflow:
                print(f"Gradient overflow.  Skipping step, reducing loss scale to {self.loss_scaler.loss_scale()}")
                self.zero_grad(set_grads_to_None=True)
                return None
            result: Any = self.optimizer.step()
        else:
            result = self.optimizer.step(lambda: self._loss_without_overflow(closure))
            self.first_closure_call_this_step = True
        self._master_params_to_model_params()
        return result

    def _loss_without_overflow(self, closure: Callable[[], Any]) -> Any:
        if not self.first_closure_call_this_step:
            # The optimizer has moved the masters since, and asks for the loss at the new values.
            self._master_params_to_model_params()
        self.first_closure_call_this_step = False
        loss = closure()
        while self.overflow:
            scale = self.loss_scaler.loss_scale()
            if scale < _HOPELESS_SCALE:
                raise RuntimeError(
                    f"the gradients of the closure overflow even with a loss scale of {scale}: the loss itself, or the "
                    "model, holds inf or nan"
                )
            print(f"OVERFLOW within closure! Skipping step, reducing loss scale to {scale}")
            self.zero_grad(set_grads_to_None=True)
            loss = closure()
        return loss

    def _master_params_to_model_params(self) -> None:
        master_params_to_model_params(self.all_fp16_params, self.all_fp32_from_fp16_params)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the gradients of what the optimizer steps, per group; after an overflow warn and return None."""
        if self.overflow:
            print(
                "Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow state. Gradients are "
                "inf, nan or stale.  Returning None."
            )
            return None
        return [
            [None if p.grad is None else p.grad.detach() for p in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to resume: the scaler, the flags, the optimizer's state and the masters."""
        return {
            **{name: getattr(self, name) for name in _SAVED},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a dict returned by ``state_dict``. Load the model first.

        Raises:
            ValueError: The masters do not fit. Nothing has been loaded.
        """
        saved = [master for group in state_dict["fp32_from_fp16"] for master in group]
        own = self.all_fp32_from_fp16_params
        if [p.shape for p in saved] != [p.shape for p in own]:
            raise ValueError(
                f"the state dict has {len(saved)} masters, this optimizer {len(own)}, or their shapes differ; make the "
                "optimizer for the same model and parameter groups"
            )
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for name in _SAVED:
            setattr(self, name, state_dict[name])
        master_params_to_model_params(own, saved)

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")

    @property
    def loss_scale(self) -> float:
        """The loss scale. It can be assigned."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    def __getattr__(self, name: str) -> Any:
        if name in ("state", "param_groups"):  # these belong to the optimizer
            return getattr(self.optimizer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("state", "param_groups"):
            setattr(self.optimizer, name, value)
        else:
            object.__setattr__(self, name, value)
