# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Calls of rules on states, or parameters, that are stored in fewer bytes.

Such operands replace tensors in an ordinary call of a rule. torch passes the call to this module by
``__torch_function__``, so that calls without such operands need no check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from apex_npu.ops import cpu, cuda
from apex_npu.ops.dispatch import Call, Rule, rules
from apex_npu.ops.grad_lists import with_memory
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


class _Operand:
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        schema = getattr(func, "_schema", None)
        rule = None if schema is None else rules.get(schema.name)
        if rule is None:
            raise TypeError(
                f"{func} cannot read a state that is stored in fewer bytes; only the ops of update rules can: leave "
                "state_dtype out, or pass run.state(name) to the rule's own op"
            )
        if func.__name__.endswith(".runs"):
            rule.each(*args, **kwargs or {})
        else:
            _call(rule, args, dict(kwargs or {}))


class RunEncoding(_Operand):
    """The encoding of a run's parameters and states; it takes the place of the parameters.

    Attributes:
        param: The parameters as they are stored.
        remainder: The remainders of bfloat16 or float16 parameters, int16 or int8; None if they have none.
        stochastic_param: Whether bfloat16 parameters are rounded stochastically.
        count: The number of the step, for random bits.
    """

    def __init__(self, param: Tensor, segments: Sequence[Segment]) -> None:
        """Create the encoding of a run with ``param``, which holds ``segments``."""
        self.param = param
        self.remainder: Tensor | None = None
        self.stochastic_param = False
        self.count: int | Tensor = 0
        self._segments = list(segments)
        self._pieces: list[Piece] = []

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.param.device

    @cached_property
    def table(self) -> Tensor:
        """The int64 table of the parameters; see ``dispatch.py``."""
        return torch.tensor(self._segments, dtype=torch.int64, device="cpu").reshape(-1, 4)

    def pieces(self, param: Tensor) -> Iterator[Piece]:
        """Yield pieces of ``param``, which is the whole run, for kernels in plain torch.

        The pieces are cut once, because a captured graph reads their tables at each replay and a copy from the host
        would wait. Each call yields copies, because a piece caches tensors that are larger than its elements.
        """
        self._pieces = self._pieces or list(pieces(self._segments, param.numel(), param.device))
        return map(copy, self._pieces)

    def decode_param(self, param: Tensor, span: slice) -> Tensor:
        """Return the decoded values of ``param[span]``; if it is not encoded, a view of it."""
        if self.remainder is not None:
            return decode_remainder(param[span], self.remainder[span])
        return param[span].to(torch.float32) if self.stochastic_param else param[span]

    def encode_run(self, values: Tensor, param: Tensor, states: Sequence[tuple[int, EncodedState, Tensor]]) -> None:
        """Write a whole run: ``values`` to ``param`` if it is encoded, and the values of ``states``.

        Args:
            values: The result of ``decode_param`` for the whole run, which a rule has stepped.
            param: The parameters.
            states: Each state with its index in the rule, and its values, which may be overwritten.
        """
        if not _by_extension(param):
            for piece in self.pieces(param):
                for index, state, wide in states:
                    state.encode(wide[piece.span], index, piece)
                self.encode_param(values[piece.span], param, piece)
            return
        stored = [(index, state.values, state.scales, wide) for index, state, wide in states]
        if self.remainder is not None and self.remainder.dtype == torch.int8:
            for piece in self.pieces(param):
                self.encode_param(values[piece.span], param, piece)
        elif self.remainder is not None:
            param[:], self.remainder[:] = encode_remainder(values, param.dtype)
        elif self.stochastic_param:
            stored.append((2 * PARAM_PAIR, param, None, values))
        for index, kept, scales, wide in stored:
            cpu.encode_state(wide, kept, scales, self.table, int(self.count), index)

    def encode_param(self, values: Tensor, param: Tensor, piece: Piece) -> None:
        """Write ``values``, which ``decode_param`` returned and a rule has changed, to a piece of ``param``."""
        if self.remainder is not None:
            rounded, remainder = encode_remainder(values, param.dtype)
            if self.remainder.dtype == torch.int8:
                rounded, remainder = narrow_remainder(rounded, remainder, piece.random(PARAM_PAIR, self.count))
            param[piece.span], self.remainder[piece.span] = rounded, remainder
        elif self.stochastic_param:
            half = half_of(piece.random(PARAM_PAIR, self.count), 0)
            param[piece.span] = round_stochastically(values, half)


