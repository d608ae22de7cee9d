# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Triton's kernels compute what plain torch computes: on a GPU where there is one, else in Triton's interpreter.

The interpreter runs the kernels' arithmetic, offsets and masks on the CPU, one program after the other. That they
compile is shown by test_triton_compile.py; how fast they are, by neither.
"""

import contextlib
import importlib
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only
from triton_cases import (
    CHANGES,
    DTYPES,
    NUMEL,
    OPTIONS,
    SEGMENTED_CHANGES,
    Repeated,
    apply_reference,
    inside,
    on_device,
    operands,
    places,
    segments,
)
from triton_interpreter import DEVICE, INTERPRETED, interpreter, mend

from apex_npu import ops
from apex_npu.ops import cuda, wide_dtype
from apex_npu.ops.triton_kernels import launches, plans

OPS = sorted(OPTIONS)


# numpy, in which the interpreter computes, warns of every nan; kernels do not.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")


@pytest.fixture(autouse=True)
def _mended_interpreter(monkeypatch):
    mend(monkeypatch)


def launch(op, args, options=None):
    """Run ``op`` on copies of ``args``; what they are then, and what it returns."""
    copies = copies_on_device(op, args)
    plan = getattr(plans, op)(*copies, **(options or {}))
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, (copies, plan.run(DEVICE)))


def copies_on_device(op, args):
    """Segments alone are given on the host; the rows' owners, int64 as well, are read by kernels."""
    names = getattr(getattr(ops, op, None), "operands", [])
    return [
        a.to(DEVICE, copy=True) if isinstance(a, torch.Tensor) and name not in ("starts", "lengths") else a
        for a, name in itertools.zip_longest(args, names[: len(args)])
    ]


def in_float64(op, args, options):
    """What plain torch computes from ``args`` in float64."""
    wide = [a.double() if isinstance(a, torch.Tensor) and a.dtype.is_floating_point else a for a in args]
    wide = [w.clone() if w is a and isinstance(a, torch.Tensor) else w for w, a in zip(wide, args, strict=True)]
    apply_reference(op, wide, options)
    return wide


