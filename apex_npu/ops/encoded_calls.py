# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The encoding of a run: how its parameters and states are stored in fewer bytes than float32.

It is an argument of rules, whose operands are then the tensors as they are stored. ``state_codec.py`` has the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex_npu._extension import extension
from apex_npu.ops.state_codec import (
    PARAM_PAIR,
    Piece,
    Segment,
    decode,
    decode_remainder,
    encode,
    encode_remainder,
    half_of,
    narrow_remainder,
    pieces,
    round_stochastically,
)


class Places:
    """The parameters of a run, in the forms that kernels read; they are made once."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Set the parameters of the run."""
        self._segments = list(segments)
        self._pieces: list[Piece] = []

    @cached_property
    def table(self) -> Tensor:
        """int64, on the host, a row for each parameter: first element, elements, position, first scale."""
        return torch.tensor(self._segments, dtype=torch.int64, device="cpu").reshape(-1, 4)

    def pieces(self, param: Tensor) -> Iterator[Piece]:
        """Yield pieces of ``param``, which is the whole run, for kernels in plain torch.

        The pieces are cut once, because a captured graph reads their tables at each replay and a copy from the host
        would wait. Each call yields copies, because a piece caches tensors that are larger than its elements.
        """
        self._pieces = self._pieces or list(pieces(self._segments, param.numel(), param.device))
        return map(copy, self._pieces)


class RunEncoding(NamedTuple):
    """The encoding of the operands of one call.

    States are encoded if their dtype is bfloat16, int8 or uint8.

    Attributes:
        places: The parameters of the run.
        scales: The scales of all parameters of the arena, by the names of the states that have 8 bits.
        step: The number of the step, for random bits; a 0-dim tensor if the device counts.
        remainder: The remainders of bfloat16 or float16 parameters, int16 or int8; None if they have none.
        stochastic_param: Whether parameters, which are bfloat16, are rounded stochastically.
    """

    places: Places
    scales: Mapping[str, Tensor]
    step: int | Tensor = 0
    remainder: Tensor | None = None
    stochastic_param: bool = False

    def of_states(self) -> RunEncoding:
        """Return the encoding of a call whose states are those of the run, but whose ``param`` is not encoded."""
        return self._replace(remainder=None, stochastic_param=False)

    @property
    def encodes_param(self) -> bool:
        """True if parameters are encoded, rather than rounded to nearest."""
        return self.remainder is not None or self.stochastic_param

    def decode_param(self, param: Tensor, span: slice) -> Tensor:
        """Return the decoded values of ``param[span]``; if it is not encoded, a view of it."""
        if self.remainder is not None:
            return decode_remainder(param[span], self.remainder[span])
        return param[span].to(torch.float32) if self.stochastic_param else param[span]

    def encode_param(self, values: Tensor, param: Tensor, piece: Piece) -> None:
        """Write ``values``, which ``decode_param`` returned and a rule has changed, to a piece of ``param``."""
        if self.remainder is not None:
            rounded, remainder = encode_remainder(values, param.dtype)
            if self.remainder.dtype == torch.int8:
                rounded, remainder = narrow_remainder(rounded, remainder, piece.random(PARAM_PAIR, self.step))
            param[piece.span], self.remainder[piece.span] = rounded, remainder
        elif self.stochastic_param:
            half = half_of(piece.random(PARAM_PAIR, self.step), 0)
            param[piece.span] = round_stochastically(values, half)

    def decode_state(self, name: str, stored: Tensor) -> Tensor:
        """Return the float32 values of ``stored``, the whole run of state ``name``."""
        if not _by_extension(stored):
            scales = self.scales.get(name)
            parts = [decode(stored[piece.span], scales, piece) for piece in self.places.pieces(stored)]
            return torch.cat(parts) if parts else torch.zeros_like(stored, dtype=torch.float32)
        values = torch.empty(stored.shape, dtype=torch.float32, device=stored.device)
        extension.decode_state_cpu(stored, self.scales.get(name), self.places.table, values)
        return values

    def encode_run(self, values: Tensor, param: Tensor, states: Sequence[tuple[int, str, Tensor, Tensor]]) -> None:
        """Write a whole run: ``values`` to ``param`` if it is encoded, and the values of ``states``.

        Args:
            values: The result of ``decode_param`` for the whole run, which a rule has stepped.
            param: The parameters.
            states: For each encoded state its index in the rule, its name, the state as it is stored, and its values,
                which may be overwritten.
        """
        if not _by_extension(param):
            for piece in self.places.pieces(param):
                for index, name, stored, wide in states:
                    self._encode(wide[piece.span], index, name, stored, piece)
                self.encode_param(values[piece.span], param, piece)
            return
        table, count = self.places.table, int(self.step)
        if self.remainder is not None and self.remainder.dtype == torch.int8:
            for piece in self.places.pieces(param):
                self.encode_param(values[piece.span], param, piece)
        elif self.remainder is not None:
            param[:], self.remainder[:] = encode_remainder(values, param.dtype)
        elif self.stochastic_param:
            extension.encode_state_cpu(values, param, None, table, count, 2 * PARAM_PAIR)
        for index, name, stored, wide in states:
            extension.encode_state_cpu(wide, stored, self.scales.get(name), table, count, index)

    def decode_and_run(
        self,
        kernel: Callable[..., None],
        names: Sequence[str],
        operands: tuple[Any, ...],
        options: dict[str, Any],
        *,
        by_piece: bool,
    ) -> None:
        """Run ``kernel`` on float32 values, which are encoded again.

        If ``found_inf`` is set, the kernel leaves the values unchanged, and encoding them again changes nothing.

        Args:
            kernel: A kernel of a rule without encoded operands.
            names: The names of the states of the rule.
            operands: The operands of the rule, as they are stored.
            options: The options of the rule.
            by_piece: Run it piece by piece; else on the whole run, because elements depend on others.
        """
        param = operands[0]
        states = [(i, name, operands[2 + i]) for i, name in enumerate(names) if is_encoded(operands[2 + i])]
        if not by_piece:
            values = list(operands)
            values[0] = self.decode_param(param, slice(0, param.numel()))
            values[1] = values[1].to(torch.float32)  # as the gradients of masters
            for index, name, state in states:
                values[2 + index] = self.decode_state(name, state)
            kernel(*values, **options)
            self.encode_run(values[0], param, [(*state, values[2 + state[0]]) for state in states])
            return
        for piece in self.places.pieces(param):
            values = [None if operand is None else operand[piece.span] for operand in operands]
            values[0] = self.decode_param(param, piece.span)
            values[1] = values[1].to(torch.float32)
            for index, name, state in states:
                values[2 + index] = decode(state[piece.span], self.scales.get(name), piece)
            kernel(*values, **options)
            for index, name, state in states:
                self._encode(values[2 + index], index, name, state, piece)
            self.encode_param(values[0], param, piece)

    def _encode(self, values: Tensor, index: int, name: str, stored: Tensor, piece: Piece) -> None:
        """Write ``values`` to a piece of ``stored``, which is the ``index``-th state of its rule."""
        half = half_of(piece.random(index // 2, self.step), index)
        encode(values, stored[piece.span], self.scales.get(name), piece, half)


def is_encoded(state: Tensor | None) -> bool:
    """Return whether a state of a call with a ``RunEncoding`` is stored in fewer bytes than float32."""
    return state is not None and state.dtype in {torch.bfloat16, torch.int8, torch.uint8}


def _by_extension(operand: Tensor) -> bool:
    return extension is not None and operand.device.type == "cpu"
