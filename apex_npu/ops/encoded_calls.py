# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Calls of rules on states, or parameters, that are kept in fewer bytes.

Such operands take the places of tensors in the ordinary call of a rule. torch hands that call back here, by its
protocol for arguments that are no tensors, so that calls without such operands have nothing to ask.
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
        if func.__name__.endswith(".runs"):
            rule.each(*args, **kwargs or {})
        else:
            _call(rule, args, dict(kwargs or {}))


class RunEncoding(_Operand):
    """What a run has beside its operands; it takes the place of ``model_param``.

    Calls without it have other parameters than the run's, which are not encoded.

    Attributes:
        model_param: The operand in whose place it is.
        remainder: Of bfloat16 or float16 parameters, if these have any.
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
        self._pieces: list[Piece] = []

    @cached_property
    def table(self) -> Tensor:
        """See ``dispatch.py``."""
        return torch.tensor(self._segments, dtype=torch.int64, device="cpu").reshape(-1, 4)

    def pieces(self, param: Tensor) -> Iterator[Piece]:
        """Of ``param``, which is all of the run, for kernels in plain torch.

        They are cut once: a captured graph reads their tables at each replay, and a copy from the host would wait. Each
        call has copies, since what a piece finds out about its elements takes more memory than it describes.
        """
        self._pieces = self._pieces or list(pieces(self._segments, param.numel(), param.device))
        return map(copy, self._pieces)

    def decode_param(self, param: Tensor, span: slice) -> Tensor:
        """What a rule steps in the place of ``param[span]``: a view of it, where that is not encoded."""
        if self.remainder is not None:
            return decode_remainder(param[span], self.remainder[span])
        return param[span].to(torch.float32) if self.stochastic_param else param[span]

    def encode_run(self, values: Tensor, param: Tensor, states: Sequence[tuple[int, EncodedState, Tensor]]) -> None:
        """Write all of a run: ``values`` to ``param``, where it is encoded, and others to its ``states``.

        Args:
            values: What ``decode_param`` has given, of the whole run.
            param: The parameters.
            states: Each with its index in the rule, and its values, which may be overwritten.
        """
        if not _by_extension(param):
            for piece in self.pieces(param):
                for index, state, wide in states:
                    state.encode(wide[piece.span], index, piece)
                self.encode_param(values[piece.span], param, piece)
            return
        stored = [(index, state.values, state.scales, wide) for index, state, wide in states]
        if self.remainder is not None:
            param[:], self.remainder[:] = encode_remainder(values, param.dtype)
        elif self.stochastic_param:
            stored.append((2 * PARAM_PAIR, param, None, values))
        for index, kept, scales, wide in stored:
            cpu.encode_state(wide, kept, scales, self.table, int(self.count), index)

    def encode_param(self, values: Tensor, param: Tensor, piece: Piece) -> None:
        """Write what ``decode_param`` has given, and a rule has changed, to a piece of ``param``."""
        if self.remainder is not None:
            param[piece.span], self.remainder[piece.span] = encode_remainder(values, param.dtype)
        elif self.stochastic_param:
            half = half_of(piece.random(PARAM_PAIR, self.count), 0)
            param[piece.span] = round_stochastically(values, half)


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

    def decode(self, piece: Piece) -> Tensor:
        """The values of a piece in float32."""
        return decode(self.values[piece.span], self.scales, piece)

    def decode_run(self) -> Tensor:
        """The values of all of the run in float32."""
        if _by_extension(self.values):
            return cpu.decode_state(self.values, self.scales, self.encoding.table)
        return self.decode_all(self.encoding.pieces(self.values))

    def decode_all(self, its_pieces: Iterable[Piece]) -> Tensor:
        """The values of ``its_pieces``, joined; parameters without elements make none."""
        parts = [self.decode(piece) for piece in its_pieces]
        return torch.cat(parts) if parts else torch.zeros_like(self.values, dtype=torch.float32)

    def encode(self, values: Tensor, index: int, piece: Piece) -> None:
        """Write ``values`` to a piece of this state, which is the ``index``-th of its rule."""
        half = half_of(piece.random(index // 2, self.encoding.count), index)
        encode(values, self.values[piece.span], self.scales, piece, half)


@dataclass(frozen=True)
class Encoded:
    """What the kernels of a rule have beside the declared arguments: see ``encoded`` in ``dispatch.py``.

    ``scales`` has one for each state of the rule, which is None unless that is of 8 bits; ``count`` may be a tensor.
    """

    remainder: Tensor | None
    scales: list[Tensor | None]
    table: Tensor
    count: int | Tensor
    stochastic_param: bool


def _by_extension(operand: Tensor) -> bool:
    return cpu.available and operand.device.type == "cpu"


# Kernels, by the type of their device, that take operands as they are stored: they are planned, or None is returned.
_KERNELS = {"cuda": cuda.plan_encoded}


def prepared_encoded(call: Call) -> Call:
    """As ``cuda.prepared``, of a run whose operands are encoded."""
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
    """The encoding of ``operands``, again where it encodes their parameters, and what it is in the place of."""
    found = next(operand for operand in operands if isinstance(operand, _Operand))
    encoding = found.encoding if isinstance(found, EncodedState) else found
    assert isinstance(encoding, RunEncoding)
    of_params = encoding if any(operand is encoding for operand in operands) else None
    return encoding, of_params, tuple(encoding.model_param if o is encoding else o for o in operands)


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
    states = operands[2 : rule.operands.index("model_param")]
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
    """The kernel for float32 values, piece by piece, or of the whole run where elements depend on others.

    With ``found_inf`` it leaves values as they are, and so do the encoders.
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
    values[1] = values[1].to(torch.float32)  # as the gradients of masters are
    rule(*values, **options)
    for piece in its_pieces():
        part = slice(piece.span.start - span.start, piece.span.stop - span.start)
        for index, state in states:
            state.encode(values[2 + index][part], index, piece)
        if of_params is not None:
            of_params.encode_param(values[0][part], operands[0], piece)
