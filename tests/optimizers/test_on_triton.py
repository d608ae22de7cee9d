# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whole optimizers on Triton's kernels: those of cuda take the place of the CPU's."""

import itertools
import sys

import encoded_steps
import pytest
import torch
from lockstep import assert_equal_params, make_params
from optimizer_specs import SPECS
from small_programs import initialize
from triton_interpreter import INTERPRETED, mend

from apex_npu import amp
from apex_npu._extension import extension
from apex_npu.fusion import FlatGrads, flat_grads, fused_group, grad_slots
from apex_npu.fusion.graph_runs import GraphRuns, _DeviceStepCounts
from apex_npu.fusion.run import Runs, StepCounts
from apex_npu.ops import elementwise, encoded_calls, segmented
from apex_npu.ops.dispatch import Rule
from apex_npu.ops.triton_kernels import launches
from apex_npu.optimizers import FusedOptimizer, base, capture

OPS = (*elementwise.RULES, segmented.lamb_, segmented.segment_dot, segmented.segment_add_, segmented.norm)

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="on a GPU APEX_NPU_TEST_DEVICE=cuda runs all tests on it"),
    pytest.mark.skipif(extension is None, reason="without the extension the CPU has other segments"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|Warning only once):"),
]


@pytest.fixture(params=["listed", pytest.param("gathered", marks=pytest.mark.sweep)], autouse=True)
def where(request):
    """Where gradients are stepped: where autograd left them, or in their slots."""
    return request.param


@pytest.fixture
def launched(where, monkeypatch):
    """The names of the kernels that have run, on the CPU."""
    mend(monkeypatch)
    monkeypatch.setattr(FlatGrads, "gathers_all", where != "listed")
    monkeypatch.setattr(grad_slots, "WRITTEN_NUMEL", 0 if where == "listed" else sys.maxsize)
    if where == "listed":
        monkeypatch.setattr(flat_grads, "takes_addresses", lambda slot: True)
    names = []
    run = launches.Launch.run
    monkeypatch.setattr(
        launches.Launch, "run", lambda self, *given: (names.append(self.kernel.__name__), run(self, *given))
    )
    monkeypatch.setattr(base, "masks_writes", lambda device: True)  # a run's calls are prepared, as on cuda
    for op in OPS:
        monkeypatch.setitem(op.kernels, "cpu", op.kernels["cuda"])
    return names


# By turns whole steps are quick of the usual form of a rule, or of the capturable one.
CAPTURABLE = [spec for spec in SPECS if spec.cls.supports_capture]
QUICK_CAPTURABLE = CAPTURABLE[::2]


def quick(spec, is_quick):
    return pytest.param(spec, id=str(spec), marks=[] if is_quick else pytest.mark.sweep)


def params():
    return make_params([(5, 7), (7,), (1,), (6, 3, 3, 3), (2, 2500)], seed=1, device="cpu")


@pytest.mark.parametrize(
    ("spec", "variant"),
    [
        pytest.param(
            spec,
            variant,
            id=f"{spec}-{variant}",
            marks=[pytest.mark.sweep] if variant or spec in QUICK_CAPTURABLE else [],
        )
        for spec in SPECS
        for variant in range(min(len(spec.variants), 2 if "Adam" in spec.cls.__name__ else 3))
    ],
)
def test_optimizers_on_triton_step_like_their_references(spec, variant, launched):
    """One parameter joins later, and so has a step count, and a run, of its own."""
    options = spec.variants[variant]
    ours, theirs = params(), params()
    optimizer, reference = spec.cls(ours, **options), spec.reference(theirs, **options)
    for step in range(3):
        for index, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            late = index == 1 and step == 0
            q.grad = None if late else torch.randn(q.shape, generator=torch.Generator().manual_seed(9 * step + index))
            p.grad = None if late else q.grad.clone()
        optimizer.step()
        reference.step()
    assert_equal_params(ours, theirs, 1e-5)
    assert launched


