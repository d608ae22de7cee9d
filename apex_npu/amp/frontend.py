# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``initialize``, and the state dict of the loss scales. Start reading here."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from apex_npu._extension import REBUILD, extension
from apex_npu.amp.adoption import adopt, adopt_inside, optimizer_snapshot
from apex_npu.amp.data_parallel import DataParallel
from apex_npu.amp.float32_copies import module_snapshot, own_tensors, restore_float32, show_float32
from apex_npu.amp.kept_values import keep_values
from apex_npu.amp.optimizer_state import inner_optimizer
from apex_npu.amp.policy import OVERRIDES, Policy, check_count, resolve
from apex_npu.amp.preconditions import (
    changes_dtypes,
    check_devices,
    check_fusible,
    check_groups,
    check_incoming,
    check_inside_of_ddp,
    check_memory,
    check_nothing_averages,
    check_options,
    check_scripted,
    shared_params,
)
from apex_npu.amp.scaler import DynamicScaleOptions, make_scaler
from apex_npu.amp.session import Session, check_thread, current, install, require
from apex_npu.amp.sharding import sharded_policy
from apex_npu.amp.user_casts import registered_patches
from apex_npu.autocast.forward_cast import convert_model
from apex_npu.backends._torch_private import onednn_computes
from apex_npu.backends.script_warnings import warn
from apex_npu.distributed.consistency import Description, GroupReference, broadcast_values, describe, failing_together
from apex_npu.distributed.fully_sharded import HeldGradients
from apex_npu.distributed.grad_reducer import ReduceOptions
from apex_npu.distributed.rank_progress import is_first_rank
from apex_npu.distributed.torch_ddp import ddps_of, find_ddps, rebuild_reducer
from apex_npu.ops import LOW_PRECISION

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | Literal[False] | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    *,
    dynamic_init_scale: float = 2.0**16,
    scale_growth_factor: float = 2.0,
    scale_backoff_factor: float = 0.5,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    scale_hysteresis: int = 1,
    skip_alarm: int | None = 50,
    combine_grad: bool | None = None,
    combine_ddp: bool | None = None,
    ddp_replica_count: int = 4,
    user_cast_preferred: bool | None = None,
    check_combined_tensors: bool | Literal["error"] | None = None,
    fuse_unscale: bool | None = None,
    store_param_remainders: bool | Literal["int8"] | None = None,
    process_group: Any = None,
    ddp_reduce_dtype: torch.dtype | None = None,
    overflow_group: Any = None,
    keep_frozen_float32: bool = True,
) -> Any:
    """Set up mixed precision for models and optimizers, in place, and return them.

    | level | model             | casts                     | masters | loss scale |
    | ----- | ----------------- | ------------------------- | ------- | ---------- |
    | O0    | float32           | none                      | no      | 1.0        |
    | O1    | as it is          | per function, by autocast | no      | dynamic    |
    | O2    | float16, BN fp32  | inputs to float16         | fp32    | dynamic    |
    | O3    | float16           | inputs to float16         | no      | 1.0        |
    | O4    | as it is          | as O1, to bfloat16        | no      | 1.0        |
    | O5    | bfloat16, BN fp32 | inputs to bfloat16        | fp32    | 1.0        |

    All arguments are checked before anything is changed. If a later part fails, all models are restored.

    Args:
        models: A module or a list of modules, on the training device, with float32 parameters. A model that
            ``fully_shard`` has sharded with ``mp_policy=amp.fsdp_policy(opt_level)`` is neither cast nor copied: its
            float32 DTensors are the masters.
        optimizers: An optimizer, a list of them, or None for inference.
        enabled: False returns everything unchanged and makes all functions of amp pass-through.
        opt_level: "O0" to "O5". The following arguments override the level's settings; None keeps a setting.
        cast_model_type: Dtype of the model's parameters and inputs. False: they are not cast.
        patch_torch_functions: Cast around functions (O1 and O4 only).
        keep_batchnorm_fp32: Leave batch norms in float32. The strings "True" and "False" count as bools.
        master_weights: Keep the float32 value of each low-precision parameter beside it, and step that.
        loss_scale: "dynamic" or a positive number, which may be a string.
        cast_model_outputs: Dtype to which the outputs of the models' forward are cast. The default is float32 if
            inputs are cast.
        num_losses: Number of losses used with ``scale_loss(..., loss_id=)``. Each has its own scale.
        verbosity: 0 prints nothing; 1 prints the level, its overrides and every skipped step.
        dynamic_init_scale: First dynamic loss scale.
        scale_growth_factor: Factor of the scale after ``scale_window`` steps without overflow; >= 1.
        scale_backoff_factor: Factor of the scale after an overflow; in (0, 1).
        scale_window: Number of steps without overflow before the scale grows.
        min_loss_scale: Smallest dynamic loss scale. None: no lower bound.
        max_loss_scale: Largest dynamic loss scale.
        scale_hysteresis: Number of consecutive overflows before the scale shrinks.
        skip_alarm: Number of consecutive skipped steps after which an error with likely causes is logged. None: never.
        combine_grad: Keep the gradients of each optimizer in flat buffers, and unscale and check them in one pass.
            Fused optimizers always do so. Without the C++ extension it has no effect and emits one warning.
        combine_ddp: Train data parallel without DistributedDataParallel. All processes start from the first one's
            parameters and buffers, and scale_loss averages the gradients while backward runs. Requires combine_grad
            and the C++ extension.
        ddp_replica_count: Number of gradient buckets for ``combine_ddp``; small models have fewer.
        user_cast_preferred: O1: the built-in lists do not apply to functions with a registered cast.
        check_combined_tensors: If a parameter leaves its buffer, fused optimizers follow it. True also prints a
            message; "error" raises instead.
        fuse_unscale: Leave gradients multiplied by the loss scale until ``step``. The fused optimizers, and torch's
            with ``fused=True``, divide them in the pass that updates the parameters; others use a separate pass. After
            scale_loss ``.grad`` is still scaled: clip with ``optimizer.clip_optimizer_grad_norm_fused``, which needs
            no extra pass either.
        store_param_remainders: The format of the float32 values at O2 and O5. True: the 16 bits that each 16-bit
            parameter lacks (2 bytes); steps are bit for bit those with float32, for values of 2⁻¹⁶ and more.
            ``"int8"``: 8 of these bits (1 byte), rounded stochastically. False: float32 (4 bytes). None: for fused
            optimizers on CPUs and CUDA devices the format that the optimizer has chosen, or True; else False. See
            docs/memory.md. ``model.state_dict()`` has the float32 values.
        process_group: For ``combine_ddp``: the processes that train together. None: all.
        ddp_reduce_dtype: For ``combine_ddp``: the dtype in which float16 and bfloat16 gradients are added up,
            torch.float32 or torch.bfloat16. None: their own dtype.
        overflow_group: Processes that skip a step together if one of them finds inf or nan. They share a model but not
            its gradients. None: the processes of the device mesh if parameters are sharded (DTensor); else each process
            decides alone (with combine_ddp all gradients are equal).
        keep_frozen_float32: With masters: keep in host memory the float32 values of buffers, and of weights without a
            master, such as frozen ones. ``state_dict()``, ``shutdown`` and unfreezing use them. False: only the cast
            values remain.

    Returns:
        ``models``, or ``(models, optimizers)`` if optimizers were given. Each is a list if a list was given.

    Raises:
        RuntimeError: The level is unknown, or an override contradicts it. A model is already in half precision or
            wrapped for parallel training, or an optimizer is already initialized. A weight would become inf in
            float16, or is cast and shares its memory with another or belongs to a module of torch.jit. With
            combine_ddp: there is no process group yet, processes have different models or optimizers, or a process has
            failed.
        TypeError: An argument has the wrong type.
        ValueError: A number is out of range.

    Example::

        >>> optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic")
        >>> for input, target in loader:
        ...     optimizer.zero_grad()
        ...     with amp.scale_loss(loss_fn(model(input), target), optimizer) as scaled_loss:
        ...         scaled_loss.backward()
        ...     optimizer.step()
    """
    given = locals()
    policy = resolve(opt_level, **{name: given[name] for name in OVERRIDES})
    options = DynamicScaleOptions(
        dynamic_init_scale,
        scale_growth_factor,
        scale_backoff_factor,
        scale_window,
        min_loss_scale,
        max_loss_scale,
        scale_hysteresis,
    )
    if skip_alarm is not None:
        check_count("skip_alarm", skip_alarm)
    if not isinstance(keep_frozen_float32, bool):
        raise TypeError(f"keep_frozen_float32 must be True or False, got {keep_frozen_float32!r}")
    check_count("num_losses", num_losses)
    model_list, optimizer_list = _listed(models, optimizers)
    scalers = [make_scaler(policy.loss_scale, options) for _ in range(num_losses)]
    policy = replace(policy, enabled=bool(enabled))
    session = Session(
        policy,
        scalers if enabled else [],
        verbosity if is_first_rank() else min(verbosity, 0),
        skip_alarm=skip_alarm,
    )
    check_thread("amp.initialize")
    process_group, overflow_group = check_groups(policy, process_group, overflow_group, enabled=enabled)
    if enabled:
        if overflow_group is not None:
            session.overflow_group = GroupReference(overflow_group, "overflow_group")
        with _together(policy, process_group) as descriptions:
            session.casts.device_types = _device_types(model_list, optimizer_list)
            session.patches = registered_patches(policy)
            check_incoming(model_list, optimizer_list)
            find_ddps(session.ddps)
            ddps = ddps_of(session.ddps, [p for model in model_list for p in model.parameters()])
            changing = [ddp for ddp in ddps if changes_dtypes(policy, ddp)]
            check_inside_of_ddp(policy, changing)
            left_to_amp, units = sharded_policy(policy, overflow_group, model_list, optimizer_list)
            check_options(left_to_amp, optimizer_list)
            if policy.fuse_unscale and optimizers is not None:
                check_fusible(optimizers)
            check_devices(session.casts.device_types, model_list)
            check_scripted(policy, model_list)
            check_memory(policy, model_list)
            if policy.combine_ddp:
                check_nothing_averages(model_list, ddps)
                settings_of_all = [("amp.initialize's options", f"{policy}, {options}, {num_losses} losses")]
                descriptions.append(describe(model_list, optimizer_list, settings_of_all))
                session.data_parallel = DataParallel(
                    ReduceOptions(
                        GroupReference(process_group, "process_group"),
                        policy.ddp_replica_count,
                        policy.ddp_reduce_dtype,
                    )
                )
                session.data_parallels.append(session.data_parallel)
        _print_options(session, model_list)
        if policy.combine_grad and extension is None:
            warn(
                "combine_grad=True has no effect without apex_npu's C++ extension: gradients stay where they are. To "
                f"build it, in a checkout and with a C++ compiler: {REBUILD}"
            )
        if units:  # fully_shard casts by itself
            session.policy, session.held = left_to_amp, HeldGradients(units)
        session.verbosity = verbosity  # skipped steps are announced on every rank
        _set_up(session, model_list, optimizer_list, changing, keeps=keep_frozen_float32)
    else:
        install(session)
    return models if optimizers is None else (models, optimizers)


