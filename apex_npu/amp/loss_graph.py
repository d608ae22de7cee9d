# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks of a ``scale_loss`` block by the graph of its loss: its optimizers, and the tensor that backward starts from.

They run only before an optimizer's first step, since a wrong script is wrong from the start. The same applies to the
check of the parameters' dtypes. The optimizers of a block are also checked while another one has gradients of a block,
or has not stepped and gets gradients.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer

from apex_npu.amp.block import Block, BlockPart
from apex_npu.amp.optimizer_state import AmpOptimizerState, Stage
from apex_npu.amp.session import Session, settings
from apex_npu.backends.live_objects import instances_of
from apex_npu.distributed.torch_ddp import looking_at_all, with_bucket_views
from apex_npu.fusion import any_grads, drop_grads, grads_of, set_grads
from apex_npu.ops import LOW_PRECISION


class FirstLook(BlockPart):
    """A block before the first step of one of its optimizers. It checks the optimizers, the loss and its backward."""

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss
        # The gradients that backward has given the scaled loss, and the loss itself.
        self._scaled: list[Tensor] = []
        self._unscaled: list[Tensor] = []

    def before_begin(self, block: Block) -> None:
        """Check that the loss reaches the optimizers, and warn if it has been rounded."""
        unknown = check_optimizers(block.session, self._loss, block.optimizers)
        if unknown and block.scale != 1.0:
            _warn_of_unknown(block.session, unknown)
        # At O3 there is no float32 outside of the model either.
        policies = [state.policy for state in block.states]
        looks = any(policy.model_dtype in LOW_PRECISION and policy.opt_level != "O3" for policy in policies)
        if looks and (dtype := rounded_to(self._loss)) is not None:
            name, bits = str(dtype).removeprefix("torch."), 1 - int(math.log2(torch.finfo(dtype).eps))
            block.session.warn_once(
                block.scaler,
                f"the loss has been rounded to {name}, {bits} bits: it is computed from {name} tensors, as inside of "
                "the model's forward. Compute it in float32: in forward by loss_fn(logits.float(), target), or outside "
                "of the model from its outputs, which are float32",
            )

    def begun(self, block: Block, scaled_loss: Tensor) -> None:
        """Record which of the losses backward starts from."""
        if block.scale != 1.0 and scaled_loss.requires_grad:
            scaled_loss.register_hook(self._scaled.append)
            self._loss.register_hook(self._unscaled.append)

    def before_unscale(self, block: Block) -> None:
        """Raise if backward was called on the unscaled loss."""
        # The loss may be scaled several times, as by AmpScaler. Backward started from the tensor with the gradient 1.
        if not self._scaled and any(bool((grad == 1).all()) for grad in self._unscaled):
            raise RuntimeError(
                "the scaled loss got no gradient in its amp.scale_loss block: backward() was called on the loss "
                f"itself, and the end of the block would divide gradients by a loss scale of {block.scale} that they "
                "never had. Call it on what the block yields: `with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()`"
            )


class LaterLook(BlockPart):
    """A block while other optimizers wait for a step. It checks its optimizers if the others have or get gradients.

    Following the graph in each block of a long phase that trains one optimizer alone would take too long.
    """

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss
        self._bare: list[list[Tensor]] = []  # the parameters of each waiting optimizer without gradients

    def before_begin(self, block: Block) -> None:
        """Check that the loss reaches the optimizers, if others have gradients, to which backward would add."""
        own = {id(p) for group in block.groups for p in group.params}
        waiting = [o for o in block.session.adopted if o._amp_state.waits and o._amp_state not in block.states]
        stepped = [[p for p in _params_of(other) if id(p) not in own] for other in waiting]
        self._bare = [params for params in stepped if not any_grads(params)]
        if len(self._bare) < len(stepped):
            check_optimizers(block.session, self._loss, block.optimizers)

    def before_unscale(self, block: Block) -> None:
        """Check that the loss reaches the optimizers, if backward has given others their first gradients."""
        if any(map(any_grads, self._bare)):
            try:
                check_optimizers(block.session, self._loss, block.optimizers)
            except RuntimeError as error:
                self.drops(block, error)
                raise

    def drops(self, block: Block, error: BaseException) -> bool:
        """Drop these first gradients, which are multiplied by the loss scale."""
        for params in self._bare:
            drop_grads(params)
        return False


