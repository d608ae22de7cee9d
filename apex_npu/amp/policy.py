# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The meaning of an opt_level: a frozen ``Policy``, the table of levels, and ``resolve(level, **overrides)``.

This module touches no model, optimizer or device: a policy is complete, or refused, before anything changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from apex_npu._cli.command_line import did_you_mean
from apex_npu.autocast.cast_lists import CastPolicy
from apex_npu.ops import LOW_PRECISION

LossScale = float | Literal["dynamic"]


@dataclass(frozen=True)
class Policy(CastPolicy):
    """The settings of one level: the casts and all others. ``None`` in a tri-state field means "does not apply"."""

    # The text that the banner prints after "Selected optimization level".
    brief: str
    master_weights: bool | None = None
    loss_scale: LossScale = 1.0
    combine_grad: bool | None = None
    combine_ddp: bool | None = None
    ddp_replica_count: int = 4
    # The dtype in which float16 and bfloat16 gradients are reduced; None: their own.
    ddp_reduce_dtype: torch.dtype | None = None
    check_combined_tensors: bool | Literal["error"] | None = None
    # Gradients stay multiplied by the loss scale until step, which divides them in the same pass.
    fuse_unscale: bool = False
    # The float32 values of 16-bit parameters are kept as the 16 missing bits, or as 8 of them ("int8"); None: as 16
    # where kernels support this.
    store_param_remainders: bool | Literal["int8"] | None = None


OPT_LEVELS = {
    "O0": Policy(
        "O0", "O0:  Pure FP32 training.", cast_model_type=torch.float32, master_weights=False, loss_scale=1.0
    ),
    "O1": Policy(
        "O1", "O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
        patch_torch_functions=True, loss_scale="dynamic",
    ),
    "O2": Policy(
        "O2", "O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
        cast_model_type=torch.float16, keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic",
    ),
    "O3": Policy(
        "O3", "O3:  Pure FP16 training.",
        cast_model_type=torch.float16, keep_batchnorm_fp32=False, master_weights=False, loss_scale=1.0,
    ),
    # As in ROCm's Apex. bfloat16 has float32's range: gradients need no scale.
    "O4": Policy(
        "O4", "O4:  Insert automatic casts around Pytorch functions and Tensor methods, to BFLOAT16.",
        patch_torch_functions=True, autocast_dtype=torch.bfloat16, loss_scale=1.0,
    ),
    "O5": Policy(
        "O5", "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.",
        cast_model_type=torch.bfloat16, keep_batchnorm_fp32=True, master_weights=True, loss_scale=1.0,
    ),
}  # fmt: skip

_CASTING_LEVELS = " or ".join(name for name, level in OPT_LEVELS.items() if level.patch_torch_functions)


def resolve(opt_level: str, **overrides: Any) -> Policy:
    """Return the policy of ``opt_level`` with every override that is not None.

    Args:
        opt_level: "O0" to "O5".
        **overrides: Fields of ``Policy``; None keeps the level's setting.

    Raises:
        RuntimeError: There is no such level, or an override contradicts it.
        ValueError: ``loss_scale`` is neither "dynamic" nor a positive number, or ``ddp_replica_count`` is below 1.
        TypeError: A flag is not True or False, or a dtype argument is not a dtype.
    """
    if opt_level not in OPT_LEVELS:
        given = str(opt_level)
        nearest = did_you_mean(f"O{given[-1]}" if 0 < len(given) < 3 else given, OPT_LEVELS)  # "o2", "02" and 2
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}. Options are {', '.join(map(repr, OPT_LEVELS))}. "
            f"Note that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero{nearest}"
        )
    checked = {name: _CHECKS[name](name, value) for name, value in overrides.items() if value is not None}
    level = OPT_LEVELS[opt_level]
    _check_against_level(level, checked)
    return replace(level, **checked)