def _listed(models: Any, optimizers: Any) -> tuple[list[nn.Module], list[Optimizer]]:
    model_list = models if isinstance(models, list) else [models]
    if not all(isinstance(m, nn.Module) for m in model_list):
        raise TypeError(f"models must be either a single model or a list of models, got {_types(model_list)}.")
    given = [] if optimizers is None else optimizers if isinstance(optimizers, list) else [optimizers]
    optimizer_list = [inner_optimizer(o) for o in given]
    for wrapper in optimizer_list:
        if not isinstance(wrapper, Optimizer) and isinstance(getattr(wrapper, "optimizer", None), Optimizer):
            raise RuntimeError(
                f"Incoming optimizer is an instance of {type(wrapper).__name__}, which implements mixed precision "
                "itself; pass the optimizer that it wraps instead"
            )
    if not all(isinstance(o, Optimizer) for o in optimizer_list):
        raise TypeError(
            f"optimizers must be either a single optimizer or a list of optimizers, got {_types(optimizer_list)}."
        )
    return model_list, optimizer_list


def _types(values: Sequence[Any]) -> str:
    return ", ".join(type(v).__name__ for v in values)


def _together(policy: Policy, process_group: Any) -> AbstractContextManager[list[Description]]:
    """With combine_ddp, return a context that raises on all processes if one of them fails."""
    return failing_together(process_group) if policy.combine_ddp else nullcontext([])