class Reaching(BlockPart):
    """A block whose backward may give gradients to parameters of optimizers that were not passed to it.

    These gradients stay multiplied by the loss scale of this block. They are marked until they are cleared, or until a
    block of their own optimizer ends. If an optimizer's 16-bit parameters already have gradients, they keep these, and
    the new ones are dropped. The same applies to parameters beside those of the block in a DistributedDataParallel with
    ``find_unused_parameters``, whose reducer requires gradients of the parameter's dtype, or none.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []  # the other optimizers whose gradients are aside
        self._aside: list[tuple[list[Tensor], list[Tensor | None]]] = []

    def begun(self, block: Block, scaled_loss: Tensor) -> None:
        """Set aside the existing gradients of other optimizers' 16-bit parameters, and mark all other optimizers."""
        own = {id(p) for group in block.groups for p in group.params}
        overwritten = with_bucket_views(block.session.ddps)  # by this backward, where gradients are views of buckets
        for other in dict.fromkeys([*self._others(block), *self._beside(block, own)]):
            state, params = other._amp_state, [p for p in _params_of(other) if id(p) not in own]
            if state.widens and any_grads(params) and state.stage is not Stage.SCALED:
                grads = grads_of(params)
                if overwritten:
                    grads = [None if grad is None else grad.detach().clone() for grad in grads]
                self._aside.append((params, grads))
                self._kept.append(other)
                drop_grads(params)
                state.grads.scaled_by = ""
        self._mark(block)  # already here, because backward may raise

    def before_unscale(self, block: Block) -> None:
        """Put the gradients back, and mark the other optimizers again."""
        self._put_back()
        self._mark(block)  # a block inside of this one, or zero_grad(), may have removed the mark
        for state in block.states:
            state.grads.scaled_by = ""

    def drops(self, block: Block, error: BaseException) -> bool:
        """Put the gradients back."""
        self._put_back()
        return False

    def _put_back(self) -> None:
        for params, grads in self._aside:
            drop_grads(params)
            held = [(p, grad) for p, grad in zip(params, grads, strict=True) if grad is not None]
            set_grads([p for p, _ in held], [grad for _, grad in held])
        self._aside = []

    def _others(self, block: Block) -> list[Any]:
        others = {o for optimizer in block.optimizers for o in block.session.reached.get(optimizer, ())}
        return [other for other in others if other._amp_state not in block.states]

    def _beside(self, block: Block, own: set[int]) -> list[Any]:
        """Return the other optimizers of parameters whose gradients the reducer of the block's model looks at."""
        looking = [ddp for ddp in looking_at_all(block.session.ddps) if own & set(map(id, ddp.module.parameters()))]
        looked_at = {id(p) for ddp in looking for p in ddp.module.parameters()}
        return [
            other
            for other in (block.session.adopted if looking else ())
            if other._amp_state not in block.states and looked_at & _gets_gradients(other)
        ]

    def _mark(self, block: Block) -> None:
        if block.scale != 1.0:
            for other in self._others(block):
                if other not in self._kept:
                    other._amp_state.grads.scaled_by = _names(block.optimizers)


# Graph nodes of a loss that is divided by the number of micro-batches, or converted.
_PASSING = ("ToCopyBackward", "DivBackward", "MulBackward", "NegBackward")


def rounded_to(loss: Tensor) -> torch.dtype | None:
    """Return the low-precision dtype that ``loss`` has, or was converted from, as outputs of a cast model are."""
    if loss.dtype in LOW_PRECISION:
        return loss.dtype
    node: Any = loss.grad_fn
    while node is not None and node.name().startswith(_PASSING):
        node = next((function for function, _ in node.next_functions if function is not None), None)
        results: Any = getattr(node, "_input_metadata", ())
        if len(results) == 1 and len(results[0].shape) == 0 and results[0].dtype in LOW_PRECISION:
            dtype: torch.dtype = results[0].dtype
            return dtype
    return None


