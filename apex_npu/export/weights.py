# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Weights from a file into a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from apex_npu.export.contents import Part, common_prefix, parts_of
from apex_npu.export.files import CheckpointError, read

Model = TypeVar("Model", bound=nn.Module)
_SHOWN = 5


def load_weights(model: Model, path: str | os.PathLike[str], *, key: str | None = None) -> Model:
    """Load the weights in ``path`` into ``model``; what else is in the file does not matter.

    The file is one of ``torch.save`` (``.pth``, ``.pt``, ``.pth.tar``), read with ``weights_only=True``, or a
    ``.safetensors`` file. The weights may be all of it or an entry (``checkpoint["state_dict"]``) beside optimizer,
    loss scale and epoch. Prefixes that DistributedDataParallel (``module.``) and torch.compile (``_orig_mod.``) put
    before all names do not count, in the file as in the model. Weights of any dtype are converted to the model's; under
    amp the fp32 masters get them as they are in the file.

    Args:
        model: Has the names and shapes of the file. Passed to ``amp.initialize`` or not.
        path: The file.
        key: Which weights, where the file has several: an entry of the checkpoint, with dots between nested ones.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module.
        CheckpointError: The file is missing, no checkpoint, without weights or with several; or names are missing,
            unexpected, or of other shapes. Nothing is loaded.
        ImportError: The package safetensors is missing.

    Example::

        >>> torch.save({"epoch": 3, "state_dict": model.state_dict()}, "run.pth.tar")
        >>> model = apex_npu.export.load_weights(model, "run.pth.tar")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"load_weights takes a model, torch.nn.Module, got {type(model).__name__}")
    path = Path(path)
    part = _weights_in(path, read(path), key)
    own = _by_plain_name(model.state_dict())
    given = _by_plain_name(part.value)
    misfits = _misfits({name: value for name, (_, value) in own.items()}, {n: value for n, (_, value) in given.items()})
    if misfits:
        raise CheckpointError(
            f"{path}: {part.name} does not fit {type(model).__name__}, and nothing is loaded: {'; '.join(misfits)}"
        )
    model.load_state_dict({own[name][0]: value for name, (_, value) in given.items()})
    return model


def _weights_in(path: Path, checkpoint: Any, key: str | None) -> Part:
    found = {".".join(map(str, part.path)): part for part in parts_of(checkpoint) if part.kind == "model"}
    names = _first(list(map(repr, found)))
    if not found:
        raise CheckpointError(f"{path}: there are no weights of a model in this {type(checkpoint).__name__}")
    if key is None and len(found) > 1:
        raise CheckpointError(f"{path} has weights of {len(found)} models ({names}): pass key= to choose")
    if key is not None and key not in found:
        raise CheckpointError(f"{path}: there are no weights at key={key!r}, but at {names}")
    return found[key] if key is not None else next(iter(found.values()))


def _by_plain_name(state: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Name without prefix → name and value."""
    prefix = common_prefix(state)
    return {name.removeprefix(prefix): (name, value) for name, value in state.items()}


def _misfits(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Each kind of difference in words."""
    missing = [name for name in own if name not in given]
    unexpected = [name for name in given if name not in own]
    shapes = {name: (_shape(given[name]), _shape(own[name])) for name in own if name in given}
    other = [f"{name} is {new}, not {old}" for name, (new, old) in shapes.items() if new != old]
    return [
        f"{len(names)} {what} ({_first(names)})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", other))
        if names
    ]


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _first(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join([*names[:_SHOWN], *more])
