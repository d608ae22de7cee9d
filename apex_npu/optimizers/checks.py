# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks of hyper-parameters, with the same messages for all optimizers. NaN never passes."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
from torch import Tensor

from apex_npu._extension import require_extension
from apex_npu.backends import for_device
from apex_npu.fusion import is_dense, wraps_tensors
from apex_npu.fusion.shards import is_partial, is_sharded
from apex_npu.ops import FLOATS

# What errors call a hyper-parameter, as those of torch do, unless it is the name and "value".
_LABELS = {
    "lr": "learning rate",
    "eps": "epsilon value",
    "e": "epsilon value",
    "max_grad_norm": "max_grad_norm",
    "init_square_avg": "init_square_avg",
}


class OfTorch(TypedDict, total=False):
    """Arguments that select an implementation in torch's optimizers; they have no effect here."""

    fused: bool | None
    foreach: bool | None
    differentiable: bool


@contextmanager
def naming(optimizer: str) -> Iterator[None]:
    """Prefix the errors of checks inside the block with the name of ``optimizer``."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{optimizer}: {error}") from None


def as_number(name: str, value: Any) -> float:
    """Return ``value`` as a float.

    Raises:
        TypeError: It is neither a real number nor a tensor.
        ValueError: It is a tensor of more than one element.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        return float(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return float(value)


def check_non_negative(group: Mapping[str, Any], *names: str) -> None:
    """Require 0 <= value < inf for ``names``; the error begins as torch's does: "Invalid learning rate: -1.0".

    Raises:
        ValueError: One is negative, infinite or NaN.
        TypeError: One is not a number.
    """
    for name in names:
        if not 0.0 <= as_number(name, group[name]) < float("inf"):
            label = _LABELS.get(name, f"{name} value")
            raise ValueError(f"Invalid {label}: {group[name]} ({name} must be finite and >= 0)")


def check_unit_interval(label: str, name: str, value: Any, *, with_one: bool) -> None:
    """Require a number in [0, 1), or ``with_one`` in [0, 1].

    Raises:
        ValueError: It is outside, or NaN.
        TypeError: It is not a number.
    """
    number = as_number(name, value)
    if not (0.0 <= number < 1.0 or (with_one and number == 1.0)):
        raise ValueError(f"Invalid {label}: {value} ({name} must be in [0, 1{']' if with_one else ')'})")


def check_betas(betas: Any) -> None:
    """Require two numbers in [0, 1), both floats or both tensors, as torch does.

    Raises:
        ValueError: One is outside, or one of them alone is a tensor.
        TypeError: They are not two numbers.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers, got {betas!r}")
    if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        raise ValueError(f"betas must be either both floats or both Tensors, got {betas!r}")
    for i, beta in enumerate(betas):
        check_unit_interval(f"beta parameter at index {i}", f"betas[{i}]", beta, with_one=False)


def check_no_amsgrad(optimizer: str, amsgrad: Any) -> None:
    """Refuse AMSGrad, as NVIDIA's optimizers do.

    Raises:
        RuntimeError: ``amsgrad`` is true.
    """
    if amsgrad:
        raise RuntimeError(f"{optimizer} does not support the AMSGrad variant; use NpuFusedAdam(amsgrad=True)")


def check_bool(name: str, value: Any) -> None:
    """Require True or False.

    Raises:
        TypeError: It is another value.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_bools(group: Mapping[str, Any], *names: str) -> None:
    """Require True or False for ``names``.

    Raises:
        TypeError: One is another value.
    """
    for name in names:
        check_bool(name, group[name])


def check_of_torch(optimizer: str, given: Mapping[str, Any]) -> None:
    """Require that ``given`` arguments are those of ``OfTorch``, and that ``differentiable`` is not True.

    Raises:
        TypeError: There is another argument.
        ValueError: ``differentiable`` is true.
    """
    for name in given:
        if name not in OfTorch.__annotations__:
            raise TypeError(f"{optimizer} got an unexpected keyword argument {name!r}")
    if given.get("differentiable"):
        raise ValueError(
            f"{optimizer}: differentiable=True: autograd cannot follow a step that writes flat buffers. Use "
            "torch.optim's optimizer of the same rule, with differentiable=True"
        )


def check_adam(group: dict[str, Any]) -> None:
    """Check ``lr``, ``betas``, ``eps`` and ``weight_decay``, which all relatives of Adam have.

    Raises:
        ValueError: One is out of range.
        TypeError: One is not a number.
    """
    check_non_negative(group, "lr", "eps", "weight_decay")
    check_betas(group["betas"])


def check_params(params: Sequence[Tensor], *, shards: bool = True, on_host: bool = False) -> None:
    """Require that parameters that are trainable or have a gradient have a dtype and a layout that can be fused.

    Args:
        params: The parameters of one group.
        shards: The rule can step a part of a parameter.
        on_host: The parameters are stepped on the host.

    Raises:
        TypeError: A parameter has another dtype, is a subclass without own memory, or a DTensor that cannot be stepped
            part by part; or it is float64 on an NPU.
        ValueError: The memory of a parameter has gaps, or its elements share memory; or it is a DTensor, and stepped on
            the host.
    """
    for i, p in enumerate(params):
        which = f"parameter {i} of shape {tuple(p.shape)}"
        if is_sharded(p):
            _check_shard(which, p, shards=shards, on_host=on_host)
        elif wraps_tensors(p):
            raise TypeError(
                f"{which} is a {type(p.data).__name__}, which wraps tensors and has no memory to fuse. Use "
                "torch.optim's optimizer of the same rule for it"
            )
        if takes_part(p) and not can_be_stepped(p):
            check_dtype(which, p)
        elif takes_part(p) and not is_sharded(p) and not is_dense(p.size(), p.stride()):
            raise ValueError(
                f"{which} and strides {p.stride()} does not fill its memory: its elements have gaps between them, or "
                "share memory. Fused optimizers cannot step it. Replace it in the module by a dense copy before you "
                "make the optimizer: nn.Parameter(p.detach().contiguous())"
            )


def check_state_device(owner: str, state_device: Any, *, capturable: bool) -> bool:
    """Return whether the optimizer ``owner`` keeps the state of an accelerator's parameters on the host.

    Raises:
        ValueError: ``state_device`` is neither None nor the CPU, or the optimizer is ``capturable``.
        RuntimeError: The C++ extension is missing.
    """
    if state_device is None:
        return False
    if str(state_device) != "cpu":
        raise ValueError(
            f"{owner}: state_device must be 'cpu', or None for the device of each parameter, got {state_device!r}"
        )
    if capturable:
        raise ValueError(
            f"{owner}: state_device='cpu' steps on the host, where a CUDA graph cannot capture it: leave capturable out"
        )
    require_extension("state_device='cpu'")
    return True


def takes_part(param: Tensor) -> bool:
    """Return True if a step updates ``param``: as in torch, this includes frozen parameters that have a gradient."""
    return param.requires_grad or param.grad is not None


def can_be_stepped(tensor: Tensor) -> bool:
    """Return True if fused optimizers support the dtype of ``tensor`` on its device."""
    if tensor.dtype == torch.float64:
        return for_device(tensor.device).has_float64(tensor.device)
    return tensor.dtype in FLOATS


def check_dtype(which: str, tensor: Tensor) -> None:
    """Require that fused optimizers support the dtype of ``tensor`` on its device.

    Raises:
        TypeError: It has another dtype; the message begins with ``which``.
    """
    if can_be_stepped(tensor):
        return
    if tensor.dtype in FLOATS:
        raise TypeError(
            f"{which} is {tensor.dtype} on {tensor.device}, whose operators take float32, float16 and bfloat16; "
            "convert the model first (model.float()), or train it on a CPU"
        )
    raise TypeError(
        f"{which} is {tensor.dtype}; fused optimizers take float32, float16, bfloat16 and float64. "
        "Use torch.optim for it"
    )


def _check_shard(which: str, param: Tensor, *, shards: bool, on_host: bool) -> None:
    if on_host:
        raise ValueError(
            f"{which} is a DTensor, which state_device='cpu' does not support: pass fully_shard "
            "offload_policy=CPUOffloadPolicy(), which keeps parameters and state on the host"
        )
    if not shards:
        raise TypeError(
            f"{which} is a DTensor, as fully_shard and distribute_tensor make them, and this process has only a part "
            "of it, but this optimizer's rule needs whole parameters. Use an optimizer of this package, because they "
            "all step parts, or replicate the model, with combine_ddp=True or DistributedDataParallel"
        )
    if is_partial(param):
        raise TypeError(
            f"{which} is a DTensor whose processes hold addends (Partial), which cannot be stepped one by one; "
            "redistribute it to Shard or Replicate first"
        )