def warn_of_dtypes(session: Session, optimizer: Optimizer, state: AmpOptimizerState) -> None:
    """Warn if ``optimizer`` steps float16 or bfloat16 parameters at a level that keeps parameters in float32."""
    if state.widens or state.policy.model_dtype in LOW_PRECISION or settings.accept_low_precision_models:
        return
    formats = getattr(optimizer, "state_formats", None)
    if formats is not None and (formats.has_remainders or formats.stochastic_rounding):
        return
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}.intersection(LOW_PRECISION)
    if dtypes:
        session.warn_once(
            optimizer,
            f"{type(optimizer).__name__} steps parameters in {', '.join(map(str, dtypes))}, which have no float32 "
            f"masters at opt_level {state.policy.opt_level}: rounding loses small updates. If the model was converted "
            "after amp.initialize, as by model.half() or model.to(dtype), remove the conversion; O2 and O5 convert "
            "it, and keep masters",
        )


def _names(optimizers: Sequence[Optimizer]) -> str:
    return " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Iterate over the nodes of the loss's graph, the nearest first."""
    waiting = [loss.grad_fn]
    seen = {None, *waiting}
    for node in waiting:
        if node is not None:
            yield node
            new = dict.fromkeys(function for function, _ in node.next_functions if function not in seen)
            seen.update(new)
            waiting.extend(new)


def check_optimizers(session: Session, loss: Tensor, optimizers: Sequence[Optimizer]) -> set[int]:
    """Check that ``optimizers``, passed to a block, step parameters that ``loss`` reaches.

    ``Session.reached`` notes the other optimizers that the loss reaches, for ``Reaching``. This may be intended: a
    generator's loss reaches the discriminator.

    Returns:
        The identities of the leaves that the loss reaches, and that no optimizer known to amp steps.

    Raises:
        RuntimeError: The loss reaches no parameter of ``optimizers``, but some of another optimizer.
    """
    reached: set[int] = set()
    for node in _nodes(loss):
        if isinstance(node, BackwardCFunction):
            return set()  # for example a checkpoint: its parameters are unknown before it runs
        if (leaf := getattr(node, "variable", None)) is not None:
            reached.add(id(leaf))
    named = set().union(*map(_gets_gradients, optimizers))
    others = [o for o in session.adopted if o not in optimizers and _gets_gradients(o) & reached - named]
    if others and not named & reached:
        raise RuntimeError(
            f"amp.scale_loss was given {_names(optimizers)}, but the loss reaches none of its parameters; it reaches "
            f"those of {' and '.join(sorted({type(o).__name__ for o in others}))}: pass the optimizer that steps them"
        )
    for optimizer in optimizers if others else ():
        session.reached.setdefault(optimizer, weakref.WeakSet()).update(others)
    return reached.difference(named, *map(_gets_gradients, session.adopted))


def _warn_of_unknown(session: Session, unknown: set[int]) -> None:
    """Warn of optimizers that amp does not know, and that step the parameters with the identities ``unknown``."""
    for optimizer in instances_of(Optimizer):
        if optimizer not in session.adopted and _gets_gradients(optimizer) & unknown:
            session.warn_once(
                optimizer,
                f"{type(optimizer).__name__} was not passed to amp.initialize, but steps parameters whose gradients "
                "from an amp.scale_loss block stay multiplied by the loss scale: pass it to amp.initialize and to "
                "scale_loss, or clear these gradients before its own backward",
            )


def _gets_gradients(optimizer: Any) -> set[int]:
    """Return the identities of the parameters that ``optimizer`` steps."""
    return set(map(id, _params_of(optimizer)))


def _params_of(optimizer: Any) -> list[Tensor]:
    groups = getattr(optimizer, "param_groups", ())  # missing if the optimizer's constructor has failed
    return [p for group in groups for p in group["params"]]
