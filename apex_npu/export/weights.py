# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loads weights from a file into a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from apex_npu.export.contents import Part, common_prefix, parts_of
from apex_npu.export.files import CheckpointError, read

Model = TypeVar("Model", bound=nn.Module)
_SHOWN = 5


def load_weights(model: Model, path: str | os.PathLike[str], *, key: str | None = None) -> Model:
    """Load the weights in ``path`` into ``model``; ignore the other contents of the file.

    The file is one of ``torch.save`` (``.pth``, ``.pt``, ``.pth.tar``), read with ``weights_only=True``, a
    ``.safetensors`` file, or the index of several (``.index.json``). The weights may be the whole file or an entry
    (``checkpoint["state_dict"]``) beside optimizer, loss scale and epoch.

    Prefixes that DistributedDataParallel (``module.``) and torch.compile (``_orig_mod.``) put before all names are
    ignored in the file and in the model. Another prefix of all names in the file (``model.``, from Lightning) is
    ignored if the model has the names without it. Weights are converted to the model's dtype; under amp the
    float32 values are those of the file.

    One name is enough for a tensor that has several in the model (tied weights). ``num_batches_tracked`` of batch norms
    may be missing, and then stays unchanged.

    Args:
        model: A model with the names and shapes of the file, whether or not it was passed to ``amp.initialize``.
        path: The file.
        key: The entry of the checkpoint to load if the file has several models' weights, with dots between nested keys.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        CheckpointError: The file is missing, is no checkpoint, or has no weights or several; or names are missing,
            unexpected, or of other shapes; or values are infinite in the model's dtype. Nothing is loaded.
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
    given = _given(part.value, own)
    held = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    names = {id(held.get(own[name][0])): name for name in given if name in own}
    for name, (full, _) in own.items():
        if name not in given and full in held and id(held[full]) in names:  # another name of a tensor that is given
            given[name] = given[names[id(held[full])]]
    norms = [name for name, module in model.named_modules() if hasattr(module, "track_running_stats")]
    counts = {f"{name}.num_batches_tracked".lstrip(".") for name in norms}  # old files lack them
    expected = {name: value for name, (full, value) in own.items() if name in given or full not in counts}
    misfits = _misfits(expected, given)
    if misfits:
        raise CheckpointError(
            f"{path}: {part.name} does not fit {type(model).__name__}, and nothing is loaded: {'; '.join(misfits)}"
        )
    state = {own[name][0]: value for name, value in given.items()}
    if lost := [name for name, value in state.items() if name in held and overflows(value, held[name].dtype)]:
        raise CheckpointError(
            f"{path}: {len(lost)} weights have values that are infinite in {held[lost[0]].dtype}, the model's dtype "
            f"({first(lost)}), and nothing is loaded: load them into a model in float32, or at a level in bfloat16"
        )
    model.load_state_dict(state)
    return model


def overflows(value: Any, dtype: torch.dtype) -> bool:
    """Return whether some finite values of ``value`` are infinite in ``dtype``."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and dtype.is_floating_point):
        return False
    wider = torch.finfo(value.dtype).max > torch.finfo(dtype).max
    return wider and bool((value.isfinite() & ~value.to(dtype).isfinite()).any())


def _weights_in(path: Path, checkpoint: Any, key: str | None) -> Part:
    found = [(".".join(map(str, part.path)), part) for part in parts_of(checkpoint) if part.kind == "model"]
    names = first([repr(name) for name, _ in found])
    if not found:
        keys = f" with {first([repr(key) for key in checkpoint])}" if isinstance(checkpoint, dict) else ""
        raise CheckpointError(f"{path}: there are no weights of a model in this {type(checkpoint).__name__}{keys}")
    if key is None and len(found) > 1:
        raise CheckpointError(f"{path} has weights of {len(found)} models ({names}): pass key= to choose")
    chosen = [part for name, part in found if key in (None, name)]
    if not chosen:
        raise CheckpointError(f"{path}: there are no weights at key={key!r}, but at {names}")
    if len(chosen) > 1:
        shown = first([part.name for part in chosen])
        raise CheckpointError(
            f"{path}: key={key!r} is the name of {len(chosen)} models ({shown}): save one of them in a file of its own"
        )
    return chosen[0]


def _by_plain_name(state: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return a dict from each name without prefix to the full name and the value."""
    prefix = common_prefix(state)
    return {name.removeprefix(prefix): (name, value) for name, value in state.items()}


def _given(weights: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``weights`` without a prefix: a wrapper's, and the shortest that leaves only names in ``own``, if any."""
    plain = {name: value for name, (_, value) in _by_plain_name(weights).items()}
    *parts, _ = next(iter(plain)).split(".")
    for prefix in accumulate((f"{part}." for part in parts), initial=""):
        if all(name.startswith(prefix) and name[len(prefix) :] in own for name in plain):
            return {name[len(prefix) :]: value for name, value in plain.items()}
    return plain


def _misfits(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return each kind of difference between names or shapes, in words."""
    missing = [name for name in own if name not in given]
    unexpected = [name for name in given if name not in own]
    shapes = {name: (_shape(given[name]), _shape(own[name])) for name in own if name in given}
    other = [f"{name} is {new}, not {old}" for name, (new, old) in shapes.items() if new != old]
    return [
        f"{len(names)} {what} ({first(names)})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", other))
        if names
    ]


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def first(names: Sequence[str]) -> str:
    """Return the first of ``names`` as text, and the number of the others."""
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join([*names[:_SHOWN], *more])
