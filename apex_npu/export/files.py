# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads and writes checkpoint files. No code in a file is executed."""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from apex_npu.backends.requirements import require

_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_COPY_AGAIN = "The file is incomplete, or of another kind: copy it again, or pass the path of the checkpoint"


class CheckpointError(Exception):
    """Raised if a file cannot be read or written; the message names the file and says how to fix it."""


class _Dtype:
    """A stand-in for numpy.dtype in pickles: the code that it is called with, and the byte order that is set then."""

    def __init__(self, code: str, align: bool = False, copy: bool = True) -> None:
        self.code = code
        self.order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]


# numpy's codes of numbers, with those of struct.
_NUMBERS = {"b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
_NUMBERS |= {"f2": "e", "f4": "f", "f8": "d"}


def _number(dtype: _Dtype, data: bytes) -> bool | int | float:
    """Return a scalar of numpy as a number of Python."""
    order = "<" if dtype.order == "|" else dtype.order  # single bytes have no order
    (number,) = struct.unpack(order + _NUMBERS[dtype.code], data)
    return cast("bool | int | float", number)


# The objects that training scripts write besides tensors: their arguments, of which only the __dict__ is restored, and
# metrics that numpy has computed. numpy's own functions would trust sizes and flags in the file.
_PLAIN: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": argparse.Namespace,
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
}


def read(path: Path) -> Any:
    """Return the checkpoint in ``path``, on the CPU, read as ``torch.load(path, weights_only=True)`` reads it.

    A file whose name ends with ``.safetensors`` is read with that package, and is a model's state dict. The shards that
    an index (``model.safetensors.index.json``) names are one state dict, too. Scalars of numpy become Python's numbers.

    Raises:
        CheckpointError: There is no such file, it is no checkpoint, or it holds objects that only unpickling, which
            may execute code, would restore. The message names these objects.
        ImportError: The package safetensors is missing.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; name a file in it")
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix == ".json":
        return _read_shards(path)
    try:  # as the caller allows, since numpy's arrays need its own dtypes
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch.load's refusals have no common type
        pass
    try:
        with torch.serialization.safe_globals([(plain, name) for name, plain in _PLAIN.items()]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        found = _objects_in(path)
        if objects := [name for name in found if name not in _PLAIN] or found:
            raise CheckpointError(
                f"{path} contains objects other than tensors and numbers ({', '.join(objects[:5])}). It is not "
                "read, because reading them would execute code from the file. Load it where it was made, and save "
                "the state_dict() of each object; or, if you trust it, read it from Python under "
                "torch.serialization.safe_globals([...]) with the classes and functions of these names"
            ) from error
        # torch's message begins with advice to unpickle, and ends with its cause.
        why = first_line(error.__context__ or error)
        raise CheckpointError(
            f"{path} is not a complete checkpoint that torch.load reads ({why}). {_COPY_AGAIN}"
        ) from error


def _read_shards(path: Path) -> dict[str, Any]:
    """Return the state dict of all files that an index in Hugging Face's format names, in the index's folder."""
    state: dict[str, Any] = {}
    try:
        for shard in sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())):
            if Path(shard).suffix == ".json":
                raise ValueError(f"{shard} is not a file of weights")
            if not path.with_name(shard).exists():
                raise CheckpointError(f"{path} names {shard}, which is not beside it: copy all shards into its folder")
            state |= read(path.with_name(shard))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f'{path} is not an index of shards, which is JSON with the file of each name in "weight_map" '
            f"({first_line(error)})"
        ) from error
    return state


def _read_safetensors(path: Path) -> Any:
    require(f"reading {path.name}", "safetensors", "0.4.3")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a complete file of safetensors ({first_line(error)}). {_COPY_AGAIN}"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the type and the first sentence of the error that first caused ``error``, without a terminal's colours."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = _COLOURS.sub("", str(error)).strip().partition("\n")[0].partition(". ")[0][:200].removesuffix(".")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _objects_in(path: Path) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # the file is no checkpoint
        return []


@contextmanager
def replacing(path: Path, error: type[Exception]) -> Iterator[Path]:
    """Yield a path in a temporary folder, and afterwards move all files of that folder to ``path`` and beside it.

    At any time ``path`` has either the old contents or the new ones. If it is a link, it stays, and its target is
    replaced. The other files are moved first, since the one at ``path`` may refer to them.

    Raises:
        error: ``path`` is a folder, or its folder is missing or cannot be written to.
    """
    if path.is_dir():
        raise error(f"{path} is a folder; name a file in it")
    target = Path(os.path.realpath(path))
    try:
        folder = tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.")
    except OSError as failure:
        raise error(f"{path}: {failure.strerror}; name a file in a folder that can be written to") from failure
    with folder as name:
        yield Path(name, target.name)
        for written in sorted(Path(name).iterdir(), key=lambda file: file.name == target.name):
            os.replace(written, target.with_name(written.name))


def write(checkpoint: Any, path: Path) -> None:
    """Write ``checkpoint`` to ``path``, which at any time has either the old contents or the new ones.

    If ``path`` is a link, it stays, and its target is written.

    Raises:
        CheckpointError: The folder is missing or cannot be written to, ``path`` is a folder, or its name is one of
            safetensors.
    """
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: this is a file of torch.save; name it {path.with_suffix('.pt').name}")
    with replacing(path, CheckpointError) as new:
        torch.save(checkpoint, new)
