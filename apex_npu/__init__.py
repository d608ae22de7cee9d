# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision and fused optimizers for PyTorch on npu, cuda and cpu.

Importing this module alone imports neither torch nor any submodule.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from apex_npu._cli.hooks import register
from apex_npu._cli.options import OPTIONS
from apex_npu.compat.finder import serve_aliases

if TYPE_CHECKING:
    from apex_npu import amp, optimizers
    from apex_npu.compat import fp16_utils, install_as_apex, multi_tensor_apply, normalization, parallel, uninstall_apex

__version__ = "0.1.0"
__all__ = [
    "amp",
    "fp16_utils",
    "install_as_apex",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "uninstall_apex",
]

serve_aliases()


@register
def amp_imported() -> None:
    """Give amp the rest of Apex's names, and begin what variables of the environment ask for."""
    import apex_npu.compat.amp  # noqa: F401

    if any(os.environ.get(option.variable) for option in OPTIONS):
        from apex_npu.debug.script import look_as_environment_says

        look_as_environment_says()


@register
def diagnostics() -> Any:
    """The package ``amp.debug``."""
    return importlib.import_module("apex_npu.debug")


@register
def group_steps() -> Any:
    """What follows the ``_group_step`` of a subclass of an optimizer."""
    return importlib.import_module("apex_npu.compat.group_steps")


@register
def step_skipped(*args: Any) -> None:
    """Name the gradients for which a step was skipped."""
    from apex_npu.debug.gradients import explain_skip

    explain_skip(*args)


@register
def profiler_changed() -> None:
    """Open the ranges of amp for a profiler, or no longer."""
    from apex_npu.debug.profiling.labels import follow_profiler

    follow_profiler()


def __getattr__(name: str) -> Any:
    if name in ("install_as_apex", "uninstall_apex"):
        return getattr(importlib.import_module("apex_npu.compat"), name)
    if name in __all__:
        home = "apex_npu" if name in ("amp", "optimizers") else "apex_npu.compat"
        return importlib.import_module(f"{home}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
