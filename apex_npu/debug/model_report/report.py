# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``report``: reports the effect of each level on a model before training: dtypes, FLOPs, casts, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex_npu.amp.inspect import adopted_inside, check_incoming, check_thread, trial
from apex_npu.amp.policy import OPT_LEVELS, Policy, resolve
from apex_npu.backends._torch_private import tree_leaves
from apex_npu.debug.model_report.copies import every_tensor, fake_copies, leaves_of_graph, without_gradients
from apex_npu.debug.model_report.table import LevelReport, Memory, ModelReport
from apex_npu.debug.model_report.tally import Tally
from apex_npu.debug.text import described, name_of
from apex_npu.debug.watching.kept_state import KeptState
from apex_npu.debug.watching.opening import inside_of
from apex_npu.fusion import MASTER_PARAM, EncodedView
from apex_npu.fusion.shards import is_sharded
from apex_npu.ops import LOW_PRECISION
from apex_npu.optimizers import FusedOptimizer, NpuFusedAdam
from apex_npu.optimizers.memory_choices import MemoryChoice, memory_choices

LEVELS = ("O0", "O1", "O2", "O4", "O5")

# For each optimizer and parameter, by names: the elements of the state in the dtype of the stepped tensor, and the
# bytes of all else, such as a count of steps.
_Sizes = dict[str, dict[str, tuple[int, int]]]


class _Refused(ValueError):
    """An error in the caller's arguments, as opposed to a computation that is impossible without values."""


