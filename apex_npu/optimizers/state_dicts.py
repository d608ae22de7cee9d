# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""State dicts of fused optimizers. Loading one checks it before anything changes, and copies its tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex_npu.fusion import MASTER_PARAM, EncodedView
from apex_npu.fusion.encoded_state import STORED_KEYS
from apex_npu.fusion.shards import is_sharded
from apex_npu.ops import LOW_PRECISION
from apex_npu.ops.state_codec import scale_count
from apex_npu.optimizers.checks import as_number, naming
from apex_npu.optimizers.shown_state import saved
from apex_npu.optimizers.state_formats import StateFormats

# Options of torch's optimizers that change the rule, and that some optimizers of this package lack.
_RULE_OPTIONS = ("amsgrad", "maximize")


class StateDicts(Optimizer):
    """A base class of ``FusedOptimizer``, which sets these attributes and has the rule."""

    # Other keys of the groups of torch's optimizer, added for its state dicts only.
    torch_options: ClassVar[tuple[str, ...]] = ()
    state_formats: StateFormats
    on_host: bool

    def add_torch_options(self, group: dict[str, Any]) -> None:
        """Add the keys that groups of torch's optimizer have, which torch.distributed.checkpoint reads."""
        # Not this optimizer's capturable: with True, torch's optimizer would refuse the state dict on a CPU.
        values = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
        for name in self.torch_options:
            group.setdefault(name, values[name])

    def state_dict(self, *, encoded: bool = False) -> dict[str, Any]:
        """Return the state dict, with torch.optim's names and float32 tensors for all state formats.

        Args:
            encoded: Save encoded states as they are stored: instead of a float32 tensor, a dict with the tensors
                ``values`` and ``scales``, and their layout. Only an optimizer with the same formats can load it. A
                remainder (``master_param``) belongs to the 16-bit parameter, which the model's state dict has. A state
                whose format the next step changes, because an ``eps`` has changed, is a float32 tensor all the same.

        Raises:
            ValueError: ``encoded`` is true, and an encoded state belongs to a DTensor.
        """
        if not self.state_formats.are_special:
            return super().state_dict()
        for param, entry in self.state.items() if encoded else ():
            names = [name for name, value in entry.items() if isinstance(value, EncodedView)]
            if names and is_sharded(param):
                raise ValueError(
                    f"{type(self).__name__}.state_dict(encoded=True): {names[0]!r} of a parameter of shape "
                    f"{tuple(param.shape)} is sharded over processes (DTensor), and its encoding is not; leave encoded "
                    "out"
                )
        shown = self.state
        try:
            self.state = defaultdict(dict, saved(self, encoded=encoded))  # so that users' hooks also see tensors
            return super().state_dict()
        finally:
            self.state = shown

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of torch.optim's optimizer with the same rule.

        State is copied in the precision of the state dict; torch's own method rounds it to the parameter's dtype.
        Encoded state (``state_dict(encoded=True)``) is loaded without loss into the same formats.

        Raises:
            ValueError: Groups, parameters, shapes or hyper-parameters do not fit; the optimizer is unchanged.
        """
        loaded: dict[str, Any] = {}

        def check_and_capture(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            _check_state_dict(self, final)
            loaded.update(final)
            return _with_ranges(_without_tensors(final) if self.on_host else final)

        # The last pre-hook, so that it gets the state dict after users' hooks have changed it.
        handle = self.register_load_state_dict_pre_hook(check_and_capture)
        before = {"state": self.state, "param_groups": self.param_groups}
        try:
            super().load_state_dict(state_dict)
            _copy_loaded(self, loaded)
        except BaseException:
            self.__dict__.update(before)  # drop the state that torch has rounded, or shares
            raise
        finally:
            handle.remove()


def _indexed_params(state_dict: dict[str, Any], param_groups: list[dict[str, Any]]) -> list[tuple[int, Tensor]]:
    """Return the parameters of ``param_groups``, each with its number in ``state_dict``."""
    indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in param_groups)
    return list(zip(indices, params, strict=False))


def _check_state_dict(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Require a state dict of the rule and the parameters of ``optimizer``.

    Raises:
        ValueError: It belongs to another rule or other parameters; the message has the first ten reasons.
        TypeError: A hyper-parameter has the wrong type.
    """
    owner = type(optimizer).__name__
    if "param_groups" not in state_dict:
        raise ValueError(_no_state_of_an_optimizer(owner, state_dict))
    problems: list[str] = []
    params = dict(_indexed_params(state_dict, optimizer.param_groups))
    groups = [{**optimizer.group_defaults(group), **group} for group in state_dict["param_groups"]]
    for merged in groups:
        with naming(owner):
            optimizer.validate(merged)
    wider = optimizer.state_formats.are_too_narrow(groups)
    for merged in groups:
        defaults = optimizer.group_defaults(merged)
        options = [name for name in _RULE_OPTIONS if merged.get(name) and name not in defaults]
        problems += [f"a group has {name}={merged[name]!r}, which {owner} does not have" for name in options]
        if "step" in merged and optimizer.shows_step(merged):
            problems += _step_problems(merged["step"], "a group")
        dtypes = optimizer.state_formats.kept_in(optimizer.state_names(merged), wider=wider)
        optional = (*optimizer.optional_states, MASTER_PARAM, *(("step",) if "step" in merged else ()))
        for index in merged["params"]:
            entry = state_dict["state"].get(index, {})
            if index in params and any(value is not None for value in entry.values()):
                shapes = _state_shapes(optimizer, merged, params[index])
                problems += _find_problems(entry, shapes, optional, dtypes, params[index], f"parameter {index}")
                problems += _find_unsharded(entry, params[index], f"parameter {index}")
    if problems:
        more = f", and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ValueError(
            f"this state dict is not one of {owner} for these parameters: {'; '.join(problems[:10])}{more}. Nothing "
            "has been loaded"
        )


