# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The API before ``amp.initialize``: ``amp.init()`` and the handle that it returns."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.amp.policy import resolve
from apex_npu.amp.scale_loss import scale_loss
from apex_npu.amp.session import Session, current, disable_casts, install
from apex_npu.amp.user_casts import registered_patches
from apex_npu.autocast.casting import CastHandle
from apex_npu.compat.amp.opt import OptimWrapper

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "init", "scale_loss"]


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Enable O1's casts for the accelerator, or for the CPU without one. Prefer ``amp.initialize``.

    The handle stays current until the next ``init`` or ``initialize``. ``enable_caching`` and ``verbose`` have no
    effect: torch does the casts, and caches them only in the forward of models given to ``amp.initialize``.

    Args:
        enabled: If False, nothing is cast and the handle passes everything through.
        loss_scale: The loss scale of the optimizers that the handle wraps: "dynamic" or a positive number.
        enable_caching: Accepted for compatibility.
        verbose: Accepted for compatibility.
        allow_banned: Run ``binary_cross_entropy`` in float instead of refusing it.

    Example::

        >>> handle = amp.init()
        >>> optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with optimizer.scale_loss(loss_fn(model(input), target)) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
    """
    if not enabled:
        return NoOpHandle()
    policy = replace(resolve("O1", loss_scale=loss_scale), allow_banned=allow_banned)
    session = Session(policy, [], verbosity=2 if verbose else 1)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    session.casts.device_types = ("cpu" if accelerator is None else accelerator.type,)
    session.patches = registered_patches(session.policy)
    install(session)
    return AmpHandle(session, has_cache=enable_caching)


class AmpHandle:
    """A handle on the casts of a session; without a session there are none."""

    def __init__(self, session: Session | None, has_cache: bool = True) -> None:
        self._session = session
        self._casts: CastHandle | None = None if session is None else session.casts
        self.has_cache = has_cache
        self.cache: dict[Any, Any] = {}  # torch keeps the cached casts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AmpHandle) and other._session is self._session

    def __hash__(self) -> int:
        return id(self._session)

    def is_active(self) -> bool:
        """True while functions are cast: not when the handle is inactive or replaced, nor inside ``disable_casts``."""
        return (
            current() is self._session
            and self._casts is not None
            and self._casts.active
            and any(map(torch.is_autocast_enabled, self._casts.device_types))
        )

    def _disable_casts(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._casts is None else self._casts.disabled()

    def _deactivate(self) -> None:
        """Remove the casts permanently."""
        if self._casts is not None:
            self._casts.undo()

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Give ``optimizer`` a loss scale for each of ``num_loss`` losses per step."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> Any:
        """Raise a RuntimeError: this method of the old API is not supported."""
        raise RuntimeError(
            "The old Amp API is no longer supported. Either call `model, optimizer = amp.initialize(model, optimizer, "
            'opt_level="O1")` and then `with amp.scale_loss(loss, optimizer) as scaled_loss`, or `optimizer = '
            "handle.wrap_optimizer(optimizer)` and then `with optimizer.scale_loss(loss) as scaled_loss`"
        )

    def _clear_cache(self) -> None:
        torch.clear_autocast_cache()

    def remove_cache(self, param: Tensor) -> None:
        """Do nothing: a cached cast ends with the forward that made it."""

    @property
    def verbose(self) -> bool:
        """The ``verbose`` that the session was made with, as a boolean."""
        return self._session is not None and self._session.verbosity > 1


class NoOpHandle(AmpHandle):
    """The handle that ``init(enabled=False)`` returns; it passes everything through."""

    def __init__(self) -> None:
        super().__init__(None, has_cache=False)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Yield ``loss`` as it is."""
        return nullcontext(loss)
