# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Moving averages of a model's weights, in flat buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from apex_npu.autocast.float32_view import float32_tensors
from apex_npu.distributed.fully_sharded import reshard
from apex_npu.fusion.flat_buffer import FlatBuffer, plan
from apex_npu.fusion.shards import is_sharded, local_part, sharded_like
from apex_npu.ops import wide_dtype
from apex_npu.optimizers.checks import check_dtype, check_unit_interval


class FusedEMA:
    """Exponential moving averages of a model's floating-point and complex parameters and buffers.

    ::

        average ← decay · average + (1 − decay) · value

    Averages are float32 for float16 and bfloat16 tensors, else of the tensor's dtype. Averages of one device and dtype
    are in one flat buffer and updated together. If amp keeps float32 values of parameters, these are averaged. The
    model is not moved. Tensors of integers (batch counts) are copied. For sharded parameters (DTensor) each process
    averages its part, and averages are DTensors. Polyak & Juditsky 1992, https://doi.org/10.1137/0330046.

    Args:
        model: The model to average; averages start at its present weights.
        decay: The factor of the previous average, in [0, 1].

    Raises:
        ValueError: ``decay`` is out of range.
        TypeError: A tensor is float64 on an NPU.

    Example::

        >>> optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
        >>> ema = optimizers.FusedEMA(model, decay=0.999)
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()
        >>> ema.update()
        >>> with ema.swapped():  # evaluated with the averages
        ...     output = model(input)
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        check_unit_interval("decay value", "decay", decay, with_one=True)
        self.model = model
        self.decay = decay
        self._averages: dict[str, Tensor] = {}
        by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        tensors = self._tensors()
        for name, t in tensors.items():
            if t.dtype == torch.float64:
                check_dtype(f"FusedEMA: {name}", t)
            by_kind.setdefault((local_part(t).device, wide_dtype(t.dtype)), []).append(name)
        for (device, dtype), names in by_kind.items():
            shapes = [torch.empty_like(local_part(tensors[name]), device="meta", dtype=dtype) for name in names]
            planned = plan(shapes)
            views = FlatBuffer(planned.layout.total_numel, dtype, device).views_like(shapes, planned.offsets)
            self._averages.update((n, sharded_like(v, tensors[n])) for n, v in zip(names, views, strict=True))
        self._has_shards = any(map(is_sharded, self._averages.values()))
        self._copy(float32_tensors(model), self._averages)

    def _tensors(self) -> dict[str, Tensor]:
        reshard(self.model)
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: t.detach() for name, t in named}

    @staticmethod
    @torch.no_grad()
    def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
        for name, t in target.items():
            t.copy_(source[name])

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the model's present weights.

        Raises:
            RuntimeError: The model has lost or gained tensors, or a tensor has changed its shape, or has been sharded.
        """
        if self._has_shards:
            reshard(self.model)
        tensors = float32_tensors(self.model)
        self._check(tensors)
        floating = [name for name, t in tensors.items() if _is_averaged(t)]
        averages = [local_part(self._averages[name]) for name in floating]
        values = [local_part(tensors[name]).to(a.dtype) for name, a in zip(floating, averages, strict=True)]
        if averages:
            torch._foreach_lerp_(averages, values, 1.0 - self.decay)
        self._copy(tensors, {name: t for name, t in self._averages.items() if not _is_averaged(t)})

    def _check(self, tensors: dict[str, Tensor]) -> None:
        kinds, mine = ({name: (t.shape, is_sharded(t)) for name, t in of.items()} for of in (tensors, self._averages))
        if kinds != mine:
            odd = sorted(name for name in kinds.keys() | mine.keys() if kinds.get(name) != mine.get(name))
            raise RuntimeError(f"these tensors do not fit the averages: {', '.join(odd)}; make a new FusedEMA")

    @contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """Give the model the averages as weights inside the context, and restore its own weights at the end.

        Weights and their float32 values are written in place, so that fused and other optimizers are unaffected.
        """
        reshard(self.model)
        own = {name: t.clone() for name, t in float32_tensors(self.model).items()}
        try:
            self._write(self._averages)
            yield self.model
        finally:
            reshard(self.model)  # drops gathered weights, which are averages
            self._write(own)

    def _write(self, values: dict[str, Tensor]) -> None:
        """Write float32 ``values`` to the model's tensors."""
        self._copy(values, float32_tensors(self.model))
        float32_tensors(self.model)  # loads what has been written to copies of 16-bit tensors

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"decay": float, "averages": {name: tensor}}``, with the model's names."""
        return {"decay": self.decay, "averages": dict(self._averages)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the decay and the averages of a dict that ``state_dict()`` has returned.

        Raises:
            RuntimeError: Names or shapes do not fit, or only one of state dict and model is sharded (DTensor); nothing
                has been loaded.
            ValueError: ``decay`` is out of range; nothing has been loaded.
        """
        check_unit_interval("decay value", "decay", state_dict["decay"], with_one=True)
        self._check(state_dict["averages"])
        self.decay = state_dict["decay"]
        self._copy(state_dict["averages"], self._averages)


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
