# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lets PyTorch's torchvision for CUDA be imported beside a torch for the CPU, without its C++ operators.

There is no torchvision for the CPU on the package index. Its Python part only insists on two operators being declared,
of which nothing here is called. A .pth file imports this at the start of the interpreter.
"""

import importlib.util
import sys


class _DeclareOperators:
    """Finds no module: it is asked when torchvision, which has imported torch, is about to register fakes."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision._meta_registrations":
            import torch

            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    torch.library.define(f"torchvision::{operator}", schema)


if importlib.util.find_spec("torchvision") is not None:
    sys.meta_path.insert(0, _DeclareOperators)