class EncodedState(_Operand):
    """The part of a run in one state that is stored in fewer bytes.

    Attributes:
        values: The stored values: bfloat16, int8 or uint8.
        scales: The scales of all parameters of the arena, for 8-bit states; else None.
        encoding: The encoding of the run.
    """

    def __init__(self, values: Tensor, scales: Tensor | None, encoding: RunEncoding) -> None:
        """Store the attributes."""
        self.values, self.scales, self.encoding = values, scales, encoding

    def decode(self, piece: Piece) -> Tensor:
        """Return the values of a piece in float32."""
        return decode(self.values[piece.span], self.scales, piece)

    def decode_run(self) -> Tensor:
        """Return the values of the whole run in float32."""
        if _by_extension(self.values):
            return cpu.decode_state(self.values, self.scales, self.encoding.table)
        return self.decode_all(self.encoding.pieces(self.values))

    def decode_all(self, its_pieces: Iterable[Piece]) -> Tensor:
        """Return the joined values of ``its_pieces``; zeros of the run's length if there are no pieces."""
        parts = [self.decode(piece) for piece in its_pieces]
        return torch.cat(parts) if parts else torch.zeros_like(self.values, dtype=torch.float32)

    def encode(self, values: Tensor, index: int, piece: Piece) -> None:
        """Write ``values`` to a piece of this state, which is the ``index``-th of its rule."""
        half = half_of(piece.random(index // 2, self.encoding.count), index)
        encode(values, self.values[piece.span], self.scales, piece, half)


@dataclass(frozen=True)
class Encoded:
    """The arguments of a rule's kernels besides the declared ones: see ``encoded`` in ``dispatch.py``.

    ``scales`` has an item for each state of the rule, None for a state that has no 8 bits; ``count`` may be a tensor.
    """

    remainder: Tensor | None
    scales: list[Tensor | None]
    table: Tensor
    count: int | Tensor
    stochastic_param: bool


def _by_extension(operand: Tensor) -> bool:
    return cpu.available and operand.device.type == "cpu"


# Planning functions of kernels that take operands as they are stored, by device type; they may return None.
_KERNELS = {"cuda": cuda.plan_encoded}


def prepared_encoded(call: Call) -> Call:
    """Do what ``cuda.prepared`` does, for a run whose operands are encoded."""
    rule, operands, options = call
    if not isinstance(rule, Rule):
        return call
    on_device = {name for name in rule.numbers if isinstance(options.get(name), Tensor)}
    given = {name: value.reshape(()) if name in on_device else value for name, value in options.items()}
    return _planned(rule, *_taken_apart(operands), given) or call


def _call(rule: Rule[...], operands: tuple[Any, ...], options: dict[str, Any]) -> None:
    encoding, of_params, operands = _taken_apart(operands)
    for name in rule.numbers:
        tensor = options.pop(f"{name}_tensor", None)
        if tensor is not None:
            options[name] = tensor.reshape(())
    planned = _planned(rule, encoding, of_params, operands, options)
    if planned is not None:
        run, args, _ = planned
        run(*args)
        return
    if operands[0].device.type != "cpu":
        _run_on_pieces(rule, encoding, of_params, operands, options)
        return
    found_inf = options.pop("found_inf", None)
    if found_inf is not None and bool(found_inf):
        return
    for name, number in rule.numbers.items():
        if name in options:
            options[name] = number(options[name])
    if cpu.available:
        _run_extension(rule, encoding, of_params, operands, options)
    else:
        _run_on_pieces(rule, encoding, of_params, operands, options)


def _taken_apart(operands: tuple[Any, ...]) -> tuple[RunEncoding, RunEncoding | None, tuple[Any, ...]]:
    """Return the encoding, the encoding again if it encodes parameters or else None, and the plain operands."""
    found = next(operand for operand in operands if isinstance(operand, _Operand))
    encoding = found.encoding if isinstance(found, EncodedState) else found
    assert isinstance(encoding, RunEncoding)
    of_params = encoding if any(operand is encoding for operand in operands) else None
    return encoding, of_params, tuple(encoding.param if o is encoding else o for o in operands)


def _planned(
    rule: Rule[...],
    encoding: RunEncoding,
    of_params: RunEncoding | None,
    operands: tuple[Any, ...],
    options: dict[str, Any],
) -> Call | None:
    kernel = _KERNELS.get(operands[0].device.type)
    if kernel is None:
        return None
    stored = tuple(operand.values if isinstance(operand, EncodedState) else operand for operand in operands)
    return kernel(rule, stored, options, _encoded(rule, encoding, of_params, operands))


def _encoded(
    rule: Rule[...], encoding: RunEncoding, of_params: RunEncoding | None, operands: tuple[Any, ...]
) -> Encoded:
    states = operands[2 : rule.state_end]
    return Encoded(
        remainder=None if of_params is None else of_params.remainder,
        scales=[state.scales if isinstance(state, EncodedState) else None for state in states],
        table=encoding.table,
        count=encoding.count,
        stochastic_param=of_params is not None and of_params.stochastic_param,
    )


def _run_extension(
    rule: Rule[...],
    encoding: RunEncoding,
    of_params: RunEncoding | None,
    operands: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    kernel = getattr(torch.ops.apex_npu, rule.name).encoded
    stored = (operand.values if isinstance(operand, EncodedState) else operand for operand in operands)
    encoded = _encoded(rule, encoding, of_params, operands)
    kernel(
        *stored,
        **options,
        remainder=encoded.remainder,
        scales=[scales for scales in encoded.scales if scales is not None],
        table=encoded.table,
        count=int(encoded.count),
        stochastic_param=encoded.stochastic_param,
    )


def _run_on_pieces(
    rule: Rule[...],
    encoding: RunEncoding,
    of_params: RunEncoding | None,
    operands: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Run the kernel on float32 values: piece by piece, or on the whole run if elements depend on others.

    If ``found_inf`` is set, the kernel leaves the values unchanged, and encoding them again changes nothing.
    """
    operands = tuple(map(with_memory, operands))
    if rule.is_elementwise:
        for piece in encoding.pieces(operands[0]):
            _step(rule, of_params, operands, options, piece.span, partial(list, (piece,)))
    else:
        whole = slice(0, operands[0].numel())
        _step(rule, of_params, operands, options, whole, lambda: encoding.pieces(operands[0]))


def _step(
    rule: Rule[...],
    of_params: RunEncoding | None,
    operands: tuple[Any, ...],
    options: dict[str, Any],
    span: slice,
    its_pieces: Callable[[], Iterable[Piece]],
) -> None:
    states = [(index, state) for index, state in enumerate(operands[2:]) if isinstance(state, EncodedState)]
    values = list(operands)
    if rule.is_elementwise:
        values = [None if v is None or isinstance(v, EncodedState) else v[span] for v in values]
    for index, state in states:
        values[2 + index] = state.decode_all(its_pieces())
    if of_params is not None:
        values[0] = of_params.decode_param(operands[0], span)
    values[1] = values[1].to(torch.float32)  # as the gradients of masters
    rule(*values, **options)
    for piece in its_pieces():
        part = slice(piece.span.start - span.start, piece.span.stop - span.start)
        for index, state in states:
            state.encode(values[2 + index][part], index, piece)
        if of_params is not None:
            of_params.encode_param(values[0][part], operands[0], piece)
