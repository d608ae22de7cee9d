# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``amp.debug.record`` keeps of an iteration, and that the iteration is the same with it."""

import copy
import dataclasses
import math

import pytest
import torch
from debug import healthy
from debug.test_watching import SKIPPED, hooks_of_torch, nothing_changes, set_up
from devices import DEVICE, needs
from small_programs import KINDS, LEVELS, Weights, backward
from torch.utils.flop_counter import FlopCounterMode

from apex_npu import amp, optimizers
from apex_npu.amp.session import current
from apex_npu.backends._torch_private import dispatch_modes
from apex_npu.debug.comparison.recorded import digest_of, load, on_host, samples_of
from apex_npu.debug.watching.stream import Stream


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = torch.nn.Linear(6, 4), torch.nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.out(self.fc(x).relu())


def row_of(recorded, kind, phase, module):
    (row,) = (r for r in recorded.rows if (r.kind, r.phase, r.module, r.result) == (kind, phase, module, 0))
    return row


def started(make=Small, level="O0", scale=64.0, optimizer=torch.optim.SGD):
    """A model, under amp unless ``scale`` is None, and a batch."""
    torch.manual_seed(3)
    model, x = make().to(DEVICE), torch.randn(5, 6).to(DEVICE)
    optimizer = optimizer(model.parameters(), lr=1.0)
    if scale is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    return model, optimizer, x


def iteration(path, scale=None, **options):
    """A step of ``Small``, whose loss is the sum of its outputs."""
    model, optimizer, x = started(scale=scale)
    values = [p.detach().cpu().double() for p in model.parameters()]
    with amp.debug.record(path, model, **options) as recorded:
        loss = model(x).sum()
        if scale:
            backward(loss, optimizer)
        else:
            loss.backward()
        optimizer.step()
    return recorded, x.cpu().double(), values


@pytest.mark.parametrize("scale", [None, 64.0])
def test_the_numbers_are_those_of_torch(scale, tmp_path):
    recorded, x, (weight, bias, out) = iteration(tmp_path / "a.pt", scale)
    hidden = x @ weight.T + bias
    after = hidden.relu()
    expected = {
        ("module", "forward", "fc"): hidden,
        ("operator", "forward", "out"): after @ out.T,
        ("operator", "forward", ""): after,
        ("module", "backward", "out"): torch.ones(5, 2),
        ("module", "backward", "fc"): (torch.ones(5, 2).double() @ out) * (hidden > 0),
        ("gradient", "after backward", "out.weight"): torch.ones(2, 5).double() @ after,
    }
    for key, value in expected.items():
        row, value = row_of(recorded, *key), value.double()
        assert row.shape == tuple(value.shape)
        torch.testing.assert_close(row.exact, value.flatten(), rtol=1e-5, atol=1e-5)
        for found, true in ((row.norm, value.norm()), (row.low, value.min()), (row.high, value.max())):
            assert found == pytest.approx(float(true), rel=1e-5, abs=1e-6)
        assert row.zeros == int((value == 0).sum())
        assert row.scale == ((scale or 1.0) if key[1] == "backward" else 1.0)  # a block has unscaled the gradients
    assert [(h.name, h.shape) for h in recorded.batch] == [("argument 0 of Small", (5, 6))]
    names = ["fc.weight", "fc.bias", "out.weight"]
    assert [held.name for held in recorded.weights] == names
    assert [row.module for row in recorded.rows if row.kind == "gradient"] == names
    for held, value in zip(recorded.weights, (weight, bias, out), strict=True):
        assert torch.equal(held.values.double(), value.flatten())  # before the step
    assert (recorded.level, recorded.scale) == (("O0", scale) if scale else ("", 1.0))
    assert recorded.device == DEVICE.type
    assert "aten::mul" not in [row.operator for row in recorded.rows]  # by the loss scale
    assert row_of(recorded, "operator", "forward", "").source == "return self.out(self.fc(x).relu())"


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Wrapping(torch.nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.inner, self.wrap = Small(), wrap

    def forward(self, x):
        return self.wrap(self.inner(x))


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: {"loss": None, "logits": y}, lambda out: out["logits"]),
        (Output, lambda out: out.logits),
        (lambda y: [{"a": (y,)}], lambda out: out[0]["a"][0]),
    ],
)
def test_results_of_modules_are_kept_in_containers(wrap, unwrap, tmp_path):
    model = Wrapping(wrap).to(DEVICE)
    with amp.debug.record(tmp_path / "a.pt", model) as recorded:
        unwrap(model(torch.ones(5, 6, device=DEVICE))).sum().backward()
    for phase in ("forward", "backward"):
        outer, inner = (row_of(recorded, "module", phase, name) for name in ("", "inner"))
        assert outer.norm == inner.norm > 0


