# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Muon: momentum whose matrices are orthogonalized, with AdamW for parameters that are not matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.fusion import Run
from apex_npu.ops import Matrices, orthogonalize_, sgd_
from apex_npu.optimizers.adamw import NpuFusedAdamW
from apex_npu.optimizers.base import FusedOptimizer, ParamGroup
from apex_npu.optimizers.checks import OfTorch, as_number, check_bool, naming
from apex_npu.optimizers.state_formats import StateDtype

# What a group with use_muon=False has where it does not say otherwise: AdamW's defaults.
_ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "amsgrad": False,
    "maximize": False,
    "use_muon": False,
}


class NpuFusedMuon(NpuFusedAdamW):
    """Muon on flat buffers, with the rule and state of torch.optim.Muon, and AdamW in groups of their own.

    ::

        b ← momentum · b + (1 − momentum) · g
        u ← (1 − momentum) · g + momentum · b  if nesterov else  b
        o ← u / max(‖u‖, eps);  then ns_steps times  A = o oᵀ,  o ← α · o + (β · A + γ · A A) o
        p ← p − lr · weight_decay · p
        p ← p − lr · r · o          r = sqrt(max(1, rows / columns))       "original", or None
                                    r = 0.2 · sqrt(max(rows, columns))     "match_rms_adamw"
                                    r = sqrt(rows / columns)               "spectral_unclamped"

    with (α, β, γ) the ``ns_coefficients``. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; the second r:
    Liu et al. 2025, https://arxiv.org/abs/2502.16982. The iterations for o run in bfloat16, as torch.optim's, and
    all matrices of one shape run together. On a device without bfloat16 products they run in float32, where results
    differ from torch's by the rounding of bfloat16.

    Muon steps matrices only, and is not recommended for embeddings and heads. A group with ``use_muon=False`` is
    stepped by ``NpuFusedAdamW``'s rule, with its ``lr``, ``betas``, ``eps``, ``weight_decay``, ``amsgrad`` and
    ``maximize`` and that class's defaults for them: the constructor's arguments are Muon's. A group with
    ``use_muon="auto"`` becomes two: one of its matrices, with ``use_muon=True``, and one of all other parameters. Both
    have the options that the group names, its ``lr`` for instance.

    State: ``momentum_buffer`` b, or in groups of AdamW its ``step``, ``exp_avg`` and ``exp_avg_sq`` (shape and dtype of
    the parameter, float32 for float16 and bfloat16).

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        weight_decay: Decay rate per unit of ``lr``.
        momentum: Momentum factor.
        nesterov: Nesterov momentum.
        ns_coefficients: Coefficients of the polynomial in each iteration.
        eps: Smallest norm to divide by.
        ns_steps: Number of iterations, less than 100.
        adjust_lr_fn: "original", "match_rms_adamw" or "spectral_unclamped"; None is "original".
        use_muon: Default of groups without their own: True, False or "auto".
        fuse_grad_scaler: See ``FusedOptimizer``.
        capturable: See ``FusedOptimizer``.
        state_dtype: See ``FusedOptimizer``.
        stochastic_rounding: See ``FusedOptimizer``.
        of_torch: See ``FusedOptimizer``.

    Raises:
        ValueError: A value is out of range, or a parameter of a group with ``use_muon=True`` is no matrix.
        TypeError: A value is not a number, or a parameter is a DTensor: only whole matrices can be orthogonalized.

    Example::

        >>> matrices = [p for p in model.parameters() if p.ndim == 2]  # without embeddings and the head
        >>> others = [p for p in model.parameters() if p.ndim != 2]
        >>> optimizer = optimizers.NpuFusedMuon(
        ...     [{"params": matrices}, {"params": others, "use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95)}], lr=0.02
        ... )
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
    """

    elementwise = False
    encodable_states: ClassVar[tuple[str, ...]] = ("momentum_buffer", *NpuFusedAdamW.encodable_states)
    supports_capture = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: bool | Literal["auto"] = True,
        fuse_grad_scaler: bool = False,
        capturable: bool = False,
        state_dtype: StateDtype = None,
        stochastic_rounding: bool = False,
        **of_torch: Unpack[OfTorch],
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon,
        }
        FusedOptimizer.__init__(
            self,
            params,
            defaults,
            fuse_grad_scaler=fuse_grad_scaler,
            capturable=capturable,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            **of_torch,
        )

    def update(self, run: Run, group: ParamGroup) -> None:
        """Apply the rule."""
        if not group["use_muon"]:
            super().update(run, group)
            return
        copy, matrices = run.model_param(), run.remember("matrices", group["adjust_lr_fn"], partial(_find, run, group))
        # What SGD would subtract, with the momentum's share taken from the gradient: from a parameter of zeros.
        direction = matrices.flat.zero_()
        sgd_(
            direction,
            run.scaled_grad,
            run.state("momentum_buffer"),
            lr=-1.0,
            momentum=group["momentum"],
            dampening=group["momentum"],
            weight_decay=0.0,
            nesterov=group["nesterov"],
            maximize=False,
            step=2,
            grad_scale=run.grad_scale,
            found_inf=run.found_inf,
        )
        orthogonalize_(matrices, coefficients=group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"])
        sgd_(
            run.param,
            direction,
            None,
            copy,
            lr=self.learning_rate(run, group),
            momentum=0.0,
            dampening=0.0,
            weight_decay=group["weight_decay"],
            decoupled=True,
            nesterov=False,
            maximize=False,
            step=2,
            found_inf=run.found_inf,
        )

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        if group["use_muon"] != "auto":
            check_bool("use_muon", group["use_muon"])
        if not group["use_muon"]:
            super().validate(group)
            return
        for label, name in (("Learning rate", "lr"), ("momentum", "momentum"), ("weight decay", "weight_decay")):
            if not 0.0 <= as_number(name, group[name]) < math.inf:  # in torch's words
                raise ValueError(f"{label} should be >= 0 but is: {group[name]} ({name} must be finite, too)")
        check_bool("nesterov", group["nesterov"])
        _check_iterations(group)

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """A momentum buffer, or AdamW's moments."""
        return ("momentum_buffer",) if group["use_muon"] else super().state_names(group)

    def shows_step(self, group: ParamGroup) -> bool:
        """True for groups of AdamW alone, as in torch.optim."""
        return not group["use_muon"]

    def group_defaults(self, group: ParamGroup) -> dict[str, Any]:
        """Those of the rule."""
        return self.defaults if group.get("use_muon", self.defaults["use_muon"]) else _ADAMW

    def add_torch_options(self, group: ParamGroup) -> None:
        """torch.optim.Muon has none of them."""
        if not group["use_muon"]:
            super().add_torch_options(group)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters. A group with ``use_muon="auto"`` becomes two, unless one of them has no parameters.

        Raises:
            ValueError: See ``FusedOptimizer``; or a parameter of a group with ``use_muon=True`` is not a matrix.
            TypeError: See ``FusedOptimizer``. The optimizer is unchanged in either case.
        """
        before = len(self.param_groups)
        try:
            for part in self._parts(param_group):
                super().add_param_group(part)
                added = self.param_groups[-1]
                for name in self.defaults.keys() - self.group_defaults(added).keys():
                    del added[name]  # which torch has added
                if added["use_muon"]:
                    with naming(type(self).__name__):
                        _check_matrices(added["params"])
        except (TypeError, ValueError):
            del self.param_groups[before:]
            raise

    def _parts(self, group: ParamGroup) -> Iterator[ParamGroup]:
        """``group``, or the two that it stands for."""
        if not isinstance(group, dict) or "params" not in group:
            yield group  # torch says what is wrong
            return
        rule = group.get("use_muon", self.defaults["use_muon"])
        if rule != "auto":
            yield group if rule else {**_ADAMW, **group}
            return
        params = group["params"]
        if isinstance(params, set):
            yield {**group, "use_muon": True}  # likewise
            return
        listed = [params] if isinstance(params, Tensor) else list(params)
        matrices, others = ([p for p in listed if _is_matrix(p) is kind] for kind in (True, False))
        if matrices or not others:
            kept = {name: value for name, value in group.items() if name in self.defaults or name not in _ADAMW}
            yield {**kept, "params": matrices, "use_muon": True}
        if others:
            kept = {name: value for name, value in group.items() if name in _ADAMW or name not in self.defaults}
            yield {**_ADAMW, **kept, "params": others, "use_muon": False}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of torch.optim.Muon where all groups are Muon's.

        Raises:
            ValueError: Groups, parameters, shapes or hyper-parameters do not fit; the optimizer is unchanged.
        """
        groups = [{"use_muon": "betas" not in group, **group} for group in state_dict["param_groups"]]
        for i, (found, group) in enumerate(zip(groups, self.param_groups, strict=False)):
            if bool(found["use_muon"]) is not group["use_muon"]:
                rules = ["Muon" if each["use_muon"] else "AdamW" for each in (found, group)]
                raise ValueError(
                    f"{type(self).__name__}: group {i} of this state dict is one of {rules[0]}, and this optimizer's "
                    f"is one of {rules[1]} (use_muon={group['use_muon']}). Nothing has been loaded"
                )
        super().load_state_dict({**state_dict, "param_groups": groups})


# What the learning rate of a matrix of so many rows and columns is multiplied by, by ``adjust_lr_fn``.
_ADJUST_LR: dict[str | None, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
_ADJUST_LR[None] = _ADJUST_LR["original"]


def _find(run: Run, group: ParamGroup) -> Matrices:
    """The matrices of ``run``, and what their steps are multiplied by."""
    members = run.members()
    _check_matrices([p for p, _ in members])
    shapes, factors = [], []
    for p, _ in members:
        rows, columns = p.shape
        shapes.append((rows, columns) if p.is_contiguous() else (columns, rows))  # a transposed one
        factors.append(_ADJUST_LR[group["adjust_lr_fn"]](rows, max(1, columns)))
    return Matrices.of(shapes, [offset for _, offset in members], factors, run.param)


def _is_matrix(param: Any) -> bool:
    """True for a matrix, or one with its name."""
    tensor = param[1] if isinstance(param, tuple) and len(param) == 2 else param
    return isinstance(tensor, Tensor) and tensor.ndim == 2


def _check_matrices(params: Sequence[Tensor]) -> None:
    for p in params:
        if p.ndim != 2:
            raise ValueError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()}. Give it to a "
                'group with use_muon=False, which AdamW steps, or pass use_muon="auto"'
            )


def _check_iterations(group: ParamGroup) -> None:
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"ns_steps must be an int, got {steps!r}")
    if not 0 <= steps < 100:
        raise ValueError(f"Number of steps must be less than 100 for computational efficiency, got ns_steps={steps}")
    if not isinstance(coefficients, tuple | list) or len(coefficients) != 3:
        raise ValueError(f"Coefficients must be a tuple of exactly 3 values, got ns_coefficients={coefficients!r}")
    for i, value in enumerate(coefficients):
        as_number(f"ns_coefficients[{i}]", value)
    if not 0.0 <= as_number("eps", group["eps"]) < math.inf:
        raise ValueError(f"Invalid epsilon value: {group['eps']} (eps must be finite and >= 0)")
    adjust = group["adjust_lr_fn"]
    if adjust not in tuple(_ADJUST_LR):  # by equality: it may be unhashable
        names = ", ".join(f'"{name}"' for name in _ADJUST_LR if name is not None)
        raise ValueError(
            f"Adjust learning rate function {adjust} is not supported; adjust_lr_fn must be one of {names}, or None"
        )
