# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tensors of a model in float32, as torch's ``AveragedModel`` needs them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from apex_npu.backends.patching import patch_attribute
from apex_npu.ops import LOW_PRECISION


def float32_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of ``model`` by name; low-precision ones as ``model.state_dict()`` shows them.

    If amp keeps a float32 value of a parameter, the tensor has that value.
    """
    tensors = {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    low = [name for name, t in tensors.items() if t.dtype in LOW_PRECISION]
    shown = model.state_dict() if low else {}
    return {**tensors, **{name: shown[name] for name in low if name in shown}}


def average_in_float32(undo: ExitStack) -> None:
    """Make torch's ``AveragedModel``, a float32 copy of a model that amp has cast, average float32 values.

    Args:
        undo: Receives the callback that restores torch's method.
    """

    def in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
        def update_parameters(self: AveragedModel, model: nn.Module) -> Any:
            if not any(t.dtype in LOW_PRECISION for t in [*model.parameters(), *model.buffers()]):
                return original(self, model)
            tensors = float32_tensors(model)
            params = [tensors[name] for name, _ in model.named_parameters()]
            buffers = [tensors[name] for name, _ in model.named_buffers()]
            # The part of a model that torch's method reads.
            return original(self, SimpleNamespace(parameters=lambda: params, buffers=lambda: buffers))

        return update_parameters

    patch_attribute(undo, AveragedModel, "update_parameters", in_float32)
