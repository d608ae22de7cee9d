# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Layers of ``torch_npu.contrib.module`` that public scripts name."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from npu_simulator.operators import dropout_with_byte_mask


def functional_dropout(input1: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.dropout_with_byte_mask``."""
    if inplace:
        raise ValueError("dropout probability has no-inplace computing.")
    return dropout_with_byte_mask(input1, p, training)


class DropoutWithByteMask(nn.Module):
    """Dropout on npu tensors."""

    def __init__(self, p: float = 0.5, inplace: bool = False, max_seed: int = 2**10 - 1) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        self.p, self.inplace = p, inplace

    def forward(self, input1: Tensor) -> Tensor:
        return functional_dropout(input1, self.p, self.training, self.inplace)


class NpuPreGenDropout(nn.Dropout):
    """Dropout with masks that an NPU draws in advance, once ``enable_dropout_ensemble`` has been called.

    torch_npu's also drops where the module does not train.
    """

    enabled: ClassVar[set[float]] = set()
    prob: ClassVar[set[float]] = set()

    def __init__(self, p: float, module_name: Any = None) -> None:
        super().__init__(p)
        self.module_name = module_name
        self.prob.add(p)

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.p not in {0, *self.enabled}:
            raise RuntimeError(
                f"NpuPreGenDropout({self.p}) has no mask: call NpuPreGenDropout.enable_dropout_ensemble(model) before"
            )
        return super().forward(input)

    @classmethod
    def enable_dropout_ensemble(cls, model: nn.Module) -> None:
        """Let all instances that there are by now drop."""
        cls.enabled |= cls.prob
