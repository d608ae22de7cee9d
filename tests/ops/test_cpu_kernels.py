# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The C++ kernels against the reference in float64: every rule, mix of dtypes and odd size, and what they refuse."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devices import DEVICE
from kernel_cases import (
    ADAM,
    BF16,
    CASES,
    CPU,
    F16,
    F32,
    F64,
    LAMB,
    MIXES,
    RULES,
    covered,
    name_of,
    operands_for,
    segments_of,
    shapes_for,
)

import apex_npu
from apex_npu import ops, optimizers
from apex_npu._extension import extension
from apex_npu.ops import reference
from apex_npu.ops.state_codec import Segment

pytestmark = [
    pytest.mark.skipif(extension is None, reason="there is no extension"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels for the cpu"),
]

SIZES = [0, 1, 15, 16, 17, 41 * 123]


def step(name, operands, extra, options, reference=False):
    """One step on copies, by the op or by its reference: what param and states are then."""
    copies = [None if t is None else t.clone() for t in operands]
    op = getattr(ops, name).reference if reference else getattr(ops, name)
    op(*copies, *extra, **options)
    torch.testing.assert_close(copies[1], operands[1], rtol=0, atol=0, equal_nan=True)  # gradients are not written
    return [copies[0], *copies[2:]]


def exact(name, operands, extra, options):
    """The reference in float64, on the values that the kernel is given."""
    operands = [None if t is None else t.double() for t in operands]
    extra = [t.double() if t is not None and t.is_floating_point() else t for t in extra]
    options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return step(name, operands, extra, options, reference=True)


def agree(got, want, mix, inside=slice(None)):
    """Everything to a few units in the last place of what it is computed in; parameters to one of their own, too."""
    close = {"rtol": 1e-13, "atol": 1e-13} if mix[0] == F64 else {"rtol": 3e-6, "atol": 3e-6}
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a is not None:
            rtol = max(close["rtol"], torch.finfo(a.dtype).eps) if i == 0 else close["rtol"]
            torch.testing.assert_close(a[inside].double(), b[inside], rtol=rtol, atol=close["atol"])


def check(case, numel, mix=(F32, F32), shapes=None, grad_scale=None):
    name, options, states = case
    operands = operands_for(name, states, numel, mix)
    wide = reference.wide_dtype(mix[0])
    extra = segments_of(shapes or shapes_for(numel), numel, wide) if name == "lamb_" else []
    if grad_scale is not None:
        options = {**options, "grad_scale": grad_scale}
    got = step(name, operands, extra, options)
    agree(got, exact(name, operands, extra, options), mix, covered(numel, extra))


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("numel", SIZES)
def test_every_option_and_size(case, numel):
    check(case, numel)


@pytest.mark.parametrize("case", RULES, ids=name_of)
def test_a_large_buffer(case):
    check(case, 2**20 + 3)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(str(d).removeprefix("torch.") for d in mix))
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_mix_of_dtypes_with_a_scale(case, mix):
    check(case, 41 * 123, mix, grad_scale=torch.tensor([3.0], dtype=F64 if mix[0] == F64 else F32))


@pytest.mark.parametrize("case", RULES, ids=name_of)
@pytest.mark.parametrize("mix", [(F32, F32), (F16, F16), (F32, BF16)], ids=str)
def test_memory_that_starts_anywhere(case, mix):
    """Views one element into their memory, as no vector is aligned."""
    name, options, states = case
    operands = operands_for(name, states, 5_044, mix)
    extra = segments_of(shapes_for(5_043), 5_043, F32) if name == "lamb_" else []
    aligned = step(name, [t[1:] for t in operands], extra, options)
    shifted = [t.clone() for t in operands]
    getattr(ops, name)(*(t[1:] for t in shifted), *extra, **options)
    for got, want in zip([shifted[0], *shifted[2:]], aligned, strict=True):
        assert torch.equal(got[1:], want)
    for t, before in zip(shifted, operands, strict=False):
        assert t[0] == before[0]  # nothing in front is touched


