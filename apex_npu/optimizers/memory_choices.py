# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The memory of a parameter for each choice of level and format; docs/memory.md explains the choices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from apex_npu.ops.state_codec import SCALE_NUMEL
from apex_npu.optimizers.base import FusedOptimizer
from apex_npu.optimizers.state_formats import StateFormats

_BF16 = "state_dtype=torch.bfloat16"
_INT8 = 'state_dtype="int8"'
_BYTE = 'store_param_remainders="int8"'
_WIDE = "store_param_remainders=False"
_FOLDED = "fuse_unscale=True"
_ON_HOST = 'state_device="cpu"'


@dataclass(frozen=True)
class MemoryChoice:
    """Bytes for each element of a parameter, without activations, between a block and the step that follows.

    They are those of the model's device.

    Attributes:
        name: The options of this choice.
        model: The parameter of the model.
        gradient: Its gradient.
        master: Its float32 value, or the remainder of 16 or 8 bits.
        state: The optimizer's state.
    """

    name: str
    model: float
    gradient: float
    master: float
    state: float

    def parts(self) -> dict[str, float]:
        """Return the bytes by name, as tables show them."""
        names = ("model", "gradient", "float32 value", "state")
        values = (self.model, self.gradient, self.master, self.state)
        return dict(zip(names, values, strict=True))

    @property
    def total(self) -> float:
        """The sum of all parts, in bytes."""
        return sum(self.parts().values())


def memory_choices(optimizer: FusedOptimizer) -> list[MemoryChoice]:
    """Return the choices for the rule of ``optimizer``, with the states that its first param group has.

    One number for each parameter, such as a count of steps, is left out.

    Example::

        >>> adam = optimizers.NpuFusedAdam([torch.nn.Parameter(torch.zeros(1))])
        >>> [choice.total for choice in memory_choices(adam)]
        [16, 16, 14, 10, 8.0625, 7.0625, 18, 16, 8, 4]
    """
    names = [name for name in optimizer.state_names(optimizer.param_groups[0]) if name not in optimizer.scalar_states]

    def state(state_dtype: torch.dtype | str | None = None) -> float:
        formats = StateFormats.of(optimizer.encodable_states, state_dtype=state_dtype)
        dtypes = formats.kept_in(names, wider=formats.are_too_narrow(optimizer.param_groups))
        return sum(map(_nbytes, (dtypes.get(name, torch.float32) for name in names)))

    folded = 2 + (4 if optimizer.widens_grads(optimizer.param_groups[0]) else 0)
    found = [MemoryChoice("O0", 4, 4, 0, state())]
    if not optimizer.encodable_states or optimizer.reads_param_grads:
        wide = MemoryChoice("O2, O5", 2, 4, 4, state())
        return [*found, wide, MemoryChoice(f"O2, O5, {_FOLDED}", 2, folded, 4, state())]
    found.append(MemoryChoice("O2, O5", 2, 4, 2, state()))
    found.append(MemoryChoice(f"O2, O5, {_FOLDED}", 2, folded, 2, state()))
    if state(torch.bfloat16) < state():
        found.append(MemoryChoice(f"O2, O5, {_FOLDED}, {_BF16}", 2, folded, 2, state(torch.bfloat16)))
    if state("int8") < state(torch.bfloat16):
        found.append(MemoryChoice(f"O2, O5, {_FOLDED}, {_INT8}", 2, folded, 2, state("int8")))
        found.append(MemoryChoice(f"O2, O5, {_FOLDED}, {_INT8}, {_BYTE}", 2, folded, 1, state("int8")))
    found.append(MemoryChoice(f"O2, O5, {_WIDE}", 2, 4, 4, state()))
    found.append(MemoryChoice(f"O2, O5, {_WIDE}, {_FOLDED}", 2, folded, 4, state()))
    options = ["O5, master_weights=False, stochastic_rounding=True"]
    options += [_BF16] if state(torch.bfloat16) < state() else []
    found.append(MemoryChoice(", ".join(options), 2, 2, 0, state(torch.bfloat16)))
    found.append(MemoryChoice(f"O2, O5, {_FOLDED}, {_ON_HOST}", 2, 2, 0, 0))
    return found


def _nbytes(dtype: torch.dtype) -> float:
    return dtype.itemsize + (4 / SCALE_NUMEL if dtype.itemsize == 1 else 0)
