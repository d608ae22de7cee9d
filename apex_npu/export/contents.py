# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Finds the states of models, optimizers and loss scalers in a checkpoint by their structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# The names of a rule's states; rules with more names come first.
_RULES = {
    ("exp_avg", "exp_avg_sq"): "Adam, AdamW or LAMB",
    ("square_avg", "acc_delta"): "Adadelta",
    ("square_avg",): "RMSprop",
    ("next_m", "next_v"): "BertAdam",
    ("momentum_buffer",): "SGD with momentum",
    ("sum",): "Adagrad",
}
# The key, after the module's name, of the result of its ``get_extra_state``, which may be anything.
_EXTRA_STATE = "_extra_state"
PREFIXES = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class Part:
    """One state in a checkpoint."""

    path: tuple[str | int, ...]  # the keys that lead to it from the top; empty for the checkpoint itself
    kind: str  # a key of _KINDS
    value: Any

    @property
    def name(self) -> str:
        """The path in Python's notation; "checkpoint" for the whole checkpoint."""
        return "checkpoint" + "".join(f"[{key!r}]" for key in self.path)

    def describe(self) -> str:
        """Return one line on the content of the state."""
        return _KINDS[self.kind][1](self.value)


def parts_of(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[Part]:
    """Yield the states in ``value``, which is at ``path`` of a checkpoint; containers in it are searched in order."""
    kind = _kind(value)
    if kind is not None:
        yield Part(path, kind, value)
    elif isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for key, entry in value.items():
            yield from parts_of(entry, (*path, key))
    elif isinstance(value, list | tuple) and value and None not in map(_kind, value):
        for index, entry in enumerate(value):
            yield from parts_of(entry, (*path, index))
    else:
        yield Part(path, "other", value)


def common_prefix(names: Iterable[str]) -> str:
    """Return the prefix that DistributedDataParallel (``module.``) and torch.compile (``_orig_mod.``) put before names.

    It is the longest that all ``names`` have.
    """
    names = list(names)
    prefix = ""
    while names and (longer := [prefix + p for p in PREFIXES if all(n.startswith(prefix + p) for n in names)]):
        prefix = longer[0]
    return prefix


def _kind(value: Any) -> str | None:
    kinds = _KINDS.items() if isinstance(value, Mapping) else ()
    return next((kind for kind, (is_one, _) in kinds if is_one(value)), None)


def _is_amp(value: Mapping[Any, Any]) -> bool:
    entries = [isinstance(state, Mapping) and {"loss_scale", "unskipped"} <= state.keys() for state in value.values()]
    return bool(entries) and all(entries)


def _is_model(value: Mapping[Any, Any]) -> bool:
    """Return whether ``value`` is a flat dict with a tensor; a checkpoint with a tensor as a metric has dicts, too."""
    names = all(isinstance(key, str) for key in value)
    flat = names and not any(_is_nested(entry) for key, entry in value.items() if not key.endswith(_EXTRA_STATE))
    return flat and any(isinstance(entry, Tensor) for entry in value.values())


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(_is_nested, value)))


# --- in words --------------------------------------------------------------------------------------------------------


def _describe_optimizer(value: Mapping[str, Any]) -> str:
    entries = [entry for entry in value["state"].values() if isinstance(entry, Mapping)]
    names = set().union(*entries)
    rule = next((rule for wanted, rule in _RULES.items() if set(wanted) <= names), "no known state")
    groups = value["param_groups"]
    count = sum(len(group["params"]) for group in groups)
    steps = {"in its groups, as NVIDIA's optimizers count": any("step" in group for group in groups)}
    steps["in each state, as torch.optim counts"] = "step" in names
    where = ", and ".join(text for text, is_there in steps.items() if is_there) or "nowhere"
    masters = ", float32 masters" if "master_param" in names else ""
    return (
        f"optimizer: {rule} ({', '.join(sorted(names)) or 'stateless'}), {len(entries)} of {count} parameters have "
        f"state, {len(groups)} groups{masters}; its step is {where}"
    )


def _describe_model(value: Mapping[str, Any]) -> str:
    tensors = [entry for entry in value.values() if isinstance(entry, Tensor)]
    dtypes = Counter(str(entry.dtype).removeprefix("torch.") for entry in tensors)
    prefix = f", names begin with {found}" if (found := common_prefix(value)) else ""
    shown = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
    return f"model: {len(tensors)} tensors, {sum(entry.numel() for entry in tensors):,} elements ({shown}){prefix}"


def _describe_other(value: Any) -> str:
    if isinstance(value, bool | int | float | str | None):
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    return type(value).__name__


# For each kind: whether a dict is of this kind, and what is said of it.
_KINDS: dict[str, tuple[Callable[[Mapping[Any, Any]], bool], Callable[[Any], str]]] = {
    "optimizer": (lambda value: {"state", "param_groups"} <= value.keys(), _describe_optimizer),
    "amp": (_is_amp, lambda value: "amp: " + ", ".join(f"loss scale {one['loss_scale']:g}" for one in value.values())),
    "GradScaler": (
        lambda value: {"scale", "_growth_tracker"} <= value.keys(),
        lambda value: f"torch.amp.GradScaler: loss scale {value['scale']:g}",
    ),
    "model": (_is_model, _describe_model),
    "other": (lambda value: False, _describe_other),
}
