# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The place of an operator's call: the line of the user's code, and the names of modules and tensors."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apex_npu.backends._torch_private import privateuse1_device_type

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OWN = os.path.join(Path(__file__).parents[2], "")
_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGES = tuple(
    os.path.join(folder, "") for folder in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
) + tuple(os.path.join(folder, "") for folder in site.getsitepackages())

# Code that changes gradients and parameters after backward; it is not part of the user's forward or backward.
_OPTIMIZERS = (_TORCH + "optim", _OWN + "optimizers", _OWN + "amp/master_params.py")
_AMP = tuple(_TORCH + part for part in ("nn/utils/clip_grad.py", "amp/grad_scaler.py")) + tuple(
    _OWN + part for part in ("amp", "fusion", "distributed", "debug")
)
# Code that calls a model itself, such as for a replay: the lines of its operators are found elsewhere.
_CALLING_MODELS = (_OWN + "debug/overflow/replay.py", _OWN + "debug/model_report/report.py")
# These files call the user's functions or belong to the graph.
_PART_OF_THE_GRAPH = tuple(_OWN + part for part in ("amp/scale_loss.py", "amp/user_casts.py"))


class Caller(Enum):
    """The code that calls an operator if no line of the user's does."""

    OPTIMIZER = auto()
    AMP = auto()
    ENGINE = auto()
    DEBUG = auto()


@dataclass(frozen=True)
class Place:
    """A line of code; a line in an installed package has, as ``script``, the user's line that led to it."""

    file: str
    line: int
    function: str
    script: Place | None = None

    @property
    def source(self) -> str:
        """The text of the line; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        name = self.file
        for folder in (os.getcwd(), *_PACKAGES):
            folder = os.path.join(folder, "")
            if name.startswith(folder):
                name = name[len(folder) :]
                break
        return f"{name}:{self.line}" + ("" if self.script is None else f", called from {self.script}")


@functools.cache
def _kind_of(file: str, function: str) -> Caller | bool:
    """Return True for the user's and installed packages' files, False for files to pass over, or a ``Caller``."""
    if file.startswith(_TORCH) and function == "_engine_run_backward":
        return Caller.ENGINE
    if file in _CALLING_MODELS:
        return Caller.DEBUG
    if file.startswith(_OPTIMIZERS):
        return Caller.OPTIMIZER
    if file.startswith(_AMP) and not file.startswith(_PART_OF_THE_GRAPH):
        return Caller.AMP
    # The package of an out-of-tree device may have operators that are written in Python.
    module = getattr(torch, privateuse1_device_type(), None)
    package = getattr(sys.modules.get(getattr(module, "__name__", "").partition(".")[0]), "__file__", None)
    of_device = _TORCH if package is None else os.path.join(os.path.dirname(package), "")
    if file.startswith((_TORCH, _OWN, of_device, "<")):
        return False
    return file.startswith(_PACKAGES) or not file.startswith(_LIBRARY)


def calling_line(frames: int = 2) -> Place | Caller | None:
    """Return the innermost line of the user's, after ``frames`` frames, that called the operator; None without one."""
    frame: Any = inspect.currentframe()
    for _ in range(frames):
        frame = frame.f_back
    found: Place | None = None  # a line in a package, for which the script's line is not found yet
    while frame is not None:
        code = frame.f_code
        kind = _kind_of(code.co_filename, code.co_name)
        if kind is True:
            in_package = code.co_filename.startswith(_PACKAGES)
            if found is None or not in_package:
                place = Place(code.co_filename, frame.f_lineno, code.co_name)
                if not in_package:
                    return place if found is None else replace(found, script=place)
                found = place
        elif kind is Caller.ENGINE or (kind is not False and found is None):
            return found or kind
        frame = frame.f_back
    return found


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _all_names(names: dict[int, list[str]]) -> dict[int, str]:
    return {key: "=".join(dict.fromkeys(found)) for key, found in names.items()}


def begins_within(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the memory of ``tensor`` begins in the memory of ``other``."""
    if other.layout != torch.strided or other.device != tensor.device or not tensor.data_ptr():
        return False
    return other.data_ptr() <= tensor.data_ptr() < other.data_ptr() + other.nbytes


class Names:
    """The names of the modules, parameters and buffers of some models; a shared one has several names.

    Attributes:
        tensors: The parameters and buffers.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Collect the names; with several models, they begin with ``models[i].``."""
        modules: dict[int, list[str]] = {}
        tensors: dict[int, list[str]] = {}
        self.tensors: list[Tensor] = []
        self._models = list(models)  # while they live, no other object gets their ids
        for i, model in enumerate(models):
            prefix = f"models[{i}]" if len(models) > 1 else ""
            for name, module in model.named_modules(remove_duplicate=False, prefix=prefix):
                modules.setdefault(id(module), []).append(_plain(name))
            named: Iterable[tuple[str, Tensor]] = [
                *model.named_parameters(remove_duplicate=False, prefix=prefix),
                *model.named_buffers(remove_duplicate=False, prefix=prefix),
            ]
            for name, tensor in named:
                self.tensors.append(tensor)
                tensors.setdefault(id(tensor), []).append(_plain(name))
        self._modules, self._tensors = _all_names(modules), _all_names(tensors)

    def of_module(self, module: nn.Module) -> str | None:
        """Return the name of ``module``; None if it belongs to none of the models."""
        return self._modules.get(id(module))

    def of_tensor(self, tensor: Tensor) -> str | None:
        """Return the name of ``tensor``; None if it is no parameter or buffer of the models."""
        return self._tensors.get(id(tensor))

    def of_memory(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter or buffer whose memory contains the first byte of ``tensor``, or None."""
        name = self.of_tensor(tensor)
        if name is not None:
            return name
        return next((self.of_tensor(known) for known in self.tensors if begins_within(tensor, known)), None)


class ModuleStack(threading.local):
    """The modules whose forward runs in this thread, outermost first, each with an object that belongs to the call."""

    def __init__(self) -> None:
        """Start with no module."""
        self.calls: list[tuple[nn.Module, Any]] = []

    def push(self, module: nn.Module, own: Any) -> None:
        """Add ``module``, whose forward begins, with the object ``own``."""
        self.calls.append((module, own))

    def pop(self, module: nn.Module) -> Any:
        """Remove ``module``, whose forward has ended, and those inside it; return its object, or None."""
        for i in reversed(range(len(self.calls))):
            begun, own = self.calls[i]
            if begun is module:
                del self.calls[i:]
                return own
        return None