@pytest.mark.parametrize("case", RULES, ids=name_of)
@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e15])
def test_tiny_and_huge_values(case, scale):
    name, options, states = case
    operands = operands_for(name, states, 1_000)
    operands = [operands[0] * scale, operands[1] * scale, *operands[2:]]
    extra = segments_of([(1_000,)], 1_000, F32) if name == "lamb_" else []
    got, want = step(name, operands, extra, options), exact(name, operands, extra, options)
    for a, b in zip(got, want, strict=True):
        if a is not None:  # one more bit than elsewhere for sums that cancel
            torch.testing.assert_close(a.double(), b, rtol=5e-6, atol=float(torch.finfo(F32).tiny) + 1e-6 * scale)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("case", RULES, ids=name_of)
def test_what_is_not_finite_shows_where_it_is(case, bad):
    name, options, states = case
    numel = 16 + 515 + 16
    clean = operands_for(name, states, numel)
    for place in (0, 300, numel - 1):
        operands = [t.clone() for t in clean]
        operands[1][place] = bad
        # Each its own segment: norms make all of a parameter what one element is.
        extra = segments_of([(16,), (515,), (16,)], numel, F32) if name == "lamb_" else []
        got = step(name, operands, extra, options)
        want = step(name, operands, extra, options, reference=True)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.isfinite(), b.isfinite())
        assert not got[1].isfinite().all()


def test_an_infinite_parameter_without_gradient_stays():
    """As a mask has: adding 0 times it to the gradient would make nan of it."""
    for name, options, states in CASES:
        if name == "lamb_" or options["weight_decay"]:
            continue
        operands = operands_for(name, states, 40)
        operands[0][:] = -math.inf
        operands[1].zero_()
        assert torch.equal(step(name, operands, [], options)[0], operands[0])


# Segments


