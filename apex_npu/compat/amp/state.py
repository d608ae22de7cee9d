# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``_amp_state``: Apex's shared object, here a live view of the current session."""

from __future__ import annotations

import collections.abc as container_abcs
from collections.abc import Callable
from typing import Any

from apex_npu.amp.optimizer_functions import master_params
from apex_npu.amp.policy import Policy
from apex_npu.amp.scaler import DynamicScaleOptions
from apex_npu.amp.session import Session, current, settings
from apex_npu.compat.amp.handle import AmpHandle
from apex_npu.compat.amp.scaler import LossScaler
from apex_npu.distributed.rank_progress import is_first_rank

__all__ = ["AmpState", "_amp_state", "container_abcs", "master_params", "maybe_print", "warn_or_err"]


# The options of Apex and of Ascend's patch.
_OPTIONS = (
    "enabled", "opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights",
    "loss_scale", "combine_grad", "combine_ddp", "ddp_replica_count", "user_cast_preferred", "check_combined_tensors",
)  # fmt: skip


class OptProperties:
    """The options that result from the level and the overrides of ``initialize``; read-only, all in ``options``."""

    def __init__(self, policy: Policy) -> None:
        options = {name: getattr(policy, name) for name in _OPTIONS}
        vars(self).update(options, options=options)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"opt_properties.{name} is fixed by amp.initialize; call it again with {name}={value!r}")


class AmpState:
    """The state that Apex's modules share, as far as scripts read it.

    As in Apex, the attributes that ``initialize`` sets do not exist before it, so that ``hasattr`` can be used.
    """

    hard_override = False  # makes ``warn_or_err`` print instead of raise; it disables no check of this library

    @property
    def allow_incoming_model_not_fp32(self) -> bool:
        """If True, ``initialize`` accepts models with float16 or bfloat16 parameters."""
        return settings.accept_low_precision_models

    @allow_incoming_model_not_fp32.setter
    def allow_incoming_model_not_fp32(self, value: bool) -> None:
        settings.accept_low_precision_models = bool(value)

    @property
    def verbosity(self) -> int:
        """The amount of printing: 0 is silent, 1 is normal. It can be assigned."""
        session = current()
        return 1 if session is None else session.verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        _session("verbosity").verbosity = int(value)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_SESSION:
            return _OF_SESSION[name](_session(name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_SESSION:
            raise AttributeError(f"_amp_state.{name} follows amp.initialize and cannot be assigned")
        object.__setattr__(self, name, value)


def _session(name: str) -> Session:
    session = current()
    if session is None:
        raise AttributeError(f"_amp_state.{name} exists only after amp.initialize has been called")
    return session


def _options(session: Session) -> DynamicScaleOptions:
    found = (getattr(scaler, "options", None) for scaler in session.scalers)
    return next((one for one in found if isinstance(one, DynamicScaleOptions)), DynamicScaleOptions())


def _handle(session: Session) -> AmpHandle:
    if not (session.policy.enabled and session.policy.patch_torch_functions):
        raise AttributeError(f"amp has a handle only at O1, not at {session.policy.opt_level}")
    return AmpHandle(session)


_OF_SESSION: dict[str, Callable[[Session], Any]] = {
    "handle": _handle,
    "loss_scalers": lambda session: [LossScaler.view(scaler) for scaler in session.scalers],
    "max_loss_scale": lambda session: _options(session).max_scale,
    "min_loss_scale": lambda session: _options(session).min_scale,
    "opt_properties": lambda session: OptProperties(session.policy),
}
_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    """Raise ``msg`` as a RuntimeError, or print it with ``hard_override``."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    print(f"Warning:  {msg}")


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print ``msg`` unless amp is silent; with ``rank0``, only on the first rank."""
    if _amp_state.verbosity > 0 and (not rank0 or is_first_rank()):
        print(msg)
