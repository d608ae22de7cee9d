# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``OpenCheck``: a look for overflow that can be had for nothing with the next read of the gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class OpenCheck:
    """What a ``scale_loss`` block has left open: whether its gradients have overflowed, and what follows from that.

    Gradients that ``fuse_unscale`` holds need not be written behind the block, so that looking at them would be a pass
    of its own. Whoever takes their norm next answers the question, too; else whoever first wants to know looks.
    """

    def __init__(self, look: Callable[[], bool], decide: Callable[[bool], None]) -> None:
        """``look``: reads every gradient, True where one is inf or nan. ``decide``: told that, once."""
        self._look: Callable[[], bool] | None = look
        self._decide = decide

    def close(self, norm: Tensor | None = None) -> None:
        """Have it decided; later calls do nothing.

        Args:
            norm: Of all these gradients, and inf or nan where one of them is; None: nobody has taken it.
        """
        if self._look is None:
            return
        # A norm can overflow where no gradient has.
        found_inf = self._look() if norm is None or not norm.isfinite() else False
        self._look = None
        self._decide(found_inf)
