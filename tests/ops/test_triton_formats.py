# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Triton's kernels load and store operands in fewer bytes than float32: bit for bit as ``ops/state_codec.py`` defines.

What they are compared with decodes in plain torch, steps float32 by the same kernels, and encodes in plain torch.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from covering import by_turns
from triton_cases import CHANGES, OPTIONS, SEGMENTED_CHANGES, on_device, operands, segments
from triton_interpreter import DEVICE, mend

from apex_npu import ops
from apex_npu.ops import Places, RunEncoding, cuda
from apex_npu.ops.state_codec import Segment, encode_remainder, narrow_remainder, scale_count
from apex_npu.ops.triton_kernels import launches, plans

NUMEL = 2_864
# Longer than a chunk, of one element, empty, and not of whole blocks; at places that are aligned, and that are not.
ALIGNED = [(0, 2300), (2352, 1), (2400, 0), (2432, 390)]
ANYWHERE = [(3, 2300), (2353, 1), (2361, 0), (2377, 390)]
POSITIONS = [7, 0, 1, 300]
# For each state of a rule that is never negative.
UNSIGNED = {"sgd_": [], "adam_": [1, 2], "rmsprop_": [0], "adadelta_": [0, 1], "adagrad_": [0], "lamb_": [1]}
CASES = [*CHANGES, *((op, change, ()) for op, change in SEGMENTED_CHANGES)]

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")


@pytest.fixture(autouse=True)
def _mended_interpreter(monkeypatch):
    mend(monkeypatch)
    for op in OPTIONS:
        monkeypatch.setitem(getattr(ops, op).kernels, "cpu", getattr(ops, op).kernels["cuda"])


def stepped_apart(op, args, options, encoding):
    """By the definition of the formats, around Triton's kernel for operands that are not encoded."""

    def float32_rule(*operands, **options):
        getattr(plans, op)(*operands, **options).run(DEVICE)

    getattr(ops, op).decoding(float32_rule)(*args, **options, encoding=encoding)


class Call:
    """Operands of one call, all of which are encoded; ``apart``: by the definition of the formats."""

    def __init__(self, op, dtypes, param_format=None, places=ALIGNED, without=(), count=3, seed=0):
        self.op, self.places, self.param_format = op, places, param_format
        first_scales = [0]
        for _, length in places:
            first_scales.append(first_scales[-1] + scale_count(length))
        pairs = zip(places, POSITIONS, first_scales, strict=False)
        segments_of_params = [Segment(begin, length, position, scale) for (begin, length), position, scale in pairs]
        kind = param_format or ""
        dtype = torch.float16 if "float16" in kind else torch.bfloat16 if kind else torch.float32
        param, grad, *states = operands(op, NUMEL, dtype, without=without)
        generator = torch.Generator().manual_seed(seed)
        grad = grad.float().mul(torch.exp(3 * torch.randn(NUMEL, generator=generator)))
        grad = grad.clamp(-6e4, 6e4).to(dtype)  # finite in float16
        remainder = None
        if "remainder" in kind:
            param, remainder = encode_remainder(torch.randn(NUMEL, generator=generator), dtype)
        if "int8" in kind:
            random = torch.randint(2**32, (NUMEL,), generator=generator)
            param, remainder = narrow_remainder(param, remainder, random)
        self.param, self.grad = param.to(DEVICE), grad.to(DEVICE)
        self.states, scales = [], {}
        for index, state in enumerate(states):
            kept = None if state is None else dtypes[index % len(dtypes)]
            if kept == torch.int8 and index in UNSIGNED[op]:
                kept = torch.uint8
            if kept in (torch.int8, torch.uint8):
                state, scales[getattr(ops, op).states[index]] = self._in_8_bits(kept, generator)
            self.states.append(None if state is None else state.to(kept).to(DEVICE))
        remainder = None if remainder is None else remainder.to(DEVICE)
        self.encoding = RunEncoding(Places(segments_of_params), scales, count, remainder, param_format == "stochastic")
        self.more = []
        if op == "lamb_":
            self.more = segments()
            starts, lengths = (torch.tensor(column) for column in zip(*places, strict=True))
            self.more[0] = torch.zeros(NUMEL, device=DEVICE)
            self.more[1:3] = starts, lengths

    def _in_8_bits(self, kept, generator):
        low, high = (-127, 128) if kept == torch.int8 else (0, 256)
        values = torch.randint(low, high, (NUMEL,), generator=generator).to(kept)
        scales = torch.rand(sum(scale_count(n) for _, n in self.places), generator=generator)
        scales[::5] = 0.0
        return values, scales.to(DEVICE)

    def step(self, options, *, apart):
        args = (self.param, self.grad, *self.states, *self.more)
        if apart:
            stepped_apart(self.op, args, options, self.encoding)
        else:
            getattr(ops, self.op)(*args, **options, encoding=self.encoding)
        return self.bits()

    def bits(self):
        kept = [self.param, *(state for state in self.states if state is not None)]
        if self.encoding.remainder is not None:
            kept.append(self.encoding.remainder)
        codes = {1: torch.int8, 2: torch.int16, 4: torch.int32}
        found = [[t.view(codes[t.element_size()]).cpu()[b : b + n] for b, n in self.places] for t in kept]
        scales = [scales.view(torch.int32).cpu() for scales in self.encoding.scales.values()]
        return [t.clone() for column in (*found, scales) for t in column]


