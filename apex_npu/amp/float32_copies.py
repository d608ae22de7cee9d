# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Float32 forms of a model that amp has cast to low precision: state dicts, copies, and the model after shutdown.

deepcopy and pickle copy a module by its ``__reduce_ex__``, which amp sets as an attribute of each module. A complete
copy becomes float32. If the same call also copies the optimizer, the copy returns to its level.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from apex_npu.amp.masters import Masters, fp32_value
from apex_npu.amp.shown_copies import ShownCopy
from apex_npu.autocast.containers import cast_inputs
from apex_npu.autocast.forward_cast import is_wrapped, remove_wrapper
from apex_npu.autocast.submodule_cast import CastInputs
from apex_npu.backends import is_capturing
from apex_npu.backends.script_warnings import warn
from apex_npu.distributed.torch_ddp import KnownDDPs, dtypes_of, follow_dtypes
from apex_npu.fusion import set_grads, wraps_tensors
from apex_npu.fusion.shards import is_sharded
from apex_npu.ops import LOW_PRECISION

_HOOKS = (
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
# The warning about outdated writes to tensors that ``state_dict()`` has shown.
OUTDATED = (
    "tensors of model.state_dict() have been written after the model had changed (a step, load_state_dict, a write to "
    "parameters). These tensors are float32 copies of float16 or bfloat16 tensors: elements that differ from those of "
    "the model are ignored. Call model.state_dict() again before writing to its tensors"
)
_ATTRIBUTES = ("forward", "_replicate_for_data_parallel", "__reduce_ex__", "__deepcopy__")


class CopyLink:
    """An object that the modules of a model share with its optimizers. Copies made by one call share its copy.

    Attributes:
        keeps: The float32 values of tensors without a master are kept.
        masters: The masters of the optimizers that step the model, the latest last. They outlive an optimizer.
        showing: The ``ModuleCopies`` of modules whose float32 copies ``state_dict()`` has given to scripts.
        copied: An optimizer has been copied.
        warned: The warning about outdated writes has been emitted.
    """

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.masters: list[Masters] = []
        self.showing: weakref.WeakSet[ModuleCopies] = weakref.WeakSet()
        self.copied = self.warned = False
        self._undo = ExitStack()
        self._wrapped: list[weakref.ref[nn.Module]] = []
        self._add: Callable[[nn.Module], object] | None = None

    def __reduce__(self) -> Any:
        """Copy as an object without masters."""
        return CopyLink, (self.keeps,)

    def masters_with(self, param: Tensor) -> Masters | None:
        """Return the masters that contain the model's parameter ``param``; None if it has no master."""
        return next((masters for masters in reversed(self.masters) if masters.has(param)), None)

    def load_written(self) -> None:
        """Load a script's writes to the float32 copies that ``state_dict()`` has shown into the model."""
        for copies in list(self.showing):
            copies.load_written()

    def end_loops(self) -> None:
        """End loops over ``amp.master_params`` that scripts have left early, before parameters are read."""
        for masters in self.masters:
            masters.end_loop()

    def add(self, model: nn.Module, masters: Masters) -> None:
        """Add ``masters``, which first take the float32 values that ``model`` keeps of their parameters."""
        cast = filter(None, map(copies_of, model.modules()))
        kept = [(copies, name, copies.module._parameters.get(name)) for copies in cast for name in copies.kept]
        taken = [(copies, name, param) for copies, name, param in kept if param is not None and masters.has(param)]
        masters.take_values({id(param): fp32_value(param, copies.kept.pop(name)) for copies, name, param in taken})
        if masters not in self.masters:
            self.masters.append(masters)

    def end_copy(self, module: nn.Module, values: Mapping[str, Tensor]) -> None:
        """Make ``module``, a complete copy, float32, unless its optimizer has been copied as well."""
        takes_inputs = is_wrapped(module)
        if takes_inputs and self._add is not None:
            self._add(module)
        elif takes_inputs:
            self._wrapped.append(weakref.ref(module))
        if not self.copied and copies_of(module) is not None:
            self._undo.callback(module_snapshot(module))
            to_float32(module, values)
            if takes_inputs:
                module.register_forward_pre_hook(_widen_inputs, with_kwargs=True)

    def mark_copied(self, known: KnownDDPs) -> None:
        """Note that an optimizer has been copied, and return modules that were made float32 to their level.

        Args:
            known: The DistributedDataParallel instances of this process, which average the gradients of the modules.
        """
        self.copied = True
        before = dtypes_of(known)
        self._undo.close()
        for ddp, dtypes in before:  # a copy that was made around the float32 module
            follow_dtypes(ddp, dtypes)

    def add_copies(self, add: Callable[[nn.Module], object]) -> None:
        """Call ``add``, which makes a model known to the session, with each model that has been or will be copied."""
        self._add = add
        while self._wrapped:
            module = self._wrapped.pop()()
            if module is not None:
                add(module)


@dataclass(eq=False)
class ModuleCopies:
    """The replacement of ``module.__reduce_ex__``.

    Attributes:
        module: A module of a model that has been cast.
        link: The link that ``show_float32`` was given.
        kept: The float32 values, in host memory, of tensors without a master, by their names in ``module``.
        shown: The float32 copies that ``state_dict()`` has shown, by name, the latest last.
    """

    module: nn.Module
    link: CopyLink
    kept: dict[str, Tensor] = field(default_factory=dict)
    shown: dict[str, list[ShownCopy]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without shown copies."""
        return {**vars(self), "shown": {}}

    def float32(self, name: str, tensor: Tensor, low: Tensor) -> Tensor | None:
        """Return a copy of the kept or master values of the module's ``tensor`` named ``name``; None without both.

        They round to ``low``, the tensor's values in low precision, and are on its device.
        """
        if name in self.kept:
            return fp32_value(low, self.kept[name]).clone()
        masters = self.link.masters_with(tensor)
        return None if masters is None else masters.float32(tensor, low)

    def load(self, name: str, tensor: Tensor, value: Tensor) -> Tensor:
        """Set the kept value of the module's ``tensor`` named ``name``, or its master, to ``value``.

        A value that the tensor holds exactly is not kept.

        Returns:
            The value to write to ``tensor``.
        """
        masters = self.link.masters_with(tensor)
        if masters is not None:
            return masters.load(tensor, value)
        if self.link.keeps and tensor.dtype in LOW_PRECISION and value.dtype == torch.float32:
            self.kept.pop(name, None)
            if not torch.equal(value.to(tensor.dtype).float(), value):
                self.kept[name] = value.detach().to("cpu", copy=True)
        return value

    @torch.inference_mode(False)
    @torch.no_grad()
    def show(self, name: str, tensor: Tensor, low: Tensor) -> Tensor:
        """Return a float32 copy of the module's ``tensor`` named ``name`` for scripts.

        ``load_written`` loads what a script writes to the copy.
        """
        value = self.float32(name, tensor, low)
        value = fp32_value(low, None) if value is None else value
        copies = self.shown.setdefault(name, [])
        copies[:] = [shown for shown in copies if shown.value is not None]
        if not copies or not copies[-1].is_same(value, tensor):
            copies.append(ShownCopy(value, tensor))
            self.link.showing.add(self)
        return copies[-1].show()

    def load_written(self) -> None:
        """Load a script's writes to copies into the module's own tensors."""
        if is_capturing():
            return
        tensors = dict(own_tensors(self.module))
        for name, copies in self.shown.items():
            for shown in copies:
                if shown.is_written:
                    self._take(name, tensors.get(name), shown)
            copies[:] = [shown for shown in copies if shown.value is not None]
        if not any(self.shown.values()):
            self.shown.clear()
            self.link.showing.discard(self)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self, name: str, tensor: Tensor | None, written: ShownCopy) -> None:
        value = written.value
        if value is None or tensor is None or tensor.dtype not in LOW_PRECISION or tensor.shape != value.shape:
            written.value = None  # the script has replaced the model's tensor, or resized the copy
            return
        if written.is_outdated(tensor):
            taken = fp32_value(tensor.detach(), value)
            if not self.link.warned and not torch.equal(taken, value.to(taken.device)):
                self.link.warned = True
                warn(OUTDATED)
            value = taken
        tensor.copy_(self.load(name, tensor, value))
        for masters in self.link.masters:
            masters.end_loading([tensor])
        written.note(tensor)
        written.let_go()

    def __call__(self, protocol: Any) -> Any:
        """Return the result of the class's own ``__reduce_ex__``, with the float32 values added."""
        cls = type(self.module)
        reduced: Any = cls.__reduce_ex__(self.module, protocol)
        function, args, *rest = reduced
        if not rest or rest[0] is None:
            return function, args, *rest  # nothing is called at the end of such a copy
        return _begin_copy, (function, args), (rest[0], _exact_values(self))

    def deepcopy(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module by its class's ``__deepcopy__``, and make the copy float32."""
        cls: Any = type(self.module)
        twin: nn.Module = cls.__deepcopy__(self.module, memo)
        copy.deepcopy(self.link, memo).end_copy(twin, _exact_values(self))
        return twin


def _begin_copy(function: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    module = function(*args)
    vars(module)["__setstate__"] = partial(_end_copy, module)
    return module


def _end_copy(module: nn.Module, state_and_values: tuple[Any, dict[str, Tensor]]) -> None:
    del vars(module)["__setstate__"]
    state, values = state_and_values
    module.__setstate__(state)
    copies = vars(module).get("__reduce_ex__")
    if not isinstance(copies, ModuleCopies):
        return
    if copies.module is module:
        copies.link.end_copy(module, values)
    else:  # a shallow copy, which has the parameters and the hooks of the original
        vars(module)["__reduce_ex__"] = ModuleCopies(module, copies.link, copies.kept)


def _exact_values(copies: ModuleCopies) -> dict[str, Tensor]:
    """Return the float32 values of the module's own low-precision tensors with a master or a kept value."""
    copies.load_written()
    copies.link.end_loops()
    known = [(name, copies.float32(name, t, t.detach())) for name, t in low_tensors(copies.module)]
    return {name: value for name, value in known if value is not None}


def _widen_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast inputs to float32: a forward pre-hook of a float32 copy, so that it takes the model's inputs."""
    return cast_inputs(args, kwargs, torch.float32)


def copies_of(module: nn.Module) -> ModuleCopies | None:
    """Return the ``ModuleCopies`` of ``module`` if amp has cast its model to low precision; else None."""
    copies = vars(module).get("__reduce_ex__")
    return copies if isinstance(copies, ModuleCopies) else None


def show_float32(model: nn.Module, *, keeps: bool) -> None:
    """Make state dicts and copies of ``model``, and of its submodules, float32; the modules share a new ``CopyLink``.

    Args:
        model: A model that was cast to low precision. Modules that also belong to another such model are unchanged, and
            so are those of torch.jit, which have no tensors here and take no hooks.
        keeps: Keep the float32 values of tensors without a master.
    """
    link = CopyLink(keeps)
    for module in model.modules():
        if copies_of(module) or isinstance(module, torch.jit.ScriptModule):
            continue
        module.register_state_dict_post_hook(_show_fp32)
        module.register_load_state_dict_pre_hook(_fill_masters)
        module.register_load_state_dict_post_hook(_follow_loaded)
        copies = ModuleCopies(module, link)
        vars(module)["__reduce_ex__"] = copies
        if hasattr(type(module), "__deepcopy__"):
            vars(module)["__deepcopy__"] = copies.deepcopy


def restore_float32(model: nn.Module) -> None:
    """Undo the conversion of ``model`` and its submodules, and give them the values of their masters.

    A model that was not cast to low precision is unchanged.
    """
    for copies in filter(None, map(copies_of, reversed(list(model.modules())))):
        to_float32(copies.module, _exact_values(copies))


def module_snapshot(module: nn.Module) -> Callable[[], None]:
    """Return a function that undoes what amp changes later in ``module`` itself: its tensors, hooks and attributes."""
    attributes = {name: vars(module)[name] for name in _ATTRIBUTES if name in vars(module)}
    hooks = [(entries, dict(entries)) for entries in map(vars(module).__getitem__, _HOOKS)]
    tensors = [(tensor, tensor.data) for _, tensor in own_tensors(module)]
    grads = [(tensor, tensor.grad) for tensor, _ in tensors if tensor.is_leaf and tensor.grad is not None]
    data = [*tensors, *((grad, grad.data) for _, grad in grads)]

    def put_back() -> None:
        for tensor, former in data:
            if tensor.dtype != former.dtype or not _is_at(tensor, former):
                tensor.data = former
        for tensor, grad in grads:
            if tensor.grad is not grad:
                set_grads([tensor], [grad])
        for entries, former_entries in hooks:
            entries.clear()
            entries.update(former_entries)
        for name in _ATTRIBUTES:
            vars(module).pop(name, None)
        vars(module).update(attributes)
        _flatten(module)

    return put_back


def _is_at(tensor: Tensor, data: Tensor) -> bool:
    return wraps_tensors(tensor) or tensor.data_ptr() == data.data_ptr()


def to_float32(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Make ``module``, without its submodules, a float32 module without hooks of amp.

    Args:
        module: A module of a model that was cast to low precision.
        values: The float32 values of its own parameters, by name. Other parameters are widened.
    """
    for name, tensor in own_tensors(module):
        if name in values:  # its gradient was used in a step, or is multiplied by a loss scale
            tensor.grad = None
        for target in (tensor, tensor.grad if tensor.is_leaf else None):
            if target is not None and target.dtype in LOW_PRECISION:
                target.data = values[name] if target is tensor and name in values else target.data.float()
    _flatten(module)
    _remove_hooks(module, lambda hook: hook in _STATE_DICT_HOOKS or isinstance(hook, CastInputs))
    if is_wrapped(module):
        remove_wrapper(module)
    for name in ("__deepcopy__", "__reduce_ex__"):
        vars(module).pop(name, None)


def _remove_hooks(module: nn.Module, is_ours: Callable[[Any], bool]) -> None:
    for entries in map(vars(module).__getitem__, _HOOKS):
        for key, hook in list(entries.items()):
            if is_ours(getattr(hook, "hook", hook)):  # torch wraps some of them
                del entries[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _flatten(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()


def float32_copy(model: nn.Module, *, allow_rounded: bool = False) -> nn.Module:
    """Return a deep copy of ``model`` without amp, to pass to torch.export, torch.onnx or torch.jit.

    The copy has the values of ``model.state_dict()``, which are exact float32 values at O2 and O5. It takes float32
    inputs, and has no forward, hook or method of amp. ``model`` is unchanged. At O1 run and export the copy within
    ``amp.disable_casts()``, because O1 casts functions of torch for all models.

    Args:
        model: Any module, passed to ``amp.initialize`` or not.
        allow_rounded: Accept a model whose weights exist in low precision only, as at O3, and widen them.

    Returns:
        The copy, in the training or evaluation mode of ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: The model's weights exist in low precision only, and ``allow_rounded`` is False; or they are
            sharded over processes.

    Example::

        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        >>> clean = amp.float32_copy(model)
        >>> {p.dtype for p in clean.parameters()}
        {torch.float32}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"float32_copy takes a model, torch.nn.Module, got {type(model).__name__}")
    if any(map(is_sharded, model.parameters())):
        raise RuntimeError(
            f"the weights of this {type(model).__name__} are sharded over processes (DTensor), which torch does not "
            "copy: load get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict into a model that is not sharded"
        )
    low = [p for p in model.parameters() if p.dtype in LOW_PRECISION]
    cast = list(filter(None, map(copies_of, model.modules())))
    if low and not allow_rounded and not any(copies.link.keeps or _exact_values(copies) for copies in cast):
        raise RuntimeError(
            f"the weights of this {type(model).__name__} exist in {str(low[0].dtype).removeprefix('torch.')} alone, "
            "without float32 values, as at O3: a float32 copy has the rounded values. Pass allow_rounded=True to "
            "accept these, or train at O1, O2 or O5"
        )
    clean = copy.deepcopy(model)
    for module in clean.modules():
        if is_wrapped(module):
            remove_wrapper(module)
        _remove_hooks(module, lambda hook: hook is _widen_inputs)
    for tensor in (*clean.parameters(), *clean.buffers()):
        tensor.grad = None
        if tensor.dtype in LOW_PRECISION:  # in a model that amp has not cast
            tensor.data = tensor.data.float()
    return clean


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of ``module`` itself, with their names."""
    own = [*module._parameters.items(), *module._buffers.items()]
    return [(name, t) for name, t in own if t is not None]


def low_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the float16 and bfloat16 parameters and buffers of ``module`` itself, with their names."""
    return [(name, tensor) for name, tensor in own_tensors(module) if tensor.dtype in LOW_PRECISION]


def _show_fp32(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Show low-precision entries of this module in fp32, with exact values if known (a state_dict hook)."""
    copies = copies_of(module)
    if copies is None:
        return
    copies.link.end_loops()
    copies.load_written()
    for name, tensor in low_tensors(module):
        entry = state_dict.get(prefix + name)
        if isinstance(entry, Tensor) and entry.dtype == torch.float32:
            entry = tensor.detach()  # the loop that has been ended above gave it float32 data
        if isinstance(entry, Tensor) and entry.dtype == tensor.dtype:
            state_dict[prefix + name] = copies.show(name, tensor, entry)


@torch.no_grad()
def _fill_masters(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    """Load the saved values, not the rounded ones of the cast model, into masters (a load_state_dict hook)."""
    copies = copies_of(module)
    if copies is None:
        return
    copies.load_written()
    copies.link.end_loops()
    for name, tensor in own_tensors(module):
        entry, masters = state_dict.get(prefix + name), copies.link.masters_with(tensor)
        if masters is not None and local_metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                f"load_state_dict(assign=True) would replace {prefix + name}, whose float32 value the optimizer steps; "
                "load without assign, or before amp.initialize"
            )
        if isinstance(entry, Tensor) and entry.shape == tensor.shape:
            state_dict[prefix + name] = copies.load(name, tensor, entry)


def _follow_loaded(module: nn.Module, _: Any) -> None:
    """Copy values that a module's own ``_load_from_state_dict`` has loaded to its masters (a post-hook)."""
    copies = copies_of(module)
    by_itself = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    for masters in [] if copies is None else copies.link.masters:
        masters.end_loading([tensor for _, tensor in low_tensors(module)], by_value=by_itself)


_STATE_DICT_HOOKS = (_show_fp32, _fill_masters, _follow_loaded)
