# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's gradient clipping under amp: refused for scaled gradients, and done in one pass where it can be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch.nn.utils
from torch import Tensor

from apex_npu.amp.masters import Float32Loop
from apex_npu.backends._torch_private import disable_dynamo, labelled
from apex_npu.fusion import are_same, grads_of, low_precision_of

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")
SCALED_CLIPPED = (
    "torch.nn.utils.clip_grad_norm_ or clip_grad_value_ was given gradients that fuse_unscale=True keeps multiplied "
    "by the loss scale until step, so that it clips too much. Call "
    "optimizer.clip_optimizer_grad_norm_fused(max_norm) instead, or leave fuse_unscale out"
)
UNSTEPPED_CLIPPED = (
    "{} was given gradients of {} parameters that no optimizer of amp.initialize steps. amp.scale_loss leaves these "
    "multiplied by the loss scale, so that it clips too much. Pass amp.master_params(optimizer), or freeze these "
    "parameters by requires_grad_(False)"
)


def watch_clipping(undo: ExitStack, adopted: Collection[Any], warn_once: Callable[[Any, str], None]) -> None:
    """Wrap torch's clipping functions, including names that a script has already imported.

    Args:
        undo: Receives the callbacks that restore the functions.
        adopted: The optimizers whose gradients are checked.
        warn_once: Called with an optimizer and a warning about it.
    """

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        name, by_torch = original.__name__, labelled("amp.clip")(original)

        @disable_dynamo  # FakeTensor cannot hold a 16-bit parameter with a float32 gradient
        def clip(parameters: Tensor | Iterable[Tensor] | Float32Loop, *args: Any, **kwargs: Any) -> Any:
            if isinstance(parameters, Float32Loop):
                listed = parameters.params()  # only gradients are of interest
            else:  # it may be a generator
                listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            # ``foreach`` selects one of torch's implementations.
            asked = len(args) > 3 or kwargs.get("foreach") is not None
            clip_at_once = None if asked or name != "clip_grad_norm_" else _clip_of(adopted, listed)
            if clip_at_once is None:
                _check_clipped(adopted, warn_once, f"torch.nn.utils.{name}", listed)
                return by_torch(listed, *args, **kwargs)
            kwargs.pop("foreach", None)
            return clip_at_once(*args, **kwargs)

        return clip

    for name in _FUNCTIONS:
        # torch wraps each function in no_grad. The wrapped function is replaced, so that all imported names follow.
        for cell in getattr(torch.nn.utils.clip_grad, name).__closure__ or ():
            original = cell.cell_contents
            if getattr(original, "__name__", None) != name:
                continue  # of another wrapper
            undo.callback(setattr, cell, "cell_contents", original)
            cell.cell_contents = functools.wraps(original)(watched(original))


def _clip_of(adopted: Collection[Any], params: list[Tensor]) -> Callable[..., Tensor] | None:
    """Return the fused clipping of the optimizer that steps exactly ``params``, if it clips as torch does."""
    for optimizer in adopted:
        own = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        in_order = are_same(own, params)  # as amp.master_params gives them
        steps_just_them = in_order or set(map(id, own)) == set(map(id, params))
        if steps_just_them:
            groups = optimizer._amp_state.grads.groups_of(optimizer)
            if optimizer._amp_state.clips_like_torch(groups):
                return functools.partial(optimizer._clip_like_torch, groups)
    return None


def _check_clipped(
    adopted: Collection[Any], warn_once: Callable[[Any, str], None], caller: str, params: list[Tensor]
) -> None:
    """Raise, before torch clips the gradients of ``params``, if a block has yet to unscale them."""
    given = {id(p) for p in params}
    stepped: set[int] = set()
    unscaled_by = None
    for optimizer in adopted:
        state = optimizer._amp_state
        own = given.intersection(id(p) for group in optimizer.param_groups for p in group["params"])
        stepped |= own
        if own:
            state.check_unscaled(caller)
            if state.pending is not None:
                state.pending.start()  # clipping by value would hide an inf
                state.pending.clip_now(state.grads.groups_of(optimizer))
            if state.policy.fuse_unscale and state.grad_scale != 1.0:
                warn_once(optimizer, SCALED_CLIPPED)
            elif state.widens and low_precision_of([grad for grad in grads_of(params) if grad is not None]):
                for group in state.grads.groups_of(optimizer):
                    group.widen()
            if state.decision is not None and state.decision.scale_before != 1.0:
                unscaled_by = optimizer
    others = [p for p in params if id(p) not in stepped and p.grad is not None]
    if others and unscaled_by is not None:
        warn_once(unscaled_by, UNSTEPPED_CLIPPED.format(caller, len(others)))
