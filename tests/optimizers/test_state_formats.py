# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""States in fewer bytes than float32: formats by enumeration, rules beside float32 state, and what follows state."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from devices import DEVICE, SIMULATOR, VENDOR, needs_extension
from encoded_steps import ALL_RULES, make_params, params_of
from lockstep import set_grads
from small_programs import backward, saved_and_loaded
from torch import nn

from apex_npu import amp, optimizers
from apex_npu._extension import extension
from apex_npu.fusion import EncodedView, encoded_state
from apex_npu.ops import Places, RunEncoding, elementwise, encoded_calls, lamb_, sgd_
from apex_npu.ops.state_codec import (
    Segment,
    decode,
    decode_remainder,
    encode,
    encode_remainder,
    philox,
    pieces,
    round_stochastically,
    scale_count,
)

STATEFUL = {name: rule for name, rule in ALL_RULES.items() if name != "SGD without momentum"}
RULES = [pytest.param(*rule, id=name) for name, rule in STATEFUL.items()]
FORMATS = [torch.bfloat16, "int8"]
# Options of the rule of SGD.
STILL = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False, "step": 1}
# Of a value relative to itself, or to the largest of its block.
ROUNDING = {torch.bfloat16: 2.0**-7, torch.int8: 1 / 127, torch.uint8: 2.1 / 255, torch.float32: 1e-6}


def train(rule, options, steps=3, dtype=torch.float32, **formats):
    optimizer = rule(make_params(dtype), lr=1e-2, **options, **formats)
    params = params_of(optimizer)
    for step in range(steps):
        set_grads(params, step)
        optimizer.step()
    return optimizer, params


def values_of(optimizer):
    state = optimizer.state_dict()["state"]
    return [
        {name: value for name, value in state[index].items() if isinstance(value, torch.Tensor) and value.dim()}
        for index in range(len(state))
    ]


# Formats