def _print_options(session: Session, models: list[nn.Module]) -> None:
    """Print the level and its overrides."""
    policy = session.policy
    session.say(f"Selected optimization level {policy.brief}")
    level = resolve(policy.opt_level)
    for name in OVERRIDES:
        value, default = getattr(policy, name), getattr(level, name)
        if value != default:
            session.say(f"{name:22} : {value} (default: {default})")
    slow = _slow_convolutions(policy, models)
    if slow is not None:
        session.say(slow)


def _slow_convolutions(policy: Policy, models: list[nn.Module]) -> str | None:
    """Return a message if torch emulates the convolutions of ``models`` in the dtype of ``policy``; else None."""
    dtype = policy.autocast_dtype if policy.patch_torch_functions else policy.model_dtype
    if dtype not in LOW_PRECISION or not torch.backends.mkldnn.is_available() or onednn_computes(dtype):
        return None
    layers = (layer for model in models for layer in model.modules() if isinstance(layer, _CONVOLUTIONS))
    if not any(p.device.type == "cpu" for layer in layers for p in layer.parameters(recurse=False)):
        return None
    other = "O4 or O5 (bfloat16) or O0" if dtype == torch.float16 and onednn_computes(torch.bfloat16) else "O0"
    return (
        f"This CPU has no {str(dtype).removeprefix('torch.')} arithmetic: torch emulates it, and convolutions take up "
        f"to 100 times as long as in float32. Opt_level {other} is faster here; `python -m apex_npu doctor` times both."
    )


