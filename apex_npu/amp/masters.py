# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Masters``: the interface of the float32 values of an optimizer's 16-bit parameters, and the loop over them.

``float32_masters.py`` and ``remainder_masters.py`` implement two formats of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from apex_npu.fusion import FusedGroup, HasFusedGroups


class Masters:
    """The masters of one optimizer. This base class has no masters.

    Attributes:
        swaps: Parameters have float32 data while they are stepped.
        own_values: Parameters with the float32 values that this process had before the cast. Until the first block
            another process may send its rounded values.
        retired: The model was passed to another ``initialize``, or amp was shut down.
        uncast: Parameters that the model itself had in 16 bits. A loop over ``amp.master_params`` leaves their data.
        loop: A weak reference to the last loop over ``amp.master_params``; None: it has been ended.
    """

    swaps = False

    def __init__(self, *, retired: bool = False) -> None:
        self.retired = retired
        self.own_values: list[Tensor] = []
        self.uncast: list[Tensor] = []
        self.loop: weakref.ref[Float32Loop] | None = None

    def params(self) -> list[Tensor]:
        """Return the parameters that have masters."""
        return []

    def has(self, param: Tensor) -> bool:
        """Return whether ``param`` has a master."""
        return False

    def belong_to(self, optimizer: Any) -> None:
        """Note that these are the masters of ``optimizer``, a completed copy."""

    def make(self, optimizer: Any, fp32_values: Mapping[int, Tensor] = MappingProxyType({})) -> bool:
        """Make masters for the 16-bit parameters of ``optimizer`` that have no master yet.

        Args:
            optimizer: The optimizer.
            fp32_values: ``id(param)`` → its value before it was cast. Other parameters are widened.

        Returns:
            True if masters may have yet to take the float32 values that the model keeps of their parameters.
        """
        return False

    def find_new(self, optimizer: Any) -> bool:
        """Make masters for parameters that have been unfrozen or added, before a block; return as ``make`` does."""
        return False

    def take_values(self, fp32_values: Mapping[int, Tensor]) -> None:
        """Set masters to ``fp32_values``, which maps ``id(param)`` to the value of a parameter."""

    def float32(self, param: Tensor, shown: Tensor) -> Tensor | None:
        """Return the master of ``param``, whose 16-bit values are ``shown``, on their device; None without a master."""
        return None

    def sent(self, param: Tensor) -> Tensor | None:
        """Return the master of ``param`` in the process that has just broadcast the unchanged parameter."""
        return self.float32(param, param)

    def load(self, param: Tensor, value: Tensor) -> Tensor:
        """Set the master of ``param`` to ``value``. Return the value that the caller writes to ``param``."""
        raise NotImplementedError

    def end_loading(self, loaded: Collection[Tensor], *, by_value: bool = False) -> None:
        """Note that ``loaded`` have been written; ``by_value``: maybe without a change of their version counters."""

    def without_values(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's ``state_dict`` without masters, so that all levels and devices have the same entries.

        ``torch.distributed.checkpoint`` loads entries only where a checkpoint has them.
        """
        return state_dict

    def keep_values_of(self, params: Collection[int]) -> None:
        """Note that the masters of ``params``, identities of parameters, are equal on all processes."""
        self.own_values = [param for param in self.own_values if id(param) not in params]

    def round_own_values(self) -> None:
        """Set the masters of ``own_values`` to the 16-bit values."""

    def begin_step(self, optimizer: Any) -> None:
        """Copy a script's writes to 16-bit parameters to the masters, before a step of ``optimizer``."""

    def end_step(self, optimizer: Any) -> None:
        """Round masters into the 16-bit data, after a step of ``optimizer``."""

    def stepping(self) -> AbstractContextManager[None]:
        """Return the context for the optimizer's own step, in which parameters have the data that the step updates."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        """Return the context for the optimizer's own ``load_state_dict``, which casts states like the parameter."""
        return self.stepping()

    def float32_data(self, params: Sequence[Tensor] | None = None) -> AbstractContextManager[None]:
        """Return a re-entrant context in which ``params`` (None: all) have float32 data, which scripts may write."""
        return nullcontext()

    def take_assigned(self) -> None:
        """Use float32 data that a script has assigned to a 16-bit parameter as its master."""

    def end_loop(self) -> None:
        """End a loop over ``amp.master_params`` that a script has left early."""
        loop, self.loop = None if self.loop is None else self.loop(), None
        if loop is not None:
            loop.close()

    def moving(self) -> AbstractContextManager[None]:
        """Return the context for code that moves parameters to other addresses, which does not count as a write."""
        return nullcontext()

    def has_flat_model(self, groups: Sequence[FusedGroup]) -> bool:
        """Return whether the 16-bit data is laid out like the masters in the buffers of ``groups``."""
        return True

    def combined_model(self, groups: Sequence[FusedGroup]) -> list[Tensor]:
        """Return for each of the combined ``groups`` the buffer of the model's parameters.

        Raises:
            RuntimeError: A parameter shares its memory with others.
        """
        return [group.param_flat for group in groups]


class Float32Loop(Iterator[Tensor]):
    """The result of ``amp.master_params``: yields parameters, each with float32 data until the next one is requested.

    A parameter that the model itself had in 16 bits keeps its data: NVIDIA's tests compare it in the loop with float16.
    The current parameter has 16-bit data again when the script drops this object, and at the latest at the next
    forward, block, step or state dict. If these are in the loop's body, the loop goes on with the next parameter.
    """

    def __init__(self, params: Callable[[], list[Tensor]], masters: Masters) -> None:
        """Make the iterator.

        Args:
            params: Returns the parameters; called when the first one is requested.
            masters: The masters of their optimizer.
        """
        self.params = params
        self._masters = masters
        self._left: Iterator[Tensor] | None = None
        self._uncast: set[int] = set()
        # Nothing that it refers to refers to this object: it ends when the script drops this object, rather than by
        # garbage collection.
        self._current: AbstractContextManager[None] | None = None

    def __next__(self) -> Tensor:
        """Return the next parameter."""
        masters = self._masters
        if self._left is None:
            self._left = iter(self.params())
            masters.uncast = [param for param in masters.uncast if masters.has(param)]  # others need not be kept
            self._uncast = set(map(id, masters.uncast))
        self.close()
        param = next(self._left)
        if masters.has(param) and id(param) not in self._uncast:
            masters.end_loop()
            masters.loop = weakref.ref(self)
            self._current = masters.float32_data([param])
            self._current.__enter__()
        return param

    def close(self) -> None:
        """Give the current parameter 16-bit data again."""
        current, self._current = self._current, None
        if current is not None:
            current.__exit__(None, None, None)


@torch.no_grad()
def fp32_value(value: Tensor, master: Tensor | None) -> Tensor:
    """Return the low-precision ``value`` in float32: the elements of ``master`` that round to it, else widened ones."""
    if master is None:
        return value.float()
    exact = master.detach().to(value.device)
    # Weights that were written since the last step (a swapped-in moving average) do not match their master.
    rounded = exact.to(value.dtype)
    if value.is_cpu and torch.equal(rounded, value):  # on other devices this would wait
        return exact
    return torch.where(rounded == value, exact, value.float())


def fused_groups(optimizer: Any) -> list[FusedGroup]:
    """Return the groups that a fused optimizer has stepped; empty for other optimizers."""
    return optimizer.fused_groups() if isinstance(optimizer, HasFusedGroups) else []
