# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Scripts written for cuda run on npu: ``torch.cuda``, ``.cuda()``, "cuda" and "nccl" come to mean the npu's."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from npu_simulator import npu

_device_class = torch.device

# Functions of torch, and methods, that take a device.
_FUNCTIONS = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted empty_strided eye full "
    "full_like hamming_window hann_window kaiser_window linspace load logspace normal ones ones_like rand rand_like "
    "randint randint_like randn randn_like randperm range scalar_tensor set_default_device sparse_bsc_tensor "
    "sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tensor "
    "tril_indices triu_indices zeros zeros_like is_autocast_enabled set_autocast_enabled get_autocast_dtype "
    "set_autocast_dtype get_device_module"
)
_TENSOR_METHODS = "to new_empty new_empty_strided new_full new_ones new_tensor new_zeros type pin_memory"
_MODULE_METHODS = ("to", "to_empty", "type")


class Redirection:
    """What was replaced, and what by. ``undo`` puts it back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Set ``owner.name``; what was there before, if anything, is kept for ``undo``."""
        missing = object()
        old = vars(owner).get(name, missing)
        self._replaced.append((owner, name, None if old is missing else old))
        setattr(owner, name, new)

    def undo(self) -> None:
        """Make cuda mean cuda again."""
        global _active
        for owner, name, old in reversed(self._replaced):
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        self._replaced.clear()
        _active = None
        sys.modules.pop("torch_npu.contrib.transfer_to_npu", None)


_active: Redirection | None = None


def redirect_cuda() -> Redirection:
    """Redirect everything; done once however often it is called."""
    global _active
    if _active is None:
        _active = redirection = Redirection()
        _redirect_names(redirection)
        _redirect_tensors_and_modules(redirection)
        _redirect_device_arguments(redirection)
        _redirect_distributed(redirection)
        for name in ("script", "script_method"):
            redirection.replace(torch.jit, name, _unscripted)
    return _active


def _unscripted(obj: Any, *args: Any, **kwargs: Any) -> Any:
    """As torch_npu has it: ``obj``. What stands for torch's functions cannot be compiled."""
    warnings.warn("torch.jit.script compiles nothing after transfer_to_npu", RuntimeWarning, stacklevel=2)
    return obj


def _npu_for(value: Any) -> Any:
    """``value``, with cuda replaced by npu."""
    if isinstance(value, str):
        if value == "cuda" or value.startswith("cuda:"):
            return "npu" + value[4:]
        if value.startswith("torch.cuda."):
            return "torch.npu." + value[11:]
    elif isinstance(value, _device_class) and value.type == "cuda":
        return _device_class("npu" if value.index is None else f"npu:{value.index}")
    elif isinstance(value, dict):  # torch.load's map_location
        return {_npu_for(key): _npu_for(item) for key, item in value.items()}
    return value


def _redirected(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Only arguments that are, or are called, devices: a dict of tensors is none of them.
        args = tuple(_npu_for(arg) if isinstance(arg, (str, _device_class)) else arg for arg in args)
        for name in ("device", "map_location", "device_type", "dtype", "dst_type"):
            if name in kwargs:
                kwargs[name] = _npu_for(kwargs[name])
        return function(*args, **kwargs)

    return call


def _stand_in_class(cls: type) -> type:
    """A class that makes and recognises instances of ``cls``, which cannot be subclassed."""

    class Meta(type):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return _redirected(cls)(*args, **kwargs)

        def __instancecheck__(self, instance: object) -> bool:
            return isinstance(instance, cls)

        def __subclasscheck__(self, subclass: type) -> bool:
            return issubclass(subclass, cls)

    return Meta(cls.__name__, (), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _redirect_names(redirection: Redirection) -> None:
    imported = {"torch", "sys", "warnings", "annotations", "Any", "Iterable", "Iterator", "ModuleType", "Tensor"}
    imported |= {
        "SimpleNamespace",
        "type_names",
        "contextmanager",
        "DeviceLike",
        "amp",
        "utils",
        "streams",
        "random",
        "memory",
    }
    names = [name for name in vars(npu) if not name.startswith("_") and name not in imported]
    for name in [*names, "_lazy_init", "_is_in_bad_fork", "_initialized"]:
        redirection.replace(torch.cuda, name, getattr(npu, name))
    for module in (torch.cuda.streams, torch.cuda.random, torch.cuda.memory):
        for name in names:
            if name in vars(module):
                redirection.replace(module, name, getattr(npu, name))
    for module in (torch.cuda.amp, torch.cuda.amp.autocast_mode):
        redirection.replace(module, "autocast", npu.autocast)
    for module in (torch.cuda.amp, torch.cuda.amp.grad_scaler):
        redirection.replace(module, "GradScaler", npu.GradScaler)


def _redirect_tensors_and_modules(redirection: Redirection) -> None:
    Tensor: Any = torch.Tensor
    Module: Any = torch.nn.Module
    PackedSequence: Any = torch.nn.utils.rnn.PackedSequence
    redirection.replace(Tensor, "cuda", _redirected(Tensor.npu))
    redirection.replace(Tensor, "is_cuda", Tensor.is_npu)
    redirection.replace(Module, "cuda", _redirected(Module.npu))
    redirection.replace(PackedSequence, "cuda", _redirected(PackedSequence.npu))
    redirection.replace(PackedSequence, "is_cuda", PackedSequence.is_npu)
    redirection.replace(torch.UntypedStorage, "cuda", _redirected(torch.UntypedStorage.npu))  # type: ignore[attr-defined]
    for name in _TENSOR_METHODS.split():
        redirection.replace(Tensor, name, _redirected(getattr(Tensor, name)))
    for name in _MODULE_METHODS:
        redirection.replace(Module, name, _redirected(getattr(Module, name)))


def _redirect_device_arguments(redirection: Redirection) -> None:
    for name in _FUNCTIONS.split():
        if hasattr(torch, name):
            redirection.replace(torch, name, _redirected(getattr(torch, name)))
    for name in ("device", "Generator"):
        redirection.replace(torch, name, _stand_in_class(getattr(torch, name)))
    for cls in (torch.amp.autocast, torch.amp.GradScaler):
        redirection.replace(cls, "__init__", _redirected(cls.__init__))


def _redirect_distributed(redirection: Redirection) -> None:
    if not torch.distributed.is_available():
        return
    import torch.distributed as dist

    def hccl_for(backend: Any) -> Any:
        return backend.replace("nccl", "hccl").replace("cuda", "npu") if isinstance(backend, str) else backend

    def redirected(function: Callable[..., Any], position: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > position:
                args = (*args[:position], hccl_for(args[position]), *args[position + 1 :])
            if "backend" in kwargs:
                kwargs["backend"] = hccl_for(kwargs["backend"])
            if "device_id" in kwargs:
                kwargs["device_id"] = _npu_for(kwargs["device_id"])
            return function(*args, **kwargs)

        return call

    redirection.replace(dist, "init_process_group", redirected(dist.init_process_group, 0))
    redirection.replace(dist, "new_group", redirected(dist.new_group, 2))
    redirection.replace(dist, "is_nccl_available", dist.is_gloo_available)
