# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of an arena in fewer bytes than float32; ``ops/state_codec.py`` has the formats."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apex_npu.fusion.flat_buffer import FlatBuffer
from apex_npu.fusion.flat_grads import FlatGrads
from apex_npu.fusion.group_buffers import GroupBuffers
from apex_npu.ops import LOW_PRECISION
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
    scale_count,
)

# The number of elements that rules decode at once; a larger parameter is decoded by itself.
_RUN_NUMEL = 1 << 24
# The name of the state that shows the float32 masters of 16-bit parameters with remainders.
MASTER_PARAM = "master_param"
# The items of an encoded state in ``state_dict(encoded=True)``.
STORED_KEYS = ("values", "scales", "shape", "stride", "param_dtype")


class GroupEncoding:
    """The formats and the buffers of the encoded states of one arena.

    Attributes:
        formats: The dtypes of the states that are not float32, by name; that of ``MASTER_PARAM`` is for remainders.
        stochastic_param: bfloat16 parameters are rounded stochastically.
        segments: One ``Segment`` for each slot.
        decodes_runs: Rules decode all of a run at once.
        scales: The scales of all parameters, by the names of the states that have 8 bits and are in use.
    """

    def __init__(
        self,
        group: GroupBuffers,
        formats: Mapping[str, torch.dtype],
        positions: Sequence[int],
        *,
        stochastic: bool,
        decodes_runs: bool,
    ) -> None:
        """Encode the states of ``group``, whose parameters have these ``positions`` in the optimizer."""
        self.decodes_runs = decodes_runs
        dtype = group.param_flat.dtype
        self.formats = {name: kept for name, kept in formats.items() if name != MASTER_PARAM or dtype in LOW_PRECISION}
        self.stochastic_param = stochastic and dtype == torch.bfloat16
        self.segments: list[Segment] = []
        first_scale = 0
        for param, offset, position in zip(group.params, group.grads.offsets, positions, strict=True):
            self.segments.append(Segment(offset, param.numel(), position, first_scale))
            first_scale += scale_count(param.numel())
        self._scale_total = first_scale
        self.scales: dict[str, Tensor] = {}

    def divide(self, keys: list[Hashable]) -> None:
        """Split slots of one key into parts of at most ``_RUN_NUMEL`` elements, if rules decode a run at once."""
        part = numel = 0
        for i, segment in enumerate(self.segments):
            if numel and numel + segment.numel > _RUN_NUMEL:
                part, numel = part + 1, 0
            numel += segment.numel
            if self.decodes_runs and keys[i] is not None:
                keys[i] = keys[i], part

    @property
    def own_states(self) -> tuple[str, ...]:
        """The names of the states that are shown in addition to the rule's."""
        return (MASTER_PARAM,) if MASTER_PARAM in self.formats else ()

    def new_state(self, group: GroupBuffers, name: str) -> tuple[Tensor, list[EncodedView]]:
        """Allocate state ``name``; return its values, zeros, and the view of each parameter."""
        device, dtype = group.param_flat.device, self.formats[name]
        values = FlatBuffer(group.param_flat.numel(), dtype, device).flat
        if dtype.itemsize == 1 and name != MASTER_PARAM:
            self.scales[name] = FlatBuffer(self._scale_total, torch.float32, device).flat
        views = [
            EncodedView(values, self.scales.get(name), owner if name == MASTER_PARAM else None, segment, param)
            for segment, param, owner in zip(self.segments, group.params, group.owners, strict=True)
        ]
        return values, views


