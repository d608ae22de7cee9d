# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Calls of elementwise rules on states, or parameters, that are kept in fewer bytes.

Such operands take the places of tensors in the ordinary call of a rule. torch hands that call back here, by its
protocol for arguments that are no tensors, so that calls without such operands have nothing to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from apex_npu.ops import cpu
from apex_npu.ops.dispatch import Rule, rules
from apex_npu.ops.state_codec import (
    PARAM_PAIR,
    Piece,
    Segment,
    decode,
    decode_remainder,
    encode,
    encode_remainder,
    half_of,
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
                f"{func} cannot read a state that is kept in fewer bytes, which only the update rules can: leave "
                "state_dtype out, or pass the rule's own op what run.state(name) gives"
            )
        if func._overloadname == "runs":
            rule.each(*args, **kwargs or {})
        else:
            _call(rule, args, dict(kwargs or {}))


class RunEncoding(_Operand):
    """What a run has beside its operands; it takes the place of ``model_param``.

    Attributes:
        model_param: The operand in whose place it is.
        remainder: Of bfloat16 parameters that have any.
        stochastic_param: bfloat16 parameters are rounded stochastically.
        count: The number of the step, for random bits.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Of a run that holds ``segments``."""
        self.model_param: Tensor | None = None
        self.remainder: Tensor | None = None
        self.stochastic_param = False
        self.count: int | Tensor = 0
        self._segments = list(segments)

    @cached_property
    def table(self) -> Tensor:
        """See ``dispatch.py``."""
        return torch.tensor(self._segments, dtype=torch.int64).reshape(-1, 4)

    def pieces(self, param: Tensor) -> list[Piece]:
        """Of ``param``, for kernels in plain torch; made for each call, as they take more memory than they describe."""
        return pieces(self._segments, param.numel(), param.device)


class EncodedState(_Operand):
    """The part of a run in one state that is kept in fewer bytes.

    Attributes:
        values: bfloat16, int8 or uint8.
        scales: Of all parameters of the arena, for 8-bit states; else None.
        encoding: Of the run.
    """

    def __init__(self, values: Tensor, scales: Tensor | None, encoding: RunEncoding) -> None:
        """See the attributes."""
        self.values, self.scales, self.encoding = values, scales, encoding


def _call(rule: Rule[...], operands: tuple[Any, ...], options: dict[str, Any]) -> None:
    found = next(operand for operand in operands if isinstance(operand, _Operand))
    encoding = found.encoding if isinstance(found, EncodedState) else found
    assert isinstance(encoding, RunEncoding)
    operands = tuple(encoding.model_param if operand is encoding else operand for operand in operands)
    for name in rule.numbers:
        tensor = options.pop(f"{name}_tensor", None)
        if tensor is not None:
            options[name] = tensor.reshape(())
    if operands[0].device.type != "cpu":
        _run_on_pieces(rule, encoding, operands, options)
        return
    found_inf = options.pop("found_inf", None)
    if found_inf is not None and bool(found_inf):
        return
    for name, number in rule.numbers.items():
        options[name] = number(options[name])
    if cpu.available:
        _run_extension(rule, encoding, operands, options)
    else:
        _run_on_pieces(rule, encoding, operands, options)


def _run_extension(rule: Rule[...], encoding: RunEncoding, operands: tuple[Any, ...], options: dict[str, Any]) -> None:
    kernel = getattr(torch.ops.apex_npu, rule.name).encoded
    states = [operand for operand in operands if isinstance(operand, EncodedState)]
    kernel(
        *(operand.values if isinstance(operand, EncodedState) else operand for operand in operands),
        **options,
        remainder=encoding.remainder,
        scales=[state.scales for state in states if state.scales is not None],
        table=encoding.table,
        count=int(encoding.count),
        stochastic_param=encoding.stochastic_param,
    )


def _run_on_pieces(rule: Rule[...], encoding: RunEncoding, operands: tuple[Any, ...], options: dict[str, Any]) -> None:
    """The kernel for float32 values, piece by piece."""
    found_inf = options.pop("found_inf", None)
    for piece in encoding.pieces(operands[0]):
        written = _written(encoding, operands, piece)
        before = [] if found_inf is None else [t.clone() for t in written]
        _step_piece(rule, encoding, operands, options, piece)
        for now, then in zip(written, before, strict=False):
            torch.where(found_inf.reshape(()) != 0, then, now, out=now)


def _step_piece(
    rule: Rule[...], encoding: RunEncoding, operands: tuple[Any, ...], options: dict[str, Any], piece: Piece
) -> None:
    values: list[Any] = []
    for operand in operands:
        if isinstance(operand, EncodedState):
            values.append(decode(operand.values[piece.span], operand.scales, piece))
        else:
            values.append(None if operand is None else operand[piece.span])
    param, remainder = values[0], encoding.remainder
    if remainder is not None:
        values[0] = decode_remainder(param, remainder[piece.span])
    elif encoding.stochastic_param:
        values[0] = param.to(torch.float32)
    values[1] = values[1].to(torch.float32)  # as the gradients of masters are
    rule(*values, **options)
    random: dict[int, Tensor] = {}
    for index, operand in enumerate(operands[2:]):
        if isinstance(operand, EncodedState):
            pair = index // 2
            if pair not in random:
                random[pair] = piece.random(pair, encoding.count)
            half = half_of(random[pair], index)
            encode(values[2 + index], operand.values[piece.span], operand.scales, piece, half)
    if remainder is not None:
        rounded, rest = encode_remainder(values[0])
        param.copy_(rounded)
        remainder[piece.span] = rest
    elif encoding.stochastic_param:
        half = half_of(piece.random(PARAM_PAIR, encoding.count), 0)
        param.copy_(round_stochastically(values[0], half))


def _written(encoding: RunEncoding, operands: tuple[Any, ...], piece: Piece) -> list[Tensor]:
    """What a step writes of ``piece``, except for the gradient, which is the second operand."""
    written: list[Tensor] = []
    for index, operand in enumerate(operands):
        if isinstance(operand, EncodedState):
            written.append(operand.values[piece.span])
            if operand.scales is not None:
                written.append(operand.scales[piece.scale_span])
        elif operand is not None and index != 1:
            written.append(operand[piece.span])
    if encoding.remainder is not None:
        written.append(encoding.remainder[piece.span])
    return written
