# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The launches of an op, as data, and checks of their operands; all kernels are compiled before the first one runs."""

from __future__ import annotations

from collections.abc import Hashable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex_npu.ops.reference import FLOATS


class Launch(NamedTuple):
    """One launch of one kernel.

    Attributes:
        kernel: A function of ``triton.jit``.
        programs: The number of programs.
        args: The arguments in the kernel's order: tensors, numbers, and None for tensors that are missing.
        constants: The constants by name, in the kernel's order; Triton compiles a kernel for each combination of
            values.
        warps: The number of groups of 32 threads in a program.
        compiled: The result of ``compile`` for this variant, or None; see ``Plan.compile``.
    """

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    compiled: Any = None

    def again(self, args: tuple[Any, ...]) -> Launch:
        """Return the launch with other ``args`` of the same variant, with ``compiled`` if that is known."""
        launch = Launch(self.kernel, self.programs, args, self.constants, self.warps, self.compiled)
        return launch if self.compiled is not None else launch._replace(compiled=_compiled.get(launch.variant()))

    def variant(self) -> Hashable:
        """Return a key that is equal for launches of the same compiled kernel."""
        kinds: list[Hashable] = []
        _add_kinds(kinds, self.args)
        return self.kernel.__name__, self.args[0].device, self.warps, *kinds, *self.constants.values()

    def compile(self) -> Any:
        """Compile and load the kernel; return Triton's compiled kernel, or None if Triton interprets."""
        compiled = self._call(warmup=True)
        if compiled is not None:
            _ = compiled.run  # loads the binary and builds the launcher, which can fail, too
        return compiled

    def run(self, compiled: Any = None) -> None:
        """Run the kernel on the current stream of the current device.

        Args:
            compiled: The result of ``compile`` for this variant; None if Triton has to find it.
        """
        if not self.programs:
            return
        if hasattr(compiled, "__getitem__"):
            # kernel.run does the same, but takes ten times as long to find ``compiled`` by the same arguments.
            compiled[self.programs, 1, 1](*self.args, *self.constants.values())
        else:
            self._call(warmup=False)

    def _call(self, *, warmup: bool) -> Any:
        # Products and sums are not fused, as on the CPU. Otherwise the compiler would select products to fuse by the
        # present operands and the position of an element in its thread, so the last bit of a result could change.
        options = {"num_warps": self.warps, "enable_fp_fusion": False}
        return self.kernel.run(*self.args, grid=(self.programs, 1, 1), warmup=warmup, **options, **self.constants)


class CompilationError(RuntimeError):
    """The compilation of a kernel has failed; nothing has been launched."""


_compiled: dict[Hashable, Any] = {}


class Plan(NamedTuple):
    """The launches of one call of an op, and its result."""

    launches: tuple[Launch, ...]
    result: Any = None

    def compile(self, device: torch.device) -> list[Any]:
        """Compile all kernels for ``device`` that are not compiled yet, so that launching cannot fail half way.

        Returns:
            The compiled kernels.

        Raises:
            CompilationError: Triton cannot compile a kernel; its error is the cause.
        """
        kernels = [launch.compiled or _compiled.get(launch.variant()) for launch in self.launches]
        if all(kernels):
            return kernels
        with _current(device):
            return [kernel or _compiled_once(launch) for kernel, launch in zip(kernels, self.launches, strict=True)]

    def run(self, device: torch.device, compiled: list[Any] | None = None) -> Any:
        """Run the launches in order on ``device``; Triton itself would use the current device, not that of the tensors.

        Args:
            device: The device of the tensors.
            compiled: The result of ``compile`` for it; None to compile first.

        Raises:
            CompilationError: Triton cannot compile a kernel; nothing has been launched.
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
    # Triton's own errors share no base class, and building a launcher raises many others.
    except Exception as error:
        raise CompilationError(f"{launch.kernel.__name__}: {type(error).__name__}: {error}") from error
    return compiled


def kind(argument: Tensor | None) -> Hashable:
    """Return a key of an argument; Triton compiles a kernel for each key."""
    return None if argument is None else (argument.dtype, argument.data_ptr() % 16 == 0)


def _add_kinds(kinds: list[Hashable], args: tuple[Any, ...]) -> None:
    """Add the keys of ``args``, and of those in tuples, to ``kinds``; inlined, because every launch calls it."""
    for argument in args:
        if argument is None:
            kinds.append(None)
        elif isinstance(argument, Tensor):
            kinds += (argument.dtype, argument.data_ptr() % 16 == 0)
        elif isinstance(argument, tuple):
            _add_kinds(kinds, argument)
        elif type(argument) is not float:  # floats are never specialized, and have fixed positions in each kernel
            kinds += (argument % 16 == 0, argument == 1)


# The dtypes of operands, if some are encoded.
STORED = FLOATS | {torch.int8, torch.uint8, torch.int16}


def check_operands(op: str, dtypes: Set[torch.dtype] = FLOATS, **operands: Tensor | None) -> None:
    """Check that a kernel does not read or write past the end of an operand, or misread it; it has no check itself.

    Raises:
        ValueError: Operands differ in length or device, are not contiguous, or have a dtype that is not in ``dtypes``.
    """
    first, like = next((name, tensor) for name, tensor in operands.items() if tensor is not None)
    numel, device = like.numel(), like.device
    for name, tensor in operands.items():
        if tensor is None:
            continue
        if tensor.numel() != numel or tensor.device != device:
            problem = f"has {tensor.numel()} elements on {tensor.device}, but {first} has {numel} on {device}"
        elif not tensor.is_contiguous():
            problem = f"has stride {tensor.stride()}: call contiguous() on it"
        elif tensor.dtype not in dtypes:
            problem = f"has dtype {tensor.dtype}, which is not one of {', '.join(sorted(map(str, dtypes)))}"
        else:
            continue
        raise ValueError(
            f"{op}: {name} {problem}. Operands are contiguous flat buffers of one length on one device. "
            "Nothing has been written"
        )
