# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The checks of ``initialize`` before it changes anything. Each function raises the errors ``initialize`` documents."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu._extension import require_extension
from apex_npu.amp.float32_copies import copies_of, own_tensors
from apex_npu.amp.kept_values import check_averages
from apex_npu.amp.optimizer_state import adopted_inside, inner_optimizer, state_of
from apex_npu.amp.policy import Policy
from apex_npu.amp.session import current, settings
from apex_npu.backends._torch_private import is_fake
from apex_npu.backends.live_objects import instances_of
from apex_npu.distributed.consistency import check_group
from apex_npu.distributed.torch_ddp import obstacle_to_rebuilding
from apex_npu.fusion import HasFusedGroups, address_range, overlapping, wraps_tensors
from apex_npu.fusion.shards import is_sharded
from apex_npu.ops import LOW_PRECISION


def check_incoming(models: list[nn.Module], optimizers: list[Optimizer]) -> None:
    """Raise for models that cannot be converted or are wrapped, and for optimizers that cannot be adopted."""
    for model in models:
        ours = {id(t) for module in filter(copies_of, model.modules()) for _, t in own_tensors(module)}
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise RuntimeError(
                f"Incoming model is an instance of {type(model).__name__}. Parallel wrappers should only be applied "
                "AFTER the model has been returned from amp.initialize"
            )
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if nn.parameter.is_lazy(tensor):
                raise RuntimeError(
                    f"parameter {name} has no shape yet; run the model once on a batch before amp.initialize, so that "
                    "its lazy modules know theirs"
                )
            if is_sharded(tensor):
                continue  # see sharding.py
            if tensor.dtype in LOW_PRECISION and id(tensor) not in ours and not settings.accept_low_precision_models:
                raise RuntimeError(
                    f"Found param {name} with type {tensor.dtype}, expected torch.float32. When using amp.initialize, "
                    "you do not need to call .half() or .bfloat16() on your model before passing it, no matter what "
                    "optimization level you choose; drop that call"
                )
    if len({id(o) for o in optimizers}) != len(optimizers):
        raise RuntimeError(
            "A given optimizer should only be passed through amp.initialize once: the list has one twice"
        )
    for optimizer in optimizers:
        check_adoptable(optimizer)
        for inner in optimizers_inside(optimizer):
            if shares_groups(optimizer, inner) and inner not in optimizers:
                check_adoptable(inner)


def changes_dtypes(policy: Policy, model: nn.Module) -> bool:
    """Return whether ``initialize`` changes the dtype of parameters of ``model``."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return any(map(copies_of, model.modules())) or (policy.model_dtype is not None and dtypes != {policy.model_dtype})


def check_scripted(policy: Policy, models: list[nn.Module]) -> None:
    """Raise for modules of torch.jit whose weights would be cast, since they take no hooks for float32 values."""
    for model in models if policy.model_dtype in LOW_PRECISION else ():
        for name, module in model.named_modules():
            has_floats = any(tensor.is_floating_point() for _, tensor in own_tensors(module))
            if isinstance(module, torch.jit.ScriptModule) and has_floats:
                raise RuntimeError(
                    f"{name or 'the model'} is a {type(module).__name__} of torch.jit: opt_level {policy.opt_level} "
                    "casts its weights, and cannot show their float32 values in its state dict. Pass the model as it "
                    "was before torch.jit, and script amp.float32_copy(model) after training; or use O1 or O4, which "
                    "cast no weights"
                )


def check_memory(policy: Policy, models: list[nn.Module]) -> None:
    """Raise if trained parameters share memory with other tensors, since a cast would end the sharing."""
    named: dict[int, tuple[str, Tensor]] = {}
    for model in models:
        if changes_dtypes(policy, model):
            named.update({id(t): (name, t) for name, t in [*model.named_buffers(), *model.named_parameters()]})
    names, tensors = map(list, zip(*named.values(), strict=True)) if named else ([], [])
    for i, j in _sharing_memory(tensors):
        if tensors[i].requires_grad or tensors[j].requires_grad:
            raise RuntimeError(
                f"{names[i]} and {names[j]} share memory, but are not the same Parameter: opt_level "
                f"{policy.opt_level} casts each into separate memory, so that a write to one no longer changes the "
                "other. Use one Parameter for both (decoder.weight = encoder.weight), take views of it in the forward, "
                "or use O1 or O4, which cast no weights"
            )


def _sharing_memory(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the indices of pairs of ``tensors`` that have elements in common; columns of one matrix do not."""
    plain = [i for i, t in enumerate(tensors) if t.layout == torch.strided and not wraps_tensors(t)]
    spans = [address_range(tensors[i]) for i in plain]
    for k in overlapping(spans):
        for other, (begin, end) in enumerate(spans):
            if other != k and begin < spans[k][1] and spans[k][0] < end:
                i, j = plain[other], plain[k]
                if _share_elements(tensors[i], tensors[j]):
                    yield i, j


