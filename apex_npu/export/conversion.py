# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Translates the states of a checkpoint. The given checkpoint is not changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from apex_npu.export.contents import PREFIXES, Part, common_prefix, parts_of

TARGETS = ("apex", "torch")
# The options of a GradScaler besides its scale, with torch's defaults.
_GRAD_SCALER = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def convert(checkpoint: Any, to: str, *, strip_module: bool = False) -> tuple[Any, list[str]]:
    """Return ``checkpoint`` in the form that ``to`` loads.

    - Loss scales become those of ``torch.amp.GradScaler`` (``to="torch"``) or of ``amp.load_state_dict`` (``"apex"``,
      which apex_npu also reads). A GradScaler has one scale, so the smallest of several scales is used.
    - torch.optim keeps an optimizer's step in each parameter's state, NVIDIA's optimizers keep it in the group. The
      result has it in both places, which all of them load.
    - float32 masters in an optimizer's state (NVIDIA's ``master_weights``) are removed for torch, which would drop
      them.
    - Models are not changed, except for the prefix of their names if ``strip_module`` is set.

    Args:
        checkpoint: The result of ``torch.load``.
        to: ``"torch"``, or ``"apex"`` for NVIDIA's Apex and apex_npu.
        strip_module: Remove the prefixes that DistributedDataParallel and torch.compile add to the names of models.

    Returns:
        The new checkpoint, which shares tensors with the old one, and a sentence for each change.

    Raises:
        ValueError: ``to`` is unknown, there is nothing to convert, or parameters of one group have taken different
            numbers of steps, which NVIDIA's optimizers cannot express.
    """
    if to not in TARGETS:
        raise ValueError(f"to={to!r}: {' or '.join(map(repr, TARGETS))} is expected")
    parts = list(parts_of(checkpoint))
    if all(part.kind == "other" for part in parts):
        raise ValueError(
            f"there is no state of a model, an optimizer or a loss scaler in this {type(checkpoint).__name__}"
        )
    changes: list[str] = []
    if strip_module and all(part.kind != "model" for part in parts):
        changes.append("no prefix removed: there are no weights of a model")
    for part in parts:
        new, said = _converted(part, to, strip_module)
        if said:
            checkpoint = _with(checkpoint, part.path, new)
            changes += [f"{part.name}: {text}" for text in said]
    return checkpoint, changes


def _converted(part: Part, to: str, strip_module: bool) -> tuple[Any, list[str]]:
    if part.kind == "amp" and to == "torch":
        return _to_grad_scaler(part.value)
    if part.kind == "GradScaler" and to == "apex":
        return _to_amp(part.value)
    if part.kind == "optimizer":
        return _with_steps(part, to)
    if part.kind == "model" and strip_module:
        return _stripped(part.value)
    return part.value, []


def _to_grad_scaler(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    smallest = min(state.values(), key=lambda entry: float(entry["loss_scale"]))
    scale = float(smallest["loss_scale"])
    said = [
        f"loss scale {scale:g} becomes that of a torch.amp.GradScaler, which is dynamic, with growth_interval "
        f"{_GRAD_SCALER['growth_interval']}: amp's state does not say whether the scale was static"
    ]
    if len(state) > 1:
        said.append(f"used the smallest of {len(state)} loss scales, because a GradScaler has one")
    return {"scale": scale, **_GRAD_SCALER, "_growth_tracker": int(smallest["unskipped"])}, said


def _to_amp(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    scale = float(state["scale"])
    entry = {"loss_scale": scale, "unskipped": int(state["_growth_tracker"])}
    said = [f"loss scale {scale:g} becomes amp's, for one loss"]
    own = ", ".join(
        f"{name}={state[name]:g}" for name, usual in _GRAD_SCALER.items() if state.get(name, usual) != usual
    )
    if own:
        said.append(
            f"left out {own}, which amp's state does not have: pass them to amp.initialize as scale_growth_factor, "
            "scale_backoff_factor and scale_window"
        )
    return {"loss_scaler0": entry}, said


def _stripped(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    prefix = common_prefix(state)
    if not prefix:
        return state, [f"no prefix removed: not all names begin with {' or '.join(PREFIXES)}"]
    return {name.removeprefix(prefix): value for name, value in state.items()}, [f"removed {prefix} from the names"]


def _with_steps(part: Part, to: str) -> tuple[dict[str, Any], list[str]]:
    """Return an optimizer's state with its steps in both places."""
    said: dict[str, None] = {}
    state = {index: dict(entry) for index, entry in part.value["state"].items()}
    groups = [dict(group) for group in part.value["param_groups"]]
    for number, group in enumerate(groups):
        entries = [state[index] for index in group["params"] if state.get(index)]
        for entry in entries:
            if "step" in group and "step" not in entry:
                entry["step"] = torch.tensor(float(_count(group["step"])), dtype=torch.float32)
                said["copied the steps of the groups to the states"] = None
        steps = {_count(entry["step"]) for entry in entries if "step" in entry}
        if len(steps) > 1 and to == "apex":
            raise ValueError(
                f"{part.name}: the parameters of group {number} have taken {min(steps)} to {max(steps)} steps, but "
                "NVIDIA's optimizers count one number for a group. apex_npu's optimizers load the checkpoint as it "
                "is"
            )
        if steps and to == "apex":
            # torch.optim keeps the step that a group was loaded with, and increments only those of the states.
            old, step = group.get("step"), steps.pop() + group.get("step_offset", 0)
            if old is None or _count(old) != step:
                group["step"] = torch.full_like(old, step) if isinstance(old, Tensor) else step
                said["copied the steps of the states to the groups"] = None
        for entry in entries:
            if to == "torch" and entry.pop("master_param", None) is not None:
                said["removed float32 masters: torch.optim steps the model's own parameters"] = None
    return {**part.value, "state": state, "param_groups": groups}, list(said)


def _count(step: Any) -> int:
    return int(step.item() if isinstance(step, Tensor) else step)


def _with(container: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of ``container`` with ``value`` at ``path``; entries that are not on the path are shared."""
    if not path:
        return value
    key, *rest = path
    copy = list(container) if isinstance(container, list | tuple) else dict(container)
    copy[key] = _with(container[key], tuple(rest), value)
    return tuple(copy) if isinstance(container, tuple) else copy
