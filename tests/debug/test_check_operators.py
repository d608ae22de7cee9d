# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Each operator against float64 on its own inputs: which one is wrong, and that none is where none is."""

import math
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from covering import by_turns
from debug import healthy, planted
from debug.test_watching import set_up
from devices import DEVICE, SIMULATOR, needs
from small_programs import backward
from torch.utils._python_dispatch import TorchDispatchMode

from apex_npu import amp
from apex_npu.debug.comparison.check_operators import _error
from apex_npu.debug.watching.operators import operator_of, tensors_in

PACKAGE = Path(sys.modules[_error.__module__].__file__).parents[1]
MARKED = planted.marked_lines(__file__)


class Spoil(TorchDispatchMode):
    """Adds 5 % of the largest element to every 17th element of what one call of an operator returns."""

    def __init__(self, name=None):
        super().__init__()
        self.name, self.done, self.seen = name, False, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        operator = operator_of(func)
        results = [t for t in tensors_in(returned) if t.dtype.is_floating_point and t.numel()]
        if not operator.written:  # a view of what it has read
            read = {t.untyped_storage()._cdata for t in tensors_in(args)}
            results = [t for t in results if t.untyped_storage()._cdata not in read]
        if results and not (operator.passed_over or operator.is_random or operator.makes_tensor or is_own()):
            self.seen.append(operator.name)
            if operator.name == self.name and not self.done:
                self.done = True
                for t in results:
                    flat = t.detach().flatten().cpu()
                    largest = flat[flat.isfinite()].abs().max().clamp(min=1e-3)
                    flat[::17] += (0.05 * largest).to(flat.dtype)
                    t.detach().copy_(flat.view_as(t))
        return returned


def is_own():
    """Whether what checks operators has called this one, as for a copy of an operand."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(str(PACKAGE)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name not in ("__torch_dispatch__", "call_operator")


def check(make, level, spoil=None, **options):
    model, optimizer = set_up(make, level, torch.optim.SGD, dynamic_init_scale=16.0)
    with spoil or Spoil() as mode, amp.debug.check_operators(model, **options) as checked:
        optimizer.zero_grad()
        backward(model.loss(), optimizer)
    amp.shutdown()
    return checked, mode


@needs("float64")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
@pytest.mark.parametrize("make", healthy.MODELS)
def test_none_is_blamed_where_none_is_wrong(make, level):
    checked, _ = check(make, level)
    assert checked.blamed == []
    assert checked.checked > 15
    assert "no operator differs by more than rounding explains" in str(checked)
    # Fused ones of recurrent layers have no kernel for float64, or for the host.
    known = ("random", "integers or truth values")
    assert all(why in known or "rnn" in why or "lstm" in why for why in checked.left_out), checked.left_out
    if DEVICE.type == "cuda" and make is healthy.LSTM:
        assert "aten::_cudnn_rnn: the host has no kernel for it" in checked.left_out


def spoilt_one_by_one(make, level, names):
    wrong = []
    for name in names:
        checked, mode = check(make, level, Spoil(name))
        assert mode.done
        blamed = {one.operator for one in checked.blamed}
        if blamed != {name}:
            wrong.append((name, blamed))
    return wrong


def operators_of(make, level):
    _, mode = check(make, level)
    checked, _ = check(make, level)
    compared = {one.operator for one in checked.errors}
    return [name for name in dict.fromkeys(mode.seen) if name in compared]


@pytest.mark.parametrize(("make", "level"), [(healthy.ResNet, "O1"), (healthy.GPT, "O2")])
def test_an_operator_that_is_wrong_is_blamed_alone(make, level):
    names = operators_of(make, level)
    assert len(names) >= 15
    assert spoilt_one_by_one(make, level, names[::4]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("make", "level"), by_turns(healthy.MODELS, [("O0",), ("O1",), ("O2",)]))
def test_each_operator_that_is_wrong_is_blamed_alone(make, level):
    assert spoilt_one_by_one(make, level, operators_of(make, level)) == []


class Marked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 64)

    def forward(self, x):
        return torch.tanh(self.fc(x))  # fault: tanh

    def loss(self):
        return self(torch.linspace(-1, 1, 32).view(4, 8).to(DEVICE)).float().square().mean()


def test_what_is_said_of_it():
    checked, _ = check(Marked, "O2", Spoil("aten::tanh"))
    (one,) = checked.blamed
    assert (one.operator, one.phase, one.module, one.line) == ("aten::tanh", "forward", "", MARKED["tanh"])
    assert (one.dtype, one.shape) == ("float16", (4, 64))
    assert one.eps == torch.finfo(torch.float16).eps
    assert one.error > 8 > one.host_error
    text = str(checked)
    assert "forward  the model itself  aten::tanh  float16 [4, 64]" in text
    assert "(0.000977)" in text
    assert "do: compute these in float32" in text
    backward, _ = check(Marked, "O2", Spoil("aten::tanh_backward"))
    (one,) = backward.blamed
    assert (one.operator, one.phase, one.line) == ("aten::tanh_backward", "backward", MARKED["tanh"])


def test_the_error_against_numbers_known():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert _error(exact, torch.tensor([3.0, 4.5])) == pytest.approx(0.1)
    assert _error(exact, exact.float()) == 0.0
    assert _error(torch.tensor([3.0, 1e6]), torch.tensor([3.0, math.inf]).half()) == 0.0  # float16 does not hold it
    assert _error(exact, torch.tensor([3.0, math.inf])) == math.inf
    assert _error(torch.tensor([3.0, math.nan]).double(), torch.tensor([3.0, math.nan])) == 0.0
    tiny = torch.tensor([2.0**-25, 0.0], dtype=torch.float64)
    assert _error(tiny, tiny.half()) == 0.0  # becomes 0, as the spacing of subnormal numbers is 2^-24
    assert _error(torch.zeros(2).double(), torch.ones(2)) == math.inf


def test_the_error_where_terms_cancel():
    true, got = torch.tensor([1e-9], dtype=torch.float64), torch.tensor([3e-9])
    assert _error(true, got) == pytest.approx(2.0)
    assert _error(true, got, floor=1e-3) == pytest.approx(2e-6)
    assert _error(torch.zeros(1).double(), got, floor=1e-3) == pytest.approx(3e-6)


class Cancelling(torch.nn.Module):
    """Sums whose results are far below their terms, over views that are not contiguous."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(64, 2)

    def forward(self, x):
        x = x - x.mean()
        ones = torch.ones_like(x)
        sums = [x[:, ::2].sum(), x[:, 1:].sum(), x.t().sum(0).sum(), (x[:, :8].t() @ ones[:, :8]).sum(), x[:, 1].mean()]
        return self.fc(x).square().mean() + sum(sums)