class EncodedView:
    """The encoded state of one parameter, as ``optimizer.state`` shows it.

    It is not a tensor; ``dequantize()`` returns one. Copying or pickling it makes a float32 tensor.
    """

    def __init__(
        self, values: Tensor, scales: Tensor | None, param: Tensor | None, segment: Segment, like: Tensor
    ) -> None:
        """View the elements of ``segment``.

        Args:
            values: The encoded values of all parameters.
            scales: The scales of all parameters, for 8-bit states.
            param: For a remainder, its parameter, whose memory a script may replace.
            segment: The elements of this parameter.
            like: The tensor whose size and stride the state has.
        """
        span = slice(segment.begin, segment.begin + segment.numel)
        self._values, self._scales, self._param = values[span], scales, param
        self._segment = segment._replace(begin=0)
        self._size, self._stride, self._dtype = like.size(), like.stride(), like.dtype
        self._taken_by: tuple[int, int] | None = None

    @classmethod
    @torch.no_grad()
    def remainder_of(cls, param: Tensor, master: Tensor, dtype: torch.dtype) -> EncodedView:
        """Round the float32 ``master`` into ``param``, and return the remainder of ``dtype``, in memory of its own."""
        values = torch.zeros(param.numel(), dtype=dtype, device=param.device)
        made = cls(values, None, param, Segment(0, param.numel(), 0, 0), param)
        made.copy_(master)
        return made

    def stored(self) -> dict[str, Any]:
        """Return copies of the encoded tensors, flat in the order of memory, with what identifies their format.

        The keys are those of ``STORED_KEYS``. ``scales`` is None without 8-bit blocks; for a remainder, ``param_dtype``
        is the dtype of its parameter, else None.
        """
        first, count = self._segment.first_scale, scale_count(self._segment.numel)
        scales = None if self._scales is None else self._scales[first : first + count].clone()
        param_dtype = None if self._param is None else self._dtype
        layout = tuple(self._size), tuple(self._stride)
        return dict(zip(STORED_KEYS, (self._values.clone(), scales, *layout, param_dtype), strict=True))

    @classmethod
    def of_stored(cls, stored: Mapping[str, Any], param: Tensor, device: torch.device) -> EncodedView:
        """Return the state of ``param`` that ``stored`` has encoded, in memory of its own on ``device``."""
        values, scales = stored["values"].to(device, copy=True), stored["scales"]
        scales = None if scales is None else scales.to(device, copy=True)
        owner = None if stored["param_dtype"] is None else param
        return cls(values, scales, owner, Segment(0, param.numel(), 0, 0), param)

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter."""
        return self._size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameter."""
        return self._dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the encoded values: bfloat16, int8 or uint8; int16 or int8 for remainders."""
        return self._values.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that the encoded values take, scales included."""
        scales = 0 if self._scales is None else scale_count(self._segment.numel) * self._scales.element_size()
        return self._values.nbytes + scales

    def dim(self) -> int:
        """Return the number of dimensions of the parameter."""
        return len(self._size)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a state that is kept in fewer bytes is not a tensor and has no {name!r}: dequantize() returns a tensor"
        )

    def __repr__(self) -> str:
        return f"EncodedView(shape={tuple(self._size)}, stored as {self._values.dtype})"

    @torch.no_grad()
    def dequantize(self) -> Tensor:
        """Return the values as a new float32 tensor with the strides of the parameter."""
        if self._param is not None:
            param = self._param.detach()
            if param.shape != self._size or param.dtype != self._dtype:  # a script has replaced its data
                return param.to(torch.float32, copy=True)
            return decode_remainder(param, self._remainder().to(param.device))
        flat = torch.empty(self._segment.numel, dtype=torch.float32, device=self._values.device)
        for piece in self._pieces():
            flat[piece.span] = decode(self._values[piece.span], self._scales, piece)
        return flat.as_strided(self._size, self._stride)

    @torch.no_grad()
    def copy_(self, source: Any) -> None:
        """Copy the values of ``source``, rounded with the random bits of step 0.

        For a master this also writes the parameter, unless ``source`` is another view of the same format: then only the
        remainder is copied.
        """
        if isinstance(source, EncodedView):
            if self._param is not None and self.stored_dtype == source.stored_dtype:
                self._remainder().copy_(source._remainder())
                return
            source = source.dequantize()
        shaped = torch.empty(self._segment.numel, dtype=torch.float32, device=self._values.device)
        shaped.as_strided(self._size, self._stride).copy_(source)
        if self._param is not None:
            rounded, remainder = encode_remainder(shaped, self._dtype)
            if self.stored_dtype == torch.int8 and shaped.numel():
                random = torch.cat([piece.random(PARAM_PAIR, 0) for piece in self._pieces()])
                rounded, remainder = narrow_remainder(rounded, remainder, random)
            self._param.copy_(rounded.as_strided(self._size, self._stride))
            self._values.copy_(remainder)
            self._taken_by = self._param._version, self._param.data_ptr()
            return
        for piece in self._pieces():
            half = half_of(piece.random(0, 0), 0)
            encode(shaped[piece.span], self._values[piece.span], self._scales, piece, half)

    def is_of_param(self) -> bool:
        """Return whether the parameter of this remainder is unchanged since ``copy_`` wrote both."""
        return self._param is not None and self._taken_by == (self._param._version, self._param.data_ptr())

    def fill_(self, value: float) -> None:
        """Set all elements to ``value``; a master takes the value of its parameter instead."""
        if self._param is not None:
            self._values.zero_()
        else:
            self.copy_(torch.full(self._size, value, dtype=torch.float32, device=self._values.device))

    def _remainder(self) -> Tensor:
        return self._values.as_strided(self._size, self._stride)

    def _pieces(self) -> Iterator[Piece]:
        return pieces([self._segment], self._segment.numel, self._values.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dequantize()

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_is, (self.dequantize(),)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def remainders_of(optimizer: Any) -> dict[Tensor, EncodedView]:
    """Return the masters of the 16-bit parameters of ``optimizer`` that have remainders, by parameter."""
    shown = {param: entry.get(MASTER_PARAM) for param, entry in optimizer.state.items()}
    return {param: view for param, view in shown.items() if isinstance(view, EncodedView)}


def encode_states(
    group: GroupBuffers,
    formats: Mapping[str, torch.dtype],
    positions: Sequence[int],
    *,
    stochastic: bool,
    decodes_runs: bool,
    widens_grads: bool,
) -> bool:
    """Store the states of ``group`` in ``formats`` from now on; see ``GroupEncoding``.

    With ``widens_grads`` the slots of gradients of 16-bit parameters are float32. In a group that is already encoded,
    states can get other formats, and parameters other positions.

    Returns:
        True if runs have to be cut again, and states to be copied into new buffers.
    """
    encoding = group.encoding
    if encoding is None:
        made = GroupEncoding(group, formats, positions, stochastic=stochastic, decodes_runs=decodes_runs)
        group.encoding = made
        group.counts_always = made.stochastic_param or made.formats.get(MASTER_PARAM) == torch.int8
        if widens_grads and group.encoding.own_states and isinstance(group.grads, FlatGrads):
            group.grads.widen()
        return True
    before, old = encoding.segments, encoding.formats
    encoding.segments = [s._replace(position=position) for s, position in zip(before, positions, strict=True)]
    encoding.formats = {name: kept for name, kept in formats.items() if name != MASTER_PARAM or name in old}
    changed = [name for name in old | encoding.formats if old.get(name) != encoding.formats.get(name)]
    for name in changed:
        encoding.scales.pop(name, None)
        group.drop_state(name)
    return bool(changed) or encoding.segments != before
