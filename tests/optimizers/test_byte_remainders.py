# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``store_param_remainders="int8"``: float32 values of 16-bit parameters in one more byte, rounded stochastically."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from devices import DEVICE
from encoded_steps import ALL_RULES, make_params, params_of
from lockstep import set_grads
from small_programs import backward, step_on
from torch import nn

from apex_npu import amp, debug, optimizers
from apex_npu._extension import extension
from apex_npu.fusion import EncodedView
from apex_npu.ops import Places, RunEncoding, sgd_
from apex_npu.ops.state_codec import Segment
from apex_npu.optimizers.memory_choices import memory_choices

DTYPES = [torch.bfloat16, torch.float16]
# The distance of two values of parameters in [1, 2).
SPACING = {torch.bfloat16: 2.0**-15, torch.float16: 2.0**-17}
RULES = [pytest.param(*rule, id=name) for name, rule in ALL_RULES.items() if name not in ("BertAdam", "FusedLAMB")]
PLAIN_SGD = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False, "step": 1}


def masters_of(optimizer):
    state = optimizer.state_dict()["state"]
    return [state[index]["master_param"].cpu() for index in range(len(state))]


def trained(rule, options, dtype, steps=3, **formats):
    optimizer = rule(make_params(dtype), lr=1e-3, store_param_remainders="int8", **options, **formats)
    params = params_of(optimizer)
    for step in range(steps):
        set_grads(params, step)
        optimizer.step()
    return optimizer, params


def stepped_by(moves, start, dtype, steps=1):
    """Float32 values of parameters that ``steps`` of SGD have moved from ``start`` by ``-moves`` each."""
    param = nn.Parameter(start.to(dtype).to(DEVICE))
    optimizer = optimizers.NpuFusedSGD([param], lr=1.0, store_param_remainders="int8")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"master_param": start}}})
    param.grad = moves.to(dtype).to(DEVICE)
    for _ in range(steps):
        optimizer.step()
    assert torch.equal(param.detach().cpu().float(), rounded(masters_of(optimizer)[0], dtype))
    return masters_of(optimizer)[0]


def rounded(values, dtype):
    """``values`` to nearest: ties to even in float16, and away from zero in bfloat16, in integers of NumPy."""
    if dtype == torch.float16:
        return torch.from_numpy(values.numpy().astype(np.float16).astype(np.float32))
    bits = values.numpy().view(np.uint32).astype(np.int64)
    return torch.from_numpy((bits + 0x8000 & 0xFFFF0000).astype(np.uint32).view(np.float32))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_becomes_one_of_two_neighbours_and_is_right_on_average(dtype, sign):
    """Between parameters, at their ties, below a power of two, and for float16 in subnormal numbers."""
    spacing, numel = SPACING[dtype], 1 << 16
    last_bit = 128 * spacing if dtype == torch.float16 else 256 * spacing
    starts = [1.0, 1 + last_bit, 2 - last_bit, 1.5]
    shifts = [0.3, 127.25 / 256, 0.5 - 0.2 / 256, 0.5 + 0.7 / 256, 1.0 - 0.25 / 256]
    cases = [(start, shift * last_bit, spacing) for start in starts for shift in shifts]
    if dtype == torch.float16:
        cases += [(3 * 2.0**-24, shift * 2.0**-24, 2.0**-31) for shift in shifts]
    for start, shift, step in cases:
        exact = float(np.float32(start) + np.float32(shift))
        # In float16, half a last bit below a power of two, values are spaced as above it.
        spaced = step * (2 if dtype == torch.float16 and exact >= 2 - last_bit / 2 else 1)
        start = torch.full((numel,), sign * exact)
        found = stepped_by(torch.zeros(numel), start, dtype).double().numpy()
        low, high = np.floor(exact / spaced) * spaced, np.ceil(exact / spaced) * spaced
        assert set(np.unique(found * sign)) <= {low, high}
        share = (exact - low) / spaced
        six_sigmas = 6 * spaced * np.sqrt(share * (1 - share) / numel)
        assert abs(found.mean() * sign - exact) <= six_sigmas + 2.0**-40 * (start[0].abs().item() < 1)