def test_philox_gives_the_published_words():
    zeros = [torch.zeros(1, dtype=torch.int64)] * 4
    assert philox(zeros, (0, 0)).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    digits = [torch.tensor([word]) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    assert philox(digits, (0xA4093822, 0x299F31D0)).tolist() == [[0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]]


def test_bfloat16_is_kept_whatever_the_random_bits_are():
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    for half in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        again = round_stochastically(patterns.float(), torch.full((2**16,), half))
        is_nan = patterns.isnan()
        assert again[is_nan].isnan().all()
        assert torch.equal(again[~is_nan].view(torch.int16), patterns[~is_nan].view(torch.int16))


def test_as_many_random_bits_round_away_from_zero_as_the_distance_says():
    halves = torch.arange(2**16)
    for bits in (0x3F800001, 0x3F808000, 0x3F80FFFF, 0x00010001, 0x7F7F4000):
        value = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        for sign in (1, -1):
            rounded = round_stochastically((sign * value).expand(2**16).contiguous(), halves).view(torch.int16)
            assert (rounded != rounded[0]).sum() == bits & 0xFFFF


def steps_that_change_nothing(param, remainder):
    """What the kernel of the device makes of ``param`` and ``remainder`` as it reads and writes them."""
    param, remainder = param.to(DEVICE, copy=True), remainder.to(DEVICE, copy=True)
    encoding = RunEncoding(Places([Segment(0, param.numel(), 0, 0)]), {}, remainder=remainder)
    sgd_(param, torch.zeros_like(param), None, lr=0.0, **{**STILL, "momentum": 0.0}, encoding=encoding)
    return param.cpu(), remainder.cpu()


STRETCHES = [range(first, first + 2**6) for first in range(-(2**15), 2**15, 2**12)]


@pytest.mark.parametrize(
    "lowers",
    [[0, 1, 0x7FFF, -0x8000, -0x7FFF, -1], *(pytest.param(each, marks=pytest.mark.sweep) for each in STRETCHES)],
    ids=str,
)
def test_remainders_are_exact(lowers):
    upper = torch.arange(-(2**15), 2**15).to(torch.int16)
    pairs = torch.stack(torch.broadcast_tensors(torch.tensor(lowers).to(torch.int16)[None, :], upper[:, None]), -1)
    master = pairs.contiguous().view(torch.float32).flatten()
    rounded, remainder = encode_remainder(master, torch.bfloat16)
    again, is_nan = decode_remainder(rounded, remainder), master.isnan()
    assert torch.equal(again[~is_nan].view(torch.int32), master[~is_nan].view(torch.int32))
    assert again[is_nan].isnan().all()
    # To nearest: as torch, but for ties.
    as_torch = ~is_nan & (pairs[..., 0].flatten() != -0x8000)
    assert torch.equal(rounded[as_torch], master[as_torch].bfloat16())
    kept, kept_remainder = steps_that_change_nothing(rounded, remainder)
    assert torch.equal(kept.view(torch.int16)[~is_nan], rounded.view(torch.int16)[~is_nan])
    assert torch.equal(kept_remainder[~is_nan], remainder[~is_nan])
    assert rounded[is_nan].isnan().all()
    assert kept[is_nan].isnan().all()


def test_a_stale_remainder_makes_nothing_else_of_what_a_script_has_written():
    for value in (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0):
        written = torch.full((2**16,), value, dtype=torch.bfloat16)
        master = decode_remainder(written, torch.arange(-(2**15), 2**15).to(torch.int16))
        if value in (0.0, 1.0):
            ulp = 2.0**-133 if value == 0 else 2.0**-7
            assert (master - value).abs().max() <= ulp / 2
        elif value != value:
            assert master.isnan().all()
        else:
            assert torch.equal(master[2**15 :], written[2**15 :].float())  # whose remainder is not negative


@pytest.mark.parametrize("moved", [0.0, 2.0**-9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_read_and_write_every_number_with_any_remainder(dtype, moved):
    """Stale remainders included, in rows of 37 numbers, which no vectors divide: the bits are those of plain torch."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([-(2**15), -(2**14), 2**13, 2**13 + 1, 2**14, 2**15 - 1])
    kept = torch.cat([edges, torch.randint(-(2**15), 2**15, (15,), generator=generator)]).to(torch.int16)
    param = every.repeat(kept.numel())
    remainder = kept.repeat_interleave(every.numel())
    numel = param.numel() - 37
    expected = decode_remainder(param[:numel], remainder[:numel]) - moved
    wanted, wanted_remainder = encode_remainder(expected, dtype)
    grad = torch.ones(numel, dtype=torch.float32)
    got = param[:numel].to(DEVICE, copy=True)
    got_remainder = remainder[:numel].to(DEVICE, copy=True)
    encoding = RunEncoding(Places([Segment(0, numel, 0, 0)]), {}, remainder=got_remainder)
    sgd_(got, grad.to(DEVICE), None, lr=moved, **{**STILL, "momentum": 0.0}, encoding=encoding)
    nan = wanted.isnan()
    assert torch.equal(got.cpu().isnan(), nan)
    assert torch.equal(got.cpu()[~nan].view(torch.int16), wanted[~nan].view(torch.int16))
    assert torch.equal(got_remainder.cpu()[~nan], wanted_remainder[~nan])


def test_remainders_of_float16_are_exact_from_two_to_the_minus_16_on():
    """In float64: ties of float16 and their neighbours, powers of two, and random magnitudes in each binade."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.arange(0x7C00).to(torch.int16).view(torch.float16)
    middles = (halves[1:].double() + halves[:-1].double()).float() / 2
    exponents = torch.arange(-40, 16).repeat_interleave(4096)
    random = torch.ldexp(1 + torch.rand(exponents.numel(), generator=generator), exponents)
    masters = torch.cat([halves.float(), middles, random])
    masters = torch.cat([masters, masters.nextafter(torch.tensor(0.0)), masters.nextafter(torch.tensor(1e9))])
    masters = torch.cat([masters, -masters])
    masters = masters[masters.abs() < 65520.0]
    rounded, remainder = encode_remainder(masters, torch.float16)
    assert torch.equal(rounded.view(torch.int16), masters.half().view(torch.int16))
    assert remainder.to(torch.int32).abs().max() <= 2**14
    again, error = decode_remainder(rounded, remainder), masters.double()
    error = (again.double() - error).abs()
    assert not error[masters.abs() >= 2.0**-16].any()
    assert error.max() <= 2.0**-39
    kept = steps_that_change_nothing(rounded, remainder)
    assert torch.equal(kept[0].view(torch.int16), rounded.view(torch.int16))
    assert torch.equal(kept[1], remainder)


LIMITS = {sign * 2**power + beside for power in (0, 13, 14) for sign in (1, -1) for beside in (-1, 0, 1)}


@pytest.mark.parametrize("stale", [-(2**15), *sorted(LIMITS), 2**15 - 1])
def test_a_float16_that_a_script_has_written_stays_whatever_its_remainder_is(stale):
    written = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    is_nan = written.isnan()
    remainder = torch.full(written.shape, stale, dtype=torch.int16)
    master = decode_remainder(written, remainder)
    assert torch.equal(master.half()[~is_nan], written[~is_nan])
    assert master[is_nan].isnan().all()
    kept, _ = steps_that_change_nothing(written, remainder)
    assert torch.equal(kept[~is_nan], written[~is_nan])
    assert kept[is_nan].isnan().all()


@pytest.mark.parametrize("value", [65520.0, 1e30, float("inf"), -float("inf"), float("nan")])
def test_what_is_too_large_for_float16_is_inf(value):
    rounded, remainder = encode_remainder(torch.tensor([value]), torch.float16)
    assert torch.equal(rounded, torch.tensor([value]).half()) or rounded.isnan() == (value != value)
    assert not remainder.any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_codes_are_kept_whatever_the_random_bits_are(dtype):
    least = -127 if dtype == torch.int8 else 0
    codes = torch.arange(least, least + 255 + (dtype == torch.uint8)).to(dtype)
    codes = torch.nn.functional.pad(codes, (0, 1), value=127) if dtype == torch.int8 else codes
    for exponent in (-90, -89, -40, -1, 0, 1, 125, 126, 127):
        for mantissa in (1.0, 1.3333334, 1.9999999):
            scales = torch.full((2,), mantissa).mul_(2.0**exponent)
            stored = codes.clone()
            stored[0], stored[128] = codes[-1], codes[-1]  # each block has its largest magnitude
            (piece,) = pieces([Segment(0, 256, 0, 0)], 256, torch.device("cpu"))
            values = decode(stored, scales, piece)
            for half in (0, 0xFFFF):
                again, scales_again = torch.zeros_like(stored), torch.zeros(2)
                encode(values, again, scales_again, piece, torch.full((256,), half))
                assert torch.equal(again, stored)
                assert torch.equal(scales_again, scales)


def test_blocks_of_8_bits():
    (piece,) = pieces([Segment(0, 512, 0, 0)], 512, torch.device("cpu"))
    values = torch.zeros(512)
    values[0], values[1], values[2] = 1.0, 1e-30, -0.5
    values[128], values[129] = float("nan"), 1.0
    values[256] = 2.0**-91
    for dtype in (torch.int8, torch.uint8):
        stored, scales = torch.zeros(512, dtype=dtype), torch.zeros(4)
        encode(values, stored, scales, piece, torch.zeros(512, dtype=torch.int64))
        decoded = decode(stored, scales, piece)
        assert decoded[0] == 1
        assert decoded[128:256].isnan().all()
        assert not decoded[:128].isnan().any()
        assert torch.equal(decoded[256:], torch.zeros(256))
        if dtype == torch.uint8:
            assert decoded[1] > 0  # a step divides by its root
        else:
            assert decoded[2] == pytest.approx(-0.5, abs=1 / 127)


@pytest.mark.skipif(extension is None, reason="compares the extension's kernels with the reference")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8])
def test_the_extension_gives_the_bits_of_the_reference(dtype):
    segments = [Segment(0, 1000, 0, 0), Segment(1040, 3, 1, 8), Segment(1088, 70001, 5, 9)]
    numel = 1088 + 70001 + 40
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
    grad[10], grad[2000], grad[3000:3300] = float("inf"), float("nan"), 0.0
    grad = grad.abs() if dtype == torch.uint8 else grad
    found = []
    for uses_extension in (True, False):
        param = torch.zeros(numel)
        scales = {} if dtype == torch.bfloat16 else {"momentum_buffer": torch.zeros(9 + scale_count(70001))}
        encoding = RunEncoding(Places(segments), scales, 7)
        state = torch.zeros(numel, dtype=dtype)
        step = sgd_ if uses_extension else sgd_.reference
        step(param, grad, state, lr=0.0, **STILL, encoding=encoding)  # the first momentum is the gradient
        bits = state.view(torch.int16) if dtype == torch.bfloat16 else state
        found.append([bits[s.begin : s.begin + s.numel] for s in segments] + list(scales.values()))
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(extension is None or DEVICE.type != "cpu", reason="compares the extension with the reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", FORMATS)
def test_a_whole_run_is_decoded_and_encoded_with_the_bits_of_the_reference(state_dtype, dtype, monkeypatch):
    formats = {"state_dtype": state_dtype, "stochastic_rounding": dtype == torch.bfloat16}
    optimizer, params = train(optimizers.FusedNovoGrad, {"weight_decay": 0.1}, dtype=dtype, **formats)
    monkeypatch.setattr(encoded_calls, "_by_extension", lambda operand: False)
    reference, expected = train(optimizers.FusedNovoGrad, {"weight_decay": 0.1}, dtype=dtype, **formats)
    for p, q in zip(params, expected, strict=True):
        assert torch.equal(p, q)
        m, n = optimizer.state[p]["exp_avg"].dequantize(), reference.state[q]["exp_avg"].dequantize()
        assert m.any()
        assert torch.equal(m, n)


@pytest.mark.skipif(extension is None, reason="of the extension")
@pytest.mark.parametrize(
    ("stored", "scales", "numel", "error", "message"),
    [
        (torch.zeros(9), None, 9, TypeError, "stored must be bfloat16, int8 or uint8, got Float"),
        (torch.zeros(9, dtype=torch.bfloat16), None, 8, ValueError, "of all 9 elements of table, got 9 and 8"),
        (torch.zeros(9, dtype=torch.int8), None, 9, ValueError, "stored is Char and has no 1 float32 scales"),
        (torch.zeros(9, dtype=torch.uint8), torch.zeros(0), 9, ValueError, "Byte and has no 1 float32 scales"),
    ],
)
def test_what_is_no_state_is_not_decoded(stored, scales, numel, error, message):
    table = torch.tensor([[0, 9, 0, 0]])
    with pytest.raises(error, match=message):
        extension.decode_state_cpu(stored, scales, table, torch.zeros(numel))


# Rules


@pytest.mark.parametrize("state_dtype", FORMATS)
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_a_step_is_that_of_float32_state_but_for_the_rounding(rule, options, state_dtype):
    optimizer, params = train(rule, options, state_dtype=state_dtype)
    exact = rule([nn.Parameter(p.detach().clone()) for p in params], lr=1e-2, **options)
    exact_params = params_of(exact)
    exact.load_state_dict(optimizer.state_dict())
    set_grads(params, 9)
    set_grads(exact_params, 9)
    optimizer.step()
    exact.step()
    torch.testing.assert_close(params, exact_params, rtol=1e-6, atol=1e-6)
    for i, (kept, expected) in enumerate(zip(values_of(optimizer), values_of(exact), strict=True)):
        assert kept.keys() == expected.keys()
        for name, value in kept.items():
            shown = optimizer.state[params[i]][name]
            stored = getattr(shown, "stored_dtype", torch.float32)  # of a centered rule
            bound = expected[name].abs() if stored == torch.bfloat16 else expected[name].abs().max()
            assert ((value - expected[name]).abs() <= ROUNDING[stored] * bound + 1e-12).all()


@pytest.mark.parametrize("state_dtype", [*FORMATS, {"exp_avg": "int8"}])
@pytest.mark.parametrize(
    ("rule", "options"),
    [(optimizers.NpuFusedLamb, {}), (optimizers.NpuFusedAdamP, {}), (optimizers.NpuFusedAdamP, {"nesterov": True})],
)
def test_rules_with_norms_step_by_moments_that_have_not_been_rounded(rule, options, state_dtype):
    # The first is more than one piece of work, and has rows that are ranges of memory.
    params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in [(200, 150), (40, 30), (7,)]]
    optimizer = rule(params, lr=1e-2, weight_decay=0.1, **options, state_dtype=state_dtype)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    exact_params = [nn.Parameter(p.detach().clone()) for p in params]
    exact = rule(exact_params, lr=1e-2, weight_decay=0.1, **options)
    exact.load_state_dict(optimizer.state_dict())
    for held, stepped in ((params, optimizer), (exact_params, exact)):
        set_grads(held, 5)
        stepped.step()
    torch.testing.assert_close(params, exact_params, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("state_dtype", FORMATS)
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_parameters_without_elements_are_stepped(rule, options, state_dtype, monkeypatch):
    for op in (*elementwise.RULES, lamb_):
        monkeypatch.setattr(op, "kernels", {})
    monkeypatch.setattr(encoded_calls, "_by_extension", lambda operand: False)
    params = [nn.Parameter(torch.zeros(shape, device=DEVICE)) for shape in [(0,), (0, 3)]]
    optimizer = rule(params, lr=1e-2, **options, state_dtype=state_dtype)
    set_grads(params, 0)
    optimizer.step()
    assert all(value.numel() == 0 for kept in values_of(optimizer) for value in kept.values())


@pytest.mark.skipif(extension is None, reason="without the extension each parameter is a run")
@pytest.mark.parametrize("state_dtype", FORMATS)
def test_what_is_decoded_at_once_has_a_bound(state_dtype, monkeypatch):
    found = []
    for limit in (1 << 24, 100):
        monkeypatch.setattr(encoded_state, "_RUN_NUMEL", limit)
        optimizer, params = train(optimizers.FusedNovoGrad, {}, state_dtype=state_dtype)
        found.append((params, values_of(optimizer)))
        assert len(optimizer.fused_groups()[0].runs.current) == (1 if limit > 100 else 3)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=1e-6)