def report(
    model: nn.Module,
    *batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    levels: str | Sequence[str | Policy] = LEVELS,
    optimizer: Optimizer | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> ModelReport:
    """Compare levels for ``model``, by one forward and backward at each level on tensors without values.

    The Python code of the model and of ``loss`` runs on copies that have only sizes and dtypes (torch's fake tensors).
    No values are computed or allocated, except by operators whose inputs depend on neither the model nor the batch. The
    model, all gradients, amp's session and all random generators do not change. Forward hooks of the model are called
    on the copies.

    Args:
        model: A model, passed to ``amp.initialize`` or not; every level begins with its float32 weights. The module
            inside DistributedDataParallel, DataParallel and torch.compile is used.
        *batch: The positional arguments of the model.
        loss: A function from the model's output to a scalar; it holds the targets as a closure. With None, all floating
            outputs that require a gradient get one, and no loss function is counted.
        levels: Some of "O0" to "O5", or policies of other names.
        optimizer: The optimizer whose state is counted, which has stepped. None counts SGD with momentum and Adam.
        kwargs: The keyword arguments of the model.

    Returns:
        A ``ModelReport``, which prints as tables.

    Raises:
        TypeError: ``model`` is not a module, ``loss`` is not callable, or ``optimizer`` is not an optimizer.
        ValueError: ``levels`` is empty; the batch is on another device than the model, or both are on meta; ``loss``
            does not return a scalar; ``optimizer`` steps no parameter of the model, or has never stepped.
        RuntimeError: A level is unknown; parameters have no shape yet, or low precision that amp has not given them, or
            are sharded (DTensor); the model cannot be called without values, such as if shapes depend on data.

    Example::

        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(-1))
        >>> r = amp.debug.report(model, torch.randn(2, 8), levels=("O1", "O2"))
        >>> r.levels["O1"].tally.flops_in(torch.float16)
        256
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"amp.debug.report takes a model, torch.nn.Module, got {type(model).__name__}")
    model = inside_of(model)
    if any(map(is_sharded, model.parameters())):
        raise RuntimeError(
            "amp.debug.report works on a copy of a whole model, but the parameters of this one are sharded over "
            "processes (DTensor): report on it before fully_shard"
        )
    listed = [levels] if isinstance(levels, str) else list(levels)
    if not listed:
        raise ValueError(f"levels is empty: pass some of {', '.join(OPT_LEVELS)}")
    resolved = (level if isinstance(level, Policy) else resolve(level) for level in listed)
    policies = {policy.opt_level: policy for policy in resolved}
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the model's output, or None, got {type(loss).__name__}")
    check_thread("amp.debug.report")
    check_incoming([model], [])
    given = (batch, dict(kwargs or {}))
    tensors = list(every_tensor(given))
    device_types = _device_types(model, [t for t in tree_leaves(given) if isinstance(t, Tensor)])
    with KeptState([], [torch.device(kind) for kind in device_types]).put_back(), ExitStack() as stack:
        for device_type in device_types:  # a region around the call
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        sizes = _usual_sizes(model) if optimizer is None else _sizes_of(optimizer, model)
        try:
            results = [_try(policy, device_types, model, given, loss, sizes) for policy in policies.values()]
        except _Refused:
            raise
        except Exception as error:
            raise RuntimeError(
                f"the model cannot be run without values ({described(error)}). Sizes that depend on values (x[mask], "
                ".item()), operators without a rule for sizes, and derivatives of torch.func in forward are not "
                "supported: report on a part of the model without them"
            ) from error
    found = ModelReport(
        type(model).__name__,
        sum(p.numel() for p in model.parameters()),
        [f"{name_of(t.dtype)} {list(t.shape)}" for t in tensors],
        {one.level: one for one in results},
        _choices_of(optimizer),
    )
    if loss is None:
        found.notes.append("no loss function was given, so none is counted")
    uncounted = {name for one in results for name in one.tally.uncounted}
    if uncounted:
        found.notes.append(f"FLOPs of {', '.join(sorted(uncounted))} are not counted: there is no formula for them")
    if not all(any(function.phase == "backward" for function in one.tally.calls) for one in results):
        found.notes.append("nothing that the model returns requires a gradient: only forward is counted")
    return found


def _device_types(model: nn.Module, tensors: list[Tensor]) -> list[str]:
    devices = dict.fromkeys(t.device for t in [*model.parameters(), *model.buffers()])
    other = next((t.device for t in tensors if t.dim() and t.device not in devices), None)
    if other is not None and len(devices) == 1:
        (own,) = devices
        raise ValueError(f"a tensor of the batch is on {other}, but the model is on {own}: move one of them")
    types = list(dict.fromkeys(device.type for device in devices)) or ["cpu"]
    if "meta" in types:
        raise ValueError(
            "the model is on the meta device, where functions cannot be cast: create it on the cpu or another device"
        )
    return types


def _try(
    policy: Policy,
    device_types: list[str],
    model: nn.Module,
    given: Any,
    loss: Callable[[Any], Tensor] | None,
    sizes: _Sizes,
) -> LevelReport:
    """Run one forward and backward of a copy of ``model``, with the casts of ``policy``."""
    tally = Tally()
    with (
        without_gradients(model.parameters()) as remove,
        fake_copies(model, given) as (made, (args, kwargs)),
        trial(made, policy, device_types),
    ):
        with tally.counting(made, list(every_tensor((args, kwargs)))):
            outputs = made(*args, **kwargs)
            ends = _ends(outputs, loss)
            remove(leaves_of_graph(ends))
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
        memory = _measure(made, policy, sizes)
    return LevelReport(policy.opt_level, tally, memory)


def _ends(outputs: Any, loss: Callable[[Any], Tensor] | None) -> list[Tensor]:
    """Return the tensors at which backward begins."""
    if loss is None:
        return [t for t in every_tensor(outputs) if t.requires_grad]
    value = loss(outputs)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
        got = f"a tensor of {value.dtype}, {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise _Refused(f"loss must return a scalar, a floating tensor of one element, got {got}")
    return [value] if value.requires_grad else []


def _measure(model: nn.Module, policy: Policy, sizes: _Sizes) -> Memory:
    """Return the memory of ``model``, converted for ``policy``, after a backward; its tensors have only sizes."""
    found = Memory(states=dict.fromkeys(sizes, 0))
    for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
        found.parameters[tensor.dtype] += tensor.nbytes
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        stepped = torch.float32 if policy.master_weights and param.dtype in LOW_PRECISION else param.dtype
        if stepped != param.dtype:
            found.masters[stepped] += param.numel() * stepped.itemsize
        if param.grad is not None:
            if param.grad.layout == torch.sparse_coo:
                raise NotImplementedError(f"the number of rows of the sparse gradient of {name} is not known")
            found.gradients[stepped] += param.grad.numel() * stepped.itemsize
        for optimizer, of in sizes.items():
            if name in of:
                elements, others = of[name]
                found.states[optimizer] += elements * stepped.itemsize + others
    return found


def _usual_sizes(model: nn.Module) -> _Sizes:
    """Return the state sizes of SGD with momentum and of Adam, without counts of steps."""
    named, titles = list(model.named_parameters()), {"SGD with momentum": 1, "Adam": 2}
    return {title: {name: (n * p.numel(), 0) for name, p in named} for title, n in titles.items()}


def _sizes_of(optimizer: Optimizer, model: nn.Module) -> _Sizes:
    """Return the state sizes of ``optimizer``, which has stepped parameters of ``model``.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: ``optimizer`` steps no parameter of the model, or has not stepped.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    optimizer = adopted_inside(optimizer)
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    stepped = {name: p for name, p in model.named_parameters() if id(p) in listed}
    title = type(optimizer).__name__
    if not stepped:
        raise ValueError(
            f"this {title} steps no parameter of the model: create it from model.parameters(), or leave optimizer out"
        )
    state: Any = optimizer.state
    if not any(p in state for p in stepped.values()):
        raise ValueError(
            f"this {title} has no state yet: call amp.debug.report after its first step, or leave optimizer out"
        )
    return {title: {name: _size(p, state[p]) for name, p in stepped.items() if p in state}}


def _choices_of(optimizer: Optimizer | None) -> list[MemoryChoice]:
    """Return the memory choices of ``optimizer``, or of Adam if it is None; empty if it is not of this library."""
    own = NpuFusedAdam([nn.Parameter(torch.zeros(1))]) if optimizer is None else adopted_inside(optimizer)
    return memory_choices(own) if isinstance(own, FusedOptimizer) else []


def _size(param: Tensor, state: dict[str, Any]) -> tuple[int, int]:
    # The float32 values of 16-bit parameters are counted as such.
    own = tree_leaves({name: value for name, value in state.items() if name != MASTER_PARAM})
    elements = others = 0
    for value in {id(value): value for value in own if isinstance(value, (Tensor, EncodedView))}.values():
        is_count = isinstance(value, Tensor) and value.numel() == 1 and value.shape != param.shape
        if isinstance(value, Tensor) and value.dtype == param.dtype and not is_count:
            elements += value.numel()
        else:
            others += value.nbytes
    return elements, others
