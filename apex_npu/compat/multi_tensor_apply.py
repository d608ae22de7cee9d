# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_applier``: the interface to Apex's CUDA kernels, which this package does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """A caller of operators on lists of tensors.

    ``available`` is False, so that scripts fall back to plain torch: the kernels of ``amp_C`` are not part of this
    package. An operator that the caller passes is called with ``chunk_size`` as its first argument.
    """

    available = False
    warned = False
    import_err = ImportError("apex_npu has no amp_C: its optimizers and amp do not need it")

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Raise a RuntimeError, since this package has no ``amp_C``."""
        raise RuntimeError(
            "Attempted to call MultiTensorApply method, but MultiTensorApply is not available: apex_npu has no amp_C. "
            "Check multi_tensor_applier.available first, and use torch._foreach functions if it is False"
        ) from self.import_err

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        """Return ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