RESUMED = [
    *[(torch.float32, {"state_dtype": state_dtype}) for state_dtype in FORMATS],
    *[(dtype, {"state_dtype": "int8", "store_param_remainders": "int8"}) for dtype in (torch.float16, torch.bfloat16)],
]


@pytest.mark.parametrize(("dtype", "formats"), RESUMED, ids=str)
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_a_run_resumes_bit_for_bit_through_float32_tensors(rule, options, dtype, formats):
    optimizer, params = train(rule, options, dtype=dtype, **formats)
    resumed = rule([nn.Parameter(p.detach().clone()) for p in params], lr=1e-2, **options, **formats)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    others = [resumed, copy.deepcopy(optimizer), saved_and_loaded(optimizer)]
    for step in (7, 8):
        for stepped in (optimizer, *others):
            set_grads(params_of(stepped), step)
            stepped.step()
    for other in others:
        torch.testing.assert_close(params_of(other), params, rtol=0, atol=0)
        torch.testing.assert_close(values_of(other), values_of(optimizer), rtol=0, atol=0)


def test_state_dicts_go_from_format_to_format():
    optimizer, params = train(optimizers.NpuFusedAdamW, {}, state_dtype="int8")
    for state_dtype in (None, torch.bfloat16, {"exp_avg": torch.bfloat16, "exp_avg_sq": "int8"}):
        other = optimizers.NpuFusedAdamW(params, lr=1e-2, state_dtype=state_dtype)
        other.load_state_dict(optimizer.state_dict())
        set_grads(params, 3)
        other.step()
        assert all(entry["step"] == 4 for entry in other.state_dict()["state"].values())
    in_torch = torch.optim.AdamW(params, lr=1e-2)
    in_torch.load_state_dict(optimizer.state_dict())
    assert in_torch.state[params[0]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("state_dtype", FORMATS)
def test_a_nan_or_inf_is_in_its_own_block_alone(state_dtype, value):
    param = nn.Parameter(torch.zeros(512, device=DEVICE))
    optimizer = optimizers.NpuFusedAdam([param], state_dtype=state_dtype)
    param.grad = torch.ones_like(param)
    param.grad[130] = value
    optimizer.step()
    found = optimizer.state[param]["exp_avg"].dequantize()
    spoilt = (~found.isfinite()).nonzero().flatten().tolist()
    assert spoilt == ([130] if state_dtype == torch.bfloat16 else list(range(128, 256)))
    assert state_dtype == torch.bfloat16 or found[128:256].isnan().all()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="threads are those of the CPU")
