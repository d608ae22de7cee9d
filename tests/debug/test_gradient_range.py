# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which loss scale gradients need: the census of exponents, what is lost, advice; and the numbers for trackers."""

import math
import re
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from debug import healthy
from debug.test_watching import iterate, set_up
from devices import DEVICE, needs
from small_programs import backward
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex_npu import amp, optimizers
from apex_npu.amp.session import current, settings
from apex_npu.debug.gradient_range import report
from apex_npu.debug.gradient_range.report import GradientRange, ParameterRange, exponent_census


def reference(tensor):
    """The census by the bits of float32."""
    bits = tensor.detach().cpu().float().contiguous().view(torch.int32).flatten()
    exponents = (bits >> 23) & 255
    columns = torch.where((bits & 0x7FFFFFFF) == 0, 0, exponents.clamp(min=1))
    return torch.bincount(columns, minlength=256).tolist()


def all_of(dtype):
    """All numbers of 16 bits."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def random_bits(n):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31 - 1, (n,), generator=generator, dtype=torch.int64).int().view(torch.float32)


def tensors():
    subnormal = torch.arange(-7, 8, dtype=torch.int32).view(torch.float32)
    return {
        "float16": all_of(torch.float16),
        "bfloat16": all_of(torch.bfloat16),
        "float32": random_bits(5000),
        "subnormal": subnormal,
        "transposed": random_bits(600).view(20, 30).t(),
        "every second": random_bits(600)[::2],
        "scalar": torch.tensor(-3.0),
        "signed zeros": torch.tensor([0.0, -0.0]),
    }


@needs("inf")
@pytest.mark.parametrize("piece", [2**24, 1000])
def test_the_census_is_that_of_the_bits(piece, monkeypatch):
    monkeypatch.setattr(report, "_ELEMENTS", piece)
    given = [t.to(DEVICE) for t in tensors().values()]
    found = exponent_census(given)
    assert found.dtype == np.int64
    assert found.tolist() == [reference(t) for t in given]
    normal = random_bits(3000)
    normal = normal[(normal.abs() > 2.0**-100) & normal.isfinite()].to(DEVICE)
    assert exponent_census([normal], 2.0**-9).tolist() == [reference(normal * 2.0**-9)]
    assert exponent_census([]).shape == (0, 256)


class Rows(nn.Module):
    """Row i of the weight has the gradient ``factors[i] * x``."""

    def __init__(self, factors, run=None):
        super().__init__()
        self.fc = nn.Linear(4, len(factors))
        self.last = nn.Linear(2, 1)
        self.factors = torch.tensor(factors, device=DEVICE)
        self.run = run or (lambda function, x: function(x))

    def forward(self, x):
        return self.run(self.fc, x)

    def loss(self):
        x = torch.tensor([[1.0, 0.5, 0.0, 0.25]], device=DEVICE)  # the third column has true zeros
        return (self(x).float() * self.factors).sum()


def set_up_rows(exponents, level="O1", run=None, optimizer=torch.optim.SGD, **options):
    model = Rows([2.0**e for e in exponents], run).to(DEVICE)
    options = {"loss_scale": 1.0, **options}
    return amp.initialize(model, optimizer(model.parameters(), lr=0.1), opt_level=level, verbosity=0, **options)


def gradients(model, optimizer):
    optimizer.zero_grad()
    backward(model.loss(), optimizer)
    return [None if p.grad is None else p.grad.clone() for p in amp.master_params(optimizer)]


EXPONENTS = [-3, -10, -14, -20, -24, -25, -26, -30, -36]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_lost_is_zero_here_and_not_in_float32(level):
    true = gradients(*set_up_rows(EXPONENTS, "O0"))
    amp.shutdown()
    model, optimizer = set_up_rows(EXPONENTS, level)
    alone = gradients(model, optimizer)
    with amp.debug.gradient_range(optimizer, probe=2.0**14) as r:
        probed = gradients(model, optimizer)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(alone, probed, strict=True))
    for name, here, there in zip(("fc.weight", "fc.bias"), alone, true, strict=False):
        assert r[name].lost == int(((here == 0) & (there != 0)).sum()) > 0
        assert r[name].zeros == int((here == 0).sum())
        assert r[name].lossy == int(((here != 0) & (here.abs() < 2.0**-14)).sum())
    assert set(r.parameters) == {"fc.weight", "fc.bias"}  # last is not used
    assert f"not at {2**14} times this scale" in str(r)
    assert amp.debug.gradient_range(optimizer)["fc.weight"].lost is None


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("scale", "options"),
    [(1000.0, {}), (2.0**9, {"fuse_unscale": True}), (2.0**9, {"combine_grad": True}), (2.0**9, {})],
)
def test_what_is_lossy_follows_from_the_scaled_gradients(level, scale, options):
    optimizer = torch.optim.SGD if not options else optimizers.NpuFusedSGD
    model, optimizer = set_up_rows(EXPONENTS, level, optimizer=optimizer, loss_scale=scale, **options)
    with amp.debug.gradient_range(optimizer, probe=16) as probed:
        gradients(model, optimizer)
    r = amp.debug.gradient_range(optimizer)
    scaled = [
        p.grad.float() * (1.0 if options.get("fuse_unscale") else scale) for p in list(amp.master_params(optimizer))[:2]
    ]
    scaled = [s.abs() for s in scaled]
    assert r.scale == scale
    assert r["fc.weight"].lossy == int(((scaled[0] > 0) & (scaled[0] < 2.0**-14)).sum())
    assert r["fc.bias"].lossy == int(((scaled[1] > 0) & (scaled[1] < 2.0**-14)).sum())
    assert all((r[name].counts == probed[name].counts).all() for name in ("fc.weight", "fc.bias"))
    assert r.total.largest_scale == math.floor(math.log2(scale)) + 15 - math.floor(math.log2(scaled[1].max()))


def test_a_probe_measures_again_each_time_it_is_entered():
    model, optimizer = set_up_rows(EXPONENTS, "O1")
    probe = amp.debug.gradient_range(optimizer, probe=2.0**14)
    with probe as first:
        gradients(model, optimizer)
    shown = str(first)
    with probe as second:
        gradients(model, optimizer)
    assert second is not first
    assert str(second) == str(first) == shown
    assert second["fc.weight"].lost > 0


@needs("inf")
def test_where_the_probe_overflows_it_is_unknown():
    model, optimizer = set_up_rows([-30, 5], loss_scale=2.0**8)
    with amp.debug.gradient_range(optimizer, probe=2.0**8) as r:
        grads = gradients(model, optimizer)
        optimizer.step()
    assert r["fc.weight"].lost is None
    assert r.total.lost is None
    assert "true ones" not in r.advice
    assert "amp/gradients_lost" not in amp.debug.scalars(r)
    assert amp.last_step(optimizer).applied
    assert all(g is None or g.isfinite().all() for g in grads)
    assert "unknown" in str(r)
    assert not current().observers


def test_what_cannot_be_computed_twice_is_said():
    def reentrant(function, x):
        return checkpoint(function, x.requires_grad_(), use_reentrant=True)

    model, optimizer = set_up_rows([-3, -5], run=reentrant)
    with amp.debug.gradient_range(optimizer, probe=2.0**8) as r:
        grads = gradients(model, optimizer)
    assert grads[0].count_nonzero() == 6
    assert str(r).count("the lost elements could not be measured") == 1
    present = amp.debug.gradient_range(optimizer)
    assert present["fc.weight"].lossy == 0
    assert (r["fc.weight"].counts == present["fc.weight"].counts).all()  # of the block
    assert (r["fc.weight"].lost, r["fc.bias"].lost) == (None, 0)  # the bias has no zeros
    assert r.total.lost is None
    with amp.debug.gradient_range(optimizer, probe=2.0**8) as r:
        for _ in range(3):
            gradients(model, optimizer)
            r.parameters.clear()  # as where a block leaves no gradient
    assert str(r).count("the lost elements could not be measured") == 1


class Checkpointed(nn.Module):
    """A BatchNorm and a Dropout whose forwards backward repeats, in a checkpoint."""

    def __init__(self, **options):
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)
        self.options = {"use_reentrant": False, "preserve_rng_state": False, **options}

    def loss(self):
        x = torch.linspace(-1, 1, 64, device=DEVICE).view(8, 8).requires_grad_()
        hidden = checkpoint(lambda x: self.drop(self.norm(x)), x, **self.options)
        return self.last(hidden).float().square().mean()


def test_buffers_and_random_numbers_are_as_without_it():
    left = []
    for probes in (False, True):
        model, optimizer = set_up(Checkpointed, "O1", torch.optim.SGD, dynamic_init_scale=4.0)
        torch.manual_seed(3)
        with amp.debug.gradient_range(optimizer, probe=4.0) if probes else nullcontext():
            gradients(model, optimizer)
        left.append([*model.buffers(), torch.rand(4, device=DEVICE), torch.rand(4), model.last.weight.grad])
        amp.shutdown()
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
    assert int(left[1][2]) == 2  # num_batches_tracked: forward, and once more in backward


def test_what_the_probe_does_not_reach_is_named():
    model, optimizer = set_up(lambda: Checkpointed(use_reentrant=True), "O1", torch.optim.SGD, dynamic_init_scale=4.0)
    with amp.debug.gradient_range(optimizer, probe=4.0) as r:
        gradients(model, optimizer)
    assert set(r.parameters) == {"last.weight", "last.bias"}
    assert "not measured: norm.weight, norm.bias," in str(r)


def test_inf_and_nan_have_a_column():
    assert "inf, nan" not in str(range_of(a={-5: 10}))
    lines = str(range_of(a={"inf": 1, -5: 9}, b={-5: 10})).splitlines()
    (head,) = [i for i, line in enumerate(lines) if line.startswith("those that lose most")]
    assert lines[head].endswith("inf, nan")
    assert lines[head + 1].split() == ["a", "10", "0", "%", "0", "%", "10", "%"]


def counts_of(counted):
    counts = np.zeros(256, np.int64)
    for exponent, count in counted.items():
        counts[{"zero": 0, "inf": 255}.get(exponent, 127 + exponent if isinstance(exponent, int) else 0)] = count
    return counts


def range_of(scale=1.0, lost=None, probe=None, level="O1", dtype=torch.float16, **exponents):
    """Of parameters by their names: how many elements have each exponent; ``zero``: are zero; ``lost``: likewise."""
    found = GradientRange("SGD", level, probe, dtype)
    found.scale = scale
    for name, counted in exponents.items():
        one = found.parameters[name] = ParameterRange(name, counts_of(counted), math.floor(math.log2(scale)), dtype)
        if lost is not None and name in lost:
            one.set_lost(counts_of(lost[name]))
    return found


WIDE = {e: 10 for e in range(-40, 1)}
CASES = {
    "all too small": (range_of(a={-20: 50, -19: 50}), "too small: a static one of 2^8 would do"),
    "all too small, lost": (
        range_of(a={"zero": 60, -22: 40}, lost={"a": {-28: 60}}, probe=256.0),
        "too small: a static one of 2^16 would do.*; 60 % of all elements are zero for lack of range, and lost",
    ),
    "it fits": (range_of(scale=2.0**10, a={-10: 60, -19: 40}), "the loss scale fits; a static one of 2^7 would do"),
    "too large": (range_of(scale=2.0**10, a={6: 50, 0: 50}), "too large: a static one of 2^2 would do"),
    "one layer too small": (
        range_of(scale=2.0**4, body={-5: 10000}, head={-24: 10}),
        "the loss scale fits; .*; head would need a larger one, or float32$",
    ),
    "true zeros": (
        range_of(scale=2.0**4, a={"zero": 90, -5: 10}, lost={"a": {}}, probe=256.0),
        "fits; .*; the zeros are true ones",
    ),
    "half lost, the others fit": (
        range_of(scale=4.0, a={"zero": 50}, b={-5: 50}, lost={"a": {-30: 50}, "b": {}}, probe=2.0**10),
        "too small: a static one of 2^18 would do.*; 50 % of all elements are zero for lack of range, and lost$",
    ),
    "one percent lost is none": (
        range_of(scale=4.0, a={"zero": 1}, b={-5: 999}, lost={"a": {-30: 1}, "b": {}}, probe=2.0**10),
        "fits; .*; a would need a larger one, or float32; 0.10 % of all elements are zero for lack of range, and lost$",
    ),
    "the sum of many that are lost is no larger than they allow": (
        range_of(a={"zero": 60, -5: 40}, lost={"a": {-12: 60}}, probe=256.0),
        "too small: a static one of 2^13 would do",
    ),
    "unknown of one": (
        range_of(scale=2.0**4, a={"zero": 90, -5: 10}, b={"zero": 9}, lost={"b": {}}, probe=256.0),
        "fits; .*; what is lost of a is unknown$",
    ),
    "only zeros": (
        range_of(a={"zero": 90}, lost={"a": {}}, probe=256.0),
        "all gradients are zero; the zeros are true ones",
    ),
    "all lost": (
        range_of(a={"zero": 90}, lost={"a": {-28: 90}}, probe=256.0),
        "all gradients are zero; 100 % .* lost: a static loss scale of 2^16 would do",
    ),
    "float32": (range_of(level="O0", dtype=torch.float32, a={-30: 10}), "O0 needs no loss scale: its gradients are f"),
    "too wide": (range_of(a=WIDE, b={-3: 10}), "need 41 binades, and float16 has 30. Use O4 or O5.* keep a in float32"),
    "overflow": (range_of(a={"inf": 1, -5: 10}), "a have inf or nan.*find_overflow"),
    "bfloat16": (
        range_of(level="O5", dtype=torch.bfloat16, a={-30: 10}),
        "O5 needs no loss scale: bfloat16 has the range of float32",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_advice(case):
    found, said = CASES[case]
    assert re.search(said.replace("2^", r"2\^"), found.advice), found.advice


class Branches(nn.Module):
    """The gradients of ``faint`` are zero in float16 at a loss scale of 1."""

    def __init__(self):
        super().__init__()
        self.faint, self.plain = nn.Linear(8, 100), nn.Linear(8, 100)

    def forward(self, x):
        return self.plain(x) + self.faint(x) * 1e-7

    def loss(self):
        return self(torch.linspace(-1, 1, 256, device=DEVICE).view(32, 8)).float().square().mean() * 100


def test_what_is_lost_asks_for_a_larger_scale():
    model, optimizer = set_up(Branches, "O2", torch.optim.SGD)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})
    with amp.debug.gradient_range(optimizer, probe=2.0**10) as r:
        gradients(model, optimizer)
    assert r["faint.weight"].lost == r["faint.weight"].elements == 800
    assert r.total.smallest_scale >= 11  # what is below 2^-25 becomes normal at 2^11 at the soonest
    assert re.search(r"the loss scale is too small: a static one of 2\^1\d would do", r.advice)
    assert amp.debug.scalars(r)["amp/gradients_lost"] == pytest.approx(0.5, abs=0.01)


def test_where_no_float16_is():
    for level, options in (("O0", {}), ("O2", {"cast_model_type": torch.bfloat16}), ("O4", {}), ("O5", {})):
        model, optimizer = set_up_rows([-3, -30], level, **options)
        gradients(model, optimizer)
        r = amp.debug.gradient_range(optimizer)
        assert r.advice.startswith(f"{level} needs no loss scale: ")
        assert r.total.lossy == 0
        assert "float16" not in str(r).replace("bfloat16", "")
        amp.shutdown()


def test_the_advised_scale_loses_at_most_one_percent():
    model, optimizer = set_up(healthy.GPT, "O2")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})
    gradients(model, optimizer)
    total = amp.debug.gradient_range(optimizer).total
    assert total.lossy_at(total.smallest_scale) <= 0.01 * total.nonzero < total.lossy_at(total.smallest_scale - 1)
    largest = max(float(p.grad.abs().max()) for p in amp.master_params(optimizer))
    assert largest * 2.0**total.largest_scale < 2.0**16 <= largest * 2.0 ** (total.largest_scale + 1)


def test_the_histogram_counts_all_and_has_its_limit_between_rows():
    for scale in (1.0, 2.0**7, 2.0**24):
        found = range_of(scale=scale, a={**WIDE, "zero": 90})
        rows = [line for line in str(found).splitlines() if "█" in line]
        shares = [float(line.split()[-2] if "lossy" not in line else line.split()[-3]) for line in rows]
        assert sum(shares) == pytest.approx(100 * 410 / 500, abs=3.0)
        lossy = [share for line, share in zip(rows, shares, strict=True) if "lossy" in line]
        assert sum(lossy) == pytest.approx(100 * found.total.lossy / 500, abs=3.0)


def test_the_pictures_show_what_is_lost(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    for a, lost in (({"zero": 60, -22: 40}, {-28: 60}), ({"zero": 100}, {-28: 100})):
        found = range_of(a=a, lost={"a": lost}, probe=256.0)
        (row,) = (line for line in str(found).splitlines() if "░" in line)
        assert row.endswith(f"{lost[-28]} % lost")
        begin, end = (int(power.removeprefix("2^")) for power in row.split("░")[0].split(" to "))
        assert begin <= -28 < end
        drawn = []
        monkeypatch.setattr(figure, "savefig", lambda figure, path: drawn.append(figure.axes[0]))  # noqa: B023
        found.plot(tmp_path / "range.png")
        bars = next(bars for bars in drawn[0].containers if bars.get_label() == "lost")
        (bar,) = (bar for bar in bars if bar.get_height())
        assert bar.get_x() + bar.get_width() / 2 == pytest.approx(-28)
        assert bar.get_height() == pytest.approx(lost[-28])


def test_plot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    found = range_of(scale=2.0**7, a=WIDE)
    found.plot(tmp_path / "range.png")
    assert (tmp_path / "range.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        found.plot(tmp_path / "again.png")


def test_bad_input():
    model, optimizer = set_up_rows([-3])
    for probe in (1, 0.5, -2, math.inf, math.nan, True, "8"):
        with pytest.raises(ValueError, match=r"probe, .* must be larger than 1"):
            amp.debug.gradient_range(optimizer, probe=probe)
    with pytest.raises(RuntimeError, match="gradient_range found no gradient"):
        amp.debug.gradient_range(optimizer)
    with pytest.raises(RuntimeError, match=r"SGD was not passed to amp.initialize"):
        amp.debug.gradient_range(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    gradients(model, optimizer)
    with pytest.raises(KeyError, match=r"'fc' .*fc\.weight, fc\.bias"):
        amp.debug.gradient_range(optimizer)["fc"]
    with (
        amp.debug.gradient_range(optimizer, probe=2.0) as r,
        pytest.raises(KeyError, match="none was measured yet"),
    ):
        r["fc.weight"]


@pytest.mark.parametrize("order", [0, 1])
def test_within_find_overflow_both_see_the_block(order):
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=4.0)
    with amp.debug.find_overflow(model) as alone:
        iterate(model, optimizer)
    contexts = [amp.debug.find_overflow(model), amp.debug.gradient_range(optimizer, probe=4.0)]
    with contexts[order] as first, contexts[1 - order] as second:
        iterate(model, optimizer)
    found, r = (first, second)[order], (second, first)[order]
    assert len(found.reports) == 1
    assert found.reports[0].operators == alone.reports[0].operators  # none of those of the probe
    assert not found.causes
    assert r.total.nonzero > 0
    assert not current().observers


def test_what_begins_inside_stays_when_it_ends():
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=4.0)
    try:
        with amp.debug.gradient_range(optimizer, probe=4.0) as r:
            amp.debug.explain_overflows(after=2)
            iterate(model, optimizer)
        assert r.total.nonzero > 0
        assert current().observers == [settings.observer] != [None]
        with amp.debug.gradient_range(optimizer, probe=4.0):
            amp.debug.explain_overflows(None)
        assert not current().observers
        assert settings.observer is None
    finally:
        amp.debug.explain_overflows(None)


def test_without_amp():
    _, optimizer = set_up(healthy.LSTM, "O2", enabled=False)
    for ask in (amp.debug.gradient_range, amp.debug.bad_gradients):
        with pytest.raises(RuntimeError, match="enabled=False"):
            ask(optimizer)


def test_scalars():
    with pytest.raises(RuntimeError, match=r"scalars .*initialized"):
        amp.debug.scalars()
    model, optimizer = set_up(healthy.LSTM, "O2", dynamic_init_scale=4.0, num_losses=2)
    assert amp.debug.scalars() == {
        "amp/loss_scale0": 4.0,
        "amp/loss_scale1": 4.0,
        "amp/skipped_steps": 0.0,
        "amp/skips_in_a_row": 0.0,
    }
    for factor in (1.0, math.inf, math.inf):
        optimizer.zero_grad()
        backward(model.loss() * factor, optimizer)
        r = amp.debug.gradient_range(optimizer)
        optimizer.step()
    found = amp.debug.scalars(r)
    assert all(type(value) is float for value in found.values())
    assert (found["amp/loss_scale0"], found["amp/loss_scale1"]) == (1.0, 4.0)
    assert (found["amp/skipped_steps"], found["amp/skips_in_a_row"]) == (2.0, 2.0)
    assert found["amp/gradients_not_finite"] == 1.0
    assert "amp/gradients_lost" not in found
    with pytest.raises(TypeError, match=r"gradients must be .* got dict"):
        amp.debug.scalars({})
