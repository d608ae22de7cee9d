# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Muon: momentum whose matrices are orthogonalized, with AdamW for parameters that are not matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from apex_npu.distributed.matrix_exchange import MatrixExchange, MatrixPart
from apex_npu.fusion import Run, are_same
from apex_npu.fusion.shards import is_sharded, local_part, matrix_cuts
from apex_npu.ops import sgd_
from apex_npu.ops.newton_schulz import Matrices, new_directions, orthogonalize_, orthogonalize_stack_, product_dtype
from apex_npu.optimizers.adamw import NpuFusedAdamW
from apex_npu.optimizers.base import FusedOptimizer, FusedOptions, ParamGroup
from apex_npu.optimizers.checks import as_number, check_bool, check_bools, check_non_negative, naming

# The defaults of groups with use_muon=False, which are AdamW's.
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

    where (α, β, γ) are the ``ns_coefficients``. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; the
    second r: Liu et al. 2025 (Moonlight), https://arxiv.org/abs/2502.16982; the third: torch.optim.Muon from 2.14 on.
    The iterations for o run in bfloat16, as in torch.optim, and all matrices of one shape run together. On a device
    without bfloat16 products they run in float32, and results differ from torch's by the rounding of bfloat16.

    A 3-D parameter (experts) is a stack of matrices. ``split`` divides the rows of each matrix into several matrices,
    each with its own o and r. Jordan et al. recommend this for fused queries, keys and values: ``split=(n, n, n)``.

    For a DTensor, as ``fully_shard`` makes it, each process has rows of b and u. Each matrix has one owner::

        u, whole  ←  rows of all processes            all-to-all, in bfloat16
        o         ←  the iterations                   by the owner of the matrix
        o, rows   ←  the owners                       all-to-all, in bfloat16

    Replicas (HSDP) exchange within each replica. The results equal those of whole parameters within the rounding of
    bfloat16 products, and a repetition with as many processes gives the same bits. docs/distributed.md has details.

    Muon steps matrices only, and is not recommended for embeddings and heads. A group with ``use_muon=False`` uses the
    rule of ``NpuFusedAdamW`` with the group's ``lr``, ``betas``, ``eps``, ``weight_decay``, ``amsgrad`` and
    ``maximize``. Their defaults are AdamW's; the constructor's arguments apply only to Muon. A group with
    ``use_muon="auto"`` becomes two: one of its matrices, with ``use_muon=True``, and one of all other parameters. Both
    get the options of the group, such as ``lr``.

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
        split: Default of groups without their own: the numbers of rows of the matrices into which each matrix is
            divided. Their sum is the number of its rows. None: it is not divided.
        options: See ``FusedOptions``.

    Raises:
        ValueError: A value is out of range, or a parameter of a group with ``use_muon=True`` is not a matrix.
        TypeError: A value is not a number, or a parameter is a DTensor whose matrices are cut over several dimensions
            of a mesh.

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
        split: Sequence[int] | None = None,
        **options: Unpack[FusedOptions],
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
            "split": split,
        }
        FusedOptimizer.__init__(self, params, defaults, **options)

    def update(self, run: Run, group: ParamGroup) -> None:
        """Apply the rule."""
        if not group["use_muon"]:
            super().update(run, group)
            return
        matrices = run.remember("matrices", _division(group), partial(_find, run, group))
        _set_directions(matrices.flat, run, group)
        orthogonalize_(matrices, coefficients=group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"])
        self._descend(run, group, matrices.flat)

    def _descend(self, run: Run, group: ParamGroup, directions: Tensor) -> None:
        sgd_(
            run.param,
            directions,
            None,
            lr=self.learning_rate(run, group),
            momentum=0.0,
            dampening=0.0,
            weight_decay=group["weight_decay"],
            decoupled=True,
            nesterov=False,
            maximize=False,
            step=2,
            found_inf=run.found_inf,
            encoding=run.encoding,
        )

    # DTensors

    def _forget_fusion(self) -> None:
        super()._forget_fusion()
        self._exchange: tuple[list[Run], list[Any], MatrixExchange] | None = None

    def _update_parts(self, runs: list[tuple[Run, ParamGroup]]) -> None:
        """Apply the rule to all runs. No parameter is written before all matrices are orthogonalized."""
        stepping = [(run, group, _directions_of(run)) for run, group in runs if group["use_muon"]]
        exchange = self._exchange_of([(run, group) for run, group, _ in stepping])
        for run, group, directions in stepping:
            _set_directions(directions, run, group)
        exchange.apply(_orthogonalize_)
        for run, group, directions in stepping:
            self._descend(run, group, directions)
        for run, group in runs:
            if not group["use_muon"]:
                super().update(run, group)

    def _exchange_of(self, runs: list[tuple[Run, ParamGroup]]) -> MatrixExchange:
        """Return the exchange of the matrices of ``runs``. Reuse that of the previous step if they are unchanged."""
        given = [run for run, _ in runs]
        options = [(_division(group), _iterations(group, 1.0)) for _, group in runs]
        if self._exchange is None or not are_same(self._exchange[0], given) or self._exchange[1] != options:
            places = {id(p): i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
            found: dict[int, list[MatrixPart]] = {}
            for run, group in runs:
                fulls = list(map(self._fused.full_param_of, run.params))
                _check_matrices(fulls, group["split"])
                for full, (part, offset) in zip(fulls, run.members(), strict=True):
                    found[places[id(full)]] = _parts_of(full, part, _directions_of(run)[offset:], group)
            # In the order of the lists, which is equal on all processes; their runs may differ.
            ordered = [part for place in sorted(found) for part in found[place]]
            self._exchange = given, options, MatrixExchange(ordered)
        return self._exchange[2]

    def validate(self, group: ParamGroup) -> None:
        """Check the hyper-parameters of ``group``."""
        if group["use_muon"] != "auto":
            check_bool("use_muon", group["use_muon"])
        if not group["use_muon"]:
            super().validate({**_ADAMW, **group})  # the constructor's defaults lack options of AdamW
            return
        for label, name in (("Learning rate", "lr"), ("momentum", "momentum"), ("weight decay", "weight_decay")):
            if not 0.0 <= as_number(name, group[name]) < math.inf:  # torch's message
                raise ValueError(f"{label} should be >= 0 but is: {group[name]} ({name} must be finite, too)")
        check_bools(group, "nesterov")
        _check_iterations(group)

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """Return the name of the momentum buffer, or of AdamW's moments."""
        return ("momentum_buffer",) if group["use_muon"] else super().state_names(group)

    def shows_step(self, group: ParamGroup) -> bool:
        """Return True only for groups of AdamW, as in torch.optim."""
        return not group["use_muon"]

    def group_defaults(self, group: ParamGroup) -> dict[str, Any]:
        """Return the defaults of the rule of ``group``."""
        return self.defaults if group.get("use_muon", self.defaults["use_muon"]) else _ADAMW

    def add_torch_options(self, group: ParamGroup) -> None:
        """Add torch's keys to groups of AdamW; torch.optim.Muon has no such keys."""
        if not group["use_muon"]:
            super().add_torch_options(group)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters. A group with ``use_muon="auto"`` becomes two, unless one of them has no parameters.

        Raises:
            ValueError: A hyper-parameter is out of range, the memory of a parameter has gaps, or a parameter of a group
                with ``use_muon=True`` is not a matrix.
            TypeError: A hyper-parameter or a parameter has the wrong type. The optimizer is unchanged in either case.
        """
        before = len(self.param_groups)
        try:
            for part in self._parts(param_group):
                super().add_param_group(part)
                added = self.param_groups[-1]
                for name in self.defaults.keys() - self.group_defaults(added).keys():
                    del added[name]  # added by torch
                if added["use_muon"]:
                    with naming(type(self).__name__):
                        _check_matrices(added["params"], added["split"])
        except (TypeError, ValueError):
            del self.param_groups[before:]
            raise

    def _parts(self, group: ParamGroup) -> Iterator[ParamGroup]:
        """Yield ``group``, or the two groups that it becomes with ``use_muon="auto"``."""
        if not isinstance(group, dict) or "params" not in group:
            yield group  # torch raises the error
            return
        rule = group.get("use_muon", self.defaults["use_muon"])
        if rule != "auto":
            yield group if rule else {**_ADAMW, **group}
            return
        params = group["params"]
        if isinstance(params, set):
            yield {**group, "use_muon": True}  # torch raises the error
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
        """Load a state dict of this optimizer, or of torch.optim.Muon if all groups are Muon's.

        Raises:
            ValueError: Groups, parameters, shapes or hyper-parameters do not fit; the optimizer is unchanged.
        """
        groups = [{"use_muon": "betas" not in group, **group} for group in state_dict["param_groups"]]
        for i, (found, group) in enumerate(zip(groups, self.param_groups, strict=False)):
            if found["use_muon"] and group["use_muon"]:
                found.setdefault("split", group["split"])  # which torch's state dicts lack
                with naming(type(self).__name__):
                    _check_split(found["split"])
                    _check_matrices(group["params"], found["split"])
            if bool(found["use_muon"]) is not group["use_muon"]:
                rules = ["Muon" if each["use_muon"] else "AdamW" for each in (found, group)]
                raise ValueError(
                    f"{type(self).__name__}: group {i} of this state dict is one of {rules[0]}, and this optimizer's "
                    f"is one of {rules[1]} (use_muon={group['use_muon']}). Nothing has been loaded"
                )
        super().load_state_dict({**state_dict, "param_groups": groups})


# The factor of the learning rate of a matrix, by ``adjust_lr_fn``, as a function of its rows and columns.
_ADJUST_LR: dict[str | None, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
_ADJUST_LR[None] = _ADJUST_LR["original"]


class _Iterations(NamedTuple):
    """The arguments of ``orthogonalize_stack_``."""

    coefficients: tuple[float, ...]
    steps: int
    eps: float
    factor: float


def _iterations(group: ParamGroup, factor: float) -> _Iterations:
    return _Iterations(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"], factor)


def _orthogonalize_(stack: Tensor, options: _Iterations) -> None:
    coefficients, steps, eps, factor = options
    orthogonalize_stack_(stack, coefficients=coefficients, steps=steps, eps=eps, factor=factor)


def _division(group: ParamGroup) -> tuple[Any, ...]:
    """Return the options that determine the matrices of a run and the factors of their steps."""
    return group["adjust_lr_fn"], group["split"] and tuple(group["split"])


def _set_directions(directions: Tensor, run: Run, group: ParamGroup) -> None:
    """Step the momentum of ``run``, and set ``directions`` to the matrices to orthogonalize."""
    # A step of SGD from zeros, with dampening equal to the momentum and a learning rate of -1.
    sgd_(
        directions.zero_(),
        run.scaled_grad,
        run.stored("momentum_buffer"),
        lr=-1.0,
        momentum=group["momentum"],
        dampening=group["momentum"],
        weight_decay=0.0,
        nesterov=group["nesterov"],
        maximize=False,
        step=2,
        grad_scale=run.grad_scale,
        found_inf=run.found_inf,
        encoding=run.encoding and run.encoding.of_states(),
    )


def _directions_of(run: Run) -> Tensor:
    return run.remember("directions", None, partial(new_directions, run.param))


class _Block(NamedTuple):
    """A matrix of a parameter: ``rows`` rows from ``first`` on of matrix ``number`` of its stack."""

    number: int
    first: int
    rows: int
    columns: int
    factor: float


def _blocks(count: int, rows: int, columns: int, group: ParamGroup) -> Iterator[_Block]:
    """Yield the blocks of ``count`` matrices of ``rows`` x ``columns``, split as ``group`` says."""
    sizes = group["split"] or (rows,)
    for number in range(count):
        for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            factor = _ADJUST_LR[group["adjust_lr_fn"]](size, max(1, columns))
            yield _Block(number, first, size, columns, factor)


def _find(run: Run, group: ParamGroup) -> Matrices:
    """Return the matrices of ``run``, with the factors of their steps."""
    members = run.members()
    _check_matrices([p for p, _ in members], group["split"])
    shapes: list[tuple[int, int]] = []
    offsets: list[int] = []
    factors: list[float] = []
    for p, offset in members:
        *_, rows, columns = p.shape
        if not p.numel():
            shapes.append((0, 0))
            offsets.append(offset)
            factors.append(1.0)
            continue
        for block in _blocks(p.numel() // (rows * columns), rows, columns, group):
            shape = block.rows, columns
            shapes.append(shape if p.is_contiguous() else shape[::-1])  # transposed ones
            offsets.append(offset + (block.number * rows + block.first) * columns)
            factors.append(block.factor)
    return Matrices.of(shapes, offsets, factors, run.param)


def _parts_of(full: Tensor, part: Tensor, directions: Tensor, group: ParamGroup) -> list[MatrixPart]:
    """Return this process's part of each matrix of ``full``.

    Args:
        full: The parameter.
        part: This process's part of it.
        directions: A flat buffer that begins with the elements of ``part``.
        group: The param group.
    """
    view = directions.as_strided(part.size(), part.stride())
    view = view if view.dim() == 3 else view.unsqueeze(0)
    cut = next(iter(matrix_cuts(full)), None)
    dtype = product_dtype(part.device if cut is None else torch.device(cut.device_type))
    found = []
    for block in _blocks(view.size(0), full.size(-2), full.size(-1), group):
        own = cut
        first, count = block.first, block.rows
        if cut is not None and cut.dim == 0:
            own = cut.of_rows(first, count)
            rank = dist.get_rank(cut.group)
            first, count = max(0, first - cut.begins()[rank]), own.sizes[rank]
        here = view[block.number].narrow(0, min(first, view.size(1)), count)
        found.append(MatrixPart(here, block.rows, block.columns, own, dtype, _iterations(group, block.factor)))
    return found


def _is_matrix(param: Any) -> bool:
    """Return True for a matrix, or a pair of a name and a matrix."""
    tensor = param[1] if isinstance(param, tuple) and len(param) == 2 else param
    return isinstance(tensor, Tensor) and tensor.ndim == 2


def _check_matrices(params: Sequence[Tensor], split: Sequence[int] | None) -> None:
    """Require matrices, or stacks of them, that processes can exchange, and that ``split`` divides.

    Raises:
        ValueError: A parameter has another number of dimensions or rows, or other strides.
        TypeError: A DTensor has parts that processes cannot exchange.
    """
    for p in params:
        which = f"a parameter of shape {tuple(p.shape)}"
        if p.dim() not in (2, 3):
            raise ValueError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()}; 3D ones are "
                "stacks of matrices. Give it to a group with use_muon=False, which AdamW steps, or pass "
                'use_muon="auto", which also leaves 3D ones to AdamW'
            )
        if split is not None and sum(split) != p.size(-2):
            raise ValueError(
                f"split={split!r} has {sum(split)} rows in all, but {which} has matrices of {p.size(-2)}; give each "
                "group only parameters with the number of rows of its split"
            )
        if is_sharded(p):
            _check_cuts(which, p)
        elif not (p.is_contiguous() or (split is None and p.mT.is_contiguous())):
            raise ValueError(
                f"{which} has strides {p.stride()}: Muon supports contiguous stacks of matrices, transposed or not, "
                "and with split only contiguous ones. Replace it in the module by "
                "nn.Parameter(p.detach().contiguous()) first"
            )


def _check_cuts(which: str, param: Any) -> None:
    cuts = matrix_cuts(param)
    if len(cuts) > 1:
        raise TypeError(
            f"{which} is a DTensor with placements {param.placements} on a mesh of shape "
            f"{tuple(param.device_mesh.shape)}: Muon supports matrices that are cut over one mesh dimension, not over "
            "several. Shard it over one and replicate it over the others, or give it to a group with use_muon=False, "
            "which AdamW steps"
        )
    for cut in cuts:
        here = local_part(param).size(cut.dim - 2)
        if here != cut.sizes[dist.get_rank(cut.group)]:
            raise TypeError(
                f"{which} is a DTensor with placements {param.placements}. This process has {here} "
                f"{('rows', 'columns')[cut.dim]} of it, but torch.chunk gives {cut.sizes}: Muon needs parts as "
                "torch.chunk, fully_shard and distribute_tensor make them"
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
    check_non_negative(group, "eps")
    adjust = group["adjust_lr_fn"]
    if adjust not in tuple(_ADJUST_LR):  # by equality: it may be unhashable
        names = ", ".join(f'"{name}"' for name in _ADJUST_LR if name is not None)
        raise ValueError(
            f"Adjust learning rate function {adjust} is not supported; adjust_lr_fn must be one of {names}, or None"
        )
    _check_split(group["split"])


def _check_split(split: Any) -> None:
    if split is None:
        return
    if not isinstance(split, tuple | list) or not all(type(rows) is int for rows in split):
        raise TypeError(f"split must be None or the numbers of rows of matrices, a tuple of ints, got {split!r}")
    if not split or min(split) < 1:
        raise ValueError(f"split must have at least one number of rows, and each must be >= 1, got {split!r}")