def _set_up(
    session: Session,
    models: list[nn.Module],
    optimizers: list[Optimizer],
    ddps: list[DistributedDataParallel],
    *,
    keeps: bool,
) -> None:
    """Convert models, adopt optimizers, patch torch and install ``session``; undo all of it if a part fails.

    ``ddps`` are those around models whose dtypes change.
    """
    policy = session.policy
    casts = session.casts
    parallel = session.data_parallel
    undo = ExitStack()
    former = current()
    for optimizer in [] if former is None else list(former.adopted):  # keep remainders where parameters are restored
        undo.enter_context(optimizer._amp_state.masters.moving())
    try:
        undo.callback(_rebuild_reducers, ddps)
        with _together(policy, None if parallel is None else parallel.options.group):
            modules = dict.fromkeys(module for model in models for module in model.modules())
            for module in modules:
                undo.callback(module_snapshot(module))
            for model in models:
                restore_float32(model)
            # The values before any cast. Masters use their memory.
            tensors = [t for model in models for t in [*model.parameters(), *model.buffers()]]
            tensors += [t for module in modules for _, t in own_tensors(module)]  # which a model may not list
            before = {id(t): t.detach() for t in tensors}
            for model in models:
                session.models.append(weakref.ref(convert_model(model, policy, casts.device_types, casts)))
                if policy.model_dtype in LOW_PRECISION:
                    show_float32(model, keeps=keeps and bool(policy.master_weights))
            for optimizer in optimizers:
                undo.callback(optimizer_snapshot(optimizer))
            shared = {id(param) for param, *_ in shared_params(optimizers)}
            for optimizer in optimizers:
                adopt(optimizer, session, before, shared)
            for optimizer in optimizers:
                adopt_inside(optimizer)
        if parallel is not None:
            _start_alike(parallel, models, optimizers, before)
        states = [optimizer._amp_state for optimizer in optimizers]  # type: ignore[attr-defined]
        for state in states:
            state.masters.keep_values_of({id(p) for ddp in ddps for p in ddp.parameters()})
        with_master = {id(param) for state in states for param in state.masters.params()}
        for text in keep_values(models, before, with_master):
            session.say(text)
        _rebuild_reducers(ddps)
        install(session)
    except BaseException:
        if current() is not session:  # an error after the last change undoes nothing
            undo.close()
        raise


def _rebuild_reducers(ddps: list[DistributedDataParallel]) -> None:
    """Rebuild the reducers of DistributedDataParallel after wrapped models were cast or restored."""
    for ddp in ddps:
        rebuild_reducer(ddp)


def _start_alike(
    parallel: DataParallel, models: list[nn.Module], optimizers: list[Optimizer], before: Mapping[int, Tensor]
) -> None:
    """Give the models and their masters the values that the group's first process had ``before`` the cast.

    Parameters that belong to no model keep their values: they may differ between processes, such as the parts of a
    classifier.
    """
    tensors = [t for m in models for t in [*m.parameters(), *m.buffers()]]
    exact = [before[id(t)] for t in tensors]
    broadcast_values(exact, parallel.options.group)
    for t, value in zip(tensors, exact, strict=True):
        if t.dtype != value.dtype:
            t.data.copy_(value)
    values = dict(zip(map(id, tensors), exact, strict=True))
    for optimizer in optimizers:
        masters = optimizer._amp_state.masters  # type: ignore[attr-defined]
        masters.take_values(values)
        masters.keep_values_of(values.keys())


def _device_types(models: list[nn.Module], optimizers: list[Optimizer]) -> tuple[str, ...]:
    tensors = [t for m in models for t in [*m.parameters(), *m.buffers()]]
    tensors += [p for o in optimizers for group in o.param_groups for p in group["params"]]
    return tuple(dict.fromkeys(t.device.type for t in tensors)) or ("cpu",)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the loss scalers in Apex's format: ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``.

    Args:
        destination: A dict to fill and return. With ``enabled=False`` it is left unchanged.

    Raises:
        RuntimeError: amp has not been initialized.

    Example::

        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0)
        >>> amp.state_dict()["loss_scaler0"]
        {'loss_scale': 128.0, 'unskipped': 0}
    """
    destination = OrderedDict() if destination is None else destination
    destination.update(require("amp.state_dict").scaler_states())
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load the loss scales of an earlier run. Entries are assigned to losses in order.

    Args:
        state_dict: The result of ``amp.state_dict()``, here or in Apex, or of ``state_dict()`` of
            ``torch.amp.GradScaler`` or torch_npu's. The scale of a GradScaler applies to all losses.

    Raises:
        RuntimeError: amp has not been initialized, or a key is not that of a loss scaler.
        TypeError: ``state_dict`` is not a dict.
        ValueError: A loss scale is not a positive number. In all of these cases nothing is loaded.

    Example::

        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0)
        >>> checkpoint = {"amp": amp.state_dict()}
        >>> amp.load_state_dict(checkpoint["amp"])
    """
    require("amp.load_state_dict").load_scaler_states(state_dict)
