# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The private names of torch that the package uses, each with the reason.

A name is private if it, or the module that it is in, begins with an underscore; this includes attributes of torch's
objects. Not listed are operators of ATen (``torch._foreach_*``, ``torch._fused_*``,
``torch._amp_foreach_non_finite_check_and_unscale_``, ``torch._debug_has_internal_overlap``), whose schemas torch keeps
for saved programs, and attributes that the package itself sets.

``NAMES`` lists all names; ``tests/test_torch_private.py`` fails for names that the installed torch no longer has. Names
in modules of torch are reached through the functions below. These look a name up when they are called, so that a
missing name breaks only its users and not the import. Attributes of objects are read where they are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

torch_profiler = torch.autograd.profiler

_F = TypeVar("_F", bound=Callable[..., Any])

# Each name, and why no public name replaces it. "()" stands for an instance.
NAMES: dict[str, str] = {
    # Memory
    "torch.UntypedStorage._cdata": "identifies a storage; data_ptr() is 0 for all empty storages",
    "torch._C._storage_Use_Count": "the number of tensors that use a storage",
    "torch.Tensor._use_count": "the number of references to a tensor: whether a gradient may be written in place",
    "torch.Tensor._version": "the number of writes to a tensor; only increment_version is public",
    "torch.Tensor._indices": "the indices of a sparse gradient; indices() raises an error before it is coalesced",
    "torch.Tensor._values": "the values of a sparse gradient; values() raises an error before it is coalesced",
    "torch.distributed.tensor.DTensor._local_tensor": "to_local() is differentiable, and makes a view for each call",
    "torch.distributed.tensor.DTensor._spec": "how it is sharded, without a call in Python for each",
    "torch.distributed._composable_state._module_state_mapping": "the modules that fully_shard has sharded",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "whether a subclass has tensors inside",
    # Dispatcher
    "torch._C._dispatch_keys": "whether a tensor has a dispatch of its own",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether a device has a kernel for an operator",
    "torch._C._dispatch_get_registrations_for_dispatch_key": "which operators a device's autocast casts",
    "torch._C.DispatchKeySet": "redispatch below a key",
    "torch._C._get_privateuse1_backend_name": "the device type of an out-of-tree backend",
    "torch.library.Library._destroy": "removes a library's registrations before the library is collected",
    "torch.library._impls": "which kernels Python has registered",
    "torch.utils._python_dispatch.TorchDispatchMode": "sees every operator, those of backward included",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "which modes see the operators of this thread",
    "torch.utils._python_dispatch._pop_mode": "removes a mode that is not the innermost one",
    "torch.utils._python_dispatch._push_mode": "restores the modes above it",
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": "whether this CPU has float16 arithmetic for oneDNN's layers",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "whether this CPU has bfloat16 arithmetic for oneDNN's layers",
    # Autocast and torch.compile
    "torch._C._DisableAutocast": "TensorGuards compare autocast's state, too",
    "torch._compile._disable_dynamo": "torch.compiler.disable imports all of dynamo, which takes seconds",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "whether dynamo would compile a function in this thread",
    # Autograd
    "torch._C._set_grad_enabled": "torch.set_grad_enabled is a class in Python, and is entered twice by torch.no_grad",
    "torch._C._current_graph_task_id": "whether this is within a backward",
    "torch._C._current_autograd_node": "which node of the graph an operator of backward belongs to",
    "torch.autograd._get_sequence_nr": "matches a node of backward with its operator of forward",
    "torch.autograd.function.BackwardCFunction()._sequence_nr": "matches a node of backward with its operator",
    "torch.Tensor._base": "the tensor of a view, such as the weight that a linear layer transposes",
    "torch.autograd._engine_run_backward": "patched, so that backward runs without ambient autocast",
    "torch.autograd.function.BackwardCFunction()._input_metadata": "the dtype of a result that was converted since",
    "torch.autograd.function.BackwardCFunction()._forward_cls": "the class whose backward runs, a user's or torch's",
    "torch.utils.checkpoint._CheckpointFrame": "patched, so that models are computed again with the casts they had",
    "torch.nn.utils.clip_grad._no_grad": "wraps the clipping functions; what the wrapper calls is patched",
    "torch.autograd.profiler._is_profiler_enabled": "whether a profiler is on, for which ranges are opened",
    # Data parallel training
    "torch.nn.parallel.distributed._sync_module_states": "patched, so that masters follow what it broadcasts",
    # Data loading
    "torch.utils.data._utils.worker._worker_loop": "patched, so that workers do not inherit ambient autocast",
    # Containers
    "torch.utils._pytree.tree_leaves": "torch.export puts the tensors of a model's results in this order",
    "torch.utils._pytree.tree_map": "reaches the tensors of all containers that torch.export takes",
    # Fake tensors
    "torch._C._get_cudnn_enabled": "torch.backends.cudnn.flags sets and restores other settings, too",
    "torch._C._set_cudnn_enabled": "torch.backends.cudnn.flags sets and restores other settings, too",
    "torch._C._get_mkldnn_enabled": "torch.backends.mkldnn.flags sets and restores other settings, too",
    "torch._C._set_mkldnn_enabled": "torch.backends.mkldnn.flags sets and restores other settings, too",
    "torch._subclasses.fake_tensor.FakeTensorMode": "sizes and dtypes of results, without computing or allocating them",
    "torch._subclasses.fake_tensor.FakeTensor": "recognizes a tensor that has only a size and a dtype",
    "torch._subclasses.fake_tensor.FakeCopyMode": "deepcopy of a model under FakeTensorMode, without its memory",
    # Modules
    "torch.nn.Module()._parameters": "a module's own parameters, with names, None included",
    "torch.nn.Module()._buffers": "a module's own buffers, with names, None included",
    "torch.nn.Module()._forward_pre_hooks": "removes own hooks from copies of a model",
    "torch.nn.Module()._forward_pre_hooks_with_kwargs": "removes own hooks from copies of a model",
    "torch.nn.Module()._load_state_dict_pre_hooks": "removes own hooks from copies of a model",
    "torch.nn.Module._load_from_state_dict": "a class that overrides it may write to parameters uncounted",
    "torch.nn.Module()._load_state_dict_post_hooks": "removes own hooks from copies of a model",
    "torch.nn.Module()._state_dict_hooks": "removes own hooks from copies of a model",
    "torch.nn.Module._replicate_for_data_parallel": "the forward of a replica has to run the replica's weights",
    "torch.nn.modules.batchnorm._BatchNorm": "the base of all batch norms, SyncBatchNorm included",
    # Optimizers
    "torch.optim.Optimizer()._optimizer_step_pre_hooks": "hooks need unscaled gradients; skipped steps call none",
    "torch.optim.Optimizer()._optimizer_step_post_hooks": "skipped steps call none",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "as the optimizer's own",
    "torch.optim.optimizer._global_optimizer_post_hooks": "as the optimizer's own",
    "torch.optim.Optimizer()._zero_grad_profile_name": "zero_grad() is profiled under torch's name",
    # GradScaler
    "torch.amp.GradScaler()._per_optimizer_states": "stage and found_inf of an optimizer that takes scaled gradients",
    "torch.amp.GradScaler()._check_inf_per_device": "found_inf of gradients that are unscaled within the step",
    "torch.amp.GradScaler()._get_scale_async": "the scale, without waiting for the device",
    "torch.amp.GradScaler()._growth_tracker": "a key of its state_dict(), which amp's loss scaler loads",
    # Distributed
    "torch.distributed.distributed_c10d._get_default_store": "progress of ranks, without a collective",
    "torch._C._distributed_c10d.Reducer.get_backward_stats": "whether DistributedDataParallel has averaged a backward",
    "torch._C._distributed_c10d.Reducer._rebuild_buckets": "buckets are built again in a block, not between two",
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": "whether it has a communication hook",
    "torch.nn.parallel.DistributedDataParallel()._join_config": "whether this is inside of join()",
    "torch.distributed.fsdp.FSDPModule()._get_fsdp_state": "the policy of a unit, and whether it has reduced gradients",
    "torch.distributed.fsdp.FSDPState()._mp_policy": "the policy of a unit",
    "torch.distributed.fsdp.FSDPState()._fsdp_param_group": "the group of a unit; several since torch 2.12",
    "torch.distributed.fsdp.FSDPState()._is_root": "which unit knows whether a forward or backward was interrupted",
    "torch.distributed.fsdp.FSDPState()._state_ctx": "the state that all units of a model share",
    "torch.distributed.fsdp.FSDPStateContext().all_states": "all units of the model, to clear what they hold back",
    "torch.distributed.fsdp.FSDPStateContext().iter_forward_root": "whether a forward was interrupted",
    "torch.distributed.fsdp.FSDPStateContext().post_backward_final_callback_queued": "whether a backward was",
    "torch.distributed.fsdp.FSDPParamGroup().fsdp_params": "the parameters of a unit",
    "torch.distributed.fsdp.FSDPParamGroup().reduce_grads": "whether a unit holds gradients back",
    "torch.distributed.fsdp.FSDPParamGroup()._partial_reduce_output": "what HSDP has reduced only over the shards",
    "torch.distributed.fsdp.FSDPParam().sharded_param": "the parameter whose gradient is held back",
    "torch.distributed.fsdp.FSDPParam()._sharded_param_data": "the memory of a part, its padding included",
    "torch.distributed.fsdp.FSDPParam()._unsharded_param": "has the gradient that is held back",
    "torch.distributed.fsdp.FSDPParam().unsharded_accumulated_grad": "has it up to torch 2.14 with a reduce_dtype",
    "torch._utils._flatten_dense_tensors": "Apex's parallel module exports them as flatten and unflatten",
    "torch._utils._unflatten_dense_tensors": "Apex's parallel module exports them as flatten and unflatten",
}


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of references to ``storage``, including the Python object that is passed."""
    return torch._C._storage_Use_Count(storage._cdata)


def memory_of_shards() -> dict[int, list[Tensor]] | None:
    """Return ``id(parameter)`` → fully_shard's tensors over the memory of its part, for all sharded parameters.

    The tensors are longer than the part if the parameter is sharded unevenly. The result is None if this torch keeps
    them elsewhere.
    """
    try:
        from torch.distributed._composable_state import _module_state_mapping

        states = [found() if isinstance(found, ref) else found for found in _module_state_mapping.values()]
        return {
            id(cut.sharded_param): [t for t in (flat, flat._base) if t is not None]
            for state in states
            if state is not None and (groups := param_groups(state))
            for group in groups
            for cut in group.fsdp_params
            if (flat := cut._sharded_param_data) is not None
        }
    except (AttributeError, ImportError):
        return None


def param_groups(state: Any) -> list[Any]:
    """Return the parameter groups in fully_shard's state of a module; empty for other kinds of state."""
    if not type(state).__name__.startswith("FSDP"):
        return []
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def finds_held_gradients(state: Any) -> bool:
    """Return whether the attributes that hold back gradients exist in fully_shard's ``state`` of a module."""
    try:
        groups = param_groups(state)
        params = [cut for group in groups for cut in group.fsdp_params]
    except AttributeError:
        return False
    context = getattr(state, "_state_ctx", None)
    names = ("all_states", "iter_forward_root", "post_backward_final_callback_queued")
    return (
        hasattr(state, "_is_root")
        and all(hasattr(context, name) for name in names)
        and all(hasattr(group, name) for group in groups for name in ("reduce_grads", "_partial_reduce_output"))
        and all(hasattr(cut, name) for cut in params for name in ("sharded_param", "unsharded_accumulated_grad"))
        # The attribute is declared; the first forward sets it.
        and all("_unsharded_param" in type(cut).__annotations__ for cut in params)
    )


