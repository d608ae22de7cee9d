# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Recorded``: the content of a file of ``record``, the choice of its samples, and how it is written and read."""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from apex_npu.debug.text import name_of

Kind = Literal["operator", "module", "random", "gradient", "buffer"]

_KIND, _FORMAT = "apex_npu.debug.record", 1


@dataclass
class TensorRow:
    """A tensor of an iteration, and where it is computed.

    Attributes:
        kind: ``"operator"`` (a result), ``"module"`` (an output; in backward its gradient), ``"random"`` (the draws of
            an operator), ``"gradient"`` (of a parameter), or ``"buffer"``.
        phase: ``"forward"``, ``"backward"``, ``"recompute"``, ``"block"``, or ``"after backward"``.
        module: The innermost module that computes the tensor, or the name of the parameter or the buffer; None if
            there is none.
        operator: The operator, or the class of the module.
        call: The number of earlier rows with the same kind, phase, module, operator and result.
        result: The index among several results.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        place: The line of code.
        source: The text of the line of code.
        norm: The norm of all elements, divided by the loss scale if the tensor descends from the scaled loss.
        low: The smallest element, divided like ``norm``.
        high: The largest element, divided like ``norm``.
        zeros: The number of elements that are 0.
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
        scale: The factor in the tensor: the loss scale if it descends from the scaled loss, or 1.
        values: The elements that are kept, times ``scale``, in one dimension.
    """

    scale: float
    values: Tensor

    @property
    def exact(self) -> Tensor:
        """The ``values`` in float64, divided by ``scale``; complex numbers as pairs."""
        return as_real(self.values).double() / self.scale


@dataclass
class Held:
    """A tensor from before the iteration: part of the batch, or a weight.

    Attributes:
        name: The name of the tensor.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        digest: A hash of the tensor's bytes.
        values: The elements that are kept, for a weight.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    values: Tensor | None = None


@dataclass
class Recorded:
    """A recorded iteration.

    Attributes:
        samples: The maximum number of elements of a tensor that are kept; None if all are.
        level: The ``opt_level``; empty without amp.
        device: The type of the model's device.
        scale: The loss scale.
        versions: A dict from package name to version.
        batch: The tensors from outside that operators of forward have read.
        weights: The parameters (or their float32 masters if there are any) and buffers, at the beginning.
        rows: The rows in the order of execution.
        left_out: The reasons why results are not among ``rows``, with the number of results.
        notes: Remarks that ``compare`` shows.
    """

    samples: int | None
    level: str = ""
    device: str = ""
    scale: float = 1.0
    versions: dict[str, str] = field(default_factory=dict)
    batch: list[Held] = field(default_factory=list)
    weights: list[Held] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the iteration to ``path``, in a form that ``torch.load(path, weights_only=True)`` reads.

        Raises:
            OSError: The file cannot be written.
            RuntimeError: The file cannot be written, as reported by torch's writer.
        """
        torch.save({"kind": _KIND, "format": _FORMAT, **asdict(self)}, path)


def load(path: str | os.PathLike[str]) -> Recorded:
    """Read a file that ``save`` has written.

    Raises:
        FileNotFoundError: There is no file ``path``.
        ValueError: The file was not written by ``save``, or has another format version.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no file {path!r}: amp.debug.record(path, model) writes one")
    foreign = f"{path} is not a file of amp.debug.record"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the type depends on the bytes
        raise ValueError(f"{foreign}: torch.load cannot read it") from error
    if not isinstance(found, dict) or found.pop("kind", None) != _KIND:
        raise ValueError(f"{foreign}: it has other contents")
    if (version := found.pop("format", None)) != _FORMAT:
        raise ValueError(
            f"{path} has format {version}, but this version of apex_npu reads {_FORMAT}: record it again with this "
            "version, or compare with the version that wrote it"
        )
    try:
        recorded = Recorded(**found)
        recorded.rows = [Row(**row) for row in found["rows"]]
        recorded.batch = [Held(**held) for held in found["batch"]]
        recorded.weights = [Held(**held) for held in found["weights"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{foreign}: {error}") from error
    return recorded


def samples_of(tensor: Tensor, count: int | None) -> Tensor:
    """Return a copy of ``count`` elements of ``tensor``, on the host, chosen by its size alone; None: of all."""
    flat = tensor.detach().reshape(-1)
    size = flat.numel()
    if count is None or size <= count:
        return flat.clone()
    return flat[_chosen(size, count)]


@functools.lru_cache(maxsize=256)
def _chosen(size: int, count: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(size)
    return torch.randint(size, (count,), generator=generator, device="cpu").sort().values


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, and any other tensor unchanged."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.dtype.is_complex else tensor


def on_host(tensor: Tensor) -> Tensor:
    """Return ``tensor`` on the host, with pending negation and conjugation applied."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def digest_of(tensor: Tensor) -> str:
    """Return a hash of the bytes of ``tensor``, in the order of its indices."""
    host = on_host(tensor).contiguous().reshape(-1)
    return hashlib.blake2b(host.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def held_as(name: str, tensor: Tensor, values: Tensor | None = None) -> Held:
    """Return ``tensor`` as a ``Held`` with ``name`` and ``values``."""
    return Held(name, tuple(tensor.shape), name_of(tensor.dtype), digest_of(tensor), values)


def row_of(tensor: Tensor, samples: int | None, scale: float, known: dict[str, Any]) -> Row:
    """Return the row of ``tensor``; ``known`` has the attributes about where it is computed."""
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
        values=samples_of(host, samples),
        **known,
    )
