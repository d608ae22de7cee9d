# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Forwards``: keeps the inputs of models, so that they can be called again with the same result."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from apex_npu.amp.inspect import ambient
from apex_npu.backends import is_capturing
from apex_npu.backends._torch_private import tree_map
from apex_npu.debug.model_report.copies import every_tensor
from apex_npu.debug.text import described
from apex_npu.debug.watching.calls import NotReplayedError
from apex_npu.debug.watching.kept_state import KeptState
from apex_npu.debug.watching.places import ModuleStack, Place, calling_line

logger = logging.getLogger("apex_npu.debug")


class Forward:
    """One call of a model: its arguments and all else that its result depends on.

    Attributes:
        place: The line that has called the model.
        number: The number of calls before this one.
    """

    def __init__(self, module: nn.Module, given: Any, place: Place | None, number: int) -> None:
        """Keep the call of ``module`` with ``given``, which begins now."""
        self.place, self.number = place, number
        self._module = module
        self._given = tree_map(lambda leaf: leaf, given)  # in containers of its own
        tensors = list(every_tensor(given))
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        self._state: KeptState | None = KeptState([module], [t.device for t in (*module.parameters(), *tensors)])
        self._is_differentiated = False
        caches = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), caches)
            for kind in {"cpu", *(t.device.type for t in tensors if t.device.type != "meta")}
        }
        casts = ambient()
        self._casts_around = casts is not None and casts.is_inside()
        self._handles: list[Any] = []

    def check_repeatable(self) -> None:
        """Check that another call would change no state and give the same result.

        Raises:
            NotReplayedError: It would not, for the reason in the message.
        """
        if self._state is None:
            raise NotReplayedError("another optimizer has stepped with its gradients")
        if self._is_differentiated:
            raise NotReplayedError("its gradients were differentiated (create_graph=True), as for a gradient penalty")
        for i, (tensor, version) in enumerate(self._versions):
            if tensor._version != version:
                raise NotReplayedError(
                    f"tensor {i} of its arguments, of shape {list(tensor.shape)}, has been written in place since, "
                    "by the model or by the script"
                )

    def ended(self, outputs: Sequence[Tensor], arrived: Callable[[Forward, int, Tensor], None]) -> None:
        """Note the returned ``outputs``; backward then calls ``arrived`` with each output's index and gradient."""

        def note(i: int, gradient: Tensor | None) -> None:
            self._is_differentiated |= torch.is_grad_enabled()
            if gradient is not None:
                arrived(self, i, gradient)

        for i, output in enumerate(outputs):
            hook: Any = functools.partial(note, i)
            self._handles.append(output.register_hook(unserializable_hook(hook)))

    def release(self) -> None:
        """Release all that is kept, as other objects may refer to this one for longer."""
        for handle in self._handles:
            handle.remove()
        self._given, self._state, self._versions, self._handles = None, None, [], []

    @contextmanager
    def as_it_was(self) -> Iterator[tuple[Callable[[], Any], list[Tensor]]]:
        """Restore random numbers, buffers and autocast as before the call; afterwards the present state returns.

        Yield a function that calls the model, and the arguments that require a gradient.
        """
        inputs: list[Tensor] = []

        def leaf(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.requires_grad):
                return value
            inputs.append(value.detach().requires_grad_())
            return inputs[-1]

        args, kwargs = tree_map(leaf, self._given)
        call: Callable[[], Any] = functools.partial(self._module, *args, **kwargs)
        casts = ambient()
        assert self._state is not None
        with ExitStack() as stack:
            stack.enter_context(_values_kept(self._module))
            stack.enter_context(self._state.put_back())
            stack.enter_context(torch.enable_grad())
            for device_type, state in self._autocast.items():
                stack.enter_context(torch.autocast(device_type, *state))
            if casts is not None:
                call = functools.partial(casts.call_as_if, self._casts_around, call)
            yield call, inputs


@contextmanager
def _values_kept(model: nn.Module) -> Iterator[None]:
    """Restore the memory and the values of parameters, and of buffers of ``torch.jit``, after the block."""
    tensors = dict.fromkeys([*model.parameters(), *model.buffers()])
    known = [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, data, value in known:
                tensor.data = data
                data.copy_(value)


class _Hook:
    """A hook that belongs to one module only: copies and pickles of the module have an inactive one."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> Any:
        return _Hook, ()


class Forwards:
    """A store of the inputs of models, kept for as long as the graph of their outputs lives.

    Attributes:
        failed: Why calls cannot be kept; None if they can.
    """

    def __init__(self, gradient_arrived: Callable[[Forward, int, Tensor], None]) -> None:
        """Create an empty store; backward calls ``gradient_arrived`` with forward, index of output, and gradient."""
        self._gradient_arrived = gradient_arrived
        self._models: list[weakref.ref[nn.Module]] = []
        self._hooks: list[Any] = []
        self.failed: str | None = None
        self._open = ModuleStack()  # each module with its ``Forward`` if the call is kept
        self._numbers = itertools.count()

    @property
    def models(self) -> list[nn.Module]:
        """The models whose calls are kept, without those that no longer exist."""
        return [model for known in self._models if (model := known()) is not None]

    def follow(self, given: Sequence[nn.Module]) -> None:
        """Keep the calls of ``given``, and of no others."""
        models = [model.module if isinstance(model, DistributedDataParallel) else model for model in given]
        if models == self.models:
            return
        self.end()
        self._models = [weakref.ref(model) for model in models]
        for model in models:
            if isinstance(model, torch.jit.ScriptModule):
                continue  # it takes no hooks
            before, after = _Hook(self._forward_begins), _Hook(self._forward_ended)
            self._hooks += [
                model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                model.register_forward_hook(after, always_call=True, with_kwargs=True),
            ]

    def end(self) -> None:
        """Stop keeping calls."""
        for hook in self._hooks:
            hook.remove()
        self._models, self._hooks = [], []
        self.close_interrupted()

    def close_interrupted(self) -> None:
        """Forget the open forwards of this thread: they were interrupted, so that their hooks are never called."""
        self._open.calls = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep no calls of this thread within the block, as models are called again."""
        self._open.calls = [(nn.Module(), None)]  # as within another forward
        try:
            yield
        finally:
            self.close_interrupted()

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward, here = None, self._open
        keeps = not (here.calls or self.failed) and any(module is model for model in self.models)
        if keeps and torch.is_grad_enabled() and not is_capturing():
            place = calling_line(3)  # past the hook and torch's code that calls it
            try:
                number = next(self._numbers)
                forward = Forward(module, (args, kwargs), place if isinstance(place, Place) else None, number)
            except Exception as error:
                self.failed = described(error)
                logger.exception("forwards of this model cannot be kept; training is not affected")
        here.push(module, forward)

    def _forward_ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        forward = self._open.pop(module)
        if forward is not None:
            forward.ended(outputs_of(output), self._gradient_arrived)


def outputs_of(returned: Any) -> list[Tensor]:
    """Return the tensors in ``returned`` that backward passes gradients to."""
    return [tensor for tensor in every_tensor(returned) if tensor.grad_fn is not None]