def test_a_file_is_read_without_code(tmp_path):
    path = tmp_path / "a.pt"
    recorded, _, _ = iteration(path)
    assert torch.load(path, weights_only=True)["kind"] == "apex_npu.debug.record"
    found = load(path)
    assert len(found.rows) == len(recorded.rows) > 10
    assert all(torch.equal(a.values, b.values) for a, b in zip(found.rows, recorded.rows, strict=True))
    assert (found.batch, found.versions) == (recorded.batch, recorded.versions)


def test_samples_are_the_same_elements_of_each_tensor_of_a_size():
    values = torch.arange(1000.0)
    chosen = samples_of(values, 100)
    assert chosen.shape == (100,)
    assert torch.equal(samples_of(2 * values.view(10, 100), 100), 2 * chosen)
    assert torch.equal(samples_of(values.view(10, 100).t().contiguous().t(), 100), chosen)  # by indices, not by memory
    assert not torch.equal(chosen % 100, chosen % 100 * 0 + chosen[0] % 100)  # not a column
    assert torch.equal(samples_of(values, 1000), values)
    assert torch.equal(samples_of(values, None), values)


def test_how_many_elements_are_kept(tmp_path):
    few, _, _ = iteration(tmp_path / "a.pt", samples=3)
    every, _, _ = iteration(tmp_path / "b.pt", samples=None)
    assert {row.values.numel() for row in few.rows} <= {1, 3}
    assert all(row.values.numel() == math.prod(row.shape) for row in every.rows)
    assert [row.norm for row in few.rows] == [row.norm for row in every.rows]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [healthy.GPT, healthy.ResNet])