def _share_elements(a: Tensor, b: Tensor) -> bool:
    """Return whether ``a`` and ``b``, whose spans overlap, share elements; True if that is unclear."""
    size, begin = a.element_size(), min(address_range(a), address_range(b))[0]
    if size != b.element_size() or (a.data_ptr() - b.data_ptr()) % size:
        return True
    mask = torch.zeros((max(address_range(a)[1], address_range(b)[1]) - begin) // size, dtype=torch.bool, device="cpu")
    shape = [1 if stride == 0 else n for n, stride in zip(a.size(), a.stride(), strict=True)]
    mask.as_strided(shape, a.stride(), (a.data_ptr() - begin) // size).fill_(True)
    return bool(mask.as_strided(b.size(), b.stride(), (b.data_ptr() - begin) // size).any())


def check_inside_of_ddp(policy: Policy, ddps: list[nn.parallel.DistributedDataParallel]) -> None:
    """Raise for wrappers around models whose dtypes change, and that would no longer average gradients."""
    if policy.master_weights and ddps:
        check_averages()
    for ddp in ddps:
        obstacle = obstacle_to_rebuilding(ddp)
        if obstacle is not None:
            raise RuntimeError(
                f"Incoming model is inside of a DistributedDataParallel with {obstacle}: opt_level "
                f"{policy.opt_level} casts its parameters, whose gradients would not be averaged any more. Pass the "
                "model to amp.initialize first, and wrap the model that it returns"
            )


def check_adoptable(optimizer: Optimizer) -> None:
    """Raise if amp cannot adopt the optimizer.

    Raises:
        RuntimeError: The optimizer has been adopted before, its instance has a replaced ``step``, or it is a training
            framework's wrapper.
    """
    if state_of(optimizer) is not None:
        raise RuntimeError(
            "A given optimizer should only be passed through amp.initialize once: to initialize the model again, as "
            "where a cell of a notebook runs again, make a new optimizer in front of the call"
        )
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and not {"param_groups", "_optimizer_step_pre_hooks"} & vars(optimizer).keys():
        raise RuntimeError(
            f"Incoming optimizer is an instance of {type(optimizer).__name__}, which only wraps an optimizer: pass its "
            ".optimizer, before the framework wraps it, as in accelerate before prepare()"
        )
    step = vars(optimizer).get("step")
    # torch's schedulers set a counting wrapper on the instance; older ones mark it _with_counter.
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched") and not hasattr(step, "_with_counter"):
        raise RuntimeError(
            f"Incoming optimizer already has step defined on the instance ({step!r}), which would hide amp's; pass the "
            "optimizer to amp.initialize before it is wrapped"
        )


def check_groups(policy: Policy, process_group: Any, overflow_group: Any, *, enabled: bool) -> tuple[Any, Any]:
    """Check both process groups and return them, with the default one filled in."""
    if policy.combine_ddp:
        if not enabled:
            raise RuntimeError(
                "combine_ddp=True with enabled=False would train each process by itself; for data parallel training "
                "without mixed precision use opt_level='O0'"
            )
        require_extension("amp.initialize(combine_ddp=True)")
        process_group = check_group(process_group, "process_group", "combine_ddp=True")
    elif process_group is not None:
        raise RuntimeError(
            "process_group is for combine_ddp=True, which averages gradients over it; leave it out without combine_ddp"
        )
    if enabled and overflow_group is not None:
        check_group(overflow_group, "overflow_group", "overflow_group")
    return process_group, overflow_group


def check_nothing_averages(models: list[nn.Module], ddps: list[nn.parallel.DistributedDataParallel]) -> None:
    """Raise for parallel wrappers inside or around models, which would also average combine_ddp's gradients."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
                raise RuntimeError(
                    f"{name} is an instance of {type(module).__name__}, which averages gradients itself; leave it out "
                    "with combine_ddp=True"
                )
    if ddps:
        raise RuntimeError(
            f"Incoming model is inside of a {type(ddps[0]).__name__}, which averages gradients itself; leave it out "
            "with combine_ddp=True"
        )


def check_options(policy: Policy, optimizers: list[Optimizer]) -> None:
    """Raise for optimizers that cannot do what ``policy`` demands, or whose state contradicts it."""
    if policy.combine_grad:
        check_plain(optimizers)
    for optimizer in optimizers:
        name = type(optimizer).__name__
        on_host = getattr(optimizer, "on_host", False)
        if on_host and policy.combine_ddp:
            raise RuntimeError(
                f"{name} has state_device='cpu', and no buffers, in which combine_ddp=True averages gradients: wrap "
                "the model in DistributedDataParallel, or leave state_device out"
            )
        if policy.master_weights:
            _check_own_groups(policy, optimizer)
            if isinstance(optimizer, HasFusedGroups) and optimizer.state_formats.stochastic_rounding:
                raise RuntimeError(
                    f"{name} has stochastic_rounding=True, which is for bfloat16 parameters without float32 values, "
                    "but amp keeps these at this level: pass master_weights=False to amp.initialize at O5, or leave "
                    "stochastic_rounding out"
                )
            if on_host and policy.store_param_remainders is False:
                raise RuntimeError(
                    f"{name} has state_device='cpu', and keeps float32 values as remainders: leave "
                    "store_param_remainders=False out"
                )
        if policy.store_param_remainders or (on_host and policy.master_weights):
            option = f"store_param_remainders={policy.store_param_remainders or True!r}"
            require_extension(option)
            if not steps_remainders(optimizer):
                raise RuntimeError(
                    f"{name} cannot keep the remainders of parameters: {option} requires a fused optimizer of "
                    "apex_npu.optimizers with its own rule; leave it out"
                )
            check_unshared(optimizers, f"{option} would keep bits of it in each; leave it, or state_device, out")
    if policy.master_weights:
        _check_not_partitioned(policy, optimizers)


def shared_params(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Tensor, Optimizer, Optimizer]]:
    """Yield each parameter that two of ``optimizers`` step, and these two."""
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            owner = owners.setdefault(id(param), optimizer)
            if owner is not optimizer:
                yield param, owner, optimizer


def check_unshared(optimizers: Sequence[Optimizer], why: str) -> None:
    """Raise if two of ``optimizers`` step a parameter; ``why`` says what is wrong with that."""
    for param, one, other in shared_params(optimizers):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} belongs to two optimizers, {type(one).__name__} and "
            f"{type(other).__name__}: {why}"
        )


def check_fusible(optimizers: Any) -> None:
    """Raise if the given optimizers cannot work with gradients that stay scaled after the block.

    Args:
        optimizers: The argument of ``scale_loss`` or ``initialize``.

    Raises:
        RuntimeError: A wrapper, such as LARC, works on gradients before the step, or two optimizers step a parameter.
    """
    given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in given:
        inner = adopted_inside(optimizer)
        if inner is not optimizer:
            raise RuntimeError(
                f"{type(optimizer).__name__} wraps {type(inner).__name__}, and may work on gradients before step(), "
                "which with fuse_unscale=True are still multiplied by the loss scale then: pass the wrapped optimizer "
                "to scale_loss, or leave fuse_unscale out"
            )
        if inner_optimizer(optimizer) is not optimizer:
            raise RuntimeError(
                f"{type(optimizer).__name__} works on gradients before step(), which with fuse_unscale=True are still "
                "multiplied by the loss scale then; leave fuse_unscale out"
            )
    session = current()
    adopted = [] if session is None else [o for o in session.adopted if o not in given]
    holding = [o for o in adopted if (state := state_of(o)) is not None and state.holds_scaled]
    if len(holding) + len(given) > 1:
        check_unshared(
            [*holding, *given], "with fuse_unscale=True each would unscale its gradient; leave fuse_unscale out"
        )


def check_plain(optimizers: list[Optimizer]) -> None:
    """Raise for parameters whose gradients combine_grad cannot put into flat memory."""
    for param in (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]):
        if wraps_tensors(param):
            raise RuntimeError(
                f"combine_grad=True puts gradients into flat memory, but a parameter of shape {tuple(param.shape)} is "
                f"a {type(param.data).__name__}, which wraps other tensors; leave combine_grad out"
            )


def _check_own_groups(policy: Policy, optimizer: Optimizer) -> None:
    """Raise if an optimizer inside of ``optimizer`` steps parameters that are not in its own list."""
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for inner in optimizers_inside(optimizer):
        if any(id(p) not in listed for group in inner.param_groups for p in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps parameters by a {type(inner).__name__} inside that are not in its "
                f"own param_groups: at {policy.opt_level} those would be stepped in 16 bits. Pass the inner optimizers "
                "to amp.initialize, as a list, or use O1 or O4"
            )


def _check_not_partitioned(policy: Policy, optimizers: list[Optimizer]) -> None:
    """Raise for ZeroRedundancyOptimizer with ``parameters_as_bucket_view=True``, whose buckets have the 16-bit data."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    for zero in [] if module is None else instances_of(module.ZeroRedundancyOptimizer):
        given = any(optimizer in (zero, getattr(zero, "optim", None)) for optimizer in optimizers)
        if given and getattr(zero, "parameters_as_bucket_view", False):
            raise RuntimeError(
                f"{type(zero).__name__} with parameters_as_bucket_view=True sends the memory that parameters had when "
                f"it was made, but {policy.opt_level} steps separate float32 values, so that the processes would not "
                "exchange their parts. Remove parameters_as_bucket_view, or use O1 or O4"
            )


# The methods with which subclasses of fused optimizers define another update of parameters.
_RULES = ("update", "_group_step")


def steps_remainders(optimizer: Any) -> bool:
    """Return whether ``optimizer`` is a fused optimizer whose rule reads remainders and is not overridden."""
    if not isinstance(optimizer, HasFusedGroups) or not getattr(optimizer, "encodable_states", ()):
        return False
    mro = type(optimizer).__mro__
    owner = next(base for base in mro if not vars(base).keys().isdisjoint((*_RULES, "encodable_states")))
    return "encodable_states" in vars(owner)


def check_devices(device_types: Sequence[str], models: list[nn.Module]) -> None:
    """Raise for tensors without memory or of inference mode, and for a call inside an autocast block."""
    if "meta" in device_types:
        raise RuntimeError(
            "models and optimizers must have their memory when they are passed to amp.initialize, got tensors on the "
            "meta device; call model.to_empty(device=...) and initialise the weights first"
        )
    made = [torch.empty(0), *(t for model in models for t in [*model.parameters(), *model.buffers()])]
    if any(map(is_fake, made)) or torch.is_inference_mode_enabled() or any(t.is_inference() for t in made):
        raise RuntimeError(
            "amp.initialize was called under FakeTensorMode or torch.inference_mode(), or with a model made there. Its "
            "tensors have no values, or can be neither trained nor cast in place; call it outside, with a model made "
            "outside, and run the model under inference_mode() afterwards"
        )
    former = current()
    if former is not None:
        former.check_regions("amp.initialize")
    ours = former is not None and former.policy.patch_torch_functions
    for device_type in device_types:
        if torch.is_autocast_enabled(device_type) and not ours:
            raise RuntimeError(
                f"amp.initialize was called inside torch.autocast({device_type!r}), whose end would switch amp's casts "
                "off again; call it outside"
            )


def optimizers_inside(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers in attributes of ``optimizer``, and in lists and tuples in attributes."""
    found: list[Optimizer] = []
    for value in vars(optimizer).values():
        listed = value if isinstance(value, (list, tuple)) else [value]
        found += [inner for inner in listed if isinstance(inner, Optimizer) and inner is not optimizer]
    return found


def shares_groups(optimizer: Optimizer, inner: Optimizer) -> bool:
    """Return True if all groups of ``inner`` are groups of ``optimizer``."""
    groups = set(map(id, optimizer.param_groups))
    return all(id(group) in groups for group in inner.param_groups)
