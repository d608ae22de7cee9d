# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two recorded runs: where they part, that healthy ones do not, and what is said where they are not comparable."""

import math
import re
import shutil
import sys
import types
import warnings
from contextlib import nullcontext
from html import escape

import pytest
import torch
from debug import healthy
from debug.test_check_operators import Spoil
from devices import DEVICE, needs
from small_programs import backward
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from apex_npu import amp
from apex_npu.__main__ import main
from apex_npu.backends._torch_private import autograd_node
from apex_npu.debug.comparison.compare import difference, line_up
from apex_npu.debug.comparison.recorded import Row, load, samples_of


class Classifier(torch.nn.Module):
    """A step of an MLP with normalization and residuals, on a batch from outside."""

    def __init__(self, width=32):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(12, width), torch.nn.LayerNorm(width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))
            for _ in range(2)
        )
        self.drop, self.head = torch.nn.Dropout(0.0), torch.nn.Linear(width, 5)

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = torch.tanh(x + block(x))
        return self.head(self.drop(x))


class OtherKernels(TorchDispatchMode):
    """Products of matrices as another device computes them: rounded once, from sums in float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            exact = func(*(t.detach().cpu().double() for t in args), **(kwargs or {}))
            returned.copy_(exact.to(returned.dtype))
        return returned


def run(path, level="O0", *, make=Classifier, mode=None, change=None, seed=5, batch_seed=6, samples=16384, **options):
    """Record a step at ``level``; ``change(model)`` comes before amp."""
    torch.manual_seed(seed)
    model = make().to(DEVICE)
    if change:
        change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0, **options)
    torch.manual_seed(batch_seed)
    x, y = torch.randn(24, 12).to(DEVICE), torch.randint(5, (24,)).to(DEVICE)
    with mode or nullcontext(), amp.debug.record(path, model, samples=samples):
        loss = model.loss() if hasattr(model, "loss") else F.cross_entropy(model(x).float(), y)
        backward(loss, optimizer)
        optimizer.step()
    amp.shutdown()
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Records of the healthy ``Classifier`` at each level."""
    folder = tmp_path_factory.mktemp("records")
    return {level: run(folder / f"{level}.pt", level) for level in ("O0", "O1", "O2", "O5")}


# ---- healthy runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_another_device_that_is_right_does_not_part(level, files, tmp_path):
    candidate = run(tmp_path / "c.pt", level, mode=OtherKernels())
    found = amp.debug.compare(files["O0"], candidate, floor=files[level])
    assert found.first is None
    assert not found.parts
    assert found.differing == []
    assert len(found.rows) > 80
    assert max(row.ratio for row in found.rows) < 4
    assert max(row.relative for row in found.rows) > 1e-4  # the level's own errors
    assert str(found).startswith("no row diverges; ")


@pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", healthy.MODELS)
def test_models_of_usual_kinds_do_not_part(make, level, tmp_path):
    paths = [run(tmp_path / f"{i}.pt", one, make=make) for i, one in enumerate(["O0", level])]
    candidate = run(tmp_path / "c.pt", level, make=make, mode=OtherKernels())
    found = amp.debug.compare(paths[0], candidate, floor=paths[1])
    assert found.differing == []
    assert found.first is None, str(found)


def test_the_same_file_has_no_error(files):
    found = amp.debug.compare(files["O1"], files["O1"], floor=files["O1"])
    assert {row.relative for row in found.rows} == {0.0}
    assert {row.ratio for row in found.rows} == {0.0}
    assert found.unmatched == {"reference": [], "candidate": []}
    assert min(row.cosine for row in found.rows) == pytest.approx(1.0)
    gradients = [row.module for row in found.rows if row.kind == "gradient"]
    assert gradients == [name for name, _ in Classifier().named_parameters()]


# ---- planted faults -------------------------------------------------------------------------------------------------


class Wrong(TorchDispatchMode):
    """One call of an operator, the ``nth`` in a phase, returns 5 % too much."""

    def __init__(self, name, nth, *, backward=False):
        super().__init__()
        self.name, self.left, self.backward = name, nth, backward

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        in_backward = autograd_node() is not None
        if func._schema.name == self.name and in_backward is self.backward:
            if self.left == 0:
                with torch.no_grad():
                    (returned[0] if isinstance(returned, tuple) else returned).mul_(1.05)
            self.left -= 1
        return returned