@pytest.mark.parametrize("state_dtype", FORMATS)
def test_the_bits_do_not_depend_on_threads_or_on_what_else_is_fused(state_dtype):
    found = []
    threads = torch.get_num_threads()
    for count, alone in ((1, False), (2, False), (1, True)):
        torch.set_num_threads(count)
        try:
            big = nn.Parameter(torch.zeros(200_003))
            others = [] if alone else [nn.Parameter(torch.zeros(33))]
            optimizer = optimizers.NpuFusedAdam([big, *others], state_dtype=state_dtype)
            for step in range(2):
                set_grads([big, *others], step)
                big.grad = torch.linspace(-1, 1, 200_003) * (step + 1)
                optimizer.step()
        finally:
            torch.set_num_threads(threads)
        found.append((big.detach(), optimizer.state[big]["exp_avg"].dequantize()))
    for param, state in found[1:]:
        assert torch.equal(param, found[0][0])
        assert torch.equal(state, found[0][1])


# Parameters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_every_rule_keeps_float32_values_in_two_more_bytes(rule, options, dtype):
    """A float32 optimizer takes the same gradients, at learning rates that 16 bits would round away."""
    low = make_params(dtype)
    optimizer = rule(low, lr=1e-4, store_param_remainders=True, **options)
    exact = [nn.Parameter(p.detach().float()) for p in low]
    reference = rule(exact, lr=1e-4, **options)
    for step in range(4):
        set_grads(low, step)
        for p, q in zip(low, exact, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
    # float16 keeps values of 2⁻¹⁶ and more exactly. Norms, products, and plain torch add up in another order.
    exactly = rule.elementwise and extension is not None
    for kept, q in zip(values_of(optimizer), params_of(reference), strict=True):
        atol = 2.0**-38 if exactly and dtype == torch.float16 else 0.0 if exactly else 1e-7
        torch.testing.assert_close(kept["master_param"], q.detach(), rtol=0.0 if exactly else 1e-6, atol=atol)


@pytest.mark.parametrize("remainders", [True, "int8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_a_script_writes_to_parameters_with_remainders_is_the_truth(dtype, remainders):
    optimizer, params = train(optimizers.FusedAdam, {}, dtype=dtype, store_param_remainders=remainders)
    with torch.no_grad():
        params[0].fill_(3.0)
    params[1].data = torch.ones_like(params[1])  # in other memory
    optimizer.zero_grad()
    optimizer.param_groups[0].update(lr=0.0)
    for step in range(20):
        set_grads(params, step)
        optimizer.step()
    assert torch.equal(params[0], torch.full_like(params[0], 3.0))
    assert torch.equal(params[1], torch.ones_like(params[1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["loaded", "deepcopied", "pickled"])
def test_what_is_written_after_masters_have_been_loaded_or_copied_counts(kind, dtype):
    optimizer, params = train(optimizers.FusedAdam, {}, dtype=dtype, store_param_remainders=True)
    expected = values_of(optimizer)
    if kind == "loaded":
        params = [nn.Parameter(torch.zeros_like(p)) for p in params]
        loaded = optimizers.FusedAdam(params, lr=1e-2, store_param_remainders=True)
        loaded.load_state_dict(optimizer.state_dict())
        optimizer = loaded
    elif kind == "deepcopied":
        optimizer = copy.deepcopy(optimizer)
    else:
        optimizer = saved_and_loaded(optimizer)
    params = params_of(optimizer)
    for p, kept in zip(params, expected, strict=True):
        assert torch.equal(p.detach().cpu(), encode_remainder(kept["master_param"].cpu(), p.dtype)[0])
    with torch.no_grad():
        params[0].fill_(3.0)
    set_grads(params, 4, scale=0.0)
    optimizer.param_groups[0].update(lr=0.0)
    optimizer.step()
    assert torch.equal(params[0], torch.full_like(params[0], 3.0))
    for i in (1, 2):
        assert torch.equal(optimizer.state[params[i]]["master_param"].dequantize(), expected[i]["master_param"])


@pytest.mark.parametrize("stepped", [False, True])
def test_a_state_dict_has_masters_of_what_has_been_written_to_other_memory(stepped):
    """Also in another order of elements."""
    optimizer, params = train(optimizers.FusedAdam, {}, dtype=torch.bfloat16, store_param_remainders=True)
    expected = values_of(optimizer)
    params[0].data = torch.full_like(params[0], 3.0)
    assert not params[2].is_contiguous()
    params[2].data = params[2].data.contiguous()
    if stepped:
        set_grads(params, 4)
        optimizer.param_groups[0].update(lr=0.0)
        optimizer.step()
    saved = values_of(optimizer)
    assert torch.equal(encode_remainder(saved[0]["master_param"].cpu(), torch.bfloat16)[0], params[0].detach().cpu())
    for i in (1, 2):
        assert torch.equal(saved[i]["master_param"], expected[i]["master_param"])


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_has_what_has_been_written_to_other_memory(copied):
    optimizer, params = train(optimizers.FusedAdam, {}, dtype=torch.bfloat16, store_param_remainders=True)
    before = values_of(optimizer)[1]["master_param"]
    params[0].data = torch.full_like(params[0], 3.0)
    nn.utils.vector_to_parameters(2.0 * nn.utils.parameters_to_vector(params[1:2]).detach(), params[1:2])
    twin = copied(optimizer)
    assert all(map(torch.equal, params_of(twin), params))
    for kept in (optimizer.state[params[1]]["master_param"].dequantize(), values_of(twin)[1]["master_param"]):
        assert torch.equal(kept, 2.0 * before)


def test_stochastic_rounding_moves_parameters_by_less_than_their_last_bit():
    moved = {}
    for stochastic in (True, False):
        param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device=DEVICE))
        optimizer = optimizers.NpuFusedSGD([param], lr=2.0**-12, stochastic_rounding=stochastic)
        for _ in range(64):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved[stochastic] = float(1 - param.detach().float().mean())
    assert moved[False] == 0
    assert moved[True] == pytest.approx(64 * 2.0**-12, rel=0.05)


# Rules without state, whose only count of steps is that of the random bits.
STATELESS = [
    pytest.param(optimizers.NpuFusedSGD, {}, id="SGD"),
    pytest.param(optimizers.NpuFusedSGD, {"weight_decay": 1e-9}, id="SGD, weight decay"),
    pytest.param(optimizers.FusedSGD, {"wd_after_momentum": True}, id="FusedSGD"),
    pytest.param(optimizers.NpuFusedSGD, {"state_dtype": "int8"}, id="SGD, int8"),
]
TENTH_OF_AN_ULP = 0.1 * 2.0**-7


def ones(count, numel=2048):
    return [nn.Parameter(torch.ones(numel, dtype=torch.bfloat16, device=DEVICE)) for _ in range(count)]


def step_up(optimizer, *params):
    """One step in which ``params`` grow by 1 · lr, and others have no gradient."""
    optimizer.zero_grad(set_to_none=True)
    for p in params:
        p.grad = -torch.ones_like(p)
    optimizer.step()


def share_of_same_bits(first, second):
    """How many elements of two parameters have been rounded alike."""
    return float((first.detach() == second.detach()).float().mean())


@pytest.mark.parametrize(("rule", "options"), STATELESS)
def test_each_step_of_a_rule_without_state_draws_other_bits(rule, options):
    (param,) = ones(1)
    optimizer = rule([param], lr=TENTH_OF_AN_ULP, stochastic_rounding=True, **options)
    for _ in range(100):
        step_up(optimizer, param)
    moved = (param.detach().float() - 1) * 2**7
    assert float(moved.mean()) == pytest.approx(10, abs=0.5)
    assert float(moved.std()) == pytest.approx(3, abs=0.5)  # of 100 draws that are 1 in 10 times
    assert optimizer.state_dict()["state"][0].keys() == {"applied_steps"}


@pytest.mark.parametrize("kind", ["loaded", "deepcopied", "pickled"])
@pytest.mark.parametrize(("rule", "options"), [*STATELESS, pytest.param(optimizers.NpuFusedSGD, {"momentum": 0.5})])
def test_random_bits_go_on_where_an_optimizer_is_loaded_or_copied(rule, options, kind):
    params = ones(3)
    optimizer = rule(params, lr=TENTH_OF_AN_ULP, stochastic_rounding=True, **options)
    for step in range(4):
        step_up(optimizer, *params[: 2 if step < 3 else 3])  # the last one is late
    if kind == "loaded":
        again = [nn.Parameter(p.detach().clone()) for p in params]
        other = rule(again, lr=TENTH_OF_AN_ULP, stochastic_rounding=True, **options)
        step_up(other, *again)
        for p, q in zip(again, params, strict=True):
            p.data.copy_(q)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif kind == "deepcopied":
        other = copy.deepcopy(optimizer)
    else:
        other = saved_and_loaded(optimizer)
    copied = params_of(other)
    for _ in range(3):
        step_up(optimizer, *params)
        step_up(other, *copied)
    assert all(map(torch.equal, params, copied))
    counts = [float(entry["applied_steps"]) for entry in other.state_dict()["state"].values()]
    assert counts == [7, 7, 4]


def test_random_bits_go_on_where_buffers_are_made_again_and_momentum_comes_and_goes():
    params = ones(2)
    optimizer = optimizers.NpuFusedSGD(params, lr=TENTH_OF_AN_ULP, momentum=0.5, stochastic_rounding=True)
    for momentum in (0.5, 0.0, 0.0, 0.5, 0.0):
        optimizer.param_groups[0].update(momentum=momentum)
        step_up(optimizer, *params)
        params[0].data = params[0].data.clone()
    assert [float(entry["applied_steps"]) for entry in optimizer.state.values()] == [5, 5]


def test_a_step_that_fails_or_is_skipped_draws_no_bits(monkeypatch):
    params, expected = ones(1), ones(1)
    optimizer, other = (
        optimizers.NpuFusedSGD(p, lr=TENTH_OF_AN_ULP, stochastic_rounding=True) for p in (params, expected)
    )
    for step in range(4):
        step_up(other, *expected)
        optimizer.found_inf = torch.ones((), device=DEVICE)
        if step % 2 == 0:
            step_up(optimizer, *params)
        del optimizer.found_inf
        with monkeypatch.context() as failing:
            failing.setattr(optimizer, "before_updates", lambda runs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step_up(optimizer, *params)
        step_up(optimizer, *params)
    assert torch.equal(params[0], expected[0])


def test_state_dicts_of_rules_without_state_go_to_and_from_torch():
    params = ones(1)
    optimizer = optimizers.NpuFusedSGD(params, lr=TENTH_OF_AN_ULP, stochastic_rounding=True)
    step_up(optimizer, *params)
    in_torch = torch.optim.SGD(params, lr=1.0)
    in_torch.load_state_dict(optimizer.state_dict())
    step_up(in_torch, *params)
    assert in_torch.param_groups[0]["lr"] == TENTH_OF_AN_ULP
    optimizer.load_state_dict(torch.optim.SGD(params, lr=0.5).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    step_up(optimizer, *params)
    plain = optimizers.NpuFusedSGD(params, lr=0.5)
    plain.load_state_dict(optimizer.state_dict())
    step_up(plain, *params)


def test_parameters_do_not_share_random_bits():
    first, second, third, fourth = ones(4)
    optimizer = optimizers.NpuFusedSGD(
        [{"params": [first]}, {"params": [second, third]}], lr=0.5 * 2.0**-7, stochastic_rounding=True
    )
    step_up(optimizer, first)
    del optimizer.param_groups[0]  # the others are in other positions from now on
    optimizer.add_param_group({"params": [fourth]})
    step_up(optimizer, second, third, fourth)
    for a, b in ((second, third), (second, fourth), (third, fourth)):
        assert share_of_same_bits(a, b) == pytest.approx(0.5, abs=0.05)


# amp


def train_under_amp(steps=4, state_dtype=None, rule=optimizers.NpuFusedAdamW, rule_options=None, level="O5", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3)).to(DEVICE)
    optimizer = rule(model.parameters(), lr=1e-2, state_dtype=state_dtype, **rule_options or {})
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        backward(model(torch.randn(16, 20, generator=generator).to(DEVICE)).sum(), optimizer)
        for p in amp.master_params(optimizer):
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype).to(DEVICE)
        optimizer.step()
    return model, optimizer


remainders = pytest.mark.parametrize("remainders", [True, pytest.param("int8", marks=needs_extension)])


@pytest.mark.pairwise
@remainders
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("rule", [optimizers.NpuFusedAdamW, optimizers.NpuFusedSGD])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_training_with_remainders_resumes_bit_for_bit(first, rule, level, remainders):
    formats = {"level": level, "rule": rule, "store_param_remainders": remainders, "loss_scale": 64.0}
    formats["state_dtype"] = "int8" if rule is optimizers.NpuFusedAdamW else None
    model, optimizer = train_under_amp(**formats)
    saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
    set_grads(model.parameters(), 0)
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = train_under_amp(1, **formats)
    for name in sorted(saved, key=first.__ne__):
        {"model": model, "optimizer": optimizer}[name].load_state_dict(saved[name])
    set_grads(model.parameters(), 0)
    optimizer.step()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("rule", "options"), [*RULES, pytest.param(optimizers.NpuFusedSGD, {}, id="no-momentum")])
@pytest.mark.parametrize("copied", [False, True])
def test_what_has_not_been_stepped_goes_on_from_its_master(rule, options, copied):
    def start():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 5), nn.Linear(5, 3)).to(DEVICE)
        optimizer = rule(model.parameters(), lr=1e-2, **options)
        return amp.initialize(model, optimizer, opt_level="O5", verbosity=0, store_param_remainders=True)

    model, optimizer = start()
    set_grads(model[0].parameters(), 0)
    optimizer.step()
    if copied:
        resumed, its_optimizer = copy.deepcopy((model, optimizer))
    else:
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        resumed, its_optimizer = start()
        resumed.load_state_dict(saved[0])
        its_optimizer.load_state_dict(saved[1])
    masters = []
    for trained, stepped in ((model, optimizer), (resumed, its_optimizer)):
        for seed in (1, 2):
            set_grads(trained.parameters(), seed)
            stepped.step()
        masters.append([stepped.state[p]["master_param"].dequantize() for p in trained.parameters()])
    for a, b in zip(*masters, strict=True):
        assert torch.equal(a, b)


