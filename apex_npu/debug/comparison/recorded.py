# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Recorded``: what a file of ``record`` holds, how samples are chosen for it, and how it is written and read."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from apex_npu.debug.text import name_of

Kind = Literal["operator", "module", "random", "gradient", "buffer"]

_FORMAT = 1


@dataclass
class TensorRow:
    """A tensor of an iteration, and where it is computed.

    Attributes:
        kind: ``"operator"`` (a result), ``"module"`` (an output; in backward its gradient), ``"random"`` (what an
            operator has drawn), ``"gradient"`` (of a parameter), or ``"buffer"``.
        phase: ``"forward"``, ``"backward"``, ``"recompute"``, ``"block"``, or ``"after backward"``.
        module: The innermost module that it is part of, or the name of the parameter or the buffer; None: of none.
        operator: The operator, or the class of the module.
        call: How many rows before it have the same kind, phase, module, operator and result.
        result: Which of several results.
        shape: Its shape.
        dtype: Its dtype.
        place: The line of code.
        source: Its text.
        norm: Of all its elements, divided by the loss scale where it descends from the scaled loss, as are the two
            that follow.
        low: Its smallest element.
        high: Its largest.
        zeros: How many elements are 0.
    """

    kind: Kind
    phase: str
    module: str | None
    operator: str
    call: int
    result: int
    shape: tuple[int, ...]
    dtype: str
    place: str
    source: str
    norm: float
    low: float
    high: float
    zeros: int


@dataclass
class Row(TensorRow):
    """A row of a file.

    Attributes:
        scale: What the tensor is multiplied with: the loss scale where it descends from the scaled loss.
        values: One dimension: the elements that are kept, times ``scale``.
    """

    scale: float
    values: Tensor

    @property
    def exact(self) -> Tensor:
        """``values`` in float64, divided by ``scale``; complex numbers as pairs."""
        return as_real(self.values).double() / self.scale


@dataclass
class Held:
    """A tensor from before the iteration: of the batch, or a weight.

    Attributes:
        name: What it is called.
        shape: Its shape.
        dtype: Its dtype.
        digest: A hash of its bytes.
        values: Of a weight the elements that are kept.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    values: Tensor | None = None


@dataclass
class Recorded:
    """An iteration.

    Attributes:
        samples: How many elements of a tensor are kept at most; None: all.
        level: The ``opt_level``; empty: without amp.
        device: The type of the model's device.
        scale: The loss scale.
        versions: Name → version.
        random_states: Device → a hash of the state of its generator at the beginning.
        batch: Tensors from outside that operators of forward have read.
        weights: Parameters, float32 masters where there are any, and buffers, at the beginning.
        rows: In the order of execution.
        left_out: Why results are not among ``rows``, and how many.
        notes: What ``compare`` says of it.
    """

    samples: int | None
    level: str = ""
    device: str = ""
    scale: float = 1.0
    versions: dict[str, str] = field(default_factory=dict)
    random_states: dict[str, str] = field(default_factory=dict)
    batch: list[Held] = field(default_factory=list)
    weights: list[Held] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to ``path``, in a form that ``torch.load(path, weights_only=True)`` reads.

        A file that is there stays as it was until the new one is complete.

        Raises:
            OSError: It cannot be written.
            RuntimeError: Likewise, where torch's writer says so.
        """
        target = os.path.realpath(path)
        is_device = os.path.exists(target) and not os.path.isfile(target)
        beside = target if is_device or not os.access(os.path.dirname(target), os.W_OK) else f"{target}.tmp"
        try:
            torch.save({"format": _FORMAT, "kind": "apex_npu.debug.record", **asdict(self)}, beside)
            if beside != target:
                os.replace(beside, target)
        except BaseException:
            if beside != target and os.path.exists(beside):
                os.remove(beside)
            raise


def load(path: str | os.PathLike[str]) -> Recorded:
    """Read what ``save`` has written.

    Raises:
        FileNotFoundError: There is no file ``path``.
        ValueError: It is none of ``save``'s, or of a newer version.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no file {path!r}: amp.debug.record(path, model) writes one")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what it raises depends on the bytes
        raise ValueError(f"{path} is no file of amp.debug.record: torch.load cannot read it") from error
    if not isinstance(found, dict) or found.get("kind") != "apex_npu.debug.record":
        raise ValueError(f"{path} is no file of amp.debug.record: it holds other things")
    if found.get("format") != _FORMAT:
        raise ValueError(
            f"{path} has format {found.get('format')}, and this version of apex_npu reads {_FORMAT}: record it again "
            "with this version, or compare with the one that has written it"
        )
    known = {one.name for one in fields(Recorded)}
    try:
        recorded = Recorded(**{name: value for name, value in found.items() if name in known})
        recorded.rows = [Row(**row) for row in found["rows"]]
        recorded.batch = [Held(**held) for held in found["batch"]]
        recorded.weights = [Held(**held) for held in found["weights"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is no file of amp.debug.record: {error}") from error
    return recorded


class Samples:
    """Chooses which elements of a tensor are kept: for one size everywhere the same."""

    def __init__(self, count: int | None) -> None:
        """At most ``count``; None: all."""
        self._count = count
        self._indices: dict[int, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Elements of ``tensor``, which is on the host, in memory of their own."""
        flat = tensor.detach().reshape(-1)
        size = flat.numel()
        if self._count is None or size <= self._count:
            return flat.clone()
        if size not in self._indices:
            generator = torch.Generator("cpu").manual_seed(size)
            chosen = torch.randint(size, (self._count,), generator=generator, device="cpu")
            self._indices[size] = chosen.sort().values
        return flat[self._indices[size]]


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs; others as they are."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.dtype.is_complex else tensor


def on_host(tensor: Tensor) -> Tensor:
    """``tensor`` on the host, with its elements as they are in memory: not to be negated, or conjugated, yet."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def digest_of(tensor: Tensor) -> str:
    """A hash of the bytes of ``tensor``, in the order of its indices."""
    host = on_host(tensor).contiguous().reshape(-1)
    return hashlib.blake2b(host.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def row_of(tensor: Tensor, samples: Samples, scale: float, known: dict[str, Any]) -> Row:
    """The row of ``tensor``, with what is ``known`` of where it is computed."""
    host = on_host(tensor)
    real = as_real(host.reshape(-1))
    if not real.dtype.is_floating_point:
        real = real.float()
    low, high = (float(end) / scale for end in torch.aminmax(real))
    return Row(
        shape=tuple(host.shape),
        dtype=name_of(host.dtype),
        scale=scale,
        norm=float(torch.linalg.vector_norm(real, dtype=torch.float64)) / scale,
        low=low,
        high=high,
        zeros=real.numel() - int(real.count_nonzero()),
        values=samples.of(host),
        **known,
    )
