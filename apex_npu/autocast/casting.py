# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``CastHandle``: O1's casts of functions. ``convert_model`` in ``forward_cast.py`` has those of a model.

O1 is torch's autocast, enabled permanently instead of for a block, and completed by the overlay. Four rules make it
safe. This module and ``forward_cast.py`` implement them:

* Outside a model's forward autocast keeps no copies of weights, so that an in-place change of a weight takes effect.
  Inside, an ordinary autocast region keeps them and drops them at its end.
* The ambient part does not count as an autocast block, so that the end of a user's own block still clears the cache.
* Backward runs with autocast off: each operator's derivative runs in the dtype of its forward.
* The backward of a Python ``autograd.Function`` is a user's formula, and runs with autocast as it was in its forward.
  Models that it calls, or that checkpointing recomputes, run inside the same regions as in that forward.

Autocast is a property of a thread. A bare module called in another thread is not cast; a converted model is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.autograd
from torch.autograd.function import BackwardCFunction

from apex_npu.autocast.autocast_ops import install_dispatch_overlay
from apex_npu.autocast.cast_lists import CastPolicy
from apex_npu.autocast.forward_cast import Ambient, without_autocast
from apex_npu.autocast.monkey_patches import install_attribute_overlay
from apex_npu.autocast.submodule_cast import TRACED
from apex_npu.backends._torch_private import checkpoint_frame, data_worker
from apex_npu.backends.patching import patch_attribute