FORWARD = [
    *(("aten::addmm", nth, module) for nth, module in enumerate(["first", "blocks.0.0", "blocks.0.2", "blocks.1.0"])),
    *[("aten::native_layer_norm", 0, "norm"), ("aten::gelu", 1, "blocks.1.1"), ("aten::tanh", 1, "")],
]
BACKWARD = [("aten::gelu_backward", 0, "blocks.1.1"), ("aten::tanh_backward", 1, ""), ("aten::mm", 2, "blocks.1.2")]


@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O2"])
@pytest.mark.parametrize(("name", "nth", "module", "phase"), [
    *((*fault, "forward") for fault in FORWARD),
    *((*fault, "backward") for fault in BACKWARD),
])  # fmt: skip
def test_an_operator_that_is_wrong_is_the_first(name, nth, module, phase, level, files, tmp_path):
    candidate = run(tmp_path / "c.pt", level, mode=Wrong(name, nth, backward=phase == "backward"))
    found = amp.debug.compare(files["O0"], candidate, floor=files[level])
    first = found.first
    assert (first.kind, first.phase, first.module, first.operator) == ("operator", phase, module, name), str(found)
    assert found.parts
    assert first.relative == pytest.approx(0.05, rel=0.1)
    assert first.ratio == pytest.approx(first.relative / (first.resolution / 4))
    assert first.ratio > 4


def test_a_module_that_is_wrong_is_the_first(files, tmp_path):
    def spoil(model):
        act = model.blocks[1][1]
        act.forward = types.MethodType(lambda self, x: F.gelu(x) * 1.02, act)

    found = amp.debug.compare(files["O0"], run(tmp_path / "c.pt", "O1", change=spoil), floor=files["O1"])
    first = found.first
    assert (first.kind, first.phase, first.module, first.operator) == ("module", "forward", "blocks.1.1", "GELU")
    assert first.relative == pytest.approx(0.02, rel=0.1)
    assert "forward  blocks.1.1  aten::mul [24, 32]" in found.unmatched["candidate"]
    assert "only in the candidate, or more often: forward  blocks.1.1  aten::mul [24, 32]" in str(found)


def test_a_few_elements_that_are_wrong_are_seen(files, tmp_path):
    candidate = run(tmp_path / "c.pt", "O2", mode=Spoil("aten::native_layer_norm"))
    found = amp.debug.compare(files["O0"], candidate, floor=files["O2"])
    assert (found.first.module, found.first.operator) == ("norm", "aten::native_layer_norm")


def test_a_result_that_is_not_finite_is_the_first(files, tmp_path):
    class Inf(Wrong):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            returned = super().__torch_dispatch__(func, types, args, kwargs)
            if func._schema.name == self.name and self.left == -1:
                returned[0].fill_(math.inf)
            return returned

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an overflow under a static loss scale
        candidate = run(tmp_path / "c.pt", "O2", mode=Inf("aten::tanh", 0))
    found = amp.debug.compare(files["O0"], candidate, floor=files["O2"])
    assert (found.first.operator, found.first.relative, found.first.nonfinite) == ("aten::tanh", math.inf, 1 / 24)
    assert "of its elements: 4.17 % inf or nan" in str(found)


@pytest.fixture(scope="module")
def short_files(tmp_path_factory):
    """Likewise, with few elements of each tensor."""
    folder = tmp_path_factory.mktemp("short")
    return {level: run(folder / f"{level}.pt", level, samples=16) for level in ("O0", "O1")}


