# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``record``: records an iteration in a file, which ``compare`` compares with that of another run."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from apex_npu.amp.inspect import Observer, float32_of, gradients, leave, observe, policy, stepped
from apex_npu.backends._torch_private import autograd_node
from apex_npu.backends.patching import patch_attribute
from apex_npu.debug.comparison.recorded import Kind, Recorded, held_as, on_host, row_of, samples_of
from apex_npu.debug.text import first_line
from apex_npu.debug.watching.calls import Call
from apex_npu.debug.watching.lineage import Lineage
from apex_npu.debug.watching.opening import WatchingContext, inside_of
from apex_npu.debug.watching.operators import Execution, followed, tensors_in
from apex_npu.debug.watching.operators import held as held_of
from apex_npu.debug.watching.places import Caller, Place, begins_within
from apex_npu.debug.watching.stream import Consumer
from apex_npu.distributed.rank_progress import own_rank

# Casts, copies and fills: levels differ in them, and the tensors that they write are recorded where they are read.
_LEFT_OUT = {
    *("_to_copy", "to", "copy", "copy_", "_copy_from", "clone", "contiguous", "fill", "fill_", "zero_", "zeros"),
    *("ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "arange", "eye"),
    *("scalar_tensor", "npu_dtype_cast", "_npu_dtype_cast", "npu_format_cast", "_npu_format_cast", "npu_dtype_cast_"),
}
# These read a tensor for its shape, or for probabilities.
_DRAWS = {"bernoulli", "rand_like", "randn_like", "randint_like", "multinomial", "poisson", "normal"}
# The dtypes of the masks of dropout: an element or a bit for each element.
_MASKS = (torch.bool, torch.uint8)


class Recorder(Consumer, Observer):
    """A consumer that keeps samples of the results of operators and modules, and of the gradients of parameters.

    Attributes:
        recorded: The recorded iteration.
    """

    def __init__(self, models: Sequence[nn.Module], samples: int | None) -> None:
        """Record ``models``, and at most ``samples`` elements of a tensor; None keeps all."""
        super().__init__(models)
        self.recorded = Recorded(samples)
        self._tensors = list({id(tensor): tensor for tensor in self.names.tensors}.values())
        self._calls: Counter[frozenset[Any]] = Counter()
        self._made: Lineage[bool] = Lineage()  # whether it descends from the loss times its scale
        self._optimizers: list[Optimizer] = []
        self._losses: list[Tensor] = []
        self._scaling: list[Call] = []
        self._scale_of_rest = 1.0  # of gradients that no block and no GradScaler has unscaled
        self._unscaled: set[int] = set()

    # ---- before and after ------------------------------------------------------------------------------------------

    def note_weights(self) -> None:
        """Keep the parameters or their masters, and the buffers, as before the iteration."""
        for tensor in self._tensors:
            held = held_of(float32_of(tensor) if tensor.requires_grad else tensor)
            if held is not None:
                host = on_host(held)
                self.recorded.weights.append(
                    held_as(self.names.of_tensor(tensor) or "", host, samples_of(host, self.recorded.samples))
                )

    def note_end(self) -> None:
        """Keep the buffers as the iteration has left them, and the gradients that belong to no block."""
        known = {row.module for row in self.recorded.rows if row.kind == "gradient"}
        others = [t for t in self._tensors if t.is_leaf and self.names.of_tensor(t) not in known]
        self._note_parameters([(t, t.grad, 1.0 if id(t) in self._unscaled else self._scale_of_rest) for t in others])
        for tensor in self._tensors:
            if not isinstance(tensor, nn.Parameter):
                self._keep_last("buffer", tensor, tensor)
        self.recorded.left_out = dict(self.stream.not_measured)

    def _note_parameters(self, found: Sequence[tuple[Tensor, Tensor | None, float]]) -> None:
        """Keep gradients of parameters, each with its factor."""
        # The last of several blocks counts, as its gradients are the sums.
        names = {name for parameter, _, _ in found if (name := self.names.of_tensor(parameter)) is not None}
        self.recorded.rows = [row for row in self.recorded.rows if row.kind != "gradient" or row.module not in names]
        own = {id(parameter): (gradient, scale) for parameter, gradient, scale in found}
        for tensor in self._tensors:
            gradient, scale = own.get(id(tensor), (None, 1.0))
            if gradient is not None:
                self._keep_last("gradient", tensor, gradient, scale)

    def _keep_last(self, kind: Kind, named: Tensor, tensor: Tensor, scale: float = 1.0) -> None:
        name = self.names.of_tensor(named)
        self._keep(tensor, scale, kind=kind, phase="after backward", module=name, operator=kind, result=0)

    # ---- what amp calls --------------------------------------------------------------------------------------------

    def block_begins(self, loss: Tensor, optimizers: Any, loss_id: int, scale: float, dynamic: bool) -> None:
        self._optimizers = stepped(optimizers)
        self.recorded.scale, self._losses, self._scaling = scale, [loss], []
        self.stream.set_block(scale)

    def block_ended(self) -> None:
        # Inside the block, gradients lack those of earlier blocks and the averages over processes.
        with torch.no_grad():
            self._note_parameters(gradients(self._optimizers))
        self._optimizers, self._losses = [], []
        self.stream.set_block(1.0)

    # ---- what GradScalers do ---------------------------------------------------------------------------------------

    def scales(self, losses: Any, scale: float) -> None:
        """Note that a GradScaler multiplies ``losses`` with ``scale``."""
        self.recorded.scale = self.stream.scale = self._scale_of_rest = scale
        self._losses += tensors_in(losses)

    def unscaled(self, optimizer: Optimizer) -> None:
        """Note that a GradScaler has divided the gradients of ``optimizer``."""
        self._unscaled |= {id(p) for group in optimizer.param_groups for p in group["params"]}

    # ---- operators -------------------------------------------------------------------------------------------------

    def passed_over(self, ran: Execution) -> None:
        is_scaled = autograd_node() is not None and self._reads_scaled(ran)
        if self._losses and ran.place is Caller.AMP:  # such as in GradScaler.scale
            self._is_scaling(self.stream.new_call(ran.operator, ran.place), ran)
        for tensor in ran.results():
            self._made.write(tensor, is_scaled)

    def saw(self, call: Call, ran: Execution) -> None:
        operator, place = ran.operator, ran.place
        if call.phase == "forward" and isinstance(place, Place):
            self._note_batch(ran, place)
        if self._is_scaling(call, ran):
            for tensor in ran.results():
                self._made.write(tensor, call.phase == "backward")
            return
        is_scaled = call.phase == "backward" and self._reads_scaled(ran)
        is_random = ran.is_random
        is_draw = is_random and (
            operator.plain in _DRAWS or not any(tensor.dtype.is_floating_point for _, tensor in ran.tensors_read())
        )
        known: dict[str, Any] = {"phase": call.phase, "module": call.module, "operator": operator.name}
        # The result of a collective is not complete yet; operators that read it wait.
        is_left_out = operator.makes_tensor or operator.is_collective or operator.plain in _LEFT_OUT
        for i, tensor in enumerate(ran.own_results()):
            self._made.write(tensor, is_scaled)
            if not is_left_out:
                drawn = is_random and (is_draw or tensor.dtype in _MASKS)
                scale = self.stream.scale if is_scaled and followed(tensor) is not None else 1.0
                self._keep(tensor, scale, call.place, kind="random" if drawn else "operator", result=i, **known)

    def _is_scaling(self, call: Call, ran: Execution) -> bool:
        """Return whether ``call`` multiplies the loss with its scale, or is the backward of that call."""
        plain = ran.operator.plain
        if call.phase == "forward" and self._losses and plain in ("_to_copy", "mul"):
            read = {id(t) for _, value in ran.operands() for t in tensors_in(value)}
            others = [loss for loss in self._losses if id(loss) not in read]
            if len(others) < len(self._losses) and plain == "mul":
                self._scaling.append(call)
                self._losses = others
            elif len(others) < len(self._losses):  # a half loss is scaled in float32
                self._losses = [*others, ran.results()[0]]
        return any(scaling in (call, call.forward) for scaling in self._scaling)

    def _reads_scaled(self, ran: Execution) -> bool:
        """Return whether an operator of backward reads a tensor that descends from the scaled loss, or may do so.

        The other operators compute from tensors that forward has saved, such as a power in the derivative of another
        power.
        """
        for _, tensor in ran.tensors_read():
            held = held_of(tensor)
            if held is not None and followed(held) is None:
                continue
            writers = self._made.writers(tensor)
            is_known = bool(writers) or (held is not None and self.names.of_memory(held) is not None)
            if not self._scaling or not is_known or any(writers):
                return True
        return False

    def _note_batch(self, ran: Execution, place: Place) -> None:
        """Keep the tensors read that come from outside: no operator has written them, and they belong to no model."""
        for _, tensor in ran.tensors_read():
            whole = tensor._base
            # Such as the transposed weight of a linear layer, or all positions of a batch in one dimension.
            if whole is not None and (tensor.grad_fn is not None or whole.numel() == tensor.numel()):
                tensor = whole
            held = self._unwritten(tensor)
            if held is not None:
                self._note_given(f"what {place} reads", held)

    def _unwritten(self, tensor: Tensor) -> Tensor | None:
        """Return the part of ``tensor`` in this process, if no operator of the iteration has written it."""
        held = None if tensor.grad_fn is not None else held_of(tensor)
        return None if held is None or self._made.writers(held) else held

    def _note_given(self, name: str, held: Tensor) -> None:
        """Keep ``held``, which no operator has written, as part of the batch unless it belongs to a model."""
        if self.names.of_memory(held) is None and not self._is_of_parameter(held):
            self.recorded.batch.append(held_as(name, held))
        self._made.write(held, False)

    def _is_of_parameter(self, held: Tensor) -> bool:
        """Return whether ``held`` is in a gradient or master: scripts measure these, and amp may have moved them."""
        for tensor in self._tensors:
            wide = float32_of(tensor)
            of_tensor = (tensor.grad, wide, wide.grad) if tensor.is_leaf else ()
            known = (held_of(one) for one in of_tensor if one is not None)
            if any(local is not None and begins_within(held, local) for local in known):
                return True
        return False

    # ---- modules ---------------------------------------------------------------------------------------------------

    def begins(self, given: Sequence[tuple[str, Tensor]]) -> None:
        # All are looked at before one is noted: the memory of two slices may overlap.
        for name, held in [(name, self._unwritten(tensor)) for name, tensor in given]:
            if held is not None:
                self._note_given(name, held)

    def ended(self, module: nn.Module, output: Any) -> None:
        name = self.names.of_module(module)
        if name is None:
            return
        known: dict[str, Any] = {"kind": "module", "module": name, "operator": type(module).__name__}
        phase = "forward" if autograd_node() is None else "recompute"
        for i, tensor in enumerate(tensors_in(output)):
            if followed(tensor) is None:
                continue
            with torch.no_grad():
                self._keep(tensor, phase=phase, result=i, **known)
            if tensor.grad_fn is not None:
                tensor.register_hook(functools.partial(self._note_gradient_of, {**known, "result": i}))

    def _note_gradient_of(self, known: dict[str, Any], gradient: Tensor | None) -> None:
        if gradient is not None and not self.stream.suspended:  # torch_npu's LSTM leaves some out
            with torch.no_grad():
                self._keep(gradient, self.stream.scale, phase="backward", **known)

    def _keep(self, tensor: Tensor, scale: float = 1.0, place: Place | None = None, **known: Any) -> None:
        """Add the row of ``tensor``, with the factor ``scale``; ``known``: kind, phase, module, operator, result."""
        held = held_of(tensor) if known["kind"] == "random" else followed(tensor)
        if held is None:
            return
        key = frozenset(known.items())
        known |= {"call": self._calls[key], "place": str(place or ""), "source": place.source if place else ""}
        try:
            self.recorded.rows.append(row_of(held, self.recorded.samples, scale, known))
            self._calls[key] += 1
        except (RuntimeError, NotImplementedError, MemoryError) as error:  # such as for float8, which has no norm
            self.stream.not_measured[f"{known['operator']}: {first_line(error)}"] += 1


class record(WatchingContext):
    """A context that records an iteration in a file.

    The file has the norm, range, number of zeros and samples of each result of operators and modules, in forward and
    backward, and of each gradient and buffer. Tensors that descend from the scaled loss are divided by the scale, which
    is amp's or that of a ``torch.amp.GradScaler``. The file also has hashes of the batch and the weights. The samples
    are the same elements in each run, so that ``compare`` can compare two files.

    The results of the iteration do not change, but code compiled by ``torch.compile`` runs eagerly: a compiler's
    kernels are not examined. The file holds numbers and no code: ``torch.load(path, weights_only=True)`` reads it. An
    iteration that ends in an exception leaves no file.

    Args:
        path: The file. With several processes, each but the first appends ``.rank1``, ``.rank2``, …
        models: The models whose modules and parameters are named; by default those passed to ``amp.initialize``.
        samples: The maximum number of elements of a tensor to keep; None keeps all.

    Returns:
        From ``with``: a ``Recorded``, which is complete when the context has ended.

    Raises:
        TypeError: One of ``models`` is not a module.
        ValueError: ``samples`` is not positive; no model is given, and amp has none; or another context watches.
        FileNotFoundError: The folder of ``path`` does not exist.
        RuntimeError: A CUDA graph is being captured. Or, at the end, the file cannot be written, or a dispatch mode
            that was entered before was left within the context, which ended the record.

    Example::

        >>> model = torch.nn.Linear(4, 1)
        >>> with amp.debug.record("run.pt", model) as recorded:
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> [row.operator for row in recorded.rows if row.kind == "operator" and row.phase == "forward"]
        ['aten::addmm', 'aten::sum']
    """

    def __init__(self, path: str | os.PathLike[str], *models: nn.Module, samples: int | None = 16384) -> None:
        """Check the arguments."""
        super().__init__(models)
        if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
            raise ValueError(f"samples must be a positive integer, or None to keep all elements, got {samples!r}")
        rank = own_rank()
        self.path = f"{os.fspath(path)}.rank{rank}" if rank else os.fspath(path)
        folder = os.path.dirname(os.path.abspath(self.path))
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"record cannot write {self.path!r}: there is no folder {folder!r}; make it first")
        self._samples = samples
        self._undo = ExitStack()

    def __enter__(self) -> Recorded:
        given = self.models_to_watch()
        models = list(map(inside_of, given))
        level = policy()
        recorder = self._recorder = Recorder(models, self._samples)
        self.stream = recorder.stream
        recorded = recorder.recorded
        if level is not None and level.enabled:
            recorded.level = level.opt_level
        devices = [parameter.device for model in models for parameter in model.parameters()]
        recorded.device = devices[0].type if devices else "cpu"
        recorded.versions = {"torch": str(torch.__version__)}
        if any(_is_compiled(module) for model in given for module in model.modules()):
            recorded.notes.append("torch.compile was off during the recording: compiled code ran eagerly")
        try:
            recorder.note_weights()
            observe(recorder)
            _follow_grad_scalers(self._undo, recorder)
            recorder.stream.attach()
        except BaseException:  # such as an interrupt
            self.leave()
            raise
        return recorded

    def leave(self) -> bool:
        """Stop without writing a file; return False if operators are missing, as an outer mode was left before."""
        stream, self.stream = self.stream, None
        self._undo.close()
        if stream is None:
            return True
        leave(self._recorder)
        return stream.detach()

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        was_open = self.stream is not None
        is_complete = self.leave()
        if was_open and kind is None:
            if not is_complete:
                raise RuntimeError(
                    f"the record is incomplete, and {self.path!r} is not written: a dispatch mode that was entered "
                    "before record, such as a FLOP counter, was left inside it, which ended the record"
                )
            with torch.no_grad():
                self._recorder.note_end()
            self._recorder.recorded.save(self.path)


def _follow_grad_scalers(undo: ExitStack, recorder: Recorder) -> None:
    """Tell ``recorder`` of GradScalers, in scripts that use them without amp, until ``undo`` is closed."""

    def telling_scale(original: Any) -> Any:
        def scale(scaler: GradScaler, outputs: Any) -> Any:
            if scaler.is_enabled() and not isinstance(outputs, Iterator):  # which is read once
                recorder.scales(outputs, scaler.get_scale())
            return original(scaler, outputs)

        return scale

    def telling_unscale(original: Any) -> Any:
        def unscale(scaler: GradScaler, optimizer: Optimizer) -> None:
            original(scaler, optimizer)
            if scaler.is_enabled():
                recorder.unscaled(optimizer)

        return unscale

    kinds = [GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()  # such as those of torch_npu and FSDP
        for name, telling in (("scale", telling_scale), ("unscale_", telling_unscale)):
            if name in vars(kind):
                patch_attribute(undo, kind, name, telling)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile(module)`` or ``module.compile()`` has compiled ``module``."""
    inner = getattr(module, "_orig_mod", None)
    return isinstance(inner, nn.Module) or getattr(module, "_compiled_call_impl", None) is not None