class CastHandle(Ambient):
    """O1's casts: ``enable()`` switches them on, ``disabled()`` off for a block, ``undo()`` permanently.

    Call ``enable`` outside of autocast blocks: the end of a block restores the autocast state of its beginning. Several
    handles may be enabled at once if they are undone in reverse order. A forked process inherits the casts, except for
    a DataLoader's worker.
    """

    def __init__(self, device_types: Sequence[str] = (), before_forward: Callable[[], object] = lambda: None) -> None:
        super().__init__(device_types, before_forward)
        self._undo = ExitStack()

    def enable(self, policy: CastPolicy, patches: Sequence[Callable[[ExitStack], None]] = ()) -> None:
        """Switch the casts on, or do nothing if the policy has no such casts. After a failure call ``undo``.

        Args:
            policy: The policy, for ``patch_torch_functions``, ``autocast_dtype`` and ``allow_banned``.
            patches: The patches of functions that users have registered, which are made after O1's own.
        """
        if not (policy.enabled and policy.patch_torch_functions):
            return
        for device_type in self.device_types:
            install_dispatch_overlay(self._undo, device_type)
        install_attribute_overlay(self._undo, self.device_types, allow_banned=policy.allow_banned)
        self._patch_backward()
        patch_attribute(self._undo, data_worker(), "_worker_loop", self._in_worker)
        self._undo.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        for device_type in self.device_types:
            _set_autocast(self._undo, device_type, policy.autocast_dtype)
        for patch in patches:
            patch(self._undo)
        self.active = True

    def undo(self) -> None:
        """Restore everything that enabling changed, last change first. It may be called again.

        Call it in the thread that enabled the casts: autocast's state belongs to that thread.
        """
        self.active = False
        self._undo.close()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Switch casts off inside the block, in this thread, and restore them afterwards."""
        if not self.active:
            yield
            return
        if torch.compiler.is_compiling():  # before torch 2.12 Dynamo traces no function that sets autocast's state
            with without_autocast(self.device_types):
                self.inside.append(TRACED)
                try:
                    yield
                finally:
                    self.inside.remove(TRACED)
            return
        thread_id = threading.get_ident()
        with self._switched_off():
            torch.set_autocast_cache_enabled(True)  # for a region inside, as without O1
            self.inside.append(thread_id)
            try:
                yield
            finally:
                self.inside.remove(thread_id)

    @contextmanager
    def _switched_off(self) -> Iterator[None]:
        """Switch autocast off, and restore its state at the end, unless ``undo`` has done so."""
        enabled = list(map(torch.is_autocast_enabled, self.device_types))
        caches = torch.is_autocast_cache_enabled()
        try:
            self._switch_off()
            yield
        finally:
            if self.active:
                for device_type, is_on in zip(self.device_types, enabled, strict=True):
                    torch.set_autocast_enabled(device_type, is_on)
                torch.set_autocast_cache_enabled(caches)

    def _switch_off(self) -> None:
        for device_type in self.device_types:
            torch.set_autocast_enabled(device_type, False)

    def _in_worker(self, worker_loop: Callable[..., Any]) -> Callable[..., Any]:
        def without_casts(*args: Any, **kwargs: Any) -> Any:
            self._switch_off()  # permanently: this process belongs to the worker
            return worker_loop(*args, **kwargs)

        return without_casts

    # ---------------------------------------------------------------------------------------------------- backward

    def _patch_backward(self) -> None:
        undo = self._undo
        # Tensor.backward, autograd.backward and autograd.grad all call the engine through this function.
        patch_attribute(undo, torch.autograd, "_engine_run_backward", self._without_autocast)
        # One of these is made before the forward of each Python Function, and its backward is called through it.
        patch_attribute(undo, BackwardCFunction, "__init__", self._remembering_autocast)
        for name in ("apply", "apply_boxed"):
            if hasattr(BackwardCFunction, name):  # apply_boxed: newer torch
                patch_attribute(undo, BackwardCFunction, name, self._with_remembered_autocast)

        patch_attribute(undo, checkpoint_frame(), "__init__", self._remembering_place)

    def _without_autocast(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            with self._switched_off():
                if not self.inside:
                    return run_backward(*args, **kwargs)
                return self.call_as_if(False, run_backward, *args, **kwargs)

        return engine_run_backward

    def _remembering_autocast(self, init: Callable[..., Any]) -> Callable[..., Any]:
        def init_remembering(function: Any, *args: Any, **kwargs: Any) -> None:
            init(function, *args, **kwargs)
            function._apex_npu_inside = self.is_inside()
            if _is_users_formula(type(function)._forward_cls):
                function._apex_npu_autocast = [
                    (device_type, torch.get_autocast_dtype(device_type))
                    for device_type in self.device_types
                    if torch.is_autocast_enabled(device_type)
                ]

        return init_remembering

    def _with_remembered_autocast(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def apply_with_autocast(function: Any, *args: Any) -> Any:
            inside = self.active and getattr(function, "_apex_npu_inside", False)
            call = partial(self.call_as_if, True, apply) if inside else apply
            remembered = getattr(function, "_apex_npu_autocast", ()) if self.active else ()
            with ExitStack() as restore:
                if remembered:
                    restore.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                    torch.set_autocast_cache_enabled(False)
                for device_type, dtype in remembered:
                    _set_autocast(restore, device_type, dtype)
                return call(function, *args)

        return apply_with_autocast

    def _remembering_place(self, init: Callable[..., Any]) -> Callable[..., Any]:
        def init_remembering(frame: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            recompute = partial(self.call_as_if, self.is_inside(), recompute)
            init(frame, recompute, *args, **kwargs)

        return init_remembering


def _set_autocast(undo: ExitStack, device_type: str, dtype: torch.dtype) -> None:
    undo.callback(torch.set_autocast_dtype, device_type, torch.get_autocast_dtype(device_type))
    undo.callback(torch.set_autocast_enabled, device_type, torch.is_autocast_enabled(device_type))
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_enabled(device_type, True)


def _is_users_formula(function: type) -> bool:
    """Return False for torch's own Functions (checkpoint, compiled graphs), which set autocast themselves."""
    module = function.__module__
    # torch.compile and torch.func turn a user's Function into one of that single module of torch.
    return module.partition(".")[0] != "torch" or module == "torch._functorch.autograd_function"