@pytest.mark.parametrize("value", [1e4, -1e4, math.nan, math.inf])
def test_an_element_that_no_file_keeps_is_seen(value, short_files, tmp_path):
    class Lone(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            returned = func(*args, **(kwargs or {}))
            if func._schema.name == "aten::gelu":
                kept = samples_of(torch.arange(returned.numel()), 16).tolist()
                returned.view(-1)[next(i for i in range(returned.numel()) if i not in kept)] = value
            return returned

    reference, floor = short_files["O0"], short_files["O1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an overflow under a static loss scale
        candidate = run(tmp_path / "c.pt", "O1", samples=16, mode=Lone())
    found = amp.debug.compare(reference, candidate, floor=floor)
    assert (found.first.module, found.first.operator) == ("blocks.0.1", "aten::gelu"), str(found)
    row = next(row for row in load(reference).rows if row.operator == "aten::gelu")
    ends = {1e4: row.high, -1e4: row.low}
    if value in ends:
        assert found.first.max_abs == pytest.approx(1e4 - abs(ends[value]), rel=1e-2)
        assert found.first.relative == pytest.approx(1e4 / row.norm, rel=0.1)
    else:
        assert found.first.relative == math.inf
        assert "inf or nan in only one of the two" in str(found)
    assert not amp.debug.compare(reference, floor, floor=floor).parts


def test_without_a_floor_nothing_is_blamed(files, tmp_path):
    candidate = run(tmp_path / "c.pt", "O1", mode=Wrong("aten::tanh", 0))
    found = amp.debug.compare(files["O0"], candidate)
    assert found.first is None
    assert not found.parts
    assert str(found).startswith("no verdict: pass floor=")
    assert max(row.relative for row in found.rows) > 0.04
    assert {row.ratio for row in found.rows} == {row.floor for row in found.rows} == {None}


def test_below_the_resolution_it_says_so(files):
    found = amp.debug.compare(files["O0"], files["O5"], floor=files["O5"])
    said = re.match(r"no row diverges; .*: forward (\S+), backward (\S+), after backward (\S+)\n", str(found))
    coarse = [float(number) for number in said.groups()]
    fine = amp.debug.compare(files["O0"], files["O2"], floor=files["O2"])
    said = re.match(r"no row diverges; .*: forward (\S+), backward (\S+), after backward (\S+)\n", str(fine))
    assert all(a > 3 * float(b) for a, b in zip(coarse, said.groups(), strict=True))  # bfloat16 has 3 bits fewer


# ---- other iterations -----------------------------------------------------------------------------------------------


def test_another_batch_is_said_first(files, tmp_path):
    candidate = run(tmp_path / "c.pt", "O1", batch_seed=7)
    found = amp.debug.compare(files["O0"], candidate, floor=files["O1"])
    assert (found.first, found.parts) == (None, True)
    (said,) = found.differing
    assert said.startswith(f"{candidate}: the batch differs: argument 0 of Classifier (float32 [24, 12]), what ")
    assert "(int64 [24])" in said  # the labels
    assert str(found).startswith(said)


def test_a_batch_of_another_shape(files, tmp_path, monkeypatch):
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda n, *size: draw(n // 2, *size))
    monkeypatch.setattr(torch, "randint", lambda high, size, f=torch.randint: f(high, (size[0] // 2,)))
    found = amp.debug.compare(files["O0"], run(tmp_path / "c.pt", "O1"))
    assert "argument 0 of Classifier is [24, 12] and [12, 12]" in found.differing[0]


class Reading(Classifier):
    """Calls itself with the batch in another form, of which levels read other views: O2 casts all of it first."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, *args):
        if len(args) == 1 and isinstance(args[0], list):  # images of several sizes
            return torch.cat([super(Reading, self).forward(x) for x in args[0]])
        if len(args) == 2:
            return super().forward(torch.cat([x.sin() for x in args], 1))
        (x,) = args
        if self.form == "transposed":
            return super().forward(x.T)
        return super().forward(x).flatten(0, -2)

    def of(self, x):
        forms = {
            "3-D": lambda: (x.view(4, 6, 12),),
            "transposed": lambda: (x.T.contiguous(),),
            "a list": lambda: ([x[:9], x[9:]],),
            "slices of one tensor": lambda: (x[:, :5], x[:, 5:]),
        }
        return self(*forms[self.form]())


@pytest.mark.parametrize("form", ["3-D", "transposed", "a list", "slices of one tensor"])
def test_the_same_batch_that_levels_read_as_other_views(form, tmp_path):
    def record(level, seed=6):
        torch.manual_seed(5)
        model = Reading(form).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        torch.manual_seed(seed)
        x, path = torch.randn(24, 12).to(DEVICE), tmp_path / f"{level}{seed}.pt"
        with amp.debug.record(path, model):
            loss = model.of(x).float().square().mean()
            backward(loss, optimizer)
        amp.shutdown()
        return path

    paths = {level: record(level) for level in ("O0", "O1", "O2")}
    for level in ("O1", "O2"):
        assert amp.debug.compare(paths["O0"], paths[level], floor=paths[level]).differing == []
        (said,) = amp.debug.compare(paths["O0"], record(level, seed=7)).differing
        assert ": the batch differs: " in said


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_other_weights_are_said_first(level, files, tmp_path):
    def nudge(model):
        with torch.no_grad():
            model.norm.weight[3] += 0.01

    found = amp.debug.compare(files["O0"], run(tmp_path / "c.pt", level, change=nudge), floor=files[level])
    assert found.first is None
    assert found.differing == [
        f"{tmp_path / 'c.pt'}: the weights differ: norm.weight; load the same state_dict in both"
    ]


class Dropping(Classifier):
    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.3)


def test_another_mask_of_dropout_is_said_first(tmp_path):
    reference = run(tmp_path / "r.pt", make=Dropping)
    floor = run(tmp_path / "f.pt", "O1", make=Dropping)

    class Reseeded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if torch.Tag.nondeterministic_seeded in func.tags:
                torch.manual_seed(99)
            return func(*args, **(kwargs or {}))

    healthy_one = run(tmp_path / "h.pt", "O1", make=Dropping)
    assert amp.debug.compare(reference, healthy_one, floor=floor).differing == []
    found = amp.debug.compare(reference, run(tmp_path / "c.pt", "O1", make=Dropping, mode=Reseeded()), floor=floor)
    assert found.first is None
    (said,) = found.differing
    assert re.search(r"results of random operators differ: aten::\w+ of drop; set dropout to 0 in both runs", said)


def test_masks_of_another_form_cannot_be_compared(tmp_path):
    class Uniform(torch.nn.Dropout):
        def forward(self, x):
            return x * (torch.rand_like(x) > self.p) / (1 - self.p)

    Uniform.__name__ = "Dropout"

    def replace(model):
        model.drop = Uniform(0.3)

    reference = run(tmp_path / "r.pt", make=Dropping)
    found = amp.debug.compare(reference, run(tmp_path / "c.pt", make=Dropping, change=replace))
    (said,) = found.differing
    assert "aten::rand_like of drop" in said


NAN, INF = math.nan, math.inf


@needs("inf")
@pytest.mark.parametrize(
    ("dtypes", "values", "differ"),
    [
        ((torch.float32, torch.float16), (0.5, NAN), True),
        ((torch.float16, torch.bfloat16), (NAN, 0.5), True),
        ((torch.float32, torch.bfloat16), (0.5, INF), True),
        ((torch.float16, torch.bfloat16), (INF, 0.5), True),
        ((torch.float32, torch.float16), (INF, -INF), True),
        ((torch.float16, torch.bfloat16), (NAN, INF), True),
        ((torch.float32, torch.float16), (NAN, NAN), False),
        ((torch.float16, torch.bfloat16), (INF, INF), False),
        ((torch.float32, torch.float16), (1e5, 1e5), False),  # is inf in float16
        ((torch.bfloat16, torch.float16), (1e5, 1e5), False),
        ((torch.float16, torch.bfloat16), (0.7, 0.7), False),
        ((torch.float16, torch.bfloat16), (0.7, 0.8), True),
    ],
)
def test_weights_in_two_precisions(dtypes, values, differ, tmp_path):
    def one(path, dtype, value):
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 5).to(DEVICE)
        model.weight.data[0, 0] = value
        with amp.debug.record(path, model.to(dtype)):
            model(torch.ones(2, 6, dtype=dtype, device=DEVICE)).sum().backward()
        return path

    paths = [one(tmp_path / f"{i}.pt", *given) for i, given in enumerate(zip(dtypes, values, strict=True))]
    differing = str(amp.debug.compare(*paths).differing)
    assert ("the weights differ: weight; load the same" in differing) == differ, differing


# ---- what limits it -------------------------------------------------------------------------------------------------


def test_rows_that_the_floor_lacks_are_counted(files, tmp_path):
    lacking, wrong = load(files["O1"]), load(files["O1"])
    lacking.rows = [row for row in lacking.rows if row.operator != "aten::gelu"]
    for row in wrong.rows:
        if row.operator == "aten::gelu":
            row.values *= 7
    lacking.save(tmp_path / "f.pt")
    wrong.save(tmp_path / "c.pt")
    found = amp.debug.compare(files["O0"], tmp_path / "c.pt", floor=tmp_path / "f.pt")
    (note,) = found.notes
    assert note == (
        "forward  blocks.0.1  aten::gelu [24, 32], forward  blocks.1.1  aten::gelu [24, 32]: not judged, as "
        f"{tmp_path / 'f.pt'} has no such row"
    )
    assert str(found).startswith(note + "\nno row diverges")
    found.to_html(tmp_path / "c.html")
    assert "not judged" in (tmp_path / "c.html").read_text(encoding="utf-8")


def test_other_loss_scales_and_compiled_code_are_said(files, tmp_path):
    other = load(files["O1"])
    other.scale, other.notes = 1024.0, ["it was compiled"]
    other.save(tmp_path / "f.pt")
    found = amp.debug.compare(files["O0"], files["O1"], floor=tmp_path / "f.pt")
    assert found.notes[0] == f"{tmp_path / 'f.pt'}: it was compiled"
    assert found.notes[1].startswith(
        f"the loss scales differ: {files['O0']} has 64, {files['O1']} has 64, {tmp_path / 'f.pt'} has 1024; gradients"
    )
    assert str(found).splitlines()[:2] == found.notes
    assert amp.debug.compare(files["O0"], files["O1"]).notes == []


# ---- bad files ------------------------------------------------------------------------------------------------------


def test_files_of_other_models(files, tmp_path):
    other = run(tmp_path / "c.pt", "O1", make=lambda: Classifier(16))
    with pytest.raises(ValueError, match=r"O0.pt has .*\[32.*c.pt has .*\[16"):
        amp.debug.compare(files["O0"], other)


def test_files_with_other_samples(files, tmp_path):
    other = run(tmp_path / "c.pt", "O1", samples=100)
    with pytest.raises(ValueError, match=r"c.pt .*samples=100 .*O0.pt keeps 16384"):
        amp.debug.compare(files["O0"], other)
    with pytest.raises(ValueError, match="keeps samples=100"):
        amp.debug.compare(files["O0"], files["O1"], floor=other)


def test_nothing_in_common(files, tmp_path):
    model = Classifier().to(DEVICE)
    torch.manual_seed(5)
    model.load_state_dict(Classifier().state_dict())
    with amp.debug.record(tmp_path / "c.pt", model):
        pass
    with pytest.raises(ValueError, match=r"c.pt is in .*O0.pt"):
        amp.debug.compare(files["O0"], tmp_path / "c.pt")


def test_a_floor_of_another_level(files):
    with pytest.raises(ValueError, match=r"floor=.*O2.pt .*O2, .*O1.pt at O1"):
        amp.debug.compare(files["O0"], files["O1"], floor=files["O2"])


def test_what_is_no_record(files, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file '.*none.pt': amp.debug.record"):
        amp.debug.compare(files["O0"], tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("text")
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    (tmp_path / "cut.pt").write_bytes(files["O0"].read_bytes()[:-2000])
    for name in ("text.pt", "weights.pt", "cut.pt"):
        with pytest.raises(ValueError, match=f"{name} is not a file of amp.debug.record"):
            amp.debug.compare(tmp_path / name, files["O0"])
    header = {"kind": "apex_npu.debug.record", "format": 1}
    for more in ({}, {"samples": 1, "rows": [{"x": 1}], "batch": [], "weights": []}):
        torch.save(header | more, tmp_path / "parts.pt")
        with pytest.raises(ValueError, match=r"parts.pt is not a file of amp.debug.record"):
            amp.debug.compare(tmp_path / "parts.pt", files["O0"])
    newer = torch.load(files["O0"], weights_only=True) | {"format": 2}
    torch.save(newer, tmp_path / "newer.pt")
    with pytest.raises(ValueError, match=r"newer.pt has format 2"):
        amp.debug.compare(files["O0"], tmp_path / "newer.pt")


# ---- pieces ---------------------------------------------------------------------------------------------------------


def row(values, *, module="m", operator="aten::x", kind="operator", dtype=None, scale=1.0, call=0):
    tensor = torch.as_tensor(values, dtype=dtype or torch.float64)
    name = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    return Row(kind, "forward", module, operator, call, 0, shape, name, "", "", 0.0, 0.0, 0.0, 0, scale, tensor)


def test_the_difference_against_numbers_known():
    found = difference(row([3.0, 4.0, 0.0]), row([3.0, 4.5, 0.0]))
    assert (found.max_abs, found.relative, found.max_relative) == (0.5, pytest.approx(0.1), 0.125)
    assert found.cosine == pytest.approx((9 + 18) / (5 * math.hypot(3, 4.5)))
    scaled = difference(row([3.0, 4.0]), row([24.0, 32.0], dtype=torch.float16, scale=8.0))
    assert (scaled.relative, scaled.cosine) == (0.0, pytest.approx(1.0))
    assert difference(row([-math.inf, 2.0]), row([-math.inf, 2.0])).relative == 0.0  # a mask
    bad = difference(row([1.0, 2.0, 3.0, 4.0]), row([math.inf, math.nan, 65504.0, 0.0], dtype=torch.float16))
    assert (bad.relative, bad.nonfinite, bad.saturated, bad.new_zeros) == (math.inf, 0.5, 0.25, 0.25)
    assert difference(row([0.0]), row([0.0])).relative == 0.0
    assert difference(row([0.0]), row([1e-9])).relative == math.inf
    complex_row = row(0.0)
    complex_row.values, complex_row.dtype = torch.tensor([3 + 4j]), "complex64"
    other = row(0.0)
    other.values, other.dtype = torch.tensor([3 + 4.5j]), "complex64"
    assert difference(complex_row, other).relative == pytest.approx(0.1)


def test_rows_that_both_have_equally_often_are_lined_up_in_order():
    a, b, c, d = (row([1.0], operator=name) for name in "abcd")
    assert line_up([a, b, c], [a, d, b, c]) == {0: 0, 2: 1, 3: 2}
    assert line_up([a, b, b, c], [b, c, a, b]) == {0: 1, 1: 3, 2: 0, 3: 2}
    assert line_up([a, b, b, c], [a, b, c]) == {0: 0, 2: 3}  # which of the two is missing is not known
    assert line_up([a], [row([1.0, 2.0], operator="a")]) == {}  # another shape
    assert line_up([a], [row([1.0], operator="a", kind="module")]) == {}


# ---- what is shown --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parted(files, tmp_path_factory):
    return run(tmp_path_factory.mktemp("parted") / "c.pt", "O1", mode=Wrong("aten::gelu", 0))


def test_the_text(files, parted):
    found = amp.debug.compare(files["O0"], parted, floor=files["O1"])
    lines = found.to_text(5).splitlines()
    assert lines[0].startswith("they diverge at  forward  blocks.0.1  aten::gelu  float32 [24, 32]  ")
    assert lines[0].endswith("x = torch.tanh(x + block(x))")
    assert re.fullmatch(r"its error is 0\.05\S*, \S+ times what the floor explains; resolution here \S+", lines[1])
    assert any(
        line.startswith(f"candidate  {parted}") and f"O1 on {DEVICE.type}, loss scale 64" in line for line in lines
    )
    (marked,) = (line for line in lines if line.endswith("← first"))
    assert marked.split()[:3] == ["forward", "blocks.0.1", "aten::gelu"]
    table = [line for line in lines if line.startswith(("forward ", "backward ", "after backward "))]
    assert len(table) == 5
    assert lines[-1] == f"and {len(found.rows) - 5} more; --html and to_html show all"


def test_the_page(files, parted, tmp_path):
    found = amp.debug.compare(files["O0"], parted, floor=files["O1"])
    found.rows[0].source = "<script>alert(1)</script>"
    found.to_html(tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script", page)
    assert "&lt;script&gt;" in page
    assert all(escape(cell) in page for row in found.rows for cell in row.cells())
    assert page.count("← first") == 1
    for tag in ("pre", "body", "html"):
        assert len(re.findall(f"<{tag}[ >]", page)) == page.count(f"</{tag}>")


def test_the_picture(files, parted, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    found = amp.debug.compare(files["O0"], parted, floor=files["O1"])
    found.plot(tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    found.names[1] = "c$a_{<&$.pt"  # no formula
    found.plot(tmp_path / "formula.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        found.plot(tmp_path / "again.png")


def test_the_command(files, parted, tmp_path, capsys):
    names = {"O0": files["O0"], "c": parted, "O1": files["O1"]}
    paths = {name: shutil.copy(path, tmp_path / f"{name}.pt") for name, path in names.items()}
    page = str(tmp_path / "c.html")
    options = ["--floor", str(paths["O1"]), "--html", page, "--rows", "3"]
    assert main(["compare", str(paths["O0"]), str(paths["c"]), *options]) == 1
    expected = amp.debug.compare(paths["O0"], paths["c"], floor=paths["O1"]).to_text(3)
    assert capsys.readouterr().out == expected + "\n"
    assert (tmp_path / "c.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["compare", str(paths["O0"]), str(paths["O1"]), "--floor", str(paths["O1"])]) == 0
    assert main(["compare", str(paths["O0"]), str(paths["c"])]) == 0  # no verdict
    capsys.readouterr()
    for arguments, said in (
        ([str(paths["O0"]), str(tmp_path / "none.pt")], "no file "),
        ([str(paths["O0"]), page], "is not a file of amp.debug.record"),
        ([str(paths["O0"]), str(paths["c"]), "--rows", "0"], "--rows 0: a positive number is expected"),
        ([str(paths["O0"]), str(paths["c"]), "--html", str(tmp_path / "no" / "c.html")], "No such file or directory"),
    ):
        assert main(["compare", *arguments]) == 2
        assert said in capsys.readouterr().err