def check(options, *arguments, **more):
    """The same bits; and they are others than before."""
    before = Call(*arguments, **more).bits()
    got = Call(*arguments, **more).step(options, apart=False)
    wanted = Call(*arguments, **more).step(options, apart=True)
    for index, (g, w) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(g, w), f"{index}: {(g != w).sum()} of {g.numel()}"
    assert not all(map(torch.equal, got, before))


@pytest.fixture
def counted(monkeypatch):
    """The names of the kernels that are launched."""
    calls = []
    run = launches.Launch.run
    monkeypatch.setattr(
        launches.Launch, "run", lambda self, *args: (calls.append(self.kernel.__name__), run(self, *args))
    )
    return calls


FORMATS = [[torch.bfloat16], [torch.int8], [torch.bfloat16, torch.float32, torch.int8]]
PARAM_FORMATS = [None, "remainder", "float16 remainder", "int8 remainder", "float16 int8 remainder", "stochastic"]
PLACES = [ALIGNED, ANYWHERE]
COMBINED = list(itertools.product(FORMATS, PARAM_FORMATS, PLACES))


# Of each rule and its options one of the formats, and each of these once.
@pytest.mark.parametrize(("case", "dtypes", "param_format", "places"), by_turns(CASES, COMBINED))
def test_every_rule_in_every_format(case, dtypes, param_format, places):
    op, change, without = case
    check({**OPTIONS[op], **change}, op, dtypes, param_format, places, without)


def test_the_count_may_be_large_or_on_the_device():
    """Of the latter the learning rate and the flag are, too; a flag that is set leaves all as it is."""
    options = {**OPTIONS["adam_"], "weight_decay": 0.0}
    check(options, "adam_", [torch.int8], "stochastic", count=2**31 + 5)
    for op, count in (("adam_", torch.tensor(3.0)), ("lamb_", torch.tensor([3]))):
        device_options = on_device(OPTIONS[op], torch.zeros(1))
        device_options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in device_options.items()}
        check(device_options, op, [torch.int8, torch.bfloat16], "remainder", count=count.to(DEVICE))
        skipped = Call(op, [torch.int8, torch.bfloat16], "remainder")
        device_options["found_inf"] = torch.full((1,), 2.0, device=DEVICE)
        assert all(map(torch.equal, skipped.bits(), skipped.step(device_options, apart=False)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8])