def _no_state_of_an_optimizer(owner: str, given: dict[str, Any]) -> str:
    keys = ", ".join(map(repr, list(given)[:5])) + (", ..." if len(given) > 5 else "")
    inside = [key for key, value in given.items() if isinstance(value, dict) and "param_groups" in value]
    hint = f": this looks like a whole checkpoint, pass checkpoint[{inside[0]!r}]" if inside else ""
    return (
        f"{owner}.load_state_dict takes the result of an optimizer's state_dict(), got a dict with the keys {keys} "
        f"and without 'param_groups'{hint}. Nothing has been loaded"
    )


def _with_ranges(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` with consecutive parameter numbers as ranges, which torch searches faster than lists."""

    def ranged(numbers: list[Any]) -> Any:
        first = numbers[0] if numbers and isinstance(numbers[0], int) else 0
        span = range(first, first + len(numbers))
        return span if list(span) == numbers else numbers

    groups = [{**group, "params": ranged(group["params"])} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def _without_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` with numbers in place of tensors, all of which torch would copy to the accelerator."""

    def emptied(value: Any) -> Any:
        if _is_stored(value):
            return torch.zeros(())
        return torch.zeros((), dtype=value.dtype) if isinstance(value, Tensor) else value

    state = {key: {name: emptied(value) for name, value in entry.items()} for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _copy_loaded(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Copy the state of ``state_dict`` to ``optimizer``, which has loaded it, in the saved precision.

    torch's own method rounds state to the parameter's dtype, or shares its memory.
    """
    for group in optimizer.param_groups:
        for name, default in optimizer.group_defaults(group).items():
            if name != "differentiable":  # torch's own, which no rule here has
                group.setdefault(name, default)
        optimizer.add_torch_options(group)
        if MASTER_PARAM in optimizer.state_names(group):
            continue
        for param in group["params"]:
            # A master that this optimizer does not step would be outdated in the next state dict.
            if not optimizer.state_formats.has_remainders or param.dtype not in LOW_PRECISION:
                optimizer.state.get(param, {}).pop(MASTER_PARAM, None)
    for param, name, value in copies_of_loaded(optimizer, state_dict):
        optimizer.state[param][name] = value
    for group in optimizer.param_groups:
        _take_step(optimizer, group)
    optimizer.state_formats.take_masters(optimizer.state)


def _take_step(optimizer: Any, group: dict[str, Any]) -> None:
    """Copy the step count of ``group``, where NVIDIA's optimizers keep it, to the states that have none.

    It is then removed from the group, because only some optimizers update it there.
    """
    if "step" not in group or not optimizer.shows_step(group):
        return
    for param in group["params"]:
        entry = optimizer.state.get(param, {})
        if any(entry.get(name) is not None for name in optimizer.state_names(group)):
            entry.setdefault("step", torch.tensor(float(group["step"])))
    if "step" not in optimizer.group_defaults(group):
        del group["step"]


def count_in_group(optimizer: Any, group: dict[str, Any]) -> None:
    """Set the step count of ``group``, as NVIDIA's optimizers keep it, to the largest one of its states."""
    entries = [optimizer.state.get(param, {}) for param in group["params"]]
    counts = [int(entry["step"]) for entry in entries if entry.get("step") is not None]
    if counts:
        group["step"] = max(counts) + group.get("step_offset", 0)


def copies_of_loaded(optimizer: Any, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, str, Any]]:
    """Yield the parameter, the name and a copy of each tensor in ``state_dict``, which ``optimizer`` has loaded.

    A copy of an encoded state is an ``EncodedView``.
    """
    for index, param in _indexed_params(state_dict, optimizer.param_groups):
        device = torch.device("cpu") if getattr(optimizer, "on_host", False) else param.device
        for name, value in state_dict["state"].get(index, {}).items():
            if name not in optimizer.state[param]:
                continue
            if _is_stored(value):
                yield param, name, EncodedView.of_stored(value, param, device)
            elif isinstance(value, Tensor):
                yield param, name, value.detach().to(device if value.dim() else value.device, copy=True)


def _is_stored(value: Any) -> bool:
    """Return whether ``value`` is the result of ``EncodedView.stored``."""
    return isinstance(value, Mapping) and value.keys() == set(STORED_KEYS)


