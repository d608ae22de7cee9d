# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Float32 copies of low-precision tensors in the result of ``state_dict()``, and a script's writes to them.

In torch the tensors of a state dict share memory with the model, so that ``state_dict[name].copy_(value)`` loads a
value.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class ShownCopy:
    """A float32 copy of one tensor of a model.

    Attributes:
        value: The copy, which shares memory and version counter with the tensors given to scripts. None after these
            tensors have been deleted unwritten.
    """

    def __init__(self, value: Tensor, tensor: Tensor) -> None:
        """Make a copy from ``value``, the model's ``tensor`` in float32."""
        self.value: Tensor | None = value
        self._users = 0
        self.note(tensor)

    def note(self, tensor: Tensor) -> None:
        """Note that the model's ``tensor`` and the copy agree."""
        assert self.value is not None
        self._version, self._model_version = self.value._version, tensor._version

    @property
    def is_written(self) -> bool:
        """True if a script has written to the copy."""
        return self.value is not None and self.value._version != self._version

    def is_outdated(self, tensor: Tensor) -> bool:
        """Return whether the model's ``tensor`` has been written since ``note``."""
        return tensor._version != self._model_version

    def is_same(self, value: Tensor, tensor: Tensor) -> bool:
        """Return whether the copy still equals ``value``, the model's ``tensor`` in float32, and can be reused."""
        if self.value is None or self.is_outdated(tensor) or self.value.device != value.device:
            return False
        return torch.equal(self.value, value)

    def show(self) -> Tensor:
        """Return a tensor for a script."""
        assert self.value is not None
        shown = self.value.detach()
        self._users += 1
        weakref.finalize(shown, self._end_use).atexit = False
        return shown

    def _end_use(self) -> None:
        self._users -= 1
        self.let_go()

    def let_go(self) -> None:
        """Free the copy if no script holds it and its writes have been loaded."""
        if not self._users and not self.is_written:
            self.value = None