def test_blocks_of_any_magnitude(dtype):
    """The first momentum is the gradient: of each exponent that scales treat in their own way, inf, nan and zeros."""
    exponents = [-149, -130, -91, -90, -89, 0, 100, 124, 125, 126, 127]
    generator = torch.Generator().manual_seed(0)
    magnitudes = 2.0 ** torch.tensor(exponents).double().unsqueeze(1)
    blocks = magnitudes * torch.rand(len(exponents), 128, generator=generator).add(1)
    blocks[:, :100] *= torch.linspace(0 if dtype == torch.uint8 else -1, 1, 100)
    bad = torch.ones(4, 128)
    bad[0, 5], bad[1, 6], bad[2, 7], bad[3] = torch.inf, -torch.inf, torch.nan, 0.0
    grad = torch.cat([blocks.float(), bad]).flatten()
    found = []
    for apart in (False, True):
        param = torch.zeros_like(grad, device=DEVICE)
        scales = {} if dtype == torch.bfloat16 else {"momentum_buffer": torch.zeros(15, device=DEVICE)}
        encoding = RunEncoding(Places([Segment(0, grad.numel(), 3, 0)]), scales, 9)
        state = torch.zeros(grad.numel(), dtype=dtype, device=DEVICE)
        args = param, grad.to(DEVICE), state
        options = {**OPTIONS["sgd_"], "weight_decay": 0.0, "step": 1, "lr": 0.0}
        if apart:
            stepped_apart("sgd_", args, options, encoding)
        else:
            ops.sgd_(*args, **options, encoding=encoding)
        found.append([t.cpu() for t in (state, *scales.values())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_codes_and_remainders_are_kept_where_nothing_moves():
    """A step that changes nothing encodes what it has decoded."""
    still = {**OPTIONS["adam_"], "lr": 0.0, "beta1": 1.0, "beta2": 1.0, "bias_correction": False, "weight_decay": 0.0}
    for param_format in PARAM_FORMATS[1:]:
        call = Call("adam_", [torch.bfloat16], param_format, without=(4,))
        assert all(map(torch.equal, call.bits(), call.step(still, apart=False)))


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("beside", [0, 1, -1])
def test_ties_of_remainders_are_rounded_away_from_zero(beside, direction):
    """Every bfloat16 moves by half of its last bit, exactly or with a remainder of one bit: in integers of NumPy."""
    words = np.arange(2**16)
    magnitude, exponent = words & 0x7FFF, np.minimum(words >> 7 & 0xFF, 254)
    last_bit = np.where(exponent > 7, exponent - 7 << 7, 1 << np.clip(exponent - 1, 0, 7))
    stale = (magnitude > 0x7F80) | (magnitude == 0) & (beside < 0) | (magnitude == 0x7F80) & (beside > 0)
    masters = ((words << 16) + np.where(stale, 0, beside)).astype(np.uint32).view(np.float32)
    lr = np.float32(direction / 2)
    moved = masters - lr * (last_bit << 16).astype(np.uint32).view(np.float32)
    bits = moved.view(np.uint32).astype(np.int64)

    param, grad = (torch.from_numpy(w.astype(np.int16)).view(torch.bfloat16).to(DEVICE) for w in (words, last_bit))
    remainder = torch.full((words.size,), beside, dtype=torch.int16, device=DEVICE)
    encoding = RunEncoding(Places([Segment(0, words.size, 0, 0)]), {}, 1, remainder)
    still = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
    ops.sgd_(param, grad, None, **{**OPTIONS["sgd_"], **still, "lr": float(lr)}, encoding=encoding)

    rounded, remainder = param.view(torch.int16).cpu().numpy(), remainder.cpu().numpy()
    is_nan = np.isnan(moved)
    assert np.array_equal(rounded[~is_nan], (bits + 0x8000 >> 16).astype(np.int16)[~is_nan])
    assert np.array_equal(remainder[~is_nan], bits.astype(np.int16)[~is_nan])
    assert torch.equal(param.isnan().cpu(), torch.from_numpy(is_nan))
    assert not remainder[is_nan].any()
    assert beside or (remainder == -(2**15)).mean() > 0.98  # the exact ties


@pytest.mark.parametrize(("op", "count"), [("sgd_", 1), ("adam_", 1), ("lamb_", 3)])
def test_how_many_launches_a_step_takes(op, count, counted):
    Call(op, [torch.int8], "remainder").step(OPTIONS[op], apart=False)
    assert len(counted) == count


def test_parameters_without_elements(counted):
    param, grad = torch.zeros(2, 16, device=DEVICE)
    encoding = RunEncoding(Places([Segment(0, 0, 0, 0)]), {"momentum_buffer": torch.zeros(0, device=DEVICE)})
    state = torch.zeros(16, dtype=torch.int8, device=DEVICE)
    ops.sgd_(param, grad, state, **OPTIONS["sgd_"], encoding=encoding)
    assert not counted or counted == ["sgd"]  # of no program


def test_what_triton_cannot_compile_torch_decodes(monkeypatch, caplog, counted):
    compiling = launches.Launch.compile

    def compile_(self):
        if self.kernel.__name__ == "adam" and self.constants["ALIGNED"]:
            raise RuntimeError("no such instruction")
        return compiling(self)

    wanted = Call("adam_", [torch.int8]).step(OPTIONS["adam_"], apart=True)
    monkeypatch.setattr(launches, "_compiled", type(launches._compiled)())
    monkeypatch.setattr(launches.Launch, "compile", compile_)
    monkeypatch.setattr(cuda, "_given_up", set())
    counted.clear()
    for _ in range(2):
        got = Call("adam_", [torch.int8]).step(OPTIONS["adam_"], apart=False)
    for g, w in zip(got[4:], wanted[4:], strict=True):  # of the states, which are rounded after other arithmetic
        torch.testing.assert_close(g.float(), w.float(), rtol=1e-5, atol=1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no such instruction" in caplog.text


@pytest.mark.parametrize("spoiled", ["state", "remainder"])
def test_operands_that_do_not_fit_are_refused(spoiled):
    call = Call("adam_", [torch.int8], "remainder")
    if spoiled == "state":
        call.states[0] = call.states[0][:-16]
    else:
        call.encoding = call.encoding._replace(remainder=call.encoding.remainder[:-16])
    with pytest.raises(
        ValueError, match=rf"adam_: \w+ has {NUMEL - 16} elements on .* has {NUMEL} on .*Nothing has been"
    ):
        call.step(OPTIONS["adam_"], apart=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_remainder_of_8_bits_of_any_parameter(dtype):
    """Stale ones included; a step of half of a last bit moves some parameters by the rounding of the remainder."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    kept = torch.tensor([-128, -65, -64, -33, -1, 0, 32, 63, 64, 127], dtype=torch.int8)
    numel = every.numel() * kept.numel()
    found = []
    for apart in (False, True):
        param, remainder = every.repeat(kept.numel()).to(DEVICE), kept.repeat_interleave(every.numel()).to(DEVICE)
        encoding = RunEncoding(Places([Segment(0, numel, 3, 0)]), {}, 11, remainder)
        grad = (torch.arange(numel) % 7 - 3).mul(2.0**-11).to(dtype).to(DEVICE)
        options = {**OPTIONS["sgd_"], "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "lr": 0.75}
        if apart:
            stepped_apart("sgd_", (param, grad, None), options, encoding)
        else:
            ops.sgd_(param, grad, None, **options, encoding=encoding)
        found.append((param.cpu(), remainder.cpu()))
    (param, remainder), (wanted, wanted_remainder) = found
    is_nan = wanted.isnan()
    assert torch.equal(param.isnan(), is_nan)
    assert torch.equal(param[~is_nan], wanted[~is_nan])  # by value, because Triton's -x is 0 for 0
    assert torch.equal(remainder, wanted_remainder)
