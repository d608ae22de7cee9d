# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What an op launches, as data; all of it is compiled before any of it runs."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Launch(NamedTuple):
    """One launch of one kernel.

    Attributes:
        kernel: What ``triton.jit`` has made.
        programs: How many run.
        args: In the kernel's order: tensors, None for those that are not there, numbers.
        constants: By name, in the kernel's order; for each of their values Triton compiles another kernel.
        warps: Groups of 32 threads in each program.
        compiled: What ``compile`` has returned for this variant, where that is known; see ``Plan.compile``.
    """

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    compiled: Any = None

    def again(self, args: tuple[Any, ...]) -> Launch:
        """The same with ``args``, of the same variant; ``compiled`` as far as that has been."""
        launch = Launch(self.kernel, self.programs, args, self.constants, self.warps, self.compiled)
        return launch if self.compiled is not None else launch._replace(compiled=_compiled.get(launch.variant()))

    def variant(self) -> Hashable:
        """Equal for launches that run the same compiled kernel."""
        kinds: list[Hashable] = []
        _add_kinds(kinds, self.args)
        return self.kernel.__name__, self.args[0].device, self.warps, *kinds, *self.constants.values()

    def compile(self) -> Any:
        """Compile and load the kernel, and return what Triton has made of it: None, where it interprets."""
        compiled = self._call(warmup=True)
        if compiled is not None:
            _ = compiled.run  # loads the binary and builds what launches it, which can fail as well
        return compiled

    def run(self, compiled: Any = None) -> None:
        """Run, on the current stream of the current device.

        Args:
            compiled: What ``compile`` has returned for this variant; None: Triton finds it.
        """
        if not self.programs:
            return
        if hasattr(compiled, "__getitem__"):
            # As kernel.run does in the end, which takes ten times as long to find ``compiled`` by the same arguments.
            compiled[self.programs, 1, 1](*self.args, *self.constants.values())
        else:
            self._call(warmup=False)

    def _call(self, *, warmup: bool) -> Any:
        # No product is contracted into a sum, as on the CPU: the compiler would choose which, by the operands that are
        # there and by an element's place in its thread, and the last bit of a result would depend on that.
        options = {"num_warps": self.warps, "enable_fp_fusion": False}
        return self.kernel.run(*self.args, grid=(self.programs, 1, 1), warmup=warmup, **options, **self.constants)


class CompilationError(RuntimeError):
    """A kernel could not be compiled; nothing has been launched."""


_compiled: dict[Hashable, Any] = {}


class Plan(NamedTuple):
    """What one call of an op launches, and what it returns."""

    launches: tuple[Launch, ...]
    result: Tensor | None = None

    def compile(self, device: torch.device) -> list[Any]:
        """Compile for ``device`` what has not been yet, and return all: after it launching cannot fail half way.

        Raises:
            CompilationError: The cause is what Triton has raised.
        """
        kernels = [launch.compiled or _compiled.get(launch.variant()) for launch in self.launches]
        if all(kernels):
            return kernels
        with _current(device):
            return [kernel or _compiled_once(launch) for kernel, launch in zip(kernels, self.launches, strict=True)]

    def run(self, device: torch.device, compiled: list[Any] | None = None) -> Tensor | None:
        """Launch in order on ``device``: Triton itself launches on the current one, wherever the tensors are.

        Args:
            device: Where the tensors are.
            compiled: What ``compile`` has returned for it.

        Raises:
            CompilationError: Nothing has been launched.
        """
        kernels = self.compile(device) if compiled is None else compiled
        with _current(device):
            for launch, kernel in zip(self.launches, kernels, strict=True):
                launch.run(kernel)
        return self.result


def _current(device: torch.device) -> AbstractContextManager[Any]:
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


def _compiled_once(launch: Launch) -> Any:
    variant = launch.variant()
    try:
        return _compiled[variant]
    except KeyError:
        pass
    try:
        compiled = _compiled[variant] = launch.compile()
    # Triton's own errors share no base, and what builds its launchers raises many others.
    except Exception as error:
        raise CompilationError(f"{launch.kernel.__name__}: {type(error).__name__}: {error}") from error
    return compiled


def kind(argument: Tensor | None) -> Hashable:
    """What Triton compiles another kernel for."""
    return None if argument is None else (argument.dtype, argument.data_ptr() % 16 == 0)


def _add_kinds(kinds: list[Hashable], args: tuple[Any, ...]) -> None:
    """The same of ``args``, one after the other, those in tuples included: this is on the way to every launch."""
    for argument in args:
        if argument is None:
            kinds.append(None)
        elif isinstance(argument, Tensor):
            kinds += (argument.dtype, argument.data_ptr() % 16 == 0)
        elif isinstance(argument, tuple):
            _add_kinds(kinds, argument)
        elif type(argument) is not float:  # these are never constants, and where one kernel has one it always has
            kinds += (argument % 16 == 0, argument == 1)
