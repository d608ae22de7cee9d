# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``convert_model``: casts a model's parameters, and the inputs and outputs of its forward, to the policy's dtypes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex_npu.autocast.cast_lists import MODEL_FLOATS, CastPolicy
from apex_npu.autocast.containers import cast_floating, cast_inputs
from apex_npu.autocast.submodule_cast import ModelRef, call_marked, is_marked, unwatch_submodules, watch_submodules
from apex_npu.backends.script_warnings import warn
from apex_npu.ops import LOW_PRECISION


class Ambient:
    """Where O1's casts are on outside of models. ``CastHandle`` switches them on.

    Attributes:
        device_types: The device types on which O1 casts.
        before_forward: Called before the forward of a model that has been cast, and of its submodules that are called
            directly; not in compiled code.
        thread_id: The identifier of the thread in which the casts are on.
        active: True while they are on.
        inside: The threads inside the forward of one of the models or inside ``disable_casts``; see ``call_marked``.
    """

    def __init__(self, device_types: Sequence[str] = (), before_forward: Callable[[], object] = lambda: None) -> None:
        self.device_types = tuple(device_types)
        self.before_forward = before_forward
        self.thread_id = threading.get_ident()
        self.active = False
        self.inside: list[int] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Ambient:
        """Return the object itself, which copies of a model share."""
        return self

    def __reduce__(self) -> Any:
        """Pickle as an object of its own: another process may use the identifier for another thread."""
        return Ambient, ()

    def is_here(self) -> bool:
        """Return whether this thread has O1's autocast state outside of autocast regions."""
        # torch.compile cannot trace get_ident.
        return self.active and (torch.compiler.is_compiling() or threading.get_ident() == self.thread_id)

    def is_inside(self) -> bool:
        """Return whether the current autocast state applies, because only O1 and code inside of it have set it.

        Otherwise the state may be that of a region around the forward.
        """
        return is_marked(self.inside)

    def call_as_if(self, inside: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` in this thread with ``is_inside()`` temporarily equal to ``inside``."""
        thread_id = threading.get_ident()
        count = self.inside.count(thread_id)
        if inside:
            return call_marked(self.inside, function, *args, **kwargs)
        for _ in range(count):
            self.inside.remove(thread_id)
        try:
            return function(*args, **kwargs)
        finally:
            self.inside += [thread_id] * count


@contextmanager
def without_autocast(device_types: Sequence[str]) -> Iterator[None]:
    """Enter regions with autocast off. Dynamo can trace these, but not an ExitStack of regions."""
    if not device_types:
        yield
        return
    with torch.autocast(device_types[0], enabled=False), without_autocast(device_types[1:]):
        yield


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether ``keep_batchnorm_fp32`` keeps ``module`` in float32."""
    return isinstance(module, _BatchNorm)


def is_affine_batch_norm(module: nn.Module) -> bool:
    """Return whether ``module`` is a batch norm with weights."""
    return is_batch_norm(module) and bool(module.affine)


def convert_model(
    model: nn.Module, policy: CastPolicy, device_types: Sequence[str], ambient: Ambient | None = None
) -> CastForward:
    """Cast ``model`` and wrap its forward as ``policy`` specifies.

    O0, O2, O3: floating-point parameters, buffers and existing gradients become ``policy.model_dtype`` (batch norms
    keep their dtype with ``keep_batchnorm_fp32``). So do floating-point tensors passed to the model's forward. Its
    outputs become ``cast_model_outputs``, by default float32. If a submodule is called directly
    (``model.encoder(x)``), its inputs are cast, but not its outputs.

    O1: the forward is an autocast region; outputs are cast only if ``cast_model_outputs`` is given.

    The wrapper is an instance attribute ``forward``, as in Apex. Copies run their own weights; pickling, DataParallel
    replicas, ``torch.compile`` and ``inspect.signature`` work. Convert first and compile afterwards: a copy of a
    compiled module, or of an ``fx.GraphModule``, makes itself a new forward. The wrapper of an earlier call is removed.

    Args:
        model: The model, changed in place; parameters keep their identity.
        policy: The casts to apply.
        device_types: Device types on which O1 casts.
        ambient: The ``Ambient`` of the model's casts; by default one of this thread.

    Returns:
        The wrapper; its ``undo`` removes it. A model for which nothing is cast does not get it.
    """
    inner = unwrapped_forward(model)
    if inner is None and isinstance(model, torch.jit.ScriptModule):
        inner = model.forward  # the class has no forward to call
    forward = CastForward(model, inner, ModelRef(model), ambient or Ambient(), opt_level=policy.opt_level)
    if policy.enabled:
        dtype = policy.model_dtype
        forward.input_dtype = dtype
        forward.output_dtype = policy.cast_model_outputs or (None if dtype is None else torch.float32)
        if policy.patch_torch_functions:
            forward.device_types, forward.autocast_dtype = tuple(dict.fromkeys(device_types)), policy.autocast_dtype
            forward.caches_weights, forward.looks_around = _cached_weights_have_gradients(), False
        if dtype is not None:
            cast_parameters(model, dtype, keeps=is_batch_norm if policy.keep_batchnorm_fp32 else None)
    if forward.input_dtype is not None or forward.output_dtype is not None or forward.device_types:
        if forward.input_dtype in LOW_PRECISION:
            watch_submodules(model, forward.of, forward.input_dtype)
        vars(model)["forward"] = forward
        vars(model)["_replicate_for_data_parallel"] = forward.replicate
    else:
        remove_wrapper(model)
    return forward


def is_wrapped(model: nn.Module) -> bool:
    """Return whether ``convert_model`` has wrapped the forward of ``model``."""
    return isinstance(vars(model).get("forward"), CastForward)


def unwrapped_forward(model: nn.Module) -> Callable[..., Any] | None:
    """Return the instance attribute ``forward`` of ``model`` without the wrapper; None if only its class has one."""
    forward: Callable[..., Any] | None = vars(model).get("forward")
    return forward.inner if isinstance(forward, CastForward) else forward


def remove_wrapper(model: nn.Module) -> None:
    """Remove the wrapper of ``convert_model`` from ``model``."""
    inner = unwrapped_forward(model)
    unwatch_submodules(model)
    vars(model).pop("_replicate_for_data_parallel", None)
    if inner is not None:  # last: until then the model counts as wrapped, so that this can be repeated
        vars(model)["forward"] = inner
    else:
        vars(model).pop("forward", None)


# ------------------------------------------------------------------------------------------------------------- forward


@functools.cache
def _cached_weights_have_gradients() -> bool:
    """Return whether a weight first used under ``no_grad`` in an autocast region gets a gradient from its next use.

    Older releases of torch do not give it one (https://github.com/pytorch/pytorch/issues/158232).
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        weight = torch.ones(1, 1, dtype=torch.float32, device="cpu", requires_grad=True)
        with torch.no_grad():
            nn.functional.linear(weight, weight)
        return nn.functional.linear(weight, weight).requires_grad


# What torch says of tensors that do not fit one another; of those of oneDNN's LSTM it says nothing else.
_OF_DTYPES = re.compile(r"dtype|scalar type|type .*should be the same|could not create a primitive descriptor")
_OF_INTEGERS = re.compile(r"\b(Long|Int|Short|Char|Byte|Bool|long|int|bool)\b")


@dataclasses.dataclass(eq=False)
class CastForward:
    """The replacement of ``model.forward``.

    It is an object rather than a closure or a bound function, so that deepcopy and pickle follow ``model`` to the copy.
    A pickled bound function would be looked up on the class, and would be the forward without casts.

    Attributes:
        model: The model with this forward.
        inner: The former instance attribute ``forward``, or None for the class's method.
        of: The reference to the model that the hooks of its submodules share.
        ambient: O1's casts of the session. A forward at another level keeps them out. They record when a forward is not
            a region: inside another forward, or inside ``disable_casts``.
        opt_level: The name of the level in messages.
        input_dtype: The dtype to which floating-point inputs are cast; None: they are not cast.
        output_dtype: The dtype to which floating-point outputs are cast; None: they are not cast.
        device_types: The device types for which the forward is an autocast region.
        autocast_dtype: The dtype of that region.
        caches_weights: A weight is cast once in that region; otherwise, it is cast in each use.
        running: The threads inside this forward; see ``call_marked``.
        looks_around: Warn if the forward is inside an autocast region. False after the first forward that trains,
            because later ones are called in the same place.
    """

    model: nn.Module
    inner: Callable[..., Any] | None
    of: ModelRef
    ambient: Ambient
    opt_level: str = ""
    input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    device_types: tuple[str, ...] = ()
    autocast_dtype: torch.dtype | None = None
    caches_weights: bool = True
    running: list[int] = dataclasses.field(default_factory=list)
    looks_around: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with its casts."""
        input_dtype, output_dtype = self.input_dtype, self.output_dtype
        if not torch.compiler.is_compiling() and is_marked(self.running):
            return self._call_inner(args, kwargs)  # inside the model's forward nothing is cast twice
        if input_dtype is not None:
            if not torch.compiler.is_compiling():
                self.ambient.before_forward()
                if self.looks_around:
                    self._look_around()
            args, kwargs = cast_inputs(args, kwargs, input_dtype)
        output = self._call_casting(args, kwargs) if input_dtype is None else self._call_marked(args, kwargs)
        return output if output_dtype is None else cast_floating(output, output_dtype)

    def _look_around(self) -> None:
        self.looks_around = not (self.model.training and torch.is_grad_enabled())
        param = next(self.model.parameters(), None)
        if param is None or self.ambient.is_here() or not torch.is_autocast_enabled(param.device.type):
            return
        self.looks_around = False
        device_type = param.device.type
        warn(
            f"the model was initialized at {self.opt_level}, so that it computes in {self.input_dtype}, and its "
            f"forward is called inside of torch.autocast({device_type!r}, "
            f"dtype={torch.get_autocast_dtype(device_type)}), which casts within the model a second time: leave one of "
            'both out, or initialize at "O1" (float16) or "O4" (bfloat16), whose casts replace those of the region'
        )

    def _call_inner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    def _call_marked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return call_marked(self.running, self._call_casting, args, kwargs)
        try:
            return call_marked(self.running, self._call_casting, args, kwargs)
        except RuntimeError as error:
            is_cast = self.input_dtype is not None  # else amp was shut down meanwhile
            if is_cast and _OF_DTYPES.search(str(error)):
                self._explain_dtypes(error)
            raise

    def _explain_dtypes(self, error: RuntimeError) -> None:
        """Raise, after ``error`` about dtypes, an error that says which tensors have another dtype.

        They are the model's own, or else its code may make float32 ones. Errors about integers are the model's own.
        """
        others = [
            f"{name} ({str(tensor.dtype).removeprefix('torch.')})"
            for prefix, module in self.model.named_modules()
            if not is_batch_norm(module)
            for name, tensor in chain(
                module.named_parameters(prefix, recurse=False), module.named_buffers(prefix, recurse=False)
            )
            if tensor.is_floating_point() and tensor.dtype != self.input_dtype
        ]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise RuntimeError(
                f"the forward of a model that amp.initialize has cast to {self.input_dtype} ({self.opt_level}) "
                f"has failed, and {others[0]}{more} have another dtype. They may have been converted "
                "(model.float(), .double()), passed to functional_call, or added to the model, or they are buffers "
                "that initialize reported as float32. Add modules before amp.initialize, or cast their inputs in "
                "the model's code, also in forwards that use such buffers; for a float32 model call "
                "amp.shutdown(), for a float32 copy amp.float32_copy()"
            ) from error
        if self.input_dtype in LOW_PRECISION and not _OF_INTEGERS.search(str(error)):
            casts = "O1" if self.input_dtype == torch.float16 else "O4"
            raise RuntimeError(
                f"{error}\nThe model has been cast to {self.input_dtype} ({self.opt_level}), but tensors that its code "
                "makes, such as torch.zeros(...) for an initial state, a mask, or a result of .float(), are float32. "
                "Give them the dtype of the tensors that they meet, as in torch.zeros(..., dtype=x.dtype) or "
                f"mask.to(x.dtype), or initialize at {casts!r}, which casts what each function takes"
            ) from error

    def _call_casting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.device_types:
            if not self.ambient.is_here():
                return self._call_inner(args, kwargs)
            with without_autocast(self.ambient.device_types):
                return self._call_inner(args, kwargs)
        if self.ambient.is_inside():
            return self._call_inner(args, kwargs)
        if torch.compiler.is_compiling():
            return self._call_in_regions(self.device_types, args, kwargs)
        torch.clear_autocast_cache()  # copies of weights from a region around this forward
        try:
            return call_marked(self.ambient.inside, self._call_in_regions, self.device_types, args, kwargs)
        finally:
            torch.clear_autocast_cache()  # the end of a nested region does not clear it

    def _call_in_regions(self, device_types: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not device_types:
            return self._call_inner(args, kwargs)
        with torch.autocast(device_types[0], dtype=self.autocast_dtype, cache_enabled=self.caches_weights):
            return self._call_in_regions(device_types[1:], args, kwargs)

    def undo(self) -> None:
        """Restore the model's forward; dtypes stay. It may be called again, or after another conversion."""
        # A wrapper that was installed later still calls this object, which then passes everything through.
        self.input_dtype = self.output_dtype = None
        self.device_types, self.ambient = (), Ambient()
        if vars(self.model).get("forward") is self:
            remove_wrapper(self.model)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the original forward. Trainers read it to find the inputs of a model."""
        return inspect.signature(self._inner_or_method())

    @property
    def __code__(self) -> types.CodeType:
        """The code of the original forward. torch.export reads its source location."""
        code: types.CodeType = self._inner_or_method().__code__
        return code

    def _inner_or_method(self) -> Any:
        return self.inner if self.inner is not None else types.MethodType(type(self.model).forward, self.model)

    def replicate(self) -> nn.Module:
        """Replicate the model for DataParallel, with a forward that runs the replica's own weights."""
        make_replica: Callable[[nn.Module], nn.Module] = type(self.model)._replicate_for_data_parallel
        replica, inner = make_replica(self.model), self.inner
        if isinstance(inner, types.MethodType) and inner.__self__ is self.model:
            inner = types.MethodType(inner.__func__, replica)
        if is_wrapped(replica):  # its submodules have the hooks of the original's, which read ``running``
            vars(replica)["forward"] = dataclasses.replace(self, model=replica, inner=inner, looks_around=False)
        return replica

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the attributes that belong to this process."""
        return {**vars(self), "running": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``, and make the hooks of submodules refer to this model."""
        vars(self).update(state)
        self.of.refer_to(self.model)


# ---------------------------------------------------------------------------------------------------------- parameters


def cast_parameters(model: nn.Module, dtype: torch.dtype, *, keeps: Callable[[nn.Module], bool] | None = None) -> None:
    """Cast the floating-point parameters, buffers and gradients of ``model`` in place.

    Args:
        model: The model, whose parameters keep their identity.
        dtype: The dtype to cast to.
        keeps: Returns True for the modules whose own tensors are not cast.
    """
    for module in model.modules():
        if keeps is None or not keeps(module):
            cast_own_parameters(module, dtype)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


def cast_own_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the tensors of ``module`` itself, not of its children, and their gradients."""
    tensors = [t for t in chain(module._parameters.values(), module._buffers.values()) if t is not None]
    for tensor in tensors:
        # Writes .data instead of making a new Parameter, because optimizers, tied weights and RNNs hold the object.
        for target in (tensor, tensor.grad if tensor.is_leaf else None):
            if target is not None and target.dtype in MODEL_FLOATS and target.dtype != dtype:
                target.data = target.data.to(dtype)
