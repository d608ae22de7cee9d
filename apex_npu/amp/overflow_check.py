# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``OverflowCheck``: a check for overflow that a block leaves open."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from apex_npu.amp.optimizer_grads import any_raised
from apex_npu.backends import HostCopy
from apex_npu.backends._torch_private import disable_dynamo


class OverflowCheck:
    """The check that a ``scale_loss`` block has deferred, and the decision that follows from it.

    With ``fuse_unscale`` a block does not write gradients, so that checking them would be a separate pass. A finite
    norm shows that there is no overflow. Otherwise the check runs when it is first needed.

    If the device can skip the step, the host does not wait for the result. The device reads ``flag``, and the host
    later reads a copy.

    Attributes:
        thread: The identifier of the thread that ran the block.
        on_device: The device can skip the step that follows.
        flag: One float32 number on the device, not 0 if a gradient is inf or NaN; None: not checked yet.
        lock: Held while the decision is made.
    """

    def __init__(
        self, look: Callable[[], Sequence[Tensor]], decide: Callable[[bool], None], *, on_device: bool = False
    ) -> None:
        """Make an open check.

        Args:
            look: Reads every gradient, and returns the argument of ``any_raised``.
            decide: Called once, with True if a gradient is inf or NaN, else False.
            on_device: The device can skip the step that follows.
        """
        self.thread = threading.get_ident()
        self.on_device = on_device
        self.flag: Tensor | None = None
        self._arriving: HostCopy | None = None
        # Each is released after use, because it refers to gradients, parameters and buffers.
        self._look: Callable[[], Sequence[Tensor]] | None = look
        self._decide: Callable[[bool], None] | None = decide
        self.lock = threading.RLock()  # another thread may read the loss scale; deciding reads it, too

    @property
    def is_open(self) -> bool:
        """False once the decision is made."""
        return self._decide is not None

    @disable_dynamo
    def start(self, flag: Tensor | None = None) -> Tensor:
        """Start the check on the device without waiting for it. Requires ``on_device``.

        Args:
            flag: The result, if it exists already; None: the gradients are read.

        Returns:
            The attribute ``flag``.
        """
        with self.lock:
            if self.flag is None:
                if flag is None:
                    assert self._look is not None
                    (flag,) = self._look()
                self.flag, self._arriving = flag, HostCopy(flag)
                self._look = None
            return self.flag

    @disable_dynamo
    def resolve(self, norm: Tensor | None = None, look: Callable[[], Sequence[Tensor]] | None = None) -> None:
        """Make the decision; later calls do nothing.

        Args:
            norm: The norm of all gradients, which is inf or NaN if one of them is; None: not computed.
            look: Replaces the function that reads every gradient, if they must still be read.
        """
        with self.lock:
            decide = self._decide
            if decide is None:
                return
            found_inf = self._result(norm, look)
            self._decide = self._look = self._arriving = None
            decide(found_inf)

    def _result(self, norm: Tensor | None, look: Callable[[], Sequence[Tensor]] | None) -> bool:
        if self._arriving is not None:
            return bool(self._arriving)
        if norm is not None and math.isfinite(norm):
            return False
        look = look or self._look  # a norm can overflow although no gradient has
        assert look is not None
        flags = look()
        if self.on_device:
            self.flag = flags[0]  # for a step that another thread has already begun
        return any_raised(flags)
