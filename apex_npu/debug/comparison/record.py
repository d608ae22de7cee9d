# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``record``: records an iteration in a file, which ``compare`` compares with that of another run."""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch
from torch import nn

from apex_npu.amp.inspect import leave, observe, policy
from apex_npu.debug.comparison.grad_scalers import follow_grad_scalers
from apex_npu.debug.comparison.recorded import Recorded
from apex_npu.debug.comparison.recorder import Recorder
from apex_npu.debug.watching.opening import WatchingContext, inside_of
from apex_npu.debug.watching.places import Names
from apex_npu.distributed.rank_progress import own_rank


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
        recorder = self._recorder = Recorder(Names(models), self._samples)
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
            follow_grad_scalers(self._undo, recorder.scales, recorder.unscaled)
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


def _is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile(module)`` or ``module.compile()`` has compiled ``module``."""
    inner = getattr(module, "_orig_mod", None)
    return isinstance(inner, nn.Module) or getattr(module, "_compiled_call_impl", None) is not None