def has_python_dispatch(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is of a subclass that intercepts operators."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


def has_kernel(operator: str, key: str) -> bool:
    """Return whether ``operator``, with its namespace, has a kernel for the dispatch key ``key``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def operators_with_kernel(key: str) -> list[str]:
    """Return the operators, with namespaces, that have a kernel for the dispatch key ``key``."""
    return torch._C._dispatch_get_registrations_for_dispatch_key(key)


def operators_implemented_in_python() -> set[str]:
    """Return the registrations of ``torch.library``: namespace, operator and dispatch key, joined by slashes."""
    found: set[str] = getattr(torch.library, "_impls", set())
    return found


def onednn_computes(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes ``dtype``, float16 or bfloat16, on this CPU; torch emulates the others."""
    name = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}[dtype]
    return bool(getattr(torch.ops.mkldnn, name)())


def privateuse1_device_type() -> str:
    """Return the device type of the out-of-tree backend."""
    return torch._C._get_privateuse1_backend_name()


def destroy_library(library: torch.library.Library) -> None:
    """Remove the registrations of ``library``."""
    destroy: Callable[[], None] = library._destroy
    destroy()


def autocast_disabler() -> Callable[[], AbstractContextManager[Any]]:
    """Return the class of contexts without autocast."""
    make: Callable[[], AbstractContextManager[Any]] = torch._C._DisableAutocast
    return make