@pytest.mark.parametrize("options", [{}, {"combine_grad": True, "fuse_unscale": True}])
def test_nothing_changes(make, level, options, tmp_path):
    nothing_changes(
        lambda: set_up(make, level, **SKIPPED, **options),
        (0, 4),
        5,
        lambda model: amp.debug.record(tmp_path / "a.pt", model),
    )
    found = load(tmp_path / "a.pt")
    model = make()
    assert {name for row in found.rows if row.kind == "gradient" for name in row.module.split("=")} == {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    floating = {name for name, buffer in model.named_buffers() if buffer.dtype.is_floating_point}
    assert {row.module for row in found.rows if row.kind == "buffer"} == floating
    assert {row.phase for row in found.rows if row.kind == "module"} == {"forward", "backward"}


def test_an_exception_leaves_no_file(tmp_path):
    with pytest.raises(KeyError), amp.debug.record(tmp_path / "a.pt", Small().to(DEVICE)):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_other_modes_that_are_left_in_another_order(tmp_path):
    model, counter = Small().to(DEVICE), FlopCounterMode(display=False)
    context = amp.debug.record(tmp_path / "a.pt", model)
    recorded = context.__enter__()
    counter.__enter__()
    model(torch.ones(2, 6, device=DEVICE))
    context.__exit__(None, None, None)
    assert len(load(tmp_path / "a.pt").rows) == len(recorded.rows) > 3  # it has seen all of them
    counter.__exit__(None, None, None)
    assert dispatch_modes() == []

    context = amp.debug.record(tmp_path / "b.pt", model)
    with FlopCounterMode(display=False):
        context.__enter__()
    with pytest.raises(RuntimeError, match=r"'.*b.pt' is not written: a dispatch mode"):
        context.__exit__(None, None, None)
    assert dispatch_modes() == []
    assert not (tmp_path / "b.pt").exists()


def test_an_interrupt_while_it_begins_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    model, _ = set_up(healthy.LSTM, "O1")
    before = hooks_of_torch()
    monkeypatch.setattr(Stream, "attach", interrupt)
    with pytest.raises(KeyboardInterrupt), amp.debug.record(tmp_path / "a.pt", model):
        pass
    assert not current().observers
    assert hooks_of_torch() == before


def test_gradients_that_come_later_are_not_kept(tmp_path):
    model = Small().to(DEVICE)
    with amp.debug.record(tmp_path / "a.pt", model) as recorded:
        loss = model(torch.ones(2, 6, device=DEVICE)).sum()
    count = len(recorded.rows)
    loss.backward()  # hooks of its tensors are still there
    assert len(recorded.rows) == count


def test_leaves_of_no_model_are_of_the_batch(tmp_path):
    torch.manual_seed(2)
    model, teacher = Small().to(DEVICE), torch.nn.Linear(6, 2, bias=False).to(DEVICE)
    points = torch.randn(3, 6, device=DEVICE, requires_grad=True)  # its gradient is part of the loss
    with amp.debug.record(tmp_path / "a.pt", model) as recorded:
        out = model(points)
        (slope,) = torch.autograd.grad(out.sum(), points, create_graph=True)
        (slope.square().mean() + (out - teacher(points).detach()).square().mean()).backward()
    assert {held.digest for held in recorded.batch} == {digest_of(points), digest_of(teacher.weight)}
    assert "argument 0 of Small" in {held.name for held in recorded.batch}


def test_only_what_descends_from_the_scaled_loss_is_divided_by_the_scale(tmp_path):
    class Norm(torch.nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = torch.nn.Linear(6, 4), Norm()

        def forward(self, x):
            return self.norm(self.fc(x)).pow(3)

    def rows(scale):
        model, optimizer, x = started(Slow, scale=scale)
        with amp.debug.record(tmp_path / "a.pt", model) as recorded:
            loss = model(x).sum()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                (scaled_loss / 2).backward()
        amp.shutdown()
        return [row for row in recorded.rows if row.phase != "forward"]

    plain, scaled = rows(1.0), rows(1024.0)
    assert [row.operator for row in plain] == [row.operator for row in scaled]
    for a, b in zip(plain, scaled, strict=True):
        assert torch.equal(a.exact, b.exact), (a.module, a.operator)
        assert (a.norm, a.low, a.high) == (b.norm, b.low, b.high)
    powers = [row for row in scaled if row.operator == "aten::pow"]
    assert powers
    assert {row.scale for row in powers} == {1.0}  # of what forward has saved
    assert {row.scale for row in scaled} == {1.0, 1024.0}


def test_a_half_loss_is_scaled_unseen(tmp_path):
    def rows(scale):
        model, optimizer, x = started(level="O5", scale=scale)
        with amp.debug.record(tmp_path / "a.pt", model) as recorded:
            loss = model(x).to(torch.bfloat16).sum()
            backward(loss, optimizer)
        amp.shutdown()
        assert "aten::mul" not in [row.operator for row in recorded.rows]
        return recorded.rows

    for a, b in zip(rows(1.0), rows(64.0), strict=True):
        assert torch.equal(a.exact, b.exact), (a.phase, a.module, a.operator)


def test_gradients_with_a_block_and_without(tmp_path):
    (first, optimizer, x), second = started(scale=8.0), Small().to(DEVICE)
    with amp.debug.record(tmp_path / "a.pt", first, second) as recorded:
        backward(first(x).square().sum(), optimizer)
        second(x).square().sum().backward()
    found = {row.module: row for row in recorded.rows if row.kind == "gradient"}
    for i, model in enumerate((first, second)):
        for name, parameter in model.named_parameters():
            expected = parameter.grad.cpu().double().flatten()
            torch.testing.assert_close(found.pop(f"models[{i}].{name}").exact, expected)
    assert not found


def recorded_weight(path, level, kind, inputs, **options):
    """The row of the gradient of a weight, whose blocks have the gradients ``inputs``, at the loss scale 16."""
    make, given = KINDS[kind]
    model = Weights(1.0)
    optimizer = make(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0, **given)
    with amp.debug.record(path, model) as recorded:
        for x in inputs[:-1]:
            backward(model(torch.tensor(x, device=DEVICE)), optimizer, **options)
        backward(model(torch.tensor(inputs[-1], device=DEVICE)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    (row,) = (row for row in recorded.rows if row.kind == "gradient")
    return row


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_blocks_are_their_sums(kind, level, delays, tmp_path):
    inputs = [[1.0, 2.0, -4.0], [8.0, 0.5, 4.0], [16.0, 1.0, 1.0]]
    row = recorded_weight(tmp_path / "a.pt", level, kind, inputs, delay_unscale=delays)
    assert row.exact.tolist() == [25.0, 3.5, 1.0]
    assert (row.low, row.high, row.zeros) == (1.0, 25.0, 0)


@needs("inf")
@pytest.mark.filterwarnings("ignore:gradients have overflowed under the static loss scale")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_block_that_overflows(kind, tmp_path):
    row = recorded_weight(tmp_path / "a.pt", "O2", kind, [[1.0, 1.0, 1.0], [2.0, 6e4, 0.0]])
    assert row.exact.tolist() == [3.0, math.inf, 1.0]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_views_that_are_conjugated_or_negated_later(tmp_path):
    model = torch.nn.Linear(4, 3).to(torch.cfloat)
    x = torch.randn(2, 4, dtype=torch.cfloat)
    with amp.debug.record(tmp_path / "a.pt", model) as recorded:
        model(x.conj()).imag.square().sum().backward()
    assert recorded.left_out == {}
    assert [held.digest for held in recorded.batch] == [digest_of(x.conj_physical())]
    module = row_of(recorded, "module", "forward", "")
    torch.testing.assert_close(torch.view_as_complex(module.exact.view(-1, 2)), model(x.conj()).flatten().cdouble())
    assert torch.equal(samples_of(on_host(x.conj().imag), None), x.conj_physical().imag.flatten())


def test_the_default_device_is_not_that_of_samples(tmp_path):
    model, x = torch.nn.Linear(8, 4), torch.ones(2, 8)
    torch.set_default_device("meta")
    try:
        with amp.debug.record(tmp_path / "a.pt", model, samples=5) as recorded:
            model(x).square().sum().backward()
        assert not amp.debug.compare(tmp_path / "a.pt", tmp_path / "a.pt").differing
    finally:
        torch.set_default_device(None)
    assert {held.values.device.type for held in recorded.weights} == {"cpu"}
    assert torch.equal(recorded.weights[0].values, samples_of(model.weight, 5))
    assert recorded.left_out == {}


def test_compiled_models_are_noted(tmp_path):
    class Compiled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.compile(Small(), backend="eager")

        def forward(self, x):
            return self.one(x)

    own, plain = Small(), Small()
    own.compile(backend="eager")
    said = "torch.compile was off during the recording: compiled code ran eagerly"
    for model, notes in ((Compiled(), [said]), (own, [said]), (plain, [])):
        with amp.debug.record(tmp_path / "a.pt", model.to(DEVICE)):
            pass
        assert load(tmp_path / "a.pt").notes == notes


def test_recomputed_activations_have_a_phase_of_their_own(tmp_path):
    model, x = Small().to(DEVICE), torch.ones(2, 6, device=DEVICE, requires_grad=True)
    with amp.debug.record(tmp_path / "a.pt", model) as recorded:
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert row_of(recorded, "module", "recompute", "fc").norm == row_of(recorded, "module", "forward", "fc").norm


class Slope(torch.nn.Module):
    """The derivative of tanh, by a backward within forward."""

    def forward(self, x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(leaf.tanh().sum(), leaf)
        return x * slope


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_operators_of_torchs_own_modules(reentrant, tmp_path):
    layers = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.GELU(), Slope(), torch.nn.Linear(4, 3))
    model, optimizer, x = started(lambda: layers)
    x.requires_grad_()
    with amp.debug.record(tmp_path / "a.pt", model) as recorded:
        loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).square().sum()
        backward(loss, optimizer)
    rows = [row for row in recorded.rows if row.kind == "operator"]
    forward = {(row.module, row.operator): row for row in rows if row.phase == "forward"}
    again = [row for row in rows if row.phase == "recompute"]
    for row in again:
        assert torch.equal(row.exact, forward[row.module, row.operator].exact)
        assert row.scale == 1.0
    assert [row.module for row in again if row.operator in ("aten::addmm", "aten::gelu")][:2] == ["0", "1"]
    assert "aten::tanh_backward" not in {row.operator for row in again}  # of the backward within
    assert {row.operator for row in rows if row.phase == "backward"}.isdisjoint({"aten::addmm", "aten::gelu"})


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, optimizers.NpuFusedAdam])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_and_masters_that_a_script_measures_are_not_of_the_batch(level, optimizer, tmp_path):
    model, optimizer, x = started(Small, level, optimizer=optimizer)
    norms = []
    for i in range(2):
        optimizer.zero_grad()
        with amp.debug.record(tmp_path / f"{i}.pt", model) as recorded:
            backward(model(x).float().sum(), optimizer)
            norms += [tensor.norm() for p in amp.master_params(optimizer) for tensor in (p, p.grad)]
            optimizer.step()
        assert [held.name for held in recorded.batch] == ["argument 0 of Small"]
    assert all(norm.isfinite() for norm in norms)


def test_spectral_norm(tmp_path):
    model, _, x = started(lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 4)), "O1")
    state = copy.deepcopy(model.state_dict())
    plain = model(x)
    model.load_state_dict(state)
    with amp.debug.record(tmp_path / "a.pt", model):  # below which kernels call kernels without casts
        assert torch.equal(model(x), plain)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="gloo has tensors of the CPU")