@pytest.mark.pairwise
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("of_spacing", [1 / 64, 0.5, 2.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_updates_arrive_on_average(dtype, of_spacing, sign, direction):
    """10,000 steps, each of at most a hundredth of a parameter's last bit, which cross several parameters."""
    numel, steps = 512, 10_000 if DEVICE.type == "cpu" and extension is not None else 100
    update = of_spacing * SPACING[dtype]
    begin = 1.0 if direction > 0 else 2.0 - 2.0**-5
    start = sign * (begin + torch.arange(numel) * 2.0**-15)
    moves = torch.full((numel,), -sign * direction * update)
    assert torch.equal(moves.to(dtype).float(), moves)
    found = stepped_by(moves, start, dtype, steps).double()
    assert found.abs().min() >= 1
    assert found.abs().max() < 2
    moved = ((found - start.double()) * sign * direction).numpy()
    share = of_spacing % 1
    sigma = SPACING[dtype] * np.sqrt(steps * share * (1 - share))
    assert abs(moved.mean() - steps * update) <= 6 * sigma / np.sqrt(numel) + SPACING[dtype]
    assert np.abs(moved - steps * update).max() <= 6 * sigma + SPACING[dtype]


@pytest.mark.parametrize("moved", [0.0, 2.0**-9, 2.0**-13, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_read_and_write_every_number_with_any_remainder(dtype, moved):
    """Stale remainders included, in a row that no vectors divide: the bits are those of plain torch."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    kept = torch.tensor([-128, -65, -64, -63, -33, -32, -1, 0, 31, 32, 63, 64, 65, 127], dtype=torch.int8)
    numel = every.numel() * kept.numel() - 37
    segments = [Segment(0, 70_001, 3, 0), Segment(70_001, numel - 70_001, 9, 0)]
    found = []
    for plain in (False, True):
        param = every.repeat(kept.numel())[:numel].to(DEVICE)
        remainder = kept.repeat_interleave(every.numel())[:numel].to(DEVICE)
        encoding = RunEncoding(Places(segments), {}, 5, remainder)
        grad, options = torch.ones(numel, device=DEVICE), {**PLAIN_SGD, "lr": moved}
        step = sgd_.reference if plain else sgd_
        step(param, grad, None, **options, encoding=encoding)
        found.append((param.cpu(), remainder.cpu()))
    (param, remainder), (wanted, wanted_remainder) = found
    is_nan = wanted.isnan()
    assert torch.equal(param.isnan(), is_nan)
    assert torch.equal(param[~is_nan].view(torch.int16), wanted[~is_nan].view(torch.int16))
    assert torch.equal(remainder, wanted_remainder)
    if not moved:
        before = every.repeat(kept.numel())[:numel]
        assert torch.equal(param[~is_nan], before[~is_nan])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_every_rule_stays_near_its_float32_values(rule, options, dtype):
    optimizer, low = trained(rule, options, dtype, steps=4)
    reference = rule([nn.Parameter(p.detach().float()) for p in make_params(dtype)], lr=1e-3, **options)
    exact = params_of(reference)
    for step in range(4):
        set_grads(low, step)
        for p, q in zip(low, exact, strict=True):
            q.grad = p.grad.float()
        reference.step()
    for p, master, q in zip(low, masters_of(optimizer), exact, strict=True):
        wanted = q.detach().cpu()
        # Each of four steps rounds by less than the spacing of the values, which is relative above float16's subnormal.
        spacing = SPACING[dtype] * wanted.abs().clamp(min=2.0**-14) + 1e-6
        assert ((master - wanted).abs() <= 5 * spacing).all()
        assert torch.equal(p.detach().cpu().float(), rounded(master, dtype))
        stored = optimizer.state[p]["master_param"]
        assert stored.stored_dtype == torch.int8
        assert stored.nbytes == p.numel()


@pytest.mark.parametrize("into", [True, "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_dict_has_the_values_in_float32(dtype, into):
    optimizer, params = trained(optimizers.FusedAdam, {}, dtype)
    saved = copy.deepcopy(optimizer.state_dict())
    assert {entry["master_param"].dtype for entry in saved["state"].values()} == {torch.float32}
    again = [nn.Parameter(torch.zeros_like(p)) for p in params]
    other = optimizers.FusedAdam(again, lr=0.0, store_param_remainders=into)
    other.load_state_dict(saved)
    other.param_groups[0].update(lr=0.0)
    set_grads(again, 7)
    other.step()
    assert all(map(torch.equal, masters_of(optimizer), masters_of(other)))
    assert all(map(torch.equal, params, again))


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_without_neighbours(dtype, value):
    found = stepped_by(torch.zeros(64), torch.full((64,), value), dtype) if value == value else None
    if found is None:
        param = nn.Parameter(torch.full((64,), value, dtype=dtype, device=DEVICE))
        optimizer = optimizers.NpuFusedSGD([param], lr=1.0, store_param_remainders="int8")
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert param.isnan().all()
        assert masters_of(optimizer)[0].isnan().all()
    else:
        assert torch.equal(found, torch.full((64,), value))


# amp


def under_amp(steps=3, rule_options=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 3)).to(DEVICE)
    optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1e-3, **rule_options or {})
    options = {"store_param_remainders": "int8", "fuse_unscale": True, "loss_scale": 64.0, **options}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **options)
    for step in range(steps):
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        step_on(model(x).float().square().mean(), optimizer)
    return model, optimizer


def remainders_of(model, optimizer):
    return [optimizer.state[p]["master_param"] for p in model.parameters()]


@pytest.mark.skipif(extension is None, reason="amp keeps remainders with the extension")
class TestUnderAmp:
    @pytest.mark.skipif(DEVICE.type == "npu", reason="gradients of few elements are float32 there")
    @pytest.mark.parametrize("level", ["O2", "O5"])
    def test_a_parameter_takes_7_bytes_and_a_16th(self, level):
        torch.manual_seed(0)
        model = nn.Linear(512, 256, bias=False).to(DEVICE)
        optimizer = optimizers.NpuFusedAdamW(model.parameters(), state_dtype="int8")
        options = {"loss_scale": 64.0, "fuse_unscale": True, "store_param_remainders": "int8", "verbosity": 0}
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
        backward(model(torch.ones(4, 512, device=DEVICE)).float().sum(), optimizer)
        optimizer.step()
        (param,) = model.parameters()
        state = [value for value in optimizer.state[param].values() if isinstance(value, EncodedView)]
        counted = (param.nbytes + param.grad.nbytes + sum(view.nbytes for view in state)) / param.numel()
        assert counted == 7.0625
        (choice,) = [c for c in memory_choices(optimizer) if 'store_param_remainders="int8"' in c.name]
        assert choice.total == counted

    def test_the_value_of_a_model_is_at_most_a_spacing_away(self):
        torch.manual_seed(0)
        exact = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 3)).state_dict()
        model, _ = under_amp(0)
        for name, value in model.state_dict().items():
            assert value.dtype == torch.float32
            assert ((value.cpu() - exact[name]).abs() <= SPACING[torch.bfloat16] * exact[name].abs()).all()

    @pytest.mark.skipif(DEVICE.type == "npu", reason="None selects float32 values there")
    @pytest.mark.parametrize(("own", "given", "expected"), [("int8", None, torch.int8), ("int8", True, torch.int16)])
    def test_the_argument_of_amp_takes_precedence_over_the_optimizers(self, own, given, expected):
        options = {"rule_options": {"store_param_remainders": own}, "store_param_remainders": given}
        model, optimizer = under_amp(**options)
        assert {view.stored_dtype for view in remainders_of(model, optimizer)} == {expected}

    def test_a_report_counts_the_bytes(self):
        model, optimizer = under_amp(rule_options={"state_dtype": "int8"})
        report = str(debug.report(model, torch.ones(16, 20, device=DEVICE), optimizer=optimizer))
        assert 'store_param_remainders="int8"' in report


# Bad input


@pytest.mark.parametrize("value", ["int4", "int16", 8, None, torch.int8])
def test_other_formats_are_refused_by_name(value):
    with pytest.raises(TypeError, match="NpuFusedAdam: store_param_remainders must be True, False or 'int8', got"):
        optimizers.NpuFusedAdam(make_params(torch.bfloat16), store_param_remainders=value)
    if value is None:
        return
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="store_param_remainders must be True, False, 'int8' or None, got"):
        amp.initialize(model, optimizers.NpuFusedAdam(model.parameters()), opt_level="O5", store_param_remainders=value)
    assert model.weight.dtype == torch.float32


def test_two_ways_of_rounding_are_refused():
    with pytest.raises(ValueError, match=r"store_param_remainders='int8' keeps .* stochastic_rounding=True .*pass one"):
        optimizers.NpuFusedAdam(make_params(torch.bfloat16), store_param_remainders="int8", stochastic_rounding=True)


@pytest.mark.skipif(extension is None, reason="reads the errors of the extension's kernels")
def test_kernels_refuse_other_dtypes():
    param = torch.ones(64, dtype=torch.bfloat16)
    encoding = RunEncoding(Places([Segment(0, 64, 0, 0)]), {}, remainder=torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(TypeError, match="remainder must be int16 or int8, got Byte"):
        sgd_(param, torch.ones(64), None, **PLAIN_SGD, lr=1.0, encoding=encoding)
    assert torch.equal(param, torch.ones_like(param))