@contextmanager
def autocast_within() -> Iterator[None]:
    """Let autocast cast operators that a kernel calls, which it does not do below a dispatch mode."""
    keys = [getattr(torch._C.DispatchKey, name) for name in ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1")]
    excluded = [key for key in keys if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in excluded:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


def _torch_release() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def disable_dynamo(function: _F) -> _F:
    """Let torch.compile run ``function`` uncompiled: compiled code does not see that slots and buffers share memory."""
    from torch._compile import _disable_dynamo

    disabled: Any = _disable_dynamo(function)
    # After a backward has evicted torch's wrapper from the caches, it takes longer than the arithmetic of a small step.
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    # Before 2.8 it returns an object without taking a reference: after thousands of steps the interpreter ends with
    # "deallocating None".
    if callback is None or _torch_release() < (2, 8):
        return cast(_F, disabled)

    is_traced = torch.compiler.is_dynamo_compiling  # a constant for the tracer, which does not know the callback

    @functools.wraps(function)
    def unless_compiling(*args: Any, **kwargs: Any) -> Any:
        compiling = is_traced() or callback() is not None
        return disabled(*args, **kwargs) if compiling else function(*args, **kwargs)

    return cast(_F, unless_compiling)


def no_grad(function: _F) -> _F:
    """Do the same as ``torch.no_grad()`` without the two Python objects that it makes for each call."""

    @functools.wraps(function)
    def without_grad(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return cast(_F, without_grad)


def wraps_tensors(tensor: Any) -> bool:
    """Return whether ``tensor`` is of a subclass that has no memory except that of its inner tensors."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


def is_in_backward() -> bool:
    """Return whether a backward of this thread is running."""
    return torch._C._current_graph_task_id() != -1


def autograd_node() -> Any:
    """Return the node of the graph that backward is at in this thread; None outside of backward."""
    return torch._C._current_autograd_node()


def sequence_number() -> int:
    """Return the number of the next node of a graph; within an operator, its own node has the number before."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


class _Ranges:
    """A flag for functions with a label. They open ranges while torch's profiler is on, or ``kept`` is not 0."""

    kept = 0


ranges = _Ranges()


def labelled(label: str) -> Callable[[_F], _F]:
    """Return a decorator that opens a range for profilers around each call of a function.

    Args:
        label: The name of the range, a format string of the function's positional arguments.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (torch_profiler._is_profiler_enabled or ranges.kept):
                return function(*args, **kwargs)
            with torch_profiler.record_function(label.format(*args)):
                return function(*args, **kwargs)

        return cast(_F, call)

    return decorate


def dispatch_modes() -> list[Any]:
    """Return the dispatch modes of this thread, the innermost one last."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


def pop_mode(mode: Any) -> None:
    """Remove ``mode`` from the dispatch modes of this thread, and keep those above it."""
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    above = []
    while (last := dispatch_modes()[-1]) is not mode:
        above.append(last)
        _pop_mode()
    _pop_mode()
    for other in reversed(above):
        _push_mode(other)


@contextmanager
def without_modes() -> Iterator[None]:
    """Disable the dispatch modes of this thread in the block."""
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    modes = dispatch_modes()
    for _ in modes:
        _pop_mode()
    try:
        yield
    finally:
        for mode in modes:
            _push_mode(mode)


def data_worker() -> ModuleType:
    """Return the module with the main loop of a DataLoader's worker process."""
    from torch.utils.data._utils import worker

    return worker


def checkpoint_frame() -> type:
    """Return the class that recomputes the tensors of a checkpoint (``use_reentrant=False``)."""
    from torch.utils.checkpoint import _CheckpointFrame

    frame: type = _CheckpointFrame
    return frame


def tree_leaves(value: Any) -> list[Any]:
    """Return the items in the containers of ``value``, in the order of torch.export."""
    from torch.utils._pytree import tree_leaves

    return list(tree_leaves(value))


def tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``change`` applied to the items in its containers."""
    from torch.utils._pytree import tree_map

    return tree_map(change, value)


def fake_modes() -> tuple[Any, Any]:
    """Return a mode in which tensors have only sizes and dtypes, and one in which deepcopy makes such tensors."""
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return mode, FakeCopyMode(mode)


@contextmanager
def without_fused_rnns() -> Iterator[None]:
    """Run recurrent layers as products and cells, not as layers of cuDNN and oneDNN, whose fake forwards are wrong.

    That of cuDNN leaves out a result that backward needs, and that of oneDNN returns an empty workspace.
    """
    cudnn, onednn = torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled()
    torch._C._set_cudnn_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(cudnn)
        torch._C._set_mkldnn_enabled(onednn)


def is_fake(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has only a size and a dtype."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