LAYOUTS = {
    "one row in several pieces": [(2, 20_011), (7,)],
    "rows cut by pieces": [(40, 1_000), (3, 3)],
    "rows of one element": [(40_000, 1), (5, 1)],
    "whole in one piece": [(16, 1_024), (1, 64), (147,)],
    "long vectors": [(40_001,), (17,)],
    "one element and none": [(1,), (0,), (1, 1)],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("shapes", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("case", [c for c in CASES if c[0] == "lamb_"], ids=name_of)
@pytest.mark.parametrize("mix", [(F32, F32, None), (F32, F16, F16)], ids=str)
def test_segments_of_all_shapes(case, shapes, mix):
    check(case, sum(map(math.prod, shapes)), mix, shapes)


def test_lamb_takes_segments_in_any_order_and_leaves_gaps_alone():
    operands = operands_for("lamb_", 2, 100)
    starts, lengths = torch.tensor([60, 90, 10, 90]), torch.tensor([25, 0, 40, 10])
    extra = [torch.empty(100), starts, lengths, None]
    got, want = step("lamb_", operands, extra, LAMB), exact("lamb_", operands, extra, LAMB)
    for inside in (slice(10, 50), slice(60, 85), slice(90, 100)):
        agree(got, want, (F32, F32, None), inside)
    for outside in (slice(0, 10), slice(50, 60), slice(85, 90)):
        assert torch.equal(got[0][outside], operands[0][outside])


def test_lamb_takes_full_steps_where_a_norm_is_zero_and_shows_nan():
    param, grad = torch.zeros(60), torch.ones(60)
    param[20:] = 1.0
    param[45] = math.nan
    extra = [torch.empty(60), torch.tensor([0, 20, 40]), torch.tensor([20, 20, 20]), None]
    options = {**LAMB, "decay": 0.0, "bias_correction": False, "eps": 0.0}
    got = step("lamb_", [param, grad, torch.zeros(60), torch.zeros(60)], extra, options)[0]
    # m = 0.1, v = 0.01, u = 1: r is 1 for the zeros, and ‖p‖ / ‖u‖ = 1 for the ones.
    torch.testing.assert_close(got[:40], torch.tensor([-0.1] * 20 + [0.9] * 20))
    assert got[40:].isnan().all()


def test_fake_tensors_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake, starts, lengths = torch.zeros(8), torch.zeros(1).long(), torch.ones(1).long()
    with pytest.raises(ValueError, match="plain contiguous tensor"):
        ops.norm(fake)
    for call in (
        lambda: ops.segment_dot(fake, fake, starts, lengths, None),
        lambda: ops.segment_add_(fake, fake, fake, starts, lengths, None),
    ):
        with pytest.raises(TypeError, match="plain tensors"):
            call()


def test_rows_that_are_no_ranges_of_memory_go_to_the_reference():
    rows = ops.Segments.of([10 * i for i in range(6)], [10] * 6, 60, CPU)
    ids = reference.segment_ids(rows.starts, rows.lengths, 60, CPU)
    ids[:60] = torch.arange(6).repeat(10)  # transposed
    a, b = torch.randn(60), torch.randn(60)
    before = a.clone()
    sums = ops.segment_dot(a, b, rows.starts, rows.lengths, ids)
    torch.testing.assert_close(sums, (a * b).view(10, 6).sum(0))
    ops.segment_add_(a, b, sums, rows.starts, rows.lengths, ids)
    torch.testing.assert_close(a, before + b * sums.repeat(10))


# The same bits


def results():
    """Of everything, of a size that several threads share."""
    numel = 2**18 + 3
    for name, options, states in RULES:
        for mix in ((F32, F32), (F32, F16)):
            # Of more than one piece, and of one.
            shapes = [(200, 1_000), (10_000,), (1, 16_400), (2, 16_000)]
            operands = operands_for(name, states, numel, mix, seed=1)
            extra = segments_of(shapes, numel, F32) if name == "lamb_" else []
            yield from (t for t in step(name, operands, extra, options) if t is not None)
    x, y = operands_for("sgd_", (), numel)
    yield from (ops.norm(t) for t in (x, x.half(), x.bfloat16(), x.double()))
    segments = ops.Segments.of([0, 10, 150_000], [7, 100_000, 50_003], numel, CPU)
    yield ops.segment_dot(x, y, *segments)
    yield from conversions()
    for kept in ((BF16, BF16), (torch.int8, torch.uint8), (torch.int8, BF16)):
        yield from encoded_results(numel, F32, kept)
        yield from encoded_results(numel, BF16, kept, has_remainder=True)
        yield from encoded_results(numel, F16, kept, has_remainder=True)
        yield from encoded_results(numel, BF16, kept, stochastic_param=True)
    for dtype in (BF16, F16):
        yield from encoded_results(numel, dtype, (F32, F32), has_remainder=True)


def encoded_results(numel, dtype, kept, has_remainder=False, stochastic_param=False):
    """Of Adam's rule with states in fewer bytes, whose second step decodes what the first one has encoded."""
    param, grad = (t.to(dtype) for t in operands_for("adam_", 2, numel, seed=1)[:2])
    states = [torch.zeros(numel, dtype=of_state) for of_state in kept]
    names = ["exp_avg", "exp_avg_sq"]
    scales = {name: torch.zeros(3_000) for name, of_state in zip(names, kept, strict=True) if of_state.itemsize == 1}
    remainder = torch.zeros(numel, dtype=torch.int16) if has_remainder else None
    places = ops.Places([Segment(0, 100_000, 0, 0), Segment(100_016, numel - 100_016, 3, 782)])
    for step in (1, 2):
        encoding = ops.RunEncoding(places, scales, step, remainder, stochastic_param)
        ops.adam_(param, grad, *states, None, **ADAM, encoding=encoding)
    yield from (t for t in (param, *states, *scales.values(), remainder) if t is not None)


def conversions():
    """Every float16 number; every float32 number that is half way between two of them, and its neighbours."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(F16)
    halves = halves[~halves.isnan()].sort().values
    widened = torch.empty(halves.numel())
    ops.gather.gather_([widened], [halves])
    yield widened
    middles = (halves[1:].double() + halves[:-1].double()).float() / 2
    values = torch.cat([middles, middles.nextafter(torch.tensor(math.inf)), middles.nextafter(torch.tensor(-math.inf))])
    values = torch.cat([values, torch.tensor([65519.996, 65520.0, 1e30, -1e30, 1e-45, -1e-45, 3e38])])
    for dtype in (F16, BF16):
        narrowed = torch.empty(values.numel(), dtype=dtype)
        ops.gather.gather_([narrowed], [values])
        yield narrowed


def digest(tensors):
    total = hashlib.sha256()
    for t in tensors:
        total.update(t.contiguous().view(torch.uint8 if t.dim() else t.dtype).numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_conversions_are_torchs(dtype):
    widened, *narrowed = conversions()
    halves = widened.half()
    assert torch.equal(halves.float(), widened)
    middles = (halves[1:].double() + halves[:-1].double()).float() / 2
    index = (F16, BF16).index(dtype)
    assert torch.equal(narrowed[index][: middles.numel()], middles.to(dtype))
    assert torch.equal(
        narrowed[index][-7:], torch.tensor([65519.996, 65520.0, 1e30, -1e30, 1e-45, -1e-45, 3e38], dtype=dtype)
    )
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = torch.empty(every.numel())
    ops.gather.gather_([wide], [every])
    assert torch.equal(wide.nan_to_num(7.0, math.inf, -math.inf), every.float().nan_to_num(7.0, math.inf, -math.inf))
    back = torch.empty_like(every)
    ops.gather.gather_([back], [wide])
    assert torch.equal(back.isnan(), every.isnan())
    assert torch.equal(back[~back.isnan()], every[~every.isnan()])


ON_THREE_THREADS = """
import os

import test_cpu_kernels as t

def threads():
    return len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0

t.torch.set_num_threads(3)
before = threads()
print(t.digest(t.results()))
kernels = threads()
t.torch.ones(2**20).add_(1)
print(kernels - before, threads() - kernels)
"""


@pytest.mark.parametrize("capability", ["default", pytest.param("avx2", marks=pytest.mark.slow)])
def test_any_number_of_threads_and_any_vectors_give_the_same_bits(capability):
    """Here on one thread with what the machine has; in another process on three, torch's own, with narrower vectors."""
    here = Path(__file__)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (Path(apex_npu.__file__).parents[1], here.parents[1]))),
        "ATEN_CPU_CAPABILITY": capability,  # torch reads it once
        "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait take others' time on a busy machine
    }
    # There it finds this file, and no other apex_npu before the one that is loaded here.
    done = subprocess.run(
        [sys.executable, "-c", ON_THREE_THREADS],
        env=environment,
        cwd=here.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bits, started = done.stdout.splitlines()
    assert bits == digest(results())
    # Two more for the kernels, and none for torch's own operators: there is one pool.
    assert started == ("2 0" if Path("/proc/self/task").exists() else "0 0")


# Bad input: an error that names it, and nothing is written


def adam_operands():
    param, grad, m, v, _ = operands_for("adam_", 3, 20)
    return {"param": param, "grad": grad, "exp_avg": m, "exp_avg_sq": v, "max_exp_avg_sq": None}


SHARED = torch.zeros(40)
# Lines as long as the messages.
# ruff: noqa: E501
BAD_OPERANDS = [
    ({"grad": torch.ones(19)}, ValueError, "adam_: all buffers must have one length, but grad has 19 elements and param 20"),
    ({"exp_avg": torch.ones(21)}, ValueError, "exp_avg has 21 elements"),
    ({"exp_avg_sq": torch.ones(40)[::2]}, ValueError, r"exp_avg_sq must be flat and contiguous, got shape \[20\] with strides \[2\]"),
    ({"grad": torch.ones(4, 5)}, ValueError, r"grad must be flat and contiguous, got shape \[4, 5\]"),
    ({"exp_avg": torch.ones(20).to_sparse()}, (ValueError, NotImplementedError, RuntimeError), "exp_avg must be a dense tensor|Sparse"),
    ({"exp_avg": torch.ones(20, dtype=F64)}, TypeError, "exp_avg must be Float beside Float parameters, got Double"),
    ({"exp_avg_sq": torch.ones(20, dtype=F16)}, TypeError, "exp_avg_sq must be Float beside Float parameters, got Half"),
    ({"grad": torch.ones(20, dtype=torch.int32)}, TypeError, "grad is Int beside Float parameters"),
    ({"param": torch.ones(20, dtype=torch.int64)}, TypeError, "param must be float16, bfloat16, float32 or float64, got Long"),
    ({"grad": torch.ones(20, dtype=F64)}, TypeError, "grad is Double beside Float parameters; float64 goes with float64"),
    ({"param": SHARED[:20], "exp_avg": SHARED[19:39]}, ValueError, "param and exp_avg overlap in memory"),
    ({"param": SHARED[:20], "grad": SHARED[:20]}, ValueError, "param and grad overlap in memory"),
    ({"exp_avg": SHARED[:20], "max_exp_avg_sq": SHARED[10:30]}, ValueError, "exp_avg and max_exp_avg_sq overlap"),
    ({"grad_scale": torch.ones(2)}, ValueError, r"grad_scale must be one number on the cpu, got shape \[2\]"),
    ({"grad_scale": torch.ones(1, dtype=F16)}, TypeError, "grad_scale must be float32 or float64, got Half"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"), BAD_OPERANDS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_operands_that_do_not_fit(change, error, message):
    operands = {**adam_operands(), **change}
    options = {**ADAM, "grad_scale": operands.pop("grad_scale", None)}
    before = {k: None if t is None else t.clone() for k, t in operands.items()}
    with pytest.raises(error, match=message):
        ops.adam_(*operands.values(), **options)
    for name, t in operands.items():
        assert t is None or (t.to_dense() == before[name].to_dense()).all(), name


BAD_SEGMENTS = [
    ([0, 10], [10], ValueError, "starts and lengths must have one length, got 2 and 1"),
    ([0, 10], [10, 11], ValueError, r"segment 1 \[10, 10 \+ 11\) is outside the buffer of 20 elements"),
    ([-1], [10], ValueError, r"segment 0 \[-1"),
    ([0], [-1], ValueError, "segment 0"),
    ([10, 0, 9], [5, 9, 2], ValueError, "segments 2 and 0 overlap at element 10"),
    ([0.0], [1.0], TypeError, "starts and lengths must be flat int64 tensors on the host"),
]


@pytest.mark.parametrize(
    ("starts", "lengths", "error", "message"), BAD_SEGMENTS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_segments_that_do_not_fit(starts, lengths, error, message):
    param, grad, m, v = operands_for("lamb_", 2, 20)
    before = param.clone()
    starts, lengths = torch.tensor(starts), torch.tensor(lengths)
    with pytest.raises(error, match=message):
        ops.lamb_(param, grad, m, v, torch.empty(20), starts, lengths, None, **LAMB)
    with pytest.raises(error, match=message):
        ops.segment_dot(param, grad, starts, lengths, None)
    with pytest.raises(error, match=message):
        ops.segment_add_(param, grad, torch.ones(starts.numel()), starts, lengths, None)
    assert torch.equal(param, before)


def test_norm_and_segment_sums_name_what_they_are_given():
    with pytest.raises(TypeError, match="norm: x must be float16, bfloat16, float32 or float64, got Int"):
        ops.norm(torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"norm: x must be a plain contiguous tensor on the cpu, got .* strides \[2\]"):
        ops.norm(torch.ones(6)[::2])
    starts, lengths = torch.tensor([0]), torch.tensor([3])
    with pytest.raises(ValueError, match=r"segment_dot: .* got shapes \[3\] and \[4\]"):
        ops.segment_dot(torch.ones(3), torch.ones(4), starts, lengths, None)
    with pytest.raises(TypeError, match=r"segment_add_: .* got Float and Double"):
        ops.segment_add_(torch.ones(3), torch.ones(3, dtype=F64), torch.ones(1), starts, lengths, None)
    with pytest.raises(ValueError, match=r"expected one factor per segment \(1\) on the cpu, got 2"):
        ops.segment_add_(torch.ones(3), torch.ones(3), torch.ones(2), starts, lengths, None)


@pytest.mark.parametrize("beta1", [0.0, 0.25])
def test_adam_forgets_a_huge_gradient_as_fast_as_torch(beta1):
    """The difference to a mean of 1e8 has no digits left for a gradient of 1."""
    ours, theirs = (torch.nn.Parameter(torch.zeros(40)) for _ in range(2))
    betas = (beta1, 0.5)
    for p, optimizer in (
        (ours, optimizers.NpuFusedAdam([ours], lr=1e-2, betas=betas)),
        (theirs, torch.optim.Adam([theirs], lr=1e-2, betas=betas)),
    ):
        for size in (1e8, *[1.0] * 20):
            p.grad = torch.full_like(p, size)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
