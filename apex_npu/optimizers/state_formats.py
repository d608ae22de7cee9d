# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``state_dtype`` and related options: the formats in which an optimizer stores its state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from apex_npu.fusion import MASTER_PARAM, EncodedView, FusedGroup
from apex_npu.fusion.encoded_state import encode_states
from apex_npu.fusion.shards import local_part, local_part_as, part_number
from apex_npu.ops import LOW_PRECISION
from apex_npu.ops.state_codec import LEAST_SCALE
from apex_npu.optimizers.checks import check_bool

# A format for all states, or a dict from names of states to formats.
StateDtype: TypeAlias = torch.dtype | str | Mapping[str, torch.dtype | str] | None
# True: int16, "int8": int8, False: none.
Remainders: TypeAlias = bool | Literal["int8"]

_FORMATS: dict[torch.dtype | str, torch.dtype] = {
    torch.float32: torch.float32,
    "float32": torch.float32,
    torch.bfloat16: torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
# States that can be stored without a sign.
_NEVER_NEGATIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"})
# An 8-bit block whose largest element is below LEAST_SCALE becomes zero. If eps is not well above the root of
# LEAST_SCALE, the lost values would matter as divisors.
_LEAST_EPS = 32 * LEAST_SCALE**0.5
# An upper bound of the positions of parameters. Multiples of it give the parts of a sharded parameter different random
# bits, although their elements have equal numbers.
_PART = 1 << 20
_CHOICES = "torch.float32, torch.bfloat16 or 'int8'"


class StateFormats:
    """The formats of an optimizer's states and parameters. By default states are float32, and rounding is to nearest.

    Attributes:
        dtypes: The dtypes of the states that are not float32, by name. For ``MASTER_PARAM`` it is the dtype of the
            remainders of parameters, int16 or int8.
        stochastic_rounding: bfloat16 parameters without masters are rounded stochastically.
        widens_grads: Gradients of 16-bit parameters with remainders have float32 slots.
    """

    widens_grads = False

    def __init__(self, dtypes: Mapping[str, torch.dtype], *, stochastic_rounding: bool = False) -> None:
        """Store the formats."""
        self.dtypes = dict(dtypes)
        self.stochastic_rounding = stochastic_rounding

    @classmethod
    def of(
        cls,
        states: Sequence[str],
        *,
        state_dtype: StateDtype = None,
        store_param_remainders: Remainders = False,
        stochastic_rounding: bool = False,
    ) -> StateFormats:
        """Make the formats that these arguments select.

        Args:
            states: The states that the rule can keep in other formats.
            state_dtype: The option of ``FusedOptimizer``.
            store_param_remainders: The option of ``FusedAdam``.
            stochastic_rounding: The option of ``FusedOptimizer``.

        Raises:
            ValueError: There is no such format or state, or the arguments contradict each other.
            TypeError: An argument has the wrong type.
        """
        remainders = dtype_of_remainders(store_param_remainders)
        check_bool("stochastic_rounding", stochastic_rounding)
        if state_dtype is None and not remainders and not stochastic_rounding:
            return cls({})
        if not states:
            raise ValueError(
                "this rule supports only float32 states and rounding to nearest: leave state_dtype, "
                "store_param_remainders and stochastic_rounding out"
            )
        if remainders and stochastic_rounding:
            raise ValueError(
                f"store_param_remainders={store_param_remainders!r} keeps the bits that parameters lack, "
                "stochastic_rounding=True drops them: pass one"
            )
        dtypes = {name: _dtype(kept, name in _NEVER_NEGATIVE) for name, kept in _by_name(states, state_dtype).items()}
        for name in _in_bfloat16_at_least(states, dtypes):
            if dtypes.get(name, torch.bfloat16).itemsize == 1:
                dtypes[name] = torch.bfloat16
        found = {name: dtype for name, dtype in dtypes.items() if dtype != torch.float32}
        if remainders:
            found[MASTER_PARAM] = remainders
        return cls(found, stochastic_rounding=stochastic_rounding)

    def are_too_narrow(self, groups: Iterable[Mapping[str, Any]]) -> bool:
        """Return True if 8 bits are not enough, because one of ``groups``, all of the optimizer, has a small eps."""
        if torch.uint8 not in self.dtypes.values():
            return False
        return any(float(group.get("eps", group.get("e", 1.0))) < _LEAST_EPS for group in groups)

    def kept_in(self, names: Collection[str], *, wider: bool) -> dict[str, torch.dtype]:
        """Return ``dtypes`` for a group with the states ``names``; ``wider`` is the result of ``are_too_narrow``.

        It is for all groups, so that the formats of a state do not depend on which of them share an arena.
        """
        found = dict(self.dtypes)
        if "grad_avg" in names:
            # A centered rule divides by the root of square_avg - grad_avg², which rounding can make negative or 0.
            found = {name: dtype for name, dtype in found.items() if name not in ("square_avg", "grad_avg")}
        if torch.uint8 in found.values() and wider:
            narrow = {name for name, dtype in found.items() if dtype.itemsize == 1 and name != MASTER_PARAM}
            found |= dict.fromkeys(narrow, torch.bfloat16)
        return found

    @property
    def are_special(self) -> bool:
        """True if a state is not float32, or parameters are not rounded to nearest."""
        return bool(self.dtypes) or self.stochastic_rounding

    @property
    def has_remainders(self) -> bool:
        """True if masters are stored as the bits that 16-bit parameters lack."""
        return MASTER_PARAM in self.dtypes

    @property
    def draws_random_bits(self) -> bool:
        """True if states or parameters are rounded with random bits, which depend on the step count."""
        return self.stochastic_rounding or any(dtype != torch.int16 for dtype in self.dtypes.values())

    def check(self, params: Iterable[Tensor]) -> None:
        """Require parameters whose states can have these formats.

        Raises:
            TypeError: A parameter is neither float32, float16 nor bfloat16.
        """
        for p in params if self.are_special else ():
            if p.dtype != torch.float32 and p.dtype not in LOW_PRECISION:
                raise TypeError(
                    f"a parameter of shape {tuple(p.shape)} is {p.dtype}, whose states are kept in {p.dtype}: "
                    "state_dtype, store_param_remainders and stochastic_rounding are for float32, bfloat16 and float16 "
                    "parameters; give it to an optimizer without them"
                )

    def apply(
        self,
        groups: Iterable[FusedGroup],
        param_groups: list[dict[str, Any]],
        state_names: Sequence[Sequence[str]],
        *,
        decodes_runs: bool,
    ) -> bool:
        """Apply the formats to the states of ``groups``, and return True if states must be copied into new buffers.

        Args:
            groups: All fused groups of the optimizer.
            param_groups: The ``param_groups`` of the optimizer.
            state_names: The states of each of ``param_groups``.
            decodes_runs: The argument of ``GroupEncoding``.
        """
        if not self.are_special:
            return False
        changed, wider = False, self.are_too_narrow(param_groups)
        before = [0]
        for group in param_groups:
            before.append(before[-1] + len(group["params"]))
        for fused in groups:
            positions = [
                before[index] + place + part_number(param_groups[index]["params"][place]) * _PART
                for index, place in fused.places
            ]
            names = {name for index, _ in fused.places for name in state_names[index]}
            dtypes = self.kept_in(names, wider=wider)
            stochastic = self.stochastic_rounding
            options = {"stochastic": stochastic, "decodes_runs": decodes_runs, "widens_grads": self.widens_grads}
            if encode_states(fused, dtypes, positions, **options):
                fused.runs.forget()
                changed = True
        return changed

    def with_remainders(self, dtype: torch.dtype | None = None) -> StateFormats:
        """Return these formats with remainders in ``dtype``, for parameters with float32 gradients.

        None: in the dtype that they have, or int16.
        """
        found = StateFormats({**self.dtypes, MASTER_PARAM: dtype or self.dtypes.get(MASTER_PARAM, torch.int16)})
        found.widens_grads = True
        return found

    def take_masters(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Replace float32 masters in ``state`` by remainders, so that a later write to a parameter is detected."""
        for p, entry in state.items() if self.has_remainders else ():
            master = entry.get(MASTER_PARAM)
            if isinstance(master, Tensor) and p.dtype in LOW_PRECISION:
                dtype = self.dtypes[MASTER_PARAM]
                entry[MASTER_PARAM] = EncodedView.remainder_of(local_part(p), local_part_as(master, p), dtype)


def dtype_of_remainders(chosen: Remainders) -> torch.dtype | None:
    """Return the dtype of the remainders that ``chosen``, a value of ``store_param_remainders``, selects.

    Raises:
        TypeError: It is neither True, False nor ``"int8"``.
    """
    if not isinstance(chosen, bool) and chosen != "int8":
        raise TypeError(f"store_param_remainders must be True, False or 'int8', got {chosen!r}")
    return torch.int8 if chosen == "int8" else torch.int16 if chosen else None


def _by_name(states: Sequence[str], state_dtype: StateDtype) -> dict[str, torch.dtype | str]:
    if state_dtype is None:
        return {}
    if not isinstance(state_dtype, Mapping):
        return dict.fromkeys(states, state_dtype)
    unknown = [name for name in state_dtype if name not in states]
    if unknown:
        known = ", ".join(states)
        raise ValueError(f"state_dtype names {unknown[0]!r}, which is not a state of this rule; it has {known}")
    return dict(state_dtype)


def _in_bfloat16_at_least(states: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> tuple[str, ...]:
    """Return the ``states`` of a rule for which 8 bits are not enough, if states are kept in ``dtypes``."""
    if "acc_delta" in states:
        # acc_delta accumulates squared steps and multiplies the next step, so that errors grow exponentially.
        return ("square_avg", "acc_delta")
    if "exp_avg_sq" in states and dtypes.get("exp_avg_sq") != torch.uint8:
        # The smallest code of exp_avg is relative to the largest element of its block. An 8-bit exp_avg_sq would bound
        # the step that such a code causes.
        return ("exp_avg",)
    return ()


def _dtype(kept: torch.dtype | str, nonnegative: bool) -> torch.dtype:
    if not isinstance(kept, (torch.dtype, str)):
        raise TypeError(f"state_dtype must be {_CHOICES}, or a dict of these by the names of states, got {kept!r}")
    if kept not in _FORMATS:
        raise ValueError(f"state_dtype must be {_CHOICES}, got {kept!r}")
    return torch.uint8 if kept == "int8" and nonnegative else _FORMATS[kept]
