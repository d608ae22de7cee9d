# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``DeliveredGrads``: model gradients that have been brought to masters and left in place, as they were then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from apex_npu.fusion import are_same, grads_of, versions_of


class DeliveredGrads:
    """What some model parameters had as gradient when it was brought to their masters."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        """Of ``sources``, nothing so far."""
        self._sources = list(sources)
        self._grads: list[Tensor | None] = []  # empty, or one for each source
        self._versions: list[int] = []

    def note(self) -> None:
        """All that are there now have been delivered."""
        self._grads = grads_of(self._sources)
        self._versions = versions_of(self._grads)

    def note_from(self, former: Iterable[DeliveredGrads]) -> None:
        """What ``former`` know of these sources counts here."""
        known = {
            id(source): (grad, version)
            for one in former
            for source, grad, version in zip(one._sources, one._grads, one._versions, strict=False)
        }
        if known:
            entries = [known.get(id(source), (None, 0)) for source in self._sources]
            self._grads, self._versions = [grad for grad, _ in entries], [version for _, version in entries]

    def forget(self) -> None:
        """None counts as delivered any more."""
        self._grads, self._versions = [], []

    def forget_replaced(self) -> None:
        """Those that have been replaced by others are forgotten; those that have been written are delivered again."""
        if self._grads:
            now = grads_of(self._sources)
            self._grads = [known if known is grad else None for known, grad in zip(self._grads, now, strict=True)]
            self._versions = versions_of(self._grads)

    def cleared(self) -> list[int]:
        """Indices of the sources whose gradient somebody has cleared since: dropped it, or written zeros into it."""
        if not self._grads:
            return []
        now = grads_of(self._sources)
        if are_same(now, self._grads) and versions_of(now) == self._versions:
            return []
        delivered = [i for i, grad in enumerate(self._grads) if grad is not None]
        written: list[tuple[int, Tensor]] = []
        for i in delivered:
            grad = now[i]
            if grad is not None and grad is self._grads[i] and grad._version != self._versions[i]:
                written.append((i, grad))
        # One answer for all: each alone would wait for the device.
        nonzero = torch.stack([grad.any() for _, grad in written]).tolist() if written else []
        zeroed = {i for (i, _), kept in zip(written, nonzero, strict=True) if not kept}
        return [i for i in delivered if now[i] is None or i in zeroed]

    def lack_any(self) -> bool:
        """True where a source has a gradient that has not been delivered."""
        now = grads_of(self._sources)
        known = self._grads or [None] * len(now)
        return any(grad is not None and grad is not before for grad, before in zip(now, known, strict=True))