def check(op, args, options, which=None, rtol=None):
    """``op`` gives what float64 gives, rounded once to each operand's dtype; nothing outside of ``which`` counts."""
    got, _ = launch(op, args, options)
    wanted = in_float64(op, args, options)
    assert torch.equal(got[1], args[1]), "gradients are not written"
    for place, (g, w) in enumerate(zip(got, wanted, strict=True)):
        if not isinstance(g, torch.Tensor) or not g.dtype.is_floating_point or g.numel() != args[0].numel():
            continue
        if op == "lamb_" and place == 4:
            continue  # scratch
        g, w = (g, w) if which is None else (g[which], w[which])
        eps = torch.finfo(g.dtype).eps
        tolerance = rtol or (8 * eps if g.dtype in (torch.float32, torch.float64) else eps)
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance / 4, equal_nan=True)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "change", "without"), CHANGES)
def test_every_rule_gives_what_float64_gives(op, change, without, dtypes):
    args = operands(op, 1500, *dtypes, without)
    check(op, args, {**OPTIONS[op], **change}, rtol=None if dtypes[0] != torch.float32 else 4e-6)


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 1024, 1025, 41 * 123])
@pytest.mark.parametrize("op", ["sgd_", "adam_", "rmsprop_", "adadelta_", "adagrad_"])
def test_any_length_at_any_place_and_nothing_beside_it(op, numel):
    """Views that start one element after an aligned address: the elements around them are not written."""
    padded = [torch.nn.functional.pad(a, (1, 5), value=7.0).to(DEVICE) for a in operands(op, numel)]
    plan = getattr(plans, op)(*(a[1 : 1 + numel] for a in padded), **OPTIONS[op])
    plan.run(DEVICE)
    wanted = in_float64(op, operands(op, numel), OPTIONS[op])
    for got, want in zip(padded, wanted, strict=True):
        want = torch.nn.functional.pad(want, (1, 5), value=7.0)
        torch.testing.assert_close(got.cpu().double(), want, rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    [
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
        pytest.param(torch.bfloat16, torch.float32, marks=pytest.mark.sweep),
        pytest.param(torch.float64, torch.float32, marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_grad_scale_divides(op, dtype, scale_dtype):
    """Gradients of 1e-7, scaled by 2¹⁰: float16 could not hold them divided."""
    more = segments(dtype) if op == "lamb_" else []
    numel = NUMEL if more else 100
    param, grad, *states = operands(op, numel, dtype)
    scaled = (grad.double() * 1e-7 * 2.0**10).to(dtype)
    scale = torch.tensor([2.0**10], dtype=scale_dtype, device=DEVICE)
    got, _ = launch(op, [param, scaled, *states, *more], {**OPTIONS[op], "grad_scale": scale})
    # In what it is computed in, a division by a power of two is exact.
    wide = [t.to(wide_dtype(dtype)) for t in (param, scaled)]
    want, _ = launch(op, [wide[0], wide[1] / 2.0**10, *states, *more], OPTIONS[op])
    assert torch.equal(got[0], want[0].to(dtype))
    assert torch.equal(got[2], want[2])


@pytest.mark.parametrize(("op", "change", "without"), [*CHANGES, *((*change, ()) for change in SEGMENTED_CHANGES)])
def test_numbers_that_only_the_device_knows(op, change, without):
    """They are computed in float64 of float32 numbers; the latter give what the host computes of them."""
    more = segments() if op == "lamb_" else []
    args = [*operands(op, NUMEL if more else 1500, without=without), *more]
    options = {**OPTIONS[op], **change}
    options["lr"] = float(torch.tensor(options["lr"]))
    which = inside() if more else slice(None)
    want, _ = launch(op, args, options)
    for found_inf in (None, torch.zeros(1)):
        got, _ = launch(op, args, on_device(options, found_inf))
        for place, (g, w) in enumerate(zip(got, want, strict=True)):
            if isinstance(g, torch.Tensor) and g.shape == args[0].shape and not (more and place == 4):
                torch.testing.assert_close(
                    g[which], w[which], rtol=2e-7 if g.dtype == torch.float32 else 1e-3, atol=1e-7
                )
    overflowed, _ = launch(op, args, on_device(options, torch.full((1,), 2.0)))
    for place, (then, now) in enumerate(zip(args, overflowed, strict=True)):
        if isinstance(then, torch.Tensor) and not (more and place == 4):
            assert torch.equal(now, then)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("op", ["sgd_", "adam_", "rmsprop_", "adadelta_", "adagrad_"])
def test_inf_and_nan_go_where_they_go_in_torch(op, bad):
    """In each operand in turn, at the first and the last element: nothing else is touched by them."""
    for place in range(len(operands(op, 40))):
        args = operands(op, 40)
        args[place][0] = args[place][-1] = bad
        got, _ = launch(op, args, OPTIONS[op])
        apply_reference(op, args, OPTIONS[op])
        for g, w in zip(got, args, strict=True):
            torch.testing.assert_close(g, w, rtol=4e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zero_eps_and_tiny_gradients(dtype):
    """Squares of 1e-20, which float32 only holds as denormal numbers, are not taken for 0."""
    args = operands("adam_", 50, dtype, without=(4,))
    args[1] = torch.full_like(args[1], 1e-6 if dtype == torch.float16 else 1e-20)
    args[2].zero_()
    args[3].zero_()
    check("adam_", args, {**OPTIONS["adam_"], "weight_decay": 0.0, "eps": 0.0, "step": 1}, rtol=4e-3)


def test_without_beta1_nothing_is_left_of_the_average_before():
    """As in torch.lerp: computed from the other end, 1e8 would swallow what is blended in."""
    args = operands("adam_", 50, without=(4,))
    args[2].fill_(1e8)
    got, _ = launch("adam_", args, {**OPTIONS["adam_"], "beta1": 0.0, "weight_decay": 0.0})
    assert torch.equal(got[2], args[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_norm_of_large_tiny_odd_and_no_values(dtype):
    for x in (torch.full((300,), 1e30), torch.full((300,), 1e-30), torch.randn(10_003), torch.zeros(0)):
        x = x.to(dtype)
        _, got = launch("norm", [x])
        assert got.dtype == wide_dtype(dtype)
        torch.testing.assert_close(got, torch.linalg.vector_norm(x.double()).to(got.dtype), rtol=1e-7, atol=0)
    for bad, place in itertools.product((math.inf, math.nan), (0, 500, 1_000)):
        x = torch.randn(1_001).to(dtype)
        x[place] = bad
        assert not launch("norm", [x])[1].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_looks_for_elements_that_are_not_finite(dtype):
    for numel in (0, 1, 15, 17, 5_001):
        x, found_inf = torch.full((numel,), torch.finfo(dtype).max).to(dtype), torch.zeros(1)
        (_, flag), got = launch("norm", [x, found_inf])
        assert torch.equal(got, launch("norm", [x])[1])  # which overflows, in float32
        assert flag.item() == 0.0
        for bad, place in itertools.product(
            (math.inf, -math.inf, math.nan), (0, numel // 2, numel - 1) if numel else ()
        ):
            x = torch.zeros(numel, dtype=dtype)
            x[place] = bad
            assert launch("norm", [x, found_inf])[0][1].item() == 1.0
        assert launch("norm", [torch.zeros(numel, dtype=dtype), torch.ones(1)])[0][1].item() == 1.0
    assert plans.norm(torch.ones(3).double(), torch.zeros(1)) is None  # squares may overflow in float64


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 3.0, 1e3, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_norm_comes_with_what_clips_to_it(dtype, max_norm):
    """As torch.nn.utils.clip_grad_norm_ computes it from the same norm, to the last bit."""
    for x in (torch.randn(10_003), torch.zeros(0), torch.tensor([math.inf]), torch.tensor([math.nan, 1.0])):
        x = x.to(dtype)
        norm, got = launch("norm_to_clip", [x], {"max_norm": max_norm})[1]
        torch.testing.assert_close(norm, launch("norm", [x])[1], rtol=0, atol=0, equal_nan=True)
        wanted = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_a_norm_of_more_blocks_than_programs(monkeypatch):
    monkeypatch.setattr(plans, "_NORM_PROGRAMS", 2)
    x = torch.randn(5 * 2048 + 3)
    torch.testing.assert_close(launch("norm", [x])[1], x.double().norm().float(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_segment_sums(dtype, aligned):
    where = places(aligned)
    a, b = operands("sgd_", NUMEL, dtype)[:2]
    starts, lengths = (torch.tensor(column) for column in zip(*where, strict=True))
    _, got = launch("segment_dot", [a, b, starts, lengths, None])
    # Rounded once, from a sum without rounding errors.
    wanted = [math.fsum((a[s : s + n].double() * b[s : s + n].double()).tolist()) for s, n in where]
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64).to(dtype), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_segment_add(dtype, aligned):
    where = places(aligned)
    x, y = operands("sgd_", NUMEL, dtype)[:2]
    starts, lengths = (torch.tensor(column) for column in zip(*where, strict=True))
    factors = torch.tensor([2.0, -3.0, 0.5, 9.0], dtype=dtype)
    got, _ = launch("segment_add_", [x, y, factors, starts, lengths, None])
    wanted = x.double()
    for (start, length), factor in zip(where, factors.tolist(), strict=True):
        wanted[start : start + length] += factor * y[start : start + length].double()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got[0].double(), wanted, rtol=eps, atol=eps)
    outside = torch.ones(NUMEL, dtype=torch.bool)
    for start, length in where:
        outside[start : start + length] = False
    assert torch.equal(got[0][outside], x[outside])


@pytest.mark.parametrize(
    "dtypes", [DTYPES[0], *(pytest.param(d, marks=pytest.mark.sweep) for d in DTYPES[1:])], ids=str
)
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("op", "change"), SEGMENTED_CHANGES)
def test_every_rule_that_looks_at_segments_gives_what_float64_gives(op, change, aligned, dtypes):
    args = [*operands(op, NUMEL, *dtypes), *segments(dtypes[0], aligned)]
    # The direction is stored once in between.
    rtol = {torch.float32: 1e-5, torch.float64: 1e-13}.get(dtypes[0])
    check(op, args, {**OPTIONS[op], **change}, inside(aligned), rtol)


@pytest.mark.pairwise
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0])
def test_inf_nan_and_zero_norms_go_where_they_go_in_torch(bad, aligned):
    """A segment with such a gradient, and one whose parameters are such; NaN in the padding has no effect."""
    args = [*operands("lamb_", NUMEL), *segments(aligned=aligned)]
    inner, first, second = inside(aligned), slice(0, 5000), slice(5056, 7300)
    if bad == 0.0:
        for operand in (args[1], args[2], args[3]):
            operand[first] = 0.0
        args[0][second] = 0.0
    else:
        args[1][100] = args[0][5060] = bad
    padding = torch.ones(NUMEL, dtype=torch.bool)
    padding[inner] = False
    for operand in args[:4]:
        operand[padding] = math.nan
    options = {**OPTIONS["lamb_"], "decay": 0.0}
    got, _ = launch("lamb_", args, options)
    apply_reference("lamb_", args, options)
    for g, w in zip(got[:4], args[:4], strict=True):
        torch.testing.assert_close(g[inner], w[inner], rtol=2e-5, atol=1e-6, equal_nan=True)
    assert got[0][inner].isfinite().all() == (bad == 0.0)


@pytest.mark.parametrize(("op", "count"), [("sgd_", 1), ("adam_", 1), ("rmsprop_", 1), ("adadelta_", 1),
                                           ("adagrad_", 1), ("lamb_", 3)])  # fmt: skip
def test_how_many_launches_a_step_takes(op, count):
    more = segments() if count > 1 else []
    numel = NUMEL if more else 100
    plan = getattr(plans, op)(*operands(op, numel), *more, **OPTIONS[op])
    assert len(plan.launches) == count
    assert len(plans.norm(torch.zeros(5)).launches) == 2


def test_the_same_bits_every_time():
    args = [*operands("lamb_", NUMEL), *segments()]
    one, other = (launch("lamb_", args, OPTIONS["lamb_"])[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one[:4], other[:4], strict=True))


@pytest.mark.skipif(not INTERPRETED, reason="takes the interpreter's program ids")
def test_elements_after_two_to_the_31(monkeypatch):
    """The last block of a buffer of 2³¹ + 100 elements, of which no other page is ever touched."""
    numel = 2**31 + 100
    param, grad = (torch.empty(numel, dtype=torch.float16) for _ in range(2))
    param[-200:], grad[-200:] = 1.0, 2.0
    plan = plans.sgd_(param, grad, None, **{**OPTIONS["sgd_"], "weight_decay": 0.0, "lr": 0.25})
    (only,) = plan.launches
    last = interpreter.TensorHandle(np.array([only.programs - 1], dtype=np.int32), interpreter.tl.int32)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", lambda *_: last)
    launches.Launch(only.kernel, 1, only.args, only.constants, only.warps).run()
    assert param[-100:].eq(0.5).all()
    assert param[-200:-100].eq(1.0).all()


@pytest.mark.skipif(not INTERPRETED, reason="its memory is only reserved, which takes a CPU")
def test_segments_after_two_to_the_31():
    numel = 2**31 + 4096
    x = torch.empty(numel, dtype=torch.float16)
    x[-4000:] = 1.0
    x[-1000:] = 2.0
    starts, lengths = torch.tensor([numel - 3500, numel - 500]), torch.tensor([3000, 500])
    plan = plans.segment_dot(x, x, starts, lengths, None)
    assert plan.run(DEVICE).tolist() == [2500 + 4 * 500, 4 * 500]


def test_launches_are_on_the_device_of_the_tensors(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device.index) or contextlib.nullcontext())
    launched = SimpleNamespace(compiled=None, variant=lambda: None, run=lambda kernel: None)
    monkeypatch.setattr(launches, "_compiled_once", lambda launch: "compiled")
    for index in (0, 1, 2):
        launches.Plan((launched,)).run(torch.device("cuda", index))
    assert entered == [0, 0, 2, 2]  # to compile, and to launch; 1 is the current one
    entered.clear()
    monkeypatch.setattr(launches, "_compiled", {None: "compiled"})
    launches.Plan((launched,)).run(torch.device("cuda", 0))
    assert entered == [0]  # to launch


def test_what_an_interrupt_has_left_is_compiled_on_the_device_of_the_tensors(monkeypatch):
    entered, compiled, repeated, args = [], [], Repeated(ops.adam_), adam_args()

    @contextlib.contextmanager
    def current(device):
        entered.append(device)
        try:
            yield
        finally:
            entered.pop()

    def compile_(launch):
        compiled.append(list(entered))
        if len(compiled) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(launches, "_current", current)
    monkeypatch.setattr(launches, "_compiled", {})
    monkeypatch.setattr(launches.Launch, "compile", compile_)
    with pytest.raises(KeyboardInterrupt):
        repeated(*args, **OPTIONS["adam_"])
    repeated(*args, **OPTIONS["adam_"])
    assert compiled == [[args[0].device]] * 2


# Calls that have the operands of the one before


@pytest.mark.parametrize(("op", "change", "without"), CHANGES)
def test_repeated_calls_follow_every_number_and_tensor(op, change, without, monkeypatch):
    """The launch that was planned for the operands is launched again, with the numbers of each call."""
    options = {**OPTIONS[op], **change}
    args = [a if a is None else a.to(DEVICE) for a in operands(op, 100, without=without)]
    wanted = [a if a is None else a.double().cpu() for a in args]
    repeated = Repeated(getattr(ops, op))
    planned = []
    monkeypatch.setattr(plans, "check_operands", lambda *_, **given: planned.append(given))
    ran, run = [], launches.Plan.run
    monkeypatch.setattr(launches.Plan, "run", lambda plan, *given: (ran.extend(plan.launches), run(plan, *given)))
    two = torch.full((1,), 2.0, device=DEVICE)
    number = {"lr": 0.02, **{name: options[name] + 1 for name in ("step",) if name in options}}
    flag = {"weight_decay": 0.0 if options["weight_decay"] else 0.3}
    # Each with what it takes to plan once more: another kernel, for other flags.
    calls = [({}, 1), (number, 0), (flag, 1), ({}, 0), (flag | number, 0)]
    calls += [({"grad_scale": two}, 1), ({"grad_scale": two.clone()}, 0), ({"maximize": not options["maximize"]}, 1)]
    # Integers are floats, as a call makes of them, and no reason for another kernel.
    calls += [({"lr": 1, "weight_decay": 0} | ({"eps": 1} if "eps" in options else {}), 0)]
    if op == "sgd_" and options["step"] == 1:
        calls = calls[:1]  # each first step is another kernel's
    for more, planning in calls:
        before = len(planned)
        repeated(*args, **{**options, **more})
        assert len(planned) - before == planning
        scale = more.get("grad_scale")
        reference = {**options, **more, "grad_scale": None if scale is None else scale.double().cpu()}
        apply_reference(op, wanted, reference)
    assert len({each.variant() for each in ran}) == len(planned)
    for got, want in zip(args, wanted, strict=True):
        if got is not None:
            torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-6)


def test_repeated_calls_follow_other_operands():
    repeated = Repeated(ops.adam_)
    for _ in range(2):
        for numel in (100, 2000):
            args = [a.to(DEVICE) for a in operands("adam_", numel)]
            repeated(*args, **OPTIONS["adam_"])
            wanted = in_float64("adam_", operands("adam_", numel), OPTIONS["adam_"])
            torch.testing.assert_close(args[0].cpu().double(), wanted[0], rtol=4e-6, atol=1e-6)
    with pytest.raises(ValueError, match="exp_avg has 5 elements"):
        repeated(args[0], args[1], args[2][:5], *args[3:], **OPTIONS["adam_"])


def test_repeated_calls_take_tensors_for_numbers():
    repeated = Repeated(ops.adam_)
    args = [a.to(DEVICE) for a in operands("adam_", 100)]
    repeated(*args, **OPTIONS["adam_"])
    wanted = [a.double().cpu() for a in args]
    options = {**OPTIONS["adam_"], "weight_decay": 0.3, "step": OPTIONS["adam_"]["step"] + 1}
    repeated(*args, **{**options, "weight_decay": torch.tensor(0.3, device=DEVICE)})
    apply_reference("adam_", wanted, options)
    torch.testing.assert_close(args[0].cpu().double(), wanted[0], rtol=4e-6, atol=1e-6)


def test_profilers_show_calls():
    repeated, args = Repeated(ops.adam_), adam_args()
    for _ in range(2):
        with torch.profiler.profile() as profile:
            repeated(*args, **OPTIONS["adam_"])
        assert "apex_npu::adam_" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("op", ["sgd_", "adam_", "lamb_"])
def test_repeated_calls_take_numbers_on_the_device(op):
    """Each has memory of its own for what the device makes of them, and a flag that skips it or not."""
    more = segments() if op == "lamb_" else []
    numel = NUMEL if more else 100
    given = [*operands(op, numel), *more]
    args, others = copies_on_device(op, given), copies_on_device(op, given)
    repeated = Repeated(getattr(ops, op))
    for step in (3, 4, 5):
        options = on_device({**OPTIONS[op], "step": step}, torch.tensor([float(step == 4)]))
        options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        repeated(*args, **options)
        if step != 4:
            getattr(plans, op)(*others, **{**OPTIONS[op], "step": step}).run(DEVICE)
        place = inside() if more else slice(None)
        torch.testing.assert_close(args[0][place].cpu(), others[0][place].cpu(), rtol=1e-6, atol=1e-7)


def test_a_repeated_call_that_cannot_be_compiled_is_torchs(decide_again, monkeypatch):
    repeated, args = Repeated(ops.adam_), adam_args()

    def fail(*_):
        raise launches.CompilationError("no such chip")

    monkeypatch.setattr(launches, "_compiled_once", fail)
    wanted = in_float64("adam_", operands("adam_", 100), OPTIONS["adam_"])
    repeated(*args, **OPTIONS["adam_"])
    torch.testing.assert_close(args[0].cpu().double(), wanted[0], rtol=4e-6, atol=1e-6)


# What decides between Triton and torch


def adam_args():
    return [a.to(DEVICE) for a in operands("adam_", 100)]


def stepped(args=None):
    args = adam_args() if args is None else args
    ops.adam_.kernels["cuda"](*args, **OPTIONS["adam_"])
    return args[0]


@pytest.fixture
def decide_again():
    """Nothing that was found out before, or is found out here, counts elsewhere."""
    cuda._plans.cache_clear()
    yield
    cuda._plans.cache_clear()
    cuda._given_up.clear()


@pytest.fixture
def counted(monkeypatch):
    """How many launches there were."""
    calls = []
    run = launches.Launch.run

    def counting(self, compiled):
        calls.append(self.kernel.__name__)
        run(self, compiled)

    monkeypatch.setattr(launches.Launch, "run", counting)
    return calls


@pytest.mark.usefixtures("decide_again")
def test_triton_is_taken_where_it_can_be(counted):
    stepped()
    assert counted == ["adam"]
    assert cuda.takes_ranges()


@pytest.mark.usefixtures("decide_again")
@pytest.mark.parametrize("how", ["missing", "old", "switched off"])
def test_torch_takes_over_where_there_is_no_triton(how, monkeypatch, counted, caplog):
    expected = stepped()
    counted.clear()
    cuda._plans.cache_clear()
    if how == "switched off":
        monkeypatch.setenv("APEX_NPU_NO_TRITON", "1")
    else:
        import_module = importlib.import_module

        def load(name):
            if name == "triton" and how == "missing":
                raise ModuleNotFoundError("No module named 'triton'")
            return SimpleNamespace(__version__="3.5.1") if name == "triton" else import_module(name)

        monkeypatch.setattr(importlib, "import_module", load)
    for _ in range(2):
        torch.testing.assert_close(stepped(), expected, rtol=1e-6, atol=1e-6)
    assert not counted
    assert not cuda.takes_ranges()
    said = {
        "missing": ["No module named 'triton'"],
        "old": ["Triton 3.5.1 is too old: 3.6 or newer is needed"],
        "switched off": [],
    }
    assert len(caplog.records) == len(said[how])
    assert all(words in caplog.text for words in said[how])


@pytest.mark.usefixtures("decide_again")
@pytest.mark.parametrize("op", ["adam_", "lamb_"])
def test_what_triton_cannot_compile_torch_does_instead_and_nothing_is_half_done(op, monkeypatch, counted, caplog):
    """The last kernel fails: had the first already run, moments would have been blended twice."""
    args = [*operands(op, NUMEL), *(segments() if op == "lamb_" else [])]
    args = copies_on_device(op, args)
    expected = in_float64(op, [a.cpu() if isinstance(a, torch.Tensor) else a for a in args], OPTIONS[op])
    failing = getattr(plans, op)(*args, **OPTIONS[op]).launches[-1].kernel
    compiling = launches.Launch.compile

    def compile_(self):
        if self.kernel is failing:
            raise RuntimeError("Failed to find C compiler")
        compiling(self)

    monkeypatch.setattr(launches.Launch, "compile", compile_)
    monkeypatch.setattr(launches, "_compiled", {})
    getattr(ops, op).kernels["cuda"](*args, **OPTIONS[op])
    for got, want in zip(args[:4], expected[:4], strict=True):
        torch.testing.assert_close(got.cpu()[inside()].double(), want[inside()], rtol=1e-5, atol=1e-6)
    getattr(ops, op).kernels["cuda"](*args, **OPTIONS[op])
    assert not counted
    assert len(caplog.records) == 1
    assert op in caplog.text
    assert "Failed to find C compiler" in caplog.text


@pytest.mark.usefixtures("decide_again")
def test_scattered_segments_are_left_to_torch(counted):
    """Rows of a transposed matrix are no ranges of memory: there is a map from elements to segments instead."""
    x = torch.arange(100.0, device=DEVICE)
    ids = torch.arange(100, device=DEVICE) % 2
    segment_dot = ops.segment_dot.kernels["cuda"]
    halves = segment_dot(x, x, torch.tensor([0, 1]), torch.tensor([50, 50]), ids)
    assert halves.tolist() == [sum(i * i for i in range(k, 100, 2)) for k in (0, 1)]
    assert not counted
    assert segment_dot(x, x, torch.tensor([10]), torch.tensor([3]), None).tolist() == [100 + 121 + 144]
    assert counted == ["dot_parts", "segment_sums"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda grad: grad[:-3], rf"grad has {NUMEL - 3} elements on .*, but param has {NUMEL} on .*of one length"),
        (lambda grad: torch.stack([grad, grad], 1)[:, 0], r"grad has stride \(2,\): call contiguous\(\)"),
        (lambda grad: grad.long(), r"grad has dtype torch.int64, which is not one of torch.bfloat16, torch.float16"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_operands_that_do_not_fit_are_refused_before_anything_is_written(op, spoil, words):
    args = [*operands(op, NUMEL), *(segments() if op == "lamb_" else [])]
    before = args[0].clone()
    args[1] = spoil(args[1])
    with pytest.raises(ValueError, match=f"^{op}: {words}.*Nothing has been written"):
        getattr(plans, op)(*args, **OPTIONS[op])
    assert torch.equal(args[0], before)


@pytest.mark.parametrize("op", [*OPS, "segment_dot", "segment_add_"])
def test_cuda_has_a_kernel_of_its_own_for_every_op(op):
    assert isinstance(getattr(ops, op).kernels["cuda"], cuda.Kernel)
