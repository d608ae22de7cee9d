# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads and writes files of checkpoints. No code in a file is executed."""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from apex_npu.backends.requirements import require

_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_COPY_AGAIN = "It is cut off, or another kind of file: copy it again, or name the checkpoint"


class CheckpointError(Exception):
    """A file cannot be read or written; the text names it and the way out."""


class _Dtype:
    """What a pickle calls to make numpy.dtype("f8"), and the byte order that it sets then. numpy is not involved."""

    def __init__(self, code: str, align: bool = False, copy: bool = True) -> None:
        self.code = code
        self.order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]


# numpy's codes of numbers, and struct's.
_NUMBERS = {"b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
_NUMBERS |= {"f2": "e", "f4": "f", "f8": "d"}


def _number(dtype: _Dtype, data: bytes) -> bool | int | float:
    """A scalar of numpy, as Python's."""
    order = "<" if dtype.order == "|" else dtype.order  # of single bytes, which have none
    (number,) = struct.unpack(order + _NUMBERS[dtype.code], data)
    return cast("bool | int | float", number)


# What training scripts write beside tensors: their arguments, of which nothing but the __dict__ is restored, and
# metrics that numpy has computed. numpy's own functions would take sizes and flags from the file as they are.
_PLAIN: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": argparse.Namespace,
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
}


def read(path: Path) -> Any:
    """The checkpoint in ``path``, on the CPU, as ``torch.load(path, weights_only=True)`` reads it.

    A file whose name ends with ``.safetensors`` is read with that package, and is a model's state dict. So are all
    shards together that an index (``model.safetensors.index.json``) names. Scalars of numpy become Python's numbers.

    Raises:
        CheckpointError: There is no such file, it is no checkpoint, or it holds objects that only unpickling, which
            may execute code, would restore; these are named.
        ImportError: The package safetensors is missing.

    Example::

        >>> checkpoint = apex_npu.export.files.read(Path("run.pt"))
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; name a file in it")
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix == ".json":
        return _read_shards(path)
    try:
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
                f"{path} holds objects beside tensors and numbers ({', '.join(objects[:5])}), and reading them would "
                "execute code from the file: it is not read. Where it was made, load it and save the state_dict() of "
                "each; or, if it is trusted, read it from Python under torch.serialization.safe_globals([...]) with "
                "the classes and functions of these names"
            ) from error
        # torch's message begins with advice to unpickle, and ends with what it was raised for.
        why = first_line(error.__context__ or error)
        raise CheckpointError(f"{path}: not a whole checkpoint that torch.load reads ({why}). {_COPY_AGAIN}") from error


def _read_shards(path: Path) -> dict[str, Any]:
    """The state dicts of all files that an index of Hugging Face's form names, which are beside it."""
    state: dict[str, Any] = {}
    try:
        for shard in sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())):
            if Path(shard).suffix == ".json":
                raise ValueError(f"{shard} is no file of weights")
            if not path.with_name(shard).exists():
                raise CheckpointError(f"{path} names {shard}, which is not beside it: copy all shards into its folder")
            state |= read(path.with_name(shard))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f'{path}: no index of shards, JSON with the file of each name in "weight_map" ({first_line(error)})'
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
            f"{path}: not a whole file of safetensors ({first_line(error)}). {_COPY_AGAIN}"
        ) from error


def first_line(error: BaseException) -> str:
    """Of what has caused ``error`` in the end, its first sentence there, without a terminal's colours."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = _COLOURS.sub("", str(error)).strip().partition("\n")[0].partition(". ")[0][:200].removesuffix(".")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _objects_in(path: Path) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # of files that are no checkpoint
        return []


def write(checkpoint: Any, path: Path) -> None:
    """Write ``checkpoint`` to ``path``, which has the old contents or the new ones at any time.

    A link stays, and what it points at is written.

    Raises:
        CheckpointError: The folder is missing or cannot be written to, ``path`` is a folder, or its name is one of
            safetensors.

    Example::

        >>> apex_npu.export.files.write(checkpoint, Path("run.pt"))
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; name a file in it")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: this is a file of torch.save; name it {path.with_suffix('.pt').name}")
    target = Path(os.path.realpath(path))
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; name a file in a folder that can be written to") from error
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(checkpoint, file)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
