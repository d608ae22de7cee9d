# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``OpenCheck``: whether gradients have overflowed, where that is looked for late, or only the device knows so far."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from apex_npu._extension import disable_dynamo
from apex_npu.amp.gradients import any_raised
from apex_npu.backends import HostCopy


class OpenCheck:
    """What a ``scale_loss`` block has left open: whether its gradients have overflowed, and what follows from that.

    Gradients that ``fuse_unscale`` holds need not be written behind the block, so that looking at them would be a pass
    of its own. Whoever takes their norm next answers the question, too; else whoever first wants to know looks.

    Where the device can skip the step by itself, the host need not wait for the answer either: the device goes by
    ``flag``, and the host reads a copy of that when it has long arrived.

    Attributes:
        thread: The identifier of the one whose block it was.
        masks: The device can skip the step that follows.
        flag: On the device, one float32 number, not 0 where a gradient is inf or nan; None: nobody has looked yet.
    """

    def __init__(
        self, look: Callable[[], Sequence[Tensor]], decide: Callable[[bool], None], *, masks: bool = False
    ) -> None:
        """Of gradients that nobody has looked at.

        Args:
            look: Reads every gradient; gives what ``any_raised`` takes.
            decide: Told, once, whether one of them is inf or nan.
            masks: See the attributes.
        """
        self.thread = threading.get_ident()
        self.masks = masks
        self.flag: Tensor | None = None
        self._arriving: HostCopy | None = None
        # Each is let go of when it is done: what looks holds on to gradients, parameters, buffers.
        self._look: Callable[[], Sequence[Tensor]] | None = look
        self._decide: Callable[[bool], None] | None = decide
        self._then: Callable[[], None] | None = None
        self._lock = threading.RLock()  # another thread may ask for the loss scale; deciding asks, too

    @property
    def is_open(self) -> bool:
        """False once it is decided."""
        return self._decide is not None

    @disable_dynamo
    def ask(self, flag: Tensor | None = None) -> Tensor:
        """Have the device know the answer, which nobody waits for; only where it ``masks``.

        Args:
            flag: The answer, where somebody has just had it; None: the gradients are looked at.

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

    def then(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when it has been decided: at once, if another thread has asked meanwhile."""
        with self._lock:
            if self.is_open:
                self._then = call
                return
        call()

    @disable_dynamo
    def close(self, norm: Tensor | None = None, look: Callable[[], Sequence[Tensor]] | None = None) -> None:
        """Have it decided; later calls do nothing.

        Args:
            norm: Of all these gradients, and inf or nan where one of them is; None: nobody has taken it.
            look: Another way to read every gradient, if that has yet to be done.
        """
        with self._lock:
            decide = self._decide
            if decide is None:
                return
            if self._arriving is not None:
                found_inf = bool(self._arriving)
            elif norm is not None and math.isfinite(norm):
                found_inf = False
            else:  # a norm can overflow where no gradient has
                look = look or self._look
                assert look is not None
                flags = look()
                found_inf = any_raised(flags)
                if self.masks:
                    self.flag = flags[0]  # for a step that has begun already, in another thread
            self._decide = self._look = self._arriving = None
            try:
                decide(found_inf)
            finally:  # it may warn, and a warning be an error
                then, self._then = self._then, None
                if then is not None:
                    then()
