# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tensors of a model in float32, as torch's ``AveragedModel`` needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from apex_npu.backends.patching import Undo, patch_attribute
from apex_npu.ops import LOW_PRECISION


def float32_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of ``model`` by name; low-precision ones as ``model.state_dict()`` shows them.

    If amp keeps a float32 value of a parameter, the tensor has that value.
    """
    tensors = {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    low = [name for name, t in tensors.items() if t.dtype in LOW_PRECISION]
    shown = model.state_dict() if low else {}
    return {**tensors, **{name: shown[name] for name in low if name in shown}}


class _Float32View:
    """The part of a model that ``AveragedModel.update_parameters`` reads, in float32."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = float32_tensors(model)

    def parameters(self) -> Iterator[Tensor]:
        return iter([self._tensors[name] for name, _ in self._model.named_parameters()])

    def buffers(self) -> Iterator[Tensor]:
        return iter([self._tensors[name] for name, _ in self._model.named_buffers()])


def average_in_float32(undo: Undo) -> None:
    """Make torch's ``AveragedModel``, a float32 copy of a model that amp has cast, average float32 values.

    Args:
        undo: Receives the callback that restores torch's method.
    """

    def in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
        def update_parameters(self: AveragedModel, model: nn.Module) -> Any:
            low = any(t.dtype in LOW_PRECISION for t in [*model.parameters(), *model.buffers()])
            return original(self, _Float32View(model) if low else model)

        return update_parameters

    patch_attribute(undo, AveragedModel, "update_parameters", in_float32)