@pytest.mark.parametrize("spec", [quick(spec, spec in QUICK_CAPTURABLE) for spec in CAPTURABLE])
def test_capturable_optimizers_on_triton_step_like_their_references(spec, launched, monkeypatch):
    """As on a GPU, counts are on the device, and so are the learning rate and overflow, of which step 1 has one."""
    monkeypatch.setattr(fused_group, "StepCounts", lambda count: _DeviceStepCounts(count, torch.device("cpu")))
    options = spec.variants[-1]
    ours, theirs = params(), params()
    reference = spec.reference(theirs, **options)
    lr = reference.param_groups[0]["lr"]
    optimizer = spec.cls(ours, **{**options, "lr": torch.tensor(lr)}, capturable=True)
    monkeypatch.setattr(optimizer, "skips_on", lambda: torch.device("cpu"))
    optimizer._step_supports_amp_scaling = True
    for step in range(4):
        optimizer.found_inf = torch.tensor([float(step == 1)])
        for index, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9 * step + index))
            p.grad = torch.full_like(q, torch.inf) if step == 1 else q.grad.clone()
        optimizer.step()
        if step != 1:
            reference.step()
        optimizer.param_groups[0]["lr"].mul_(0.5)
        reference.param_groups[0]["lr"] *= 0.5
    assert_equal_params(ours, theirs, 1e-5)
    assert ("step_numbers" in launched) == (str(spec) != "NpuFusedAdamP")  # whose arithmetic is torch's


QUICK = {("NpuFusedAdam", "float32"), ("NpuFusedLamb", "int8")}


def out_of_memory(monkeypatch, allowed):
    """Allocations of buffers and tables fail after ``allowed`` of them; returned are those left, in a list."""
    left = [allowed]

    def scarce(allocate):
        def wrapped(*args, **options):
            left[0] -= sys._getframe(1).f_globals["__name__"].startswith("apex_npu.")  # not of the interpreter
            if left[0] < 0:
                raise torch.OutOfMemoryError("not enough memory")
            return allocate(*args, **options)

        return wrapped

    for owner, name in [(torch, "zeros"), (torch, "cat"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, scarce(getattr(owner, name)))
    return left


@pytest.mark.parametrize(
    ("spec", "formats"),
    [
        pytest.param(spec, formats, id=f"{spec}-{name}", marks=[] if (str(spec), name) in QUICK else pytest.mark.sweep)
        for spec in SPECS
        for name, formats in {"float32": {}, "int8": {"state_dtype": "int8"}}.items()
        if str(spec) in {"NpuFusedAdam", "NpuFusedLamb"}
    ],
)
def test_memory_runs_out_before_anything_is_written(spec, formats, launched, monkeypatch):
    """Of two runs, the second one's tables are allocated, too, before the first one is stepped."""

    def make():
        ours = [torch.nn.Parameter(torch.ones(shape)) for shape in [(3, 5), (2, 2, 2)]]
        return ours, spec.cls([{"params": ours[:1]}, {"params": ours[1:], "lr": 0.03}], lr=0.05, **formats)

    def step(ours, optimizer):
        for index, p in enumerate(ours):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(index))
        optimizer.step()

    twins, reference = make()
    step(twins, reference)
    for allowed in itertools.count():
        ours, optimizer = make()
        before = [p.detach().clone() for p in ours]
        launched.clear()
        with monkeypatch.context() as patch:
            left = out_of_memory(patch, allowed)
            failed = None
            try:
                step(ours, optimizer)
            except torch.OutOfMemoryError as error:
                failed = str(error)
        if left[0] >= 0:
            break
        assert "cannot be repeated" not in failed
        assert not launched
        assert all(map(torch.equal, ours, before))
        step(ours, optimizer)
        assert all(map(torch.equal, ours, twins))
    assert launched
    assert allowed > 4  # buffers of parameters, gradients and states, and tables