def test_torch_steps_from_the_state_of_what_has_not_been_stepped():
    torch.manual_seed(0)
    model = nn.Linear(9, 5).to(DEVICE)
    optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1e-2)
    expected = [p.detach().clone() for p in model.parameters()]
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0, store_param_remainders=True)
    saved = optimizer.state_dict()
    params = [nn.Parameter(value.clone()) for value in model.state_dict().values()]
    fresh = [nn.Parameter(p) for p in expected]
    loaded, plain = torch.optim.AdamW(params, lr=1e-2), torch.optim.AdamW(fresh, lr=1e-2)
    loaded.load_state_dict(saved)
    for held, stepped in ((params, loaded), (fresh, plain)):
        set_grads(held, 1)
        stepped.step()
    assert all(map(torch.equal, params, fresh))


def first_step_of_two():
    """A FusedAdam with remainders, its parameters, of which the second has no gradient, and their masters."""
    masters = [p.detach() for p in make_params()]
    params = [nn.Parameter(master.bfloat16()) for master in masters]
    optimizer = optimizers.FusedAdam(params, lr=1e-2, store_param_remainders=True)
    for p, master in zip(params, masters, strict=True):
        optimizer.state[p]["master_param"] = master
    optimizer.state_formats.take_masters(optimizer.state)
    set_grads([params[0], params[2]], 0)
    return optimizer, params, masters


