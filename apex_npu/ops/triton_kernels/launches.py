# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What an op launches, as data; all of it is compiled before any of it runs."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel.

    Attributes:
        kernel: What ``triton.jit`` has made.
        programs: How many run.
        args: In the kernel's order: tensors, None for those that are not there, numbers.
        constants: By name; for each of their values Triton compiles another kernel.
        warps: Groups of 32 threads in each program.
    """

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int

    def variant(self) -> Hashable:
        """Equal for launches that run the same compiled kernel."""
        kinds = tuple((a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else _kind(a) for a in self.args)
        return self.kernel.__name__, self.args[0].device, kinds, tuple(self.constants.items()), self.warps

    def compile(self) -> Any:
        """Compile and load the kernel, and return what Triton has made of it: None, where it interprets."""
        compiled = self._call(warmup=True)
        if compiled is not None:
            _ = compiled.run  # loads the binary and builds what launches it, which can fail as well
        return compiled

    def run(self) -> None:
        """Run, on the current stream of the current device."""
        if self.programs:
            self._call(warmup=False)

    def _call(self, *, warmup: bool) -> Any:
        # No product is contracted into a sum, as on the CPU: the compiler would choose which, by the operands that are
        # there and by an element's place in its thread, and the last bit of a result would depend on that.
        options = {"num_warps": self.warps, "enable_fp_fusion": False}
        return self.kernel.run(*self.args, grid=(self.programs, 1, 1), warmup=warmup, **options, **self.constants)


class CompilationError(RuntimeError):
    """A kernel could not be compiled; nothing has been launched."""


_compiled: set[Hashable] = set()


@dataclass(frozen=True)
class Plan:
    """What one call of an op launches, and what it returns."""

    launches: tuple[Launch, ...]
    result: Tensor | None = None

    def compile(self) -> None:
        """Compile what has not been compiled yet: after it launching cannot fail half way.

        Raises:
            CompilationError: The cause is what Triton has raised.
        """
        for launch in self.launches:
            variant = launch.variant()
            if variant in _compiled:
                continue
            try:
                launch.compile()
            # Triton's own errors share no base, and what builds its launchers raises many others.
            except Exception as error:
                name = launch.kernel.__name__
                raise CompilationError(f"{name}: {type(error).__name__}: {error}") from error
            _compiled.add(variant)

    def run(self, device: torch.device) -> Tensor | None:
        """Launch in order on ``device``: Triton itself launches on the current one, wherever the tensors are.

        Raises:
            CompilationError: Nothing has been launched.
        """
        guard: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with guard:
            self.compile()
            for launch in self.launches:
                launch.run()
        return self.result


def _kind(argument: float | int | None) -> Hashable:
    """What Triton compiles another kernel for, as far as numbers go: floats are never constants."""
    return (argument % 16 == 0, argument == 1) if isinstance(argument, int) else argument is None
