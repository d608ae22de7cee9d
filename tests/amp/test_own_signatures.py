# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of a script's own, whose ``step`` and ``zero_grad`` take and return what they like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICE
from small_programs import backward
from torch import nn

from apex_npu import amp, optimizers

pytestmark = pytest.mark.host


class Scaled(torch.optim.SGD):
    """``step`` takes a factor, and no closure."""

    def step(self, factor: float = 1.0) -> str:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=factor)
        return "stepped"


class Zeroing(torch.optim.SGD):
    """Zeroes by default, as torch's did before 2.0."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


class Twice(torch.optim.SGD):
    """Two gradients for one step, as of sharpness-aware minimization."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return closure()


class Reporting(optimizers.NpuFusedSGD):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return "reported", super().step(*args, **kwargs)


def start(cls: Any, level: str, **options: Any) -> tuple[nn.Parameter, Any]:
    model = nn.Linear(2, 1, bias=False).to(DEVICE)
    nn.init.ones_(model.weight)
    options = {"loss_scale": 64.0, "verbosity": 0, **options}
    return amp.initialize(model, cls(model.parameters(), lr=1.0), opt_level=level, **options)


def block(model: Any, optimizer: Any, value: float = 1.0) -> torch.Tensor:
    loss = model(torch.full((1, 2), value, device=DEVICE)).float().sum()
    backward(loss, optimizer)
    return loss


LEVELS = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])


@LEVELS
def test_a_step_whose_first_argument_is_no_closure(level: str) -> None:
    model, optimizer = start(Scaled, level)
    block(model, optimizer)
    assert optimizer.step(0.5) == "stepped"
    assert model.state_dict()["weight"].tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("options", [{}, {"fuse_unscale": True}], ids=["", "fuse_unscale"])
@pytest.mark.parametrize("by_name", [False, True])
def test_the_closure_runs_once_and_its_loss_is_passed_on(level: str, options: Any, by_name: bool) -> None:
    model, optimizer = start(Reporting, level, **options)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        return block(model, optimizer)

    said, loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert (said, loss.item(), calls) == ("reported", 2.0, [1])
    assert model.weight.tolist() == [[0.0, 0.0]]


def test_a_closure_that_is_called_twice_is_refused() -> None:
    model, optimizer = start(Twice, "O1", loss_scale=64.0)
    with pytest.raises(RuntimeError, match="calls its closure more than once"):
        optimizer.step(lambda: block(model, optimizer))
    assert model.weight.tolist() == [[1.0, 1.0]]


def test_lbfgs_is_refused_with_what_to_write_instead() -> None:
    inputs, targets = torch.eye(2, device=DEVICE), torch.tensor([[1.0], [-2.0]], device=DEVICE)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    model = torch.nn.Linear(2, 1, bias=False).to(DEVICE)
    model, optimizer = amp.initialize(model, torch.optim.LBFGS(model.parameters()), opt_level="O4", verbosity=0)
    before = model.weight.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"LBFGS calls its closure many times.*amp\.initialize\(model, opt_level='O4'\)"
    ):
        optimizer.step(closure)
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)

    model = torch.nn.Linear(2, 1, bias=False).to(DEVICE)
    model = amp.initialize(model, opt_level="O4", verbosity=0)
    optimizer = torch.optim.LBFGS(model.parameters())
    for _ in range(5):
        optimizer.step(closure)
    # The solution of the least squares problem, up to the rounding of weights to bfloat16 in the forward.
    torch.testing.assert_close(model.weight.detach(), targets.T, rtol=2**-8, atol=0)


@LEVELS
@pytest.mark.parametrize("fuse", [None, True])
def test_a_skipped_step_returns_none(level: str, fuse: bool | None) -> None:
    model, optimizer = start(Reporting, level, fuse_unscale=fuse, loss_scale="dynamic")
    block(model, optimizer, torch.inf)
    assert optimizer.step() is None
    optimizer.zero_grad()
    block(model, optimizer)
    assert optimizer.step() == ("reported", None)


@LEVELS
def test_the_default_of_its_own_zero_grad_counts(level: str) -> None:
    model, optimizer = start(Zeroing, level)
    block(model, optimizer)
    optimizer.zero_grad()
    assert model.weight.grad is not None
    assert not model.weight.grad.any()
    optimizer.zero_grad(set_to_none=True)
    assert model.weight.grad is None


class KeywordOnly(torch.optim.SGD):
    """``zero_grad`` by keyword alone."""

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("arguments", [{}, {"set_to_none": True}, {"set_to_none": False}])
def test_zero_grad_is_called_by_keyword_where_it_takes_one(level: str, arguments: Any) -> None:
    model, optimizer = start(KeywordOnly, level)
    block(model, optimizer)
    optimizer.zero_grad(**arguments)
    grad = model.weight.grad
    assert grad is None if arguments.get("set_to_none", True) else not grad.any()


class Interrupted(KeywordOnly):
    """Whose step Ctrl-C ends."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise KeyboardInterrupt


def test_an_interrupted_step_calls_no_zero_grad_of_the_scripts() -> None:
    model, optimizer = start(Interrupted, "O2")
    block(model, optimizer)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert model.weight.grad is None