def test_float32_masters_take_those_of_parameters_that_have_not_been_stepped():
    optimizer, params, masters = first_step_of_two()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    loaded = optimizers.FusedAdam(params, lr=0.0, master_weights=True)
    loaded.load_state_dict(saved)
    loaded.param_groups[0].update(lr=0.0)
    set_grads(params, 1)
    loaded.step()
    assert torch.equal(values_of(loaded)[1]["master_param"], masters[1])


def test_a_first_step_that_fails_leaves_masters(monkeypatch):
    optimizer, params, masters = first_step_of_two()

    def fail(runs):
        raise RuntimeError("planned")

    with monkeypatch.context() as failing:
        failing.setattr(optimizer, "before_updates", fail)
        with pytest.raises(RuntimeError, match="planned"):
            optimizer.step()
    for kept, master in zip(values_of(optimizer), masters, strict=True):
        assert torch.equal(kept["master_param"], master)
    optimizer.param_groups[0].update(lr=0.0)
    set_grads(params, 1)
    optimizer.step()
    for kept, master in zip(values_of(optimizer), masters, strict=True):
        assert torch.equal(kept["master_param"], master)


def test_masters_of_a_state_that_is_dropped_are_the_parameters():
    optimizer, params = train(optimizers.FusedAdam, {}, dtype=torch.bfloat16, store_param_remainders=True)
    optimizer.load_state_dict(optimizers.FusedAdam(params, lr=0.0, store_param_remainders=True).state_dict())
    set_grads(params, 4)
    optimizer.step()
    for p, kept in zip(params, values_of(optimizer), strict=True):
        assert torch.equal(kept["master_param"], p.detach().float())