def _stored_problems(
    stored: Mapping[str, Any], name: str, dtypes: Mapping[str, torch.dtype], param: Tensor, what: str
) -> list[str]:
    """Return the reasons why ``stored``, the encoded state ``name`` of ``param``, does not fit."""
    is_wide = name == MASTER_PARAM and param.dtype not in LOW_PRECISION
    dtype = torch.float32 if is_wide else dtypes.get(name, torch.float32)
    values, scales = stored["values"], stored["scales"]
    if is_sharded(param):
        return [f"{what} is encoded, and the parameter is sharded (save without encoded=True)"]
    if not isinstance(values, Tensor) or values.dtype != dtype:
        found = values.dtype if isinstance(values, Tensor) else repr(values)
        return [
            f"{what} is encoded as {found}, and this optimizer keeps it as {dtype} (pass the same state_dtype and "
            "store_param_remainders, or save without encoded=True)"
        ]
    of_dtype = param.dtype if name == MASTER_PARAM else None
    if stored["param_dtype"] != of_dtype:
        return [f"{what} is encoded for a parameter of {stored['param_dtype']}, not of {of_dtype}"]
    layout = tuple(param.shape), tuple(param.stride())
    if (tuple(stored["shape"]), tuple(stored["stride"])) != layout or values.shape != (param.numel(),):
        return [
            f"{what} is encoded for shape {tuple(stored['shape'])} and strides {tuple(stored['stride'])}, not "
            f"{layout[0]} and {layout[1]}"
        ]
    count = scale_count(param.numel()) if dtype.itemsize == 1 and of_dtype is None else None
    fits = scales is None if count is None else isinstance(scales, Tensor) and scales.shape == (count,)
    if not fits or (scales is not None and scales.dtype != torch.float32):
        return [f"{what} has other scales than {count} float32 numbers"]
    return []


def _state_shapes(optimizer: Any, group: dict[str, Any], param: Tensor) -> dict[str, torch.Size]:
    # Any rule may have stepped masters; see ``_copy_loaded``.
    names = (*optimizer.state_names(group), *optimizer.optional_states, MASTER_PARAM)
    shapes = {name: torch.Size() if name in optimizer.scalar_states else param.shape for name in names}
    return {"step": torch.Size(), **shapes} if optimizer.shows_step(group) else shapes


def _find_unsharded(entry: dict[str, Any], param: Tensor, where: str) -> list[str]:
    """Return the reasons why a saved ``entry`` does not fit ``param``, if only one of them is sharded."""
    tensors = {name: value for name, value in entry.items() if isinstance(value, Tensor) and value.dim()}
    others = [name for name, value in tensors.items() if is_sharded(value) is not is_sharded(param)]
    if is_sharded(param):
        because = (
            "as a plain tensor (torch.distributed.checkpoint.state_dict's set_optimizer_state_dict distributes it)"
        )
        return [f"{where} is sharded and has {name!r} {because}" for name in others]
    return [f"{where} is not sharded and has {name!r} as a DTensor (pass its full_tensor())" for name in others]


def _find_problems(
    entry: dict[str, Any],
    shapes: Mapping[str, torch.Size],
    optional: Sequence[str],
    dtypes: Mapping[str, torch.dtype],
    param: Tensor,
    where: str,
) -> list[str]:
    """Return the reasons why a saved ``entry`` of state does not fit ``param``.

    Args:
        entry: The saved state.
        shapes: For each state of the rule its required shape; ``step`` is a number.
        optional: The states that may be missing.
        dtypes: The formats of the optimizer's states.
        param: The parameter.
        where: The parameter's name in the messages.
    """
    problems = [f"{where} lacks {name!r}" for name in shapes if entry.get(name) is None and name not in optional]
    unknown = []
    for name, value in entry.items():
        if value is None:
            continue
        if _is_stored(value):
            problems += _stored_problems(value, name, dtypes, param, f"{name!r} of {where}")
        elif name == "step":
            problems += _step_problems(value, where)
        elif name in shapes:
            problems += _shape_problems(name, value, shapes[name], where)
        elif isinstance(value, Tensor) and value.dim():  # numbers (the norms of Lamb) are ignored
            unknown.append(f"{where} has {name!r}, which is not known here")
    # In addition to states of the rule, unknown ones belong to the user.
    known = any(entry.get(name) is not None for name in shapes if name not in ("step", MASTER_PARAM))
    return problems if known and not problems else problems + unknown


def _step_problems(value: Any, where: str) -> Iterator[str]:
    try:
        step = as_number("step", value)
    except (TypeError, ValueError) as error:
        yield f"{error} ({where})"
        return
    if not (0 <= step < float("inf") and step.is_integer()):
        yield f"'step' of {where} is {step}, not a count"


def _shape_problems(name: str, value: Any, shape: torch.Size, where: str) -> Iterator[str]:
    if not isinstance(value, Tensor):
        yield f"{name!r} of {where} is {value!r}, not a tensor"
    elif value.shape != shape:
        yield f"{name!r} of {where} has shape {tuple(value.shape)}, not {tuple(shape)}"
