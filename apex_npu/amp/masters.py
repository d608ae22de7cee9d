# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Masters``: the float32 values of the 16-bit parameters that an optimizer steps. This module has the class for none.

A master is kept beside its parameter, in one of two formats: ``float32_masters.py`` and ``remainder_masters.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from apex_npu.fusion import FusedGroup


class Masters:
    """The masters of one optimizer; here none.

    Attributes:
        swaps: Whether parameters have float32 data while they are stepped.
        own_values: Parameters whose float32 values this process had before the cast. Until their first block other
            processes may send rounded ones.
        retired: The model was passed to another ``initialize``, or amp was shut down.
        loop: Returns the open loop over ``amp.master_params``, or None.
    """

    swaps = False

    def __init__(self, *, retired: bool = False) -> None:
        self.retired = retired
        self.own_values: list[Tensor] = []
        self.loop: Callable[[], Any] = _no_loop

    @property
    def are_new(self) -> bool:
        """Whether some take the float32 values that the model keeps of their parameters."""
        return False

    def params(self) -> list[Tensor]:
        """The parameters that have masters."""
        return []

    def has(self, param: Tensor) -> bool:
        """Whether ``param`` has a master."""
        return False

    def belong_to(self, optimizer: Any) -> None:
        """Take note that these are the masters of ``optimizer``, a copy that is complete."""

    def make(self, optimizer: Any, fp32_values: Mapping[int, Tensor] = MappingProxyType({})) -> bool:
        """Keep masters of the 16-bit parameters of ``optimizer`` that have none.

        Args:
            optimizer: The optimizer.
            fp32_values: ``id(param)`` → its value before it was cast; others are widened from what they have now.

        Returns:
            ``are_new``.
        """
        return False

    def find_new(self, optimizer: Any) -> bool:
        """Before a block or a step: keep masters of parameters that have been unfrozen or assigned; ``are_new``."""
        return False

    def end_following(self) -> None:
        """Take note that the first block of new masters begins."""

    def take_values(self, fp32_values: Mapping[int, Tensor]) -> None:
        """Give masters the ``fp32_values`` of their parameters, by ``id(param)``."""

    def float32(self, param: Tensor, shown: Tensor) -> Tensor | None:
        """Return the master of ``param`` on the device of ``shown``, its 16-bit values; None if it is not known."""
        return None

    def sent(self, param: Tensor) -> Tensor | None:
        """Return the master of ``param``, which has just received the values that it had, in a broadcast."""
        return self.float32(param, param)

    def load(self, param: Tensor, value: Tensor) -> Tensor:
        """Set the master of ``param`` to ``value``; return the value to write to ``param`` before ``end_loading``."""
        raise NotImplementedError

    def end_loading(self, loaded: Collection[Tensor], *, by_value: bool = False) -> None:
        """Take note that the parameters ``loaded`` have been written; with ``by_value`` maybe without a count."""

    def without_values(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's ``state_dict`` without masters, so that all levels and devices have the same entries.

        ``torch.distributed.checkpoint`` loads entries only where a checkpoint has them.
        """
        return state_dict

    def keep_values_of(self, params: Collection[int]) -> None:
        """Take note that the masters of ``params``, identities of parameters, are those of all processes."""
        self.own_values = [param for param in self.own_values if id(param) not in params]

    def round_own_values(self) -> None:
        """Set the masters of ``own_values`` to the 16-bit values."""

    def begin_step(self, optimizer: Any) -> None:
        """Before a step of ``optimizer``: have masters take what a script has written to 16-bit parameters."""

    def end_step(self, groups: Sequence[FusedGroup], skipped: Tensor | None = None) -> None:
        """After a step: round masters into the 16-bit data.

        Args:
            groups: The fused groups of the optimizer, if it has any.
            skipped: One number on the device; where it is not 0 nothing is written.
        """

    def stepping(self) -> AbstractContextManager[None]:
        """Return the context for the optimizer's own step, in which parameters have the data that it steps."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        """Return the context for the optimizer's own ``load_state_dict``, which casts state to parameters' dtypes."""
        return self.stepping()

    def float32_data(self, params: Sequence[Tensor] | None = None) -> AbstractContextManager[None]:
        """Return a re-entrant context in which ``params``, or all, have float32 data, which scripts may write."""
        return nullcontext()

    def take_assigned(self) -> None:
        """Have float32 data that a script has assigned to a 16-bit parameter be its master."""

    def end_loop(self) -> None:
        """End a loop over ``amp.master_params`` that a script has left early."""
        loop, self.loop = self.loop(), _no_loop
        if loop is not None:
            loop.close()

    def moving(self) -> AbstractContextManager[None]:
        """Return the context for code that gives parameters other addresses: that is no write."""
        return nullcontext()

    def has_flat_model(self, groups: Sequence[FusedGroup]) -> bool:
        """Whether the 16-bit data is laid out like the masters in the buffers of ``groups``, so that nothing moves."""
        return True

    def combined_model(self, groups: Sequence[FusedGroup]) -> list[Tensor]:
        """Return for each of ``groups``, those of combined buffers, the buffer of the parameters as the model has them.

        Raises:
            RuntimeError: A parameter shares its memory with others.
        """
        return [group.param_flat for group in groups]


def _no_loop() -> None:
    """Return None, as a reference to a loop that has ended."""


@torch.no_grad()
def fp32_value(value: Tensor, master: Tensor | None) -> Tensor:
    """Return ``value``, in low precision, in float32, on its device: its master's elements where those round to it."""
    if master is None:
        return value.float()
    exact = master.detach().to(value.device)
    # Weights that were written since the last step (a swapped-in moving average) are what is shown.
    rounded = exact.to(value.dtype)
    if value.is_cpu and torch.equal(rounded, value):  # elsewhere the answer would have to be waited for
        return exact
    return torch.where(rounded == value, exact, value.float())


@torch.no_grad()
def write_unless(skipped: Tensor | None, target: Tensor, source: Tensor) -> None:
    """Round ``source`` into ``target``, but where ``skipped``, one number on a device, is there and not 0."""
    if skipped is not None:
        source = torch.where(skipped.to(target.device).reshape(()) != 0, target, source)
    target.copy_(source)
