# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs of examples: at a level, stopped after a checkpoint, and whether two checkpoints are the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch


def level(name: str, *options: str, quick: bool = False) -> Any:
    """A case with the options of a run; but for ``quick`` ones a sweep."""
    marks = [] if quick else pytest.mark.sweep
    return pytest.param(["--opt-level", name, *options], id=" ".join([name, *options]), marks=marks)


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """The places where two checkpoints differ; tensors are compared bit for bit."""
    if type(left) is not type(right):
        return [where]
    if isinstance(left, torch.Tensor):
        return [] if left.dtype == right.dtype and torch.equal(left, right) else [where]
    if isinstance(left, list | tuple):
        left, right = dict(enumerate(left)), dict(enumerate(right))
    if isinstance(left, dict):
        keys = left.keys() | right.keys()
        return [place for key in keys for place in differences(left.get(key), right.get(key), f"{where}/{key}")]
    return [] if left == right else [where]


@contextmanager
def stopped_after(module: ModuleType, name: str) -> Iterator[None]:
    """The run in this context ends with the first call of a function, which saves a checkpoint.

    Random numbers are others afterwards, as in a new process.
    """

    class Stopped(Exception):
        pass

    function = getattr(module, name)

    def call_and_stop(*args: Any) -> None:
        function(*args)
        raise Stopped

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, name, call_and_stop)
        with pytest.raises(Stopped):
            yield
    torch.manual_seed(1234)
