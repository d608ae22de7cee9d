# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``DeferredInfCheck``: whether gradients have overflowed, where the check is deferred or left to the device."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from apex_npu.amp.grad_groups import any_raised
from apex_npu.backends import HostCopy
from apex_npu.backends._torch_private import disable_dynamo


class DeferredInfCheck:
    """The check that a ``scale_loss`` block has deferred, and what follows from it.

    Gradients that ``fuse_unscale`` leaves scaled need not be written at the end of a block, so that checking them would
    be a pass of its own. Their norm gives the same result; otherwise the check runs when it is first needed.

    Where the device can skip the step, the host does not wait for the result either: the device reads ``flag``, and the
    host reads a copy of it when that has arrived.

    Attributes:
        thread: The identifier of the thread whose block it was.
        on_device: The device can skip the step that follows.
        flag: On the device, one float32 number, not 0 where a gradient is inf or NaN; None: not checked yet.
    """

    def __init__(
        self, look: Callable[[], Sequence[Tensor]], decide: Callable[[bool], None], *, on_device: bool = False
    ) -> None:
        """Of gradients that have not been checked.

        Args:
            look: Reads every gradient; gives what ``any_raised`` takes.
            decide: Called once, with whether one of them is inf or NaN.
            on_device: See the attributes.
        """
        self.thread = threading.get_ident()
        self.on_device = on_device
        self.flag: Tensor | None = None
        self._arriving: HostCopy | None = None
        # Each is released when it is done: the check refers to gradients, parameters, buffers.
        self._look: Callable[[], Sequence[Tensor]] | None = look
        self._decide: Callable[[bool], None] | None = decide
        self._done: Callable[[], None] | None = None
        self._lock = threading.RLock()  # another thread may read the loss scale; deciding reads it, too

    @property
    def is_open(self) -> bool:
        """False once it is decided."""
        return self._decide is not None

    @disable_dynamo
    def start(self, flag: Tensor | None = None) -> Tensor:
        """Have the device check, without a wait; only where it is ``on_device``.

        Args:
            flag: The answer, where it is there already; None: the gradients are read.

        Returns:
            ``flag``, of the attributes.
        """
        with self._lock:
            if self.flag is None:
                if flag is None:
                    assert self._look is not None
                    (flag,) = self._look()
                self.flag, self._arriving = flag, HostCopy(flag)
                self._look = None
            return self.flag

    def add_done_callback(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when it has been decided: at once, if another thread has resolved it meanwhile."""
        with self._lock:
            if self.is_open:
                self._done = call
                return
        call()

    @disable_dynamo
    def resolve(self, norm: Tensor | None = None, look: Callable[[], Sequence[Tensor]] | None = None) -> None:
        """Have it decided; later calls do nothing.

        Args:
            norm: Of all these gradients, and inf or NaN where one of them is; None: it has not been taken.
            look: Another way to read every gradient, if that has yet to be done.
        """
        with self._lock:
            decide = self._decide
            if decide is None:
                return
            found_inf = self._result(norm, look)
            self._decide = self._look = self._arriving = None
            try:
                decide(found_inf)
            finally:  # it may warn, and a warning be an error
                done, self._done = self._done, None
                if done is not None:
                    done()

    def _result(self, norm: Tensor | None, look: Callable[[], Sequence[Tensor]] | None) -> bool:
        if self._arriving is not None:
            return bool(self._arriving)
        if norm is not None and math.isfinite(norm):
            return False
        look = look or self._look  # a norm can overflow where no gradient has
        assert look is not None
        flags = look()
        if self.on_device:
            self.flag = flags[0]  # for a step that has begun already, in another thread
        return any_raised(flags)