@pytest.mark.parametrize("spec", [quick(spec, i % 5 == 0) for i, spec in enumerate(SPECS)])
def test_another_default_device(spec, launched):
    """What kernels of cuda are given is made where their operands are, or on the host."""
    ends = []
    for default in ("meta", "cpu"):
        ours = params()
        with torch.device(default):
            optimizer = spec.cls(ours, **spec.variants[0])
            for p in ours:
                p.grad = p.detach().clone()
            optimizer.step()
        ends.append(ours)
    for p, q in zip(*ends, strict=True):
        assert torch.equal(p, q)


def test_a_gradient_that_cannot_stay_is_copied_alone(where, launched):
    ours, theirs = params(), params()
    optimizer, reference = SPECS[0].cls(ours, lr=0.1), SPECS[0].reference(theirs, lr=0.1)
    for p, q in zip(ours, theirs, strict=True):
        q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(p.numel()))
        p.grad = q.grad.clone()
    ours[0].grad = ours[0].grad.t().contiguous().t()
    before = [p.grad for p in ours]
    optimizer.step(), reference.step()
    assert_equal_params(ours, theirs, 1e-5)
    assert [p.grad is grad for p, grad in zip(ours, before, strict=True)] == [False] + [where == "listed"] * 4


def test_a_clipped_norm_is_of_triton(where, launched):
    ours = params()
    optimizer = SPECS[0].cls(ours, lr=0.1)
    for p in ours:
        p.grad = torch.ones_like(p)
    norm = optimizer.clip_optimizer_grad_norm_fused(1.0)
    torch.testing.assert_close(norm, torch.tensor(float(sum(p.numel() for p in ours)) ** 0.5))
    assert launched == ["listed_square_parts" if where == "listed" else "square_parts", "root_of_parts"]


FOLDED = {"NpuFusedAdamW", "NpuFusedSGD", "NpuFusedLamb", "NpuFusedAdamP", "FusedNovoGrad"}


@pytest.mark.parametrize("level", ["O2", pytest.param("O5", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("clip", [pytest.param(False, marks=pytest.mark.sweep), True], ids=["", "clip"])
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=[] if str(spec) in {"NpuFusedAdamW", "NpuFusedLamb"} else [pytest.mark.sweep])
        for spec in SPECS
        if str(spec) in FOLDED
    ],
    ids=str,
)
def test_scaled_gradients_are_read_where_backward_has_left_them(spec, clip, level, where, launched, monkeypatch):
    """With ``fuse_unscale``, bit for bit as gradients that are gathered. The third gradients have an inf."""
    if where == "gathered":
        pytest.skip("nothing is read in place")

    def train(gathers_all):
        launched.clear()
        monkeypatch.setattr(FlatGrads, "gathers_all", gathers_all)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 3))
        model, optimizer = initialize(
            model,
            spec.cls(model.parameters(), **spec.variants[0]),
            level,
            loss_scale="dynamic",
            dynamic_init_scale=2.0**7,
            fuse_unscale=True,
        )
        applied = []
        for step in range(5):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
                if step == 2:
                    model[2].weight.grad[1, 7] = torch.inf
            assert {p.grad.dtype for p in model.parameters()} == {model[0].weight.dtype}
            if clip:
                optimizer.clip_optimizer_grad_norm_fused(0.05)
            optimizer.step()
            applied.append(amp.last_step(optimizer).applied)
            optimizer.zero_grad()
        assert applied == [True, True, False, True, True]
        result = [value.clone() for value in model.state_dict().values()]
        amp.shutdown()
        return result, set(launched)

    read, used = train(False)
    assert "listed_square_parts" in used
    torch.testing.assert_close(read, train(True)[0], rtol=0, atol=0)