class Miscounting(TorchDispatchMode):
    """Sums as a kernel does that adds numbers in another order; with ``wrong`` one that leaves out a row."""

    def __init__(self, wrong=False):
        super().__init__()
        self.wrong = wrong

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.sum.default and not is_own():
            x = args[0].reshape(-1)
            return (x[1:] if self.wrong else x).cumsum(0)[-1]  # each step rounds to float32
        return func(*args, **(kwargs or {}))


def blamed_for(mode, seed):
    torch.manual_seed(seed)
    model, x = Cancelling().to(DEVICE), torch.randn(512, 64).to(DEVICE)
    with mode or nullcontext(), amp.debug.check_operators(model) as checked:
        model(x)
    return [one.operator for one in checked.blamed]


@needs("float64")
def test_sums_that_cancel_are_not_blamed():
    seeds = range(12)
    assert [blamed_for(None, seed) for seed in seeds] == [[]] * len(seeds)
    assert [blamed_for(Miscounting(), seed) for seed in seeds] == [[]] * len(seeds)
    assert set(blamed_for(Miscounting(wrong=True), 0)) == {"aten::sum"}


def test_what_is_not_compared_is_counted():
    x, y = torch.arange(6.0, device=DEVICE).view(2, 3), torch.tensor([1, 3, 3], device=DEVICE)
    with amp.debug.check_operators(Marked().to(DEVICE)) as checked:
        x > 0  # noqa: B015
        x.argmax(-1)
        y + y
        torch.where(y > 2, y, y * 2)
    assert checked.checked == 0
    assert dict(checked.left_out) == {"integers or truth values": 6}
    assert "6 not: integers or truth values" in str(checked)


def test_what_takes_too_long_is_counted():
    checked, _ = check(Marked, "O2", seconds=1e-9)
    assert checked.checked == 1
    assert checked.left_out["no time left of seconds=1e-09"] >= 4
    assert "not: no time left of seconds=1e-09" in str(checked)


@pytest.mark.parametrize("seconds", [0, "1", math.nan])
def test_bad_input(seconds):
    with pytest.raises(ValueError, match=f"seconds, .* must be positive, got {seconds!r}"):
        amp.debug.check_operators(seconds=seconds)


@pytest.mark.skipif(not hasattr(SIMULATOR, "configure"), reason="a chip that saturates is simulated on the npu")
@needs("configurable_chip")
def test_a_device_that_saturates():
    settings = SIMULATOR.configure(saturate="fp16")
    try:
        with pytest.raises(RuntimeError, match=r"saturated.*find_overflow"):
            amp.debug.check_operators(planted.Plain().to(DEVICE)).__enter__()
    finally:
        SIMULATOR.configure(**vars(settings))