def test_masters_that_are_not_stepped_are_not_saved_again():
    optimizer, params = train(optimizers.FusedAdam, {}, dtype=torch.bfloat16, store_param_remainders=True)
    plain = optimizers.NpuFusedAdamW(params, lr=1e-2)
    plain.load_state_dict(optimizer.state_dict())
    assert all("master_param" not in kept for kept in plain.state_dict()["state"].values())
    with_masters = optimizers.FusedAdam(params, lr=1e-2, master_weights=True)
    with_masters.load_state_dict(optimizer.state_dict())
    for expected, kept in zip(values_of(optimizer), values_of(with_masters), strict=True):
        assert torch.equal(kept["master_param"], expected["master_param"])


@remainders
@pytest.mark.parametrize("state_dtype", [None, *FORMATS])
def test_a_skipped_step_changes_no_state(state_dtype, remainders):
    formats = {"store_param_remainders": remainders, "state_dtype": state_dtype, "fuse_unscale": remainders == "int8"}
    model, optimizer = train_under_amp(loss_scale="dynamic", **formats)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    values = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    backward(model(torch.full((4, 20), float("inf"), device=DEVICE)).sum(), optimizer)
    optimizer.step()
    assert not amp.last_step(optimizer).applied
    assert all(torch.equal(model.state_dict()[name], values[name]) for name, _ in model.named_parameters())
    after = optimizer.state_dict()["state"]
    for index, entry in before.items():
        for name, value in entry.items():
            assert torch.equal(value, after[index][name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({"opt_level": level}, f"opt_level {level} .*'O2' or 'O5'") for level in ("O0", "O1", "O3", "O4")],
        ({"opt_level": "O2", "cast_model_type": torch.float32}, "no 16-bit parameters with masters"),
        ({"opt_level": "O5", "master_weights": False}, "no 16-bit parameters with masters"),
    ],
)
@pytest.mark.parametrize("remainders", [True, "int8"])
def test_remainders_are_refused_where_there_are_none(options, message, remainders):
    model = nn.Linear(2, 2).to(DEVICE)
    optimizer = optimizers.NpuFusedAdam(model.parameters())
    with pytest.raises(RuntimeError, match=message):
        amp.initialize(model, optimizer, store_param_remainders=remainders, **options)
    assert model.weight.dtype == torch.float32
    assert not optimizer.state


