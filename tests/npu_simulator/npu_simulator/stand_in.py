# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The stand-in for ``torch_npu`` in ``sys.modules``: the names that scripts and libraries for Ascend use."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from npu_simulator import formats, modules, npu, operators

VERSION = "0.0.0+simulated"


def install() -> None:
    """Put the modules where ``import torch_npu`` and its relatives find them."""
    package = _module("torch_npu", npu=npu, __version__=VERSION, Format=formats.Format)
    for name in ("get_npu_format", "get_storage_size", "npu_format_cast", "npu_format_cast_", "empty_with_format"):
        setattr(package, name, getattr(formats, name))
    for name, operator in operators.OPERATORS.items():
        setattr(package, name, operator)
    package.npu_dtype_cast = lambda tensor, dtype: tensor.to(dtype)
    sys.modules["torch_npu.npu"] = npu
    package.contrib = _module("torch_npu.contrib")
    layers = {"DropoutWithByteMask": modules.DropoutWithByteMask, "NpuPreGenDropout": modules.NpuPreGenDropout}
    package.contrib.module = _module("torch_npu.contrib.module", **layers)
    for name in ("ensemble_dropout", "npu_modules"):
        setattr(package.contrib.module, name, _module(f"torch_npu.contrib.module.{name}", **layers))
    # torch_npu's deprecated names in torch, which public scripts use.
    torch.nn.DropoutWithByteMask = modules.DropoutWithByteMask  # type: ignore[attr-defined]
    torch.nn.functional.dropout_with_byte_mask = modules.functional_dropout  # type: ignore[attr-defined]
    operators.take_float32_biases()
    # `from torch_npu.contrib import transfer_to_npu` requests the redirection, so that it cannot be made here.
    sys.meta_path.append(_TransferFinder())


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name, "The npu_simulator's stand-in for this module of torch_npu.")
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


class _TransferFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Redirects torch.cuda to npu when the module that requests it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch_npu.contrib.transfer_to_npu":
            return None
        return importlib.machinery.ModuleSpec(fullname, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        from npu_simulator import transfer

        module.handle = transfer.redirect_cuda()  # type: ignore[attr-defined]
