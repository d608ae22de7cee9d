# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models sharded by ``fully_shard``: the policy of each level for them, and the checks of ``initialize``.

``fully_shard`` casts by itself: it gathers float32 parts in its compute dtype. The float32 parts are the masters. amp
scales the loss and decides about overflow for all processes. At O0, O1 and O4 it works as for any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu.amp.block import Block, BlockPart
from apex_npu.amp.optimizer_state import Stage
from apex_npu.amp.policy import Policy, resolve
from apex_npu.autocast.forward_cast import is_affine_batch_norm
from apex_npu.distributed.fully_sharded import HeldGradients, Unit, ensure_averages, unit_around, units_of
from apex_npu.fusion.shards import groups_over, is_sharded, meshes_of
from apex_npu.ops import LOW_PRECISION

_KEEP_REMAINDERS = "Use a fused optimizer with store_param_remainders=True, which keeps the bits that are missing. Or: "


def fsdp_policy(opt_level: str, reduce_dtype: torch.dtype | None = None) -> Any:
    """Return the ``mp_policy`` of ``torch.distributed.fsdp.fully_shard`` to train a model at ``opt_level``.

    Pass it for each unit. Then pass the model to ``amp.initialize``, which casts the model's outputs to float32. At O2
    and O5 ``fully_shard`` gathers parameters in, and casts inputs to, float16 or bfloat16. At O0, O1 and O4 it casts
    nothing. Any policy with these dtypes works.

    Args:
        opt_level: "O0", "O1", "O2", "O4" or "O5".
        reduce_dtype: The dtype in which gradients are reduced. None: the compute dtype.

    Raises:
        RuntimeError: There is no such level, or it is O3, which has no float32 parameters to shard.
        TypeError: ``reduce_dtype`` is not a floating-point dtype.

    Example::

        >>> from torch.distributed.fsdp import fully_shard  # with a process group
        >>> for layer in model.children():
        ...     fully_shard(layer, mp_policy=amp.fsdp_policy("O5"))
        >>> fully_shard(model, mp_policy=amp.fsdp_policy("O5"))
        >>> optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1e-3)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O5")
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    level = resolve(opt_level)
    if not _can_be_sharded(level):
        raise RuntimeError(_no_float32(level))
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise TypeError(f"reduce_dtype must be a floating-point torch.dtype or None, got {reduce_dtype!r}")
    # No output_dtype: the layers that take a unit's outputs compute in the same dtype.
    # A reduce_dtype of None means the compute dtype up to torch 2.14, and that of the sharded gradients from 2.15 on.
    return MixedPrecisionPolicy(_param_dtype(level), reduce_dtype or _param_dtype(level))


def _can_be_sharded(policy: Policy) -> bool:
    return policy.model_dtype not in LOW_PRECISION or bool(policy.master_weights)


def _no_float32(policy: Policy) -> str:
    return (
        f"opt_level {policy.opt_level} keeps {policy.model_dtype} parameters without float32 values, so that rounding "
        "would lose small updates; with fully_shard, whose float32 parts need no extra memory, use O2 or O5"
    )


def _param_dtype(policy: Policy) -> torch.dtype | None:
    """Return the dtype in which parameters are gathered; None: their own dtype."""
    return policy.model_dtype if policy.model_dtype in LOW_PRECISION else None


def sharded_policy(
    policy: Policy, overflow_group: Any, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> tuple[Policy, list[Unit]]:
    """Return the part of ``policy`` that amp applies, and the units of the models.

    If nothing is sharded, it is all of ``policy``.

    Raises:
        RuntimeError: Parameters are sharded in a way that does not fit the policy.
    """
    named = [(name, p) for model in models for name, p in model.named_parameters()]
    stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    if not any(is_sharded(p) for p in (*(p for _, p in named), *stepped)):
        return policy, []
    if policy.store_param_remainders:
        raise RuntimeError(
            f"store_param_remainders={policy.store_param_remainders!r} of amp.initialize is for models that amp casts, "
            "but parameters are sharded over processes (DTensor); leave it out. For bfloat16 DTensors pass it to the "
            "optimizer"
        )
    if not _can_be_sharded(policy):
        raise RuntimeError(_no_float32(policy))
    if policy.combine_grad:
        raise RuntimeError(
            f"combine_grad=True{' and combine_ddp=True' if policy.combine_ddp else ''} put gradients into flat memory "
            "of one process, but parameters are sharded over processes (DTensor), and fully_shard averages their "
            "gradients; leave these arguments out"
        )
    _check_dtypes(named, policy, optimizers)
    units = [(model, units_of(model)) for model in models]
    for model, found in units:
        if found:
            _check_whole(model)
        elif _param_dtype(policy) is not None and any(map(is_sharded, model.parameters())):
            raise RuntimeError(
                f"opt_level {policy.opt_level} casts the model, whose parameters are DTensors that fully_shard has not "
                f"made: call fully_shard(model, mp_policy=amp.fsdp_policy({policy.opt_level!r})) on it, over another "
                "mesh dimension, or use O1 or O4"
            )
        for unit in found:
            _check_unit(unit, policy)
        if policy.keep_batchnorm_fp32 and _param_dtype(policy) is not None:
            _check_batch_norms(model, found, policy)
    _check_stepped(named, optimizers)
    if policy.loss_scale == "dynamic" and overflow_group is None:
        groups_over(meshes_of(stepped))
    listed = [unit for _, found in units for unit in found]
    if listed:
        ensure_averages(listed, meshes_of(stepped))
    if listed and _param_dtype(policy) is not None:
        outputs = policy.cast_model_outputs or torch.float32
        policy = replace(policy, cast_model_type=False, master_weights=False, cast_model_outputs=outputs)
    return policy, listed


def _check_dtypes(named: Sequence[tuple[str, Tensor]], policy: Policy, optimizers: Sequence[Optimizer]) -> None:
    """Raise for sharded parameters that are not float32 and that a step would round.

    A bfloat16 parameter is accepted if its optimizer keeps the remainders, or if it is frozen and in no optimizer, as
    below adapters.
    """
    owner = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    for name, p in named:
        if not is_sharded(p) or p.dtype == torch.float32 or not (p.requires_grad or id(p) in owner):
            continue
        if p.dtype not in LOW_PRECISION and policy.model_dtype:
            raise RuntimeError(
                f"parameter {name} is sharded in {p.dtype}, but opt_level {policy.opt_level} trains float32 "
                "parameters: call model.float() before fully_shard"
            )
        formats = getattr(owner.get(id(p)), "state_formats", None)
        if p.dtype in LOW_PRECISION and not (p.dtype == torch.bfloat16 and formats and formats.has_remainders):
            raise RuntimeError(
                f"parameter {name} is sharded in {p.dtype}: the optimizer would step, and keep, rounded values. "
                f"{_KEEP_REMAINDERS if p.dtype == torch.bfloat16 else ''}Keep the model in float32, and give "
                f"fully_shard the compute dtype: mp_policy=amp.fsdp_policy({policy.opt_level!r}); or freeze it, and "
                "leave it out of the optimizer"
            )


def _check_whole(model: nn.Module) -> None:
    """Raise if parameters of a sharded model are in no unit, since their gradients would differ between processes."""
    for name, p in model.named_parameters():
        if not is_sharded(p) and p.is_floating_point() and p.requires_grad:
            raise RuntimeError(
                f"parameter {name} is not sharded, but other parameters of its {type(model).__name__} are: no process "
                "would get its gradients from others. Call fully_shard(model, mp_policy=...) on the model itself, too, "
                "after its layers"
            )


def _check_unit(unit: Unit, policy: Policy) -> None:
    given, dtype = unit.policy, _param_dtype(policy)
    if not hasattr(given, "param_dtype"):
        raise RuntimeError(
            f"fully_shard was given mp_policy={given!r} for {unit.name or 'the model'}, which is no "
            f"MixedPrecisionPolicy; write mp_policy=amp.fsdp_policy({policy.opt_level!r}) there"
        )
    float32 = {None, torch.float32}
    outputs: set[torch.dtype | None] = {None, policy.cast_model_outputs or torch.float32}
    if dtype is None or (policy.keep_batchnorm_fp32 and is_affine_batch_norm(unit.module)):
        dtypes = float32
    else:
        dtypes = {dtype} if unit.is_outermost else {dtype, torch.float32}
    if not unit.is_outermost:
        outputs = outputs | float32 | {dtype}
    for name, fits in (
        ("param_dtype", given.param_dtype in dtypes),
        ("output_dtype", given.output_dtype in outputs),
        ("cast_forward_inputs", given.cast_forward_inputs or not unit.is_outermost or dtype is None),
    ):
        if not fits:
            raise RuntimeError(
                f"fully_shard was given a policy for {unit.name or 'the model'} with {name}={getattr(given, name)}, "
                f"which is not that of opt_level {policy.opt_level}; write "
                f"mp_policy=amp.fsdp_policy({policy.opt_level!r}) there"
            )


def _check_batch_norms(model: nn.Module, units: list[Unit], policy: Policy) -> None:
    for name, module in model.named_modules():
        if not is_affine_batch_norm(module):
            continue
        unit = unit_around(units, name)
        if unit is not None and unit.policy.param_dtype in LOW_PRECISION:
            raise RuntimeError(
                f"{name or 'the model'} is a {type(module).__name__}, which opt_level {policy.opt_level} keeps in "
                f"float32, but is computed in {unit.policy.param_dtype} with the unit {unit.name or 'of the model'}. "
                "Make batch norms separate units, before the others: for m in model.modules(): if isinstance(m, "
                'torch.nn.modules.batchnorm._BatchNorm): fully_shard(m, mp_policy=amp.fsdp_policy("O0")). Or pass '
                "keep_batchnorm_fp32=False"
            )


def _check_stepped(named: Sequence[tuple[str, Tensor]], optimizers: Sequence[Optimizer]) -> None:
    """Raise if an optimizer holds parameters that ``fully_shard`` has replaced."""
    ids = {id(p) for _, p in named}
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    left = {tuple(p.shape): name for name, p in named if is_sharded(p) and p.requires_grad and id(p) not in held}
    for optimizer in optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if not is_sharded(p) and id(p) not in ids and tuple(p.shape) in left:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(p.shape)} that is not the model's, "
                    f"while {left[tuple(p.shape)]} is sharded and in no optimizer: it was made before fully_shard, "
                    "which replaces parameters. Make it after that: fully_shard(model), then "
                    f"{type(optimizer).__name__}(model.parameters(), ...)"
                )


class HeldBack(BlockPart):
    """A block whose gradients units of ``fully_shard`` may hold back, for example for accumulation.

    Such gradients keep the loss scale of the last block. amp unscales gradients and decides about the step only in a
    block whose backward reduces them.
    """

    def __init__(self, held: HeldGradients) -> None:
        self._held = held

    def before_begin(self, block: Block) -> None:
        """Multiply gradients held back to the scale of this block, which may have changed since."""
        factors = {
            id(p): block.scale / state.grad_scale
            for state, groups in block.work
            if state.stage is Stage.DELAYED and state.grad_scale != block.scale
            for group in groups
            for p in group.params
        }
        if factors:
            self._held.multiply(factors)

    def before_unscale(self, block: Block) -> None:
        """Delay unscaling if gradients are held back."""
        held = set(map(id, self._held.params()))
        if held and any(id(p) in held for group in block.groups for p in group.params):
            block.set_delay("delay_unscale")

    def drops(self, block: Block, error: BaseException) -> bool:
        """Delay unscaling if gradients are held back, so that other processes are not notified of ``error``."""
        self.before_unscale(block)
        return False