@pytest.mark.parametrize("remainders", [True, "int8"])
@pytest.mark.parametrize("make", [torch.optim.Adam, optimizers.Lamb])
def test_remainders_are_refused_with_optimizers_that_cannot_keep_them(make, remainders):
    model = nn.Linear(2, 2).to(DEVICE)
    with pytest.raises(RuntimeError, match="remainders"):
        amp.initialize(model, make(model.parameters()), opt_level="O5", store_param_remainders=remainders)
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"state_dtype": "int8"}, {"store_param_remainders": True}])
def test_an_initialize_that_fails_leaves_formats_as_they_were(options, monkeypatch):
    def fail(session):
        raise ZeroDivisionError

    model = nn.Linear(2, 2).to(DEVICE)
    optimizer = optimizers.FusedAdam(model.parameters(), **options)
    before = optimizer.state_dtype
    with monkeypatch.context() as patched:
        patched.setattr("apex_npu.amp.frontend.install", fail)
        with pytest.raises(ZeroDivisionError):
            amp.initialize(model, optimizer, opt_level="O5", store_param_remainders=True)
    assert optimizer.state_dtype == before
    assert not any(optimizer.state.values())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_are_refused_where_an_optimizer_was_made_to_do_without(level):
    model = nn.Linear(2, 2).to(DEVICE)
    with pytest.raises(RuntimeError, match=r"FusedAdam has stochastic_rounding=True.*pass master_weights=False"):
        amp.initialize(model, optimizers.FusedAdam(model.parameters(), stochastic_rounding=True), opt_level=level)
    assert model.weight.dtype == torch.float32


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"state_dtype": torch.float16}, ValueError, "state_dtype must be .*, got torch.float16"),
        ({"state_dtype": "int4"}, ValueError, "got 'int4'"),
        ({"state_dtype": 8}, TypeError, "state_dtype must be .*, got 8"),
        ({"state_dtype": {"momentum": "int8"}}, ValueError, "'momentum', .* not a state of this rule"),
        ({"stochastic_rounding": 1}, TypeError, "stochastic_rounding must be True or False, got 1"),
    ],
)
def test_formats_that_do_not_exist_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=f"NpuFusedAdam: .*{message}"):
        optimizers.NpuFusedAdam(make_params(), **options)


def test_the_format_is_not_changed_by_assignment():
    optimizer, _ = train(optimizers.NpuFusedAdam, {}, state_dtype="int8")
    with pytest.raises(AttributeError, match="state_dtype of NpuFusedAdam cannot be changed after construction"):
        optimizer.state_dtype = torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "message"), [(torch.float64, "states are kept in torch.float64"), (torch.complex64, "take float32")]
)
def test_parameters_without_such_states_are_refused(dtype, message):
    param, optimizer = (
        nn.Parameter(torch.zeros(2, dtype=dtype)),
        optimizers.NpuFusedAdam(make_params(), state_dtype="int8"),
    )
    with pytest.raises(TypeError, match=message):
        optimizers.NpuFusedAdam([param], state_dtype="int8")
    with pytest.raises(TypeError, match=message):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1


def test_arguments_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="pass state_dtype, or exp_avg_dtype and exp_avg_sq_dtype"):
        optimizers.FusedAdam(make_params(), exp_avg_dtype=torch.bfloat16, state_dtype="int8")
    with pytest.raises(ValueError, match=r"master_weight_dtype must be torch\.float32, got torch\.float16"):
        optimizers.FusedAdam(make_params(), master_weight_dtype=torch.float16)


def test_a_checkpoint_of_another_rule_is_refused():
    sgd, _ = train(optimizers.NpuFusedSGD, {"momentum": 0.9}, state_dtype="int8")
    adam, _ = train(optimizers.NpuFusedAdam, {}, state_dtype="int8")
    before = adam.state_dict()["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match=r"not one of NpuFusedAdam .*: parameter 0 lacks 'step'; parameter 0 lacks"):
        adam.load_state_dict(sgd.state_dict())
    with pytest.raises(ValueError, match="parameter 0 has 'exp_avg', which is not known here"):
        sgd.load_state_dict(adam.state_dict())
    assert torch.equal(adam.state_dict()["state"][0]["exp_avg"], before)


def test_a_rule_of_ascend_that_reads_combined_states_is_refused():
    class Ascend(optimizers.NpuFusedAdam):
        def _group_step(self, group_index):
            raise AssertionError

    with pytest.raises(ValueError, match=r"Ascend: this rule supports only float32 states .* leave state_dtype"):
        Ascend(make_params(), state_dtype="int8")


def test_what_is_shown_says_how_it_is_read():
    optimizer, params = train(optimizers.NpuFusedAdam, {}, steps=1, state_dtype="int8")
    with pytest.raises(AttributeError, match=r"not a tensor and has no 'norm': dequantize\(\) returns a tensor"):
        optimizer.state[params[0]]["exp_avg"].norm()


def test_code_that_is_no_rule_cannot_read_encoded_states():
    class Peeking(optimizers.NpuFusedAdam):
        def update(self, run, group):
            torch.add(run.state("exp_avg"), 1)

    params = make_params()
    optimizer = Peeking(params, state_dtype="int8")
    set_grads(params, 0)
    with pytest.raises(TypeError, match="'exp_avg' is stored in fewer bytes"):
        optimizer.step()


# Bytes


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 8), ({"state_dtype": torch.bfloat16}, 4), ({"state_dtype": "int8"}, 2 + 2 * 4 / 128)]
)
def test_states_take_their_bytes(options, expected):
    param = nn.Parameter(torch.zeros(1 << 20, dtype=torch.bfloat16, device=DEVICE))
    if SIMULATOR is not None and not VENDOR:
        gc.collect()
        before = torch.npu.memory_allocated()
    optimizer = optimizers.FusedAdam([param], store_param_remainders=True, **options)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    shown = optimizer.state[param]
    assert isinstance(shown["master_param"], EncodedView)
    if SIMULATOR is not None and not VENDOR:
        # A gradient, and a remainder, beside the states.
        found = (torch.npu.memory_allocated() - before) / param.numel() - 2 - 2
        assert found == pytest.approx(expected, rel=0.02, abs=0.1)
    kept = sum(view.nbytes for view in shown.values() if view.dim())
    assert kept / param.numel() - 2 == pytest.approx(expected, rel=0.01)
