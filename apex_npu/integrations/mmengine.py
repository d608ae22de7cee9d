# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""MMEngine: the fused optimizers in its registry, and amp in its ``ApexOptimWrapper``, once this module is imported.

A config imports it by ``custom_imports = dict(imports=["apex_npu.integrations.mmengine"])``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

import apex_npu
from apex_npu import amp
from apex_npu.autocast.float32_view import float32_tensors
from apex_npu.backends.requirements import require
from apex_npu.integrations.optimizer_names import optimizer_classes

require(__name__, "mmengine", "0.10.7")

# MMEngine looks for apex when it is imported.
apex_npu.install_as_apex()

from mmengine.model import BaseAveragedModel  # noqa: E402
from mmengine.optim.optimizer import apex_optimizer_wrapper  # noqa: E402
from mmengine.registry import OPTIMIZERS  # noqa: E402


def register() -> None:
    """Put the fused optimizers into MMEngine's ``OPTIMIZERS``, and amp into its ``ApexOptimWrapper``. Idempotent.

    Averages of MMEngine (``EMAHook``) are float32: they read float32 values where amp keeps them.

    Importing this module calls it. Optimizers of the same names that MMEngine has taken from torch_npu are replaced.
    """
    for name, cls in optimizer_classes().items():
        OPTIMIZERS.register_module(name=name, module=cls, force=True)
    if apex_optimizer_wrapper.apex_amp is None:  # MMEngine was imported before this module
        apex_optimizer_wrapper.apex_amp = amp
    if BaseAveragedModel.update_parameters is not _update_parameters:
        BaseAveragedModel.update_parameters = _update_parameters


class _Float32Model:
    """A view of a model for MMEngine's averages: float32 values in place of the parameters that amp has cast."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = float32_tensors(model)

    def state_dict(self) -> dict[str, Any]:
        return self._model.state_dict()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._tensors[name]) for name, _ in self._model.named_parameters())

    def buffers(self) -> Iterator[Tensor]:
        return (self._tensors[name] for name, _ in self._model.named_buffers())


_average = BaseAveragedModel.update_parameters


def _update_parameters(self: BaseAveragedModel, model: nn.Module) -> None:
    _average(self, _Float32Model(model))


register()