def test_what_collectives_return_is_there_later(tmp_path):
    class Gathering(torch.nn.Linear):
        def forward(self, x):
            ops, group = torch.ops._c10d_functional, torch.distributed.group.WORLD.group_name
            return super().forward(ops.wait_tensor(ops.all_gather_into_tensor(x, 1, group)) * 2)

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, x = Gathering(6, 4), torch.randn(3, 6)
        with amp.debug.record(tmp_path / "a.pt", model) as recorded:
            model(x).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    forward = [row for row in recorded.rows if (row.kind, row.phase) == ("operator", "forward")]
    assert [row.operator for row in forward] == ["aten::mul", "aten::addmm", "aten::sum"]
    assert torch.equal(forward[0].values, 2 * x.flatten())


def test_bad_input(tmp_path):
    for samples in (0, True, 2.5):
        with pytest.raises(ValueError, match=f"samples must be a positive integer, .* got {samples}"):
            amp.debug.record(tmp_path / "a.pt", samples=samples)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*no'; make it"):
        amp.debug.record(tmp_path / "no" / "a.pt")
    assert not (tmp_path / "a.pt").exists()


def test_parameters_that_get_their_shape_in_the_iteration(tmp_path):
    model = torch.nn.LazyLinear(2).to(DEVICE)
    with amp.debug.record(tmp_path / "run.pt", model) as recorded:
        model(torch.ones(3, 4, device=DEVICE)).sum().backward()
    assert recorded.weights == []
    assert [row.module for row in recorded.rows if row.kind == "gradient"] == ["weight", "bias"]
