# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``OpenCheck``: a look for overflow that can be had for nothing with the next read of the gradients."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from torch import Tensor

from apex_npu._extension import disable_dynamo


class OpenCheck:
    """What a ``scale_loss`` block has left open: whether its gradients have overflowed, and what follows from that.

    Gradients that ``fuse_unscale`` holds need not be written behind the block, so that looking at them would be a pass
    of its own. Whoever takes their norm next answers the question, too; else whoever first wants to know looks.

    Attributes:
        thread: The identifier of the one whose block it was.
    """

    def __init__(self, look: Callable[[], bool], decide: Callable[[bool], None]) -> None:
        """``look``: reads every gradient, True where one is inf or nan. ``decide``: told that, once."""
        self.thread = threading.get_ident()
        # Together, and let go of when done: they know gradients, parameters, buffers.
        self._open: tuple[Callable[[], bool], Callable[[bool], None]] | None = look, decide
        self._lock = threading.RLock()  # another thread may ask for the loss scale; deciding asks, too

    @disable_dynamo
    def close(self, norm: Tensor | None = None) -> None:
        """Have it decided; later calls do nothing.

        Args:
            norm: Of all these gradients, and inf or nan where one of them is; None: nobody has taken it.
        """
        with self._lock:
            if self._open is None:
                return
            look, decide = self._open
            # A norm can overflow where no gradient has.
            found_inf = look() if norm is None or not math.isfinite(norm) else False
            self._open = None
            decide(found_inf)