ENCODED = [spec for spec in SPECS if getattr(spec.cls, "encodable_states", ())]
FORMATS = [
    pytest.param(torch.float32, {"state_dtype": torch.bfloat16}, id="bfloat16", marks=pytest.mark.sweep),
    pytest.param(torch.float32, {"state_dtype": "int8"}, id="int8"),
    pytest.param(
        torch.bfloat16, {"state_dtype": "int8", "stochastic_rounding": True}, id="stochastic", marks=pytest.mark.sweep
    ),
]


def stepped(spec, dtype, options, steps=2):
    """Parameters and states after some steps; one parameter joins later, and so has a run of its own."""
    held = [torch.nn.Parameter(p.detach().to(dtype)) for p in params()]
    optimizer = spec.cls(held, **options)
    for step in range(steps):
        for index, p in enumerate(held):
            generator = torch.Generator().manual_seed(9 * step + index)
            p.grad = None if index == 1 and step == 0 else torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    kept = optimizer.state_dict()["state"]
    return held, [value for state in kept.values() for value in state.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(("dtype", "formats"), FORMATS)
@pytest.mark.parametrize(
    "spec",
    # An elementwise rule, and one with norms; tests/ops/test_triton_formats.py has each in quick tests.
    [
        pytest.param(spec, marks=[] if spec.cls.__name__ in {"NpuFusedAdamW", "FusedLAMB"} else [pytest.mark.sweep])
        for spec in ENCODED
    ],
    ids=str,
)
def test_states_in_fewer_bytes(spec, dtype, formats, request, monkeypatch):
    """Those that plain torch decodes and encodes around the same kernels, bit for bit; parameters are the CPU's."""
    options = {**spec.variants[-1], **formats}
    if "stochastic_rounding" in formats and spec.cls.__name__ == "FusedMixedPrecisionLamb":
        pytest.skip("it has masters instead of stochastic rounding")
    of_cpu, _ = stepped(spec, dtype, options, steps=1)
    launched = request.getfixturevalue("launched")
    once, _ = stepped(spec, dtype, options, steps=1)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(once, of_cpu, rtol=16 * eps, atol=16 * eps)
    found = stepped(spec, dtype, options)
    assert launched
    for op in OPS:
        if isinstance(op, Rule):
            monkeypatch.setitem(op.kernels, "cpu", op.decoding(op.kernels["cuda"]))
    monkeypatch.setattr(encoded_calls, "_by_extension", lambda operand: False)
    wanted = stepped(spec, dtype, options)
    for got, want in zip(found, wanted, strict=True):
        assert all(map(torch.equal, got, want))


@pytest.fixture
def counted_there(launched, monkeypatch):
    """As on a GPU step counts are on the device, which is the CPU, and can be in the capture of a graph."""
    monkeypatch.setattr(fused_group, "new_runs", lambda count, device, capturable: (
        GraphRuns(count, device) if capturable else Runs(StepCounts(count))
    ))  # fmt: skip
    monkeypatch.setattr(capture, "check_groups", lambda *_: None)
    monkeypatch.setattr(FusedOptimizer, "skips_on", lambda self: torch.device("cpu") if self.capturable else None)
    return launched


@encoded_steps.cases([("SGD", "stochastic"), ("LAMB", "remainders")])
def test_replays_of_steps_on_encoded_states_have_the_bits_of_steps_that_the_host_counts(rule, form, counted_there):
    if rule == "AdamP":
        pytest.skip("it has no Triton kernel: on a CPU the extension encodes its states, and reads counts on the host")
    there = torch.device("cpu")
    expected = encoded_steps.Training(rule, form, there, capturable=False).run()
    assert "step_numbers" not in counted_there
    eager = encoded_steps.Training(rule, form, there, capturable=True).run()
    assert "step_numbers" in counted_there
    captured = encoded_steps.Training(rule, form, there, capturable=True).run_captured(encoded_steps.simulated)
    for found in (eager, captured):
        encoded_steps.assert_same_bits(found, expected)
        assert set(found.counts()) <= {encoded_steps.APPLIED}