def _check_against_level(level: Policy, given: dict[str, Any]) -> None:
    if level.patch_torch_functions:
        if given.get("cast_model_type", False) not in (False, torch.float32):
            raise RuntimeError(
                f"{level.opt_level} inserts casts around functions rather than casting the model; with it, leave "
                f"cast_model_type unspecified, got {given['cast_model_type']}"
            )
        for name, reason in (
            ("keep_batchnorm_fp32", "batchnorm functions run in fp32 anyway"),
            ("master_weights", "the model's weights are fp32 themselves"),
        ):
            if name in given:
                raise RuntimeError(
                    f"With opt_level {level.opt_level}, {reason}, so leave {name} unspecified, got {given[name]}"
                )
    elif given.get("patch_torch_functions"):
        raise RuntimeError(
            f"patch_torch_functions=True goes with opt_level {_CASTING_LEVELS} only, got {level.opt_level}"
        )
    elif given.get("user_cast_preferred"):
        raise RuntimeError(
            "user_cast_preferred=True should only be set by selecting opt_level='O1' (or its bfloat16 form, 'O4'), "
            f"got {level.opt_level}"
        )
    if given.get("store_param_remainders"):
        _check_remainders(level, given)
    if given.get("combine_ddp") and not given.get("combine_grad"):
        raise RuntimeError("combine_ddp=True needs combine_grad=True: it reduces the combined gradients")
    if "ddp_reduce_dtype" in given and not given.get("combine_ddp"):
        raise RuntimeError(
            f"ddp_reduce_dtype={given['ddp_reduce_dtype']} is the dtype in which combine_ddp=True reduces gradients; "
            "leave it out without combine_ddp"
        )


def _check_remainders(level: Policy, given: dict[str, Any]) -> None:
    dtype = given.get("cast_model_type", level.cast_model_type)
    if not given.get("master_weights", level.master_weights) or dtype not in LOW_PRECISION:
        raise RuntimeError(
            f"store_param_remainders={given['store_param_remainders']!r} replaces float32 masters by the bits that "
            f"16-bit parameters lack, but opt_level {level.opt_level} has no 16-bit parameters with masters here. Use "
            "opt_level='O2' or 'O5', or leave it out"
        )


def _flag(name: str, value: Any, *others: str) -> bool | str:
    # Scripts pass strings from argparse.
    if isinstance(value, str) and value in ("True", "False"):
        return value == "True"
    if not isinstance(value, bool) and value not in others:
        raise TypeError(f"{name} must be {', '.join(['True', 'False', *map(repr, others)])} or None, got {value!r}")
    return value  # type: ignore[no-any-return]


def _flag_or_error(name: str, value: Any) -> bool | str:
    return _flag(name, value, "error")


def _flag_or_int8(name: str, value: Any) -> bool | str:
    return _flag(name, value, "int8")


def _dtype(name: str, value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise TypeError(f"{name} must be a floating-point torch.dtype such as torch.float16, got {value!r}")
    return value


def _reduce_dtype(name: str, value: Any) -> torch.dtype:
    if value not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{name} must be torch.float32, torch.bfloat16 or None, got {value!r}")
    dtype: torch.dtype = value
    return dtype


def _dtype_or_false(name: str, value: Any) -> torch.dtype | Literal[False]:
    return False if value is False else _dtype(name, value)


def _loss_scale(name: str, value: Any) -> LossScale:
    if value == "dynamic":
        return "dynamic"
    try:
        scale = float(value)
    except (TypeError, ValueError):
        scale = math.nan
    if isinstance(value, bool) or not 0.0 < scale < math.inf:
        raise ValueError(f'{name} must be "dynamic" or a positive number such as 128.0, got {value!r}')
    return scale


def check_count(name: str, value: Any) -> int:
    """Return ``value``, an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "cast_model_type": _dtype_or_false,
    "patch_torch_functions": _flag,
    "keep_batchnorm_fp32": _flag,
    "master_weights": _flag,
    "loss_scale": _loss_scale,
    "cast_model_outputs": _dtype,
    "combine_grad": _flag,
    "combine_ddp": _flag,
    "ddp_replica_count": check_count,
    "ddp_reduce_dtype": _reduce_dtype,
    "user_cast_preferred": _flag,
    "check_combined_tensors": _flag_or_error,
    "fuse_unscale": _flag,
    "store_param_remainders": _flag_or_int8,
}

# The arguments of ``initialize`` that override a level's settings.
OVERRIDES = tuple(_CHECKS)
