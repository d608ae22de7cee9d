# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A simulated capture of a CUDA graph, on any device: records operators, and replays them without Python.

What it replays reads and writes the tensors of the recording, and knows nothing of what the host did in between: as in
a graph, an optimizer's numbers are those of the recording unless they are on the device. And as there, what is recorded
is not done yet: what has been written is put back at the end, and the host alone has gone on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from apex_npu.ops.triton_kernels.launches import Launch

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class Capture(TorchDispatchMode):
    """``with Capture() as graph: ...``, then ``graph.replay()``."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        self._is_in_operator = False

    def __enter__(self) -> Capture:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(torch.cuda, "is_initialized", lambda: True)
        self._patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        # What is recorded is in ordinary memory, where a graph of a GPU has a pool of its own.
        self._patch.setattr(torch.cuda, "memory_snapshot", list)
        # Launches of Triton's kernels that are no part of an operator.
        run = Launch.run
        self._patch.setattr(Launch, "run", lambda launch, *given: self._record(partial(run, launch, *given), launch))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patch.undo()
        with torch.no_grad():
            for tensor, before in reversed(self._before):
                tensor.detach().copy_(before)
        self._before.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host would wait, which ends a capture"
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(args[place] if place < len(args) else kwargs.get(argument.name))
        self._is_in_operator = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._is_in_operator = False
        if func in _COPIES:
            devices = {t.device.type for t in tree_leaves((args, out)) if isinstance(t, Tensor)}
            assert len(devices) == 1, f"{func} copies between {devices}, which ends a capture"
        if func is torch.ops.aten.lift_fresh.default:  # all that a mode sees of torch.tensor
            assert out.device.type == "cpu", "torch.tensor copies numbers of the host, which ends a capture"
        if not func.is_view:  # a view stays one of the memory it was taken of, whatever data a parameter has in between
            self._calls.append((func, args, kwargs, tree_leaves(out)))
        return out

    def _record(self, run: Callable[[], object], launch: Launch) -> None:
        if self._is_in_operator:  # which is replayed as a whole
            run()
            return
        with _disable_current_modes():
            self._keep(launch.args)
            out = run()
        self._calls.append((run, (), {}, tree_leaves(out)))

    def _keep(self, written: Any) -> None:
        self._before += [(t, t.clone()) for t in tree_leaves(written) if isinstance(t, Tensor)]

    def replay(self) -> None:
        """Do again what was recorded."""
        with torch.no_grad():
            for func, args, kwargs, recorded in self._calls:
                for then, now in zip(recorded, tree_leaves(func(*args, **kwargs)), strict=True):
                    # Where it is no view of an argument it is memory of the graph's own.
                    if isinstance(then, Tensor) and then.data_ptr() != now.data_ptr():
                        then.copy_(now)
