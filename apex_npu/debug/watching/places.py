# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where an operator is called: the line of the user's code, and the module by its name in the model."""

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
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apex_npu.backends._torch_private import autograd_node, privateuse1_device_type

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OWN = os.path.join(Path(__file__).parents[2], "")
_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGES = tuple(
    os.path.join(folder, "") for folder in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
) + tuple(os.path.join(folder, "") for folder in site.getsitepackages())

# What works on gradients and parameters after backward: no operator of the user's forward or backward.
_OPTIMIZERS = (_TORCH + "optim", _OWN + "optimizers", _OWN + "amp/master_params.py")
_AMP = tuple(_TORCH + part for part in ("nn/utils/clip_grad.py", "amp/grad_scaler.py")) + tuple(
    _OWN + part for part in ("amp", "fusion", "distributed", "debug")
)
# What calls a model by itself, as to run a forward once more: the lines that call it are not those of its operators.
_CALLING_MODELS = (_OWN + "debug/overflow/forwards.py", _OWN + "debug/model_report/report.py")
# These call the user's functions, or are part of the graph.
_PART_OF_THE_GRAPH = tuple(_OWN + part for part in ("amp/scale_loss.py", "amp/user_casts.py"))


class Caller(Enum):
    """What calls an operator where no line of the user's does."""

    OPTIMIZER = auto()
    AMP = auto()
    ENGINE = auto()
    DEBUG = auto()


@dataclass(frozen=True)
class Place:
    """A line of code; that of an installed package with the ``script``'s own line that has led to it."""

    file: str
    line: int
    function: str
    script: Place | None = None

    @property
    def source(self) -> str:
        """The text of the line; empty where the file cannot be read."""
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
def _folder_of_device(device_type: str) -> str:
    """The package of an out-of-tree device, whose operators may be written in Python."""
    module = getattr(torch, device_type, None)
    package = sys.modules.get(getattr(module, "__name__", "").partition(".")[0])
    file = getattr(package, "__file__", None)
    return _TORCH if file is None else os.path.join(os.path.dirname(file), "")


@functools.cache
def _kind_of(file: str, function: str) -> Caller | bool:
    """True: a file of the user's; False: one of a library, which is passed over."""
    if file.startswith(_TORCH) and function == "_engine_run_backward":
        return Caller.ENGINE
    if file in _CALLING_MODELS:
        return Caller.DEBUG
    if file.startswith(_OPTIMIZERS):
        return Caller.OPTIMIZER
    if file.startswith(_AMP) and not file.startswith(_PART_OF_THE_GRAPH):
        return Caller.AMP
    if file.startswith((_TORCH, _OWN, _folder_of_device(privateuse1_device_type()), "<")):
        return False
    return file.startswith(_PACKAGES) or not file.startswith(_LIBRARY)


def calling_line(frames: int = 2) -> Place | Caller | None:
    """The innermost line of the user's that has called the operator; None: there is no line.

    Args:
        frames: How many to pass over; 2 where a dispatch mode asks.
    """
    frame: Any = inspect.currentframe()
    for _ in range(frames):
        frame = frame.f_back
    while frame is not None:
        code = frame.f_code
        kind = _kind_of(code.co_filename, code.co_name)
        if kind is True:
            script = _script_line(frame.f_back) if code.co_filename.startswith(_PACKAGES) else None
            return Place(code.co_filename, frame.f_lineno, code.co_name, script)
        if kind is not False:
            return kind
        frame = frame.f_back
    return None


def _script_line(frame: Any) -> Place | None:
    """The innermost line that is of no package, among ``frame`` and what has called it; None: backward has."""
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        kind = _kind_of(file, function)
        if kind is Caller.ENGINE:
            return None
        if kind is True and not file.startswith(_PACKAGES):
            return Place(file, frame.f_lineno, function)
        frame = frame.f_back
    return None


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _all_names(names: dict[int, list[str]]) -> dict[int, str]:
    return {key: "=".join(dict.fromkeys(found)) for key, found in names.items()}


def begins_within(tensor: Tensor, other: Tensor) -> bool:
    """Whether the memory of ``tensor`` begins in that of ``other``."""
    if other.layout != torch.strided or other.device != tensor.device or not tensor.data_ptr():
        return False
    return other.data_ptr() <= tensor.data_ptr() < other.data_ptr() + other.nbytes


class Names:
    """The names of the modules, parameters and buffers of some models; those that are shared have several.

    Attributes:
        tensors: The parameters and buffers.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """With several models names begin with ``models[i].``."""
        modules: dict[int, list[str]] = {}
        tensors: dict[int, list[str]] = {}
        self.tensors: list[Tensor] = []
        self._models = list(models)  # as long as they live, no other object has their ids
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
        """Its name; None where it belongs to none of the models."""
        return self._modules.get(id(module))

    def of_tensor(self, tensor: Tensor) -> str | None:
        """Its name; None where it is no parameter or buffer of the models."""
        return self._tensors.get(id(tensor))

    def of_memory(self, tensor: Tensor) -> str | None:
        """The name of the parameter or buffer whose memory ``tensor`` begins in."""
        name = self.of_tensor(tensor)
        if name is not None:
            return name
        return next((self.of_tensor(known) for known in self.tensors if begins_within(tensor, known)), None)


class ModuleStack(threading.local):
    """The modules whose forward runs in this thread, outermost first."""

    def __init__(self) -> None:
        """None so far."""
        self.modules: list[nn.Module] = []
        self._nodes: list[Any] = []

    def push(self, module: nn.Module) -> None:
        """The forward of ``module`` begins."""
        self.modules.append(module)
        self._nodes.append(autograd_node())

    @property
    def node(self) -> Any:
        """The node of the graph that backward was at where the innermost forward began; None: it began outside."""
        return self._nodes[-1] if self._nodes else None

    def pop(self, module: nn.Module) -> None:
        """It has ended, and so have those inside of it that an exception has ended."""
        for i in reversed(range(len(self.modules))):
            if self.modules[i] is module:
                del self.modules[i:], self._nodes[i:]
                break
