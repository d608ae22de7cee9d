# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads and writes files of checkpoints. No code in a file is executed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from apex_npu.backends.requirements import require


class CheckpointError(Exception):
    """A file cannot be read or written; the text names it and the way out."""


def read(path: Path) -> Any:
    """The checkpoint in ``path``, on the CPU, as ``torch.load(path, weights_only=True)`` reads it.

    A file whose name ends with ``.safetensors`` is read with that package, and is a model's state dict.

    Raises:
        CheckpointError: There is no such file, it is no checkpoint, or it holds objects that only unpickling, which
            may execute code, would restore; these are named.
        ImportError: The package safetensors is missing.

    Example::

        >>> checkpoint = apex_npu.export.files.read(Path("run.pt"))
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load's refusals have no common type
        objects = _objects_in(path)
        if objects:
            raise CheckpointError(
                f"{path} holds objects beside tensors and numbers ({', '.join(objects[:5])}), and reading them would "
                "execute code from the file: it is not read. Where it was made, load it and save the state_dict() of "
                "each"
            ) from error
        raise CheckpointError(f"{path}: not a whole checkpoint that torch.load reads ({_first_line(error)})") from error


def _read_safetensors(path: Path) -> Any:
    require(f"reading {path.name}", "export", "safetensors", "0.4.3")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole file of safetensors ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _objects_in(path: Path) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # of files that are no checkpoint
        return []


def write(checkpoint: Any, path: Path) -> None:
    """Write ``checkpoint`` to ``path``, which has the old contents or the new ones at any time.

    Raises:
        CheckpointError: The folder is missing or cannot be written to.

    Example::

        >>> apex_npu.export.files.write(checkpoint, Path("run.pt"))
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; name a file in a folder that can be written to") from error
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(checkpoint, file)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
