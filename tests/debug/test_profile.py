# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ranges that profilers see, and the table of where the time of a step goes."""

import json
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from debug import healthy
from debug.test_watching import hooks_of_torch, set_up
from devices import DEVICE, SIMULATOR, needs_counts
from small_programs import backward

from apex_npu import amp, optimizers
from apex_npu.amp import amp_optimizer
from apex_npu.amp.session import settings
from apex_npu.debug.profiling import phases
from apex_npu.debug.profiling.phases import Event, Kernel, Steps, summarize
from apex_npu.debug.profiling.profile import advice_of

CPU_ONLY = [torch.profiler.ProfilerActivity.CPU]
needs_float16_scale = {"dynamic_init_scale": 128.0}


def iterate(model, optimizer, clip=True):
    optimizer.zero_grad()
    backward(model.loss(), optimizer)
    if clip:
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()


def set_up_gpt(optimizer=optimizers.NpuFusedAdam, level="O2", steps=2, **options):
    model, optimizer = set_up(healthy.GPT, level, optimizer, **{**needs_float16_scale, **options})
    for _ in range(steps):
        iterate(model, optimizer)
    return model, optimizer


def ranges_of(path):
    """The ranges of a trace: name, begin, end; those of operators are left out."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = [e for e in events if e.get("cat") == "user_annotation"]
    return sorted((e["ts"], -e["dur"], e["name"]) for e in found if "Optimizer.step" in e["name"] or "." in e["name"])


def nested(ranges):
    """Name → names of the ranges around it, outermost first."""
    around, open_ones = {}, []
    for begin, minus, name in ranges:
        while open_ones and open_ones[-1][0] < begin - minus - 1:
            open_ones.pop()
        around[name] = tuple(outer for _, outer in open_ones)
        open_ones.append((begin - minus, name))
    return around


IN_A_STEP = {
    "amp.forward": (),
    "amp.scale_up": (),
    "amp.backward": (),
    "amp.unscale_and_check": (),
    "amp.wait": ("amp.unscale_and_check",),
    "amp.clip": (),
    "amp.copy_masters": (),
}


def in_a_step(optimizer):
    """Remainders are no copies of parameters."""
    copies = DEVICE.type == "npu" or not isinstance(optimizer, optimizers.NpuFusedAdam)
    return {name: outer for name, outer in IN_A_STEP.items() if copies or name != "amp.copy_masters"}


@pytest.mark.parametrize("optimizer", [optimizers.NpuFusedAdam, torch.optim.Adam])
def test_each_range_is_in_the_trace_once_a_step(optimizer, tmp_path):
    model, optimizer = set_up_gpt(optimizer)
    before = hooks_of_torch(), amp_optimizer.AmpOptimizerMixin.step
    with amp.debug.profile(steps=2, trace=tmp_path / "traces") as p:
        for _ in range(3):
            iterate(model, optimizer)
            p.step()
    assert (hooks_of_torch(), amp_optimizer.AmpOptimizerMixin.step) == before
    assert settings.labels is None
    (trace,) = (tmp_path / "traces").glob("rank0.*.pt.trace.json")
    ranges = ranges_of(trace)
    cls = type(optimizer).__name__
    expected = {**in_a_step(optimizer), f"Optimizer.step#{cls}.step": (), f"Optimizer.zero_grad#{cls}.zero_grad": ()}
    assert Counter(name for _, _, name in ranges) == dict.fromkeys(expected, 2)
    assert nested(ranges) == expected
    assert sum(phase.share for phase in p.phases) == pytest.approx(100.0, abs=1.0)
    assert {phase.name for phase in p.phases} == {*expected, phases.BEFORE_FORWARD, phases.ELSEWHERE}


@needs_counts("stand_in_counts")
@pytest.mark.parametrize("options", [{"combine_grad": True}, {}])
def test_waits_and_copies_are_those_of_the_device(options):
    model, optimizer = set_up_gpt(**options)
    with amp.debug.profile(steps=2) as p, SIMULATOR.count() as counts:
        for _ in range(2):
            iterate(model, optimizer)
            float(torch.ones(3, device=DEVICE).sum())
            torch.arange(4).to(DEVICE)[torch.tensor([True, False, True, False]).to(DEVICE)]
            p.step()
    assert sum(phase.waits for phase in p.phases) * 2 == counts.syncs
    # A number that is read is a copy to the host for the device, and a wait in the table.
    assert sum(phase.copies for phase in p.phases) * 2 == counts.h2d
    (wait,) = [phase for phase in p.phases if phase.name == "amp.wait"]
    assert wait.waits == 1


@needs_counts("stand_in_counts")
def test_an_iteration_without_a_profiler_is_as_before():
    def counted(context):
        model, optimizer = set_up_gpt(combine_grad=True)
        with context:
            iterate(model, optimizer)
        with SIMULATOR.count() as counts:
            iterate(model, optimizer)
        amp.shutdown()
        return counts.launches, counts.syncs, counts.bytes

    assert counted(amp.debug.profile(steps=1)) == counted(nullcontext())


def test_another_profiler_sees_the_ranges_from_its_first_block_on():
    model, optimizer = set_up_gpt()
    with torch.profiler.profile(activities=CPU_ONLY) as p:
        for _ in range(2):
            iterate(model, optimizer)
    counts = Counter(event.name for event in p.events() if event.name.startswith("amp."))
    assert counts == {**dict.fromkeys(in_a_step(optimizer), 2), "amp.forward": 1}
    iterate(model, optimizer)  # whose block finds no profiler
    assert settings.labels is None


@pytest.mark.parametrize("end", ["shutdown", "forward"])
def test_nothing_stays_where_no_block_follows_another_profiler(end):
    before = hooks_of_torch()
    model, optimizer = set_up_gpt(steps=1)
    with torch.profiler.profile(activities=CPU_ONLY):
        iterate(model, optimizer)
    assert settings.labels is not None
    if end == "shutdown":
        amp.shutdown()
    else:
        with torch.no_grad():
            model.loss()
    assert settings.labels is None
    assert hooks_of_torch() == before


def labels_of(run):
    with torch.profiler.profile(activities=CPU_ONLY) as p, amp.debug.profiler_ranges():
        run()
    return [event.name for event in p.events() if event.name.startswith("amp.")]


def test_ranges_of_what_is_rare():
    torch.manual_seed(0)
    model = healthy.LSTM().to(DEVICE)
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O1", loss_scale="dynamic", dynamic_init_scale=128.0, verbosity=0
    )
    assert labels_of(lambda: iterate(model, optimizer, clip=False)).count("amp.fuse") == 1
    assert "amp.fuse" not in labels_of(lambda: iterate(model, optimizer, clip=False))
    assert "amp.copy_masters" not in labels_of(lambda: iterate(model, optimizer))  # O1 has none

    def overflow():
        backward(model.loss() * float("inf"), optimizer)
        optimizer.step()

    assert labels_of(overflow).count("amp.skip") == 1
    assert labels_of(lambda: optimizer.clip_optimizer_grad_norm_fused(1.0)).count("amp.clip") == 1

    def watched():
        with amp.debug.find_overflow(model):
            iterate(model, optimizer)

    assert "amp.watch" in labels_of(watched)


def clipping():
    """What the wrapper of torch's function calls."""
    cells = torch.nn.utils.clip_grad_norm_.__closure__
    return next(c.cell_contents for c in cells if getattr(c.cell_contents, "__name__", "") == "clip_grad_norm_")


@pytest.mark.parametrize("optimizer", [optimizers.NpuFusedAdam, torch.optim.Adam])
def test_sessions_may_begin_and_end_while_there_are_ranges(optimizer):
    before = clipping()
    with amp.debug.profiler_ranges():
        model, optimizer = set_up_gpt(optimizer, steps=1)
    assert clipping() is not before  # amp's, which the end of the ranges has left
    assert labels_of(lambda: iterate(model, optimizer)).count("amp.clip") == 1
    with amp.debug.profiler_ranges():
        amp.shutdown()
    assert clipping() is before


@pytest.mark.parametrize("options", [{}, {"fuse_unscale": True}])
def test_amp_clips_in_one_range(options):
    model, optimizer = set_up_gpt(steps=0, combine_grad=True, **options)

    def clip():
        iterate(model, optimizer, clip=False)
        backward(model.loss(), optimizer)
        optimizer.clip_optimizer_grad_norm_fused(1.0)

    assert labels_of(clip).count("amp.clip") == 1


def test_an_exception_closes_its_ranges():
    model, optimizer = set_up_gpt(steps=1)

    def fail():
        with pytest.raises(KeyError), amp.scale_loss(model.loss(), optimizer):
            raise KeyError
        with pytest.raises((TypeError, RuntimeError)):
            model("no tensor")
        iterate(model, optimizer)

    assert labels_of(fail).count("amp.forward") == 3
    iterate(model, optimizer)
    assert settings.labels is None


@pytest.mark.skipif(DEVICE.type != "cpu", reason="gloo has tensors of the CPU")
def test_a_range_for_each_bucket():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, optimizer = set_up_gpt(level="O1", combine_grad=True, combine_ddp=True)
        sent = [name for name in labels_of(lambda: iterate(model, optimizer)) if "all_reduce" in name]
        assert sorted(sent) == ["amp.all_reduce", "amp.all_reduce[0]"]
    finally:
        amp.shutdown()
        dist.destroy_process_group()


def step_of(*events, name="ProfilerStep#0", begin=0.0, end=1000.0):
    return [Event(name, begin, end), *events]


def test_how_the_time_is_shared_out():
    events = step_of(
        Event("aten::to", 10, 90, outermost=True, own=80),
        Event("Optimizer.zero_grad#A", 100, 150),
        Event("amp.forward", 200, 500),
        Event("aten::linear", 210, 400, outermost=True, own=90),
        Event("aten::addmm", 220, 320, own=100),
        Event("amp.unscale_and_check", 600, 700),
        Event("amp.wait", 650, 690),
        Event("aten::_local_scalar_dense", 660, 680, outermost=True, own=20, waits=True),
        Event("aten::mul", 620, 630, thread=7, outermost=True, own=10),
        Event("autograd::engine::evaluate_function: MulBackward0", 610, 640, thread=7, own=1000),
    )
    found = summarize(events)
    shares = {
        phases.BEFORE_FORWARD: 15,
        "Optimizer.zero_grad#A": 5,
        "amp.forward": 30,
        phases.ELSEWHERE: 40,
        "amp.unscale_and_check": 6,
        "amp.wait": 4,
    }
    assert [p.name for p in found.phases] == list(shares)
    assert {p.name: p.share for p in found.phases} == pytest.approx(shares)
    assert {p.name: p.ms for p in found.phases} == pytest.approx({name: s / 100 for name, s in shares.items()})
    assert [p.operators for p in found.phases] == [1, 0, 1, 0, 1, 1]
    assert [(o.name, o.ms, o.calls) for o in found.operators[:2]] == [
        ("aten::addmm", 0.1, 1),
        ("aten::linear", 0.09, 1),
    ]
    assert (found.phase("amp.wait").waits, found.phase("amp.wait").waits_ms) == (1, 0.02)
    assert found.idle is None


def test_what_comes_before_each_forward():
    events = step_of(
        Event("amp.forward", 100, 150),  # of a validation, or of another loss
        Event("Optimizer.zero_grad#A", 350, 360),
        Event("amp.forward", 400, 450),
        Event("amp.backward", 460, 500),
        Event("amp.all_reduce[0]", 470, 480),
        Event("amp.forward", 700, 750),  # accumulation
        Event("amp.backward", 760, 800),
        Event("Optimizer.step#A", 810, 900),
    )
    found = summarize(events)
    shares = {p.name: p.share for p in found.phases}
    assert shares[phases.BEFORE_FORWARD] == pytest.approx(10 + 20 + 4 + 20)
    assert shares[phases.ELSEWHERE] == pytest.approx(1 + 1 + 1 + 10)
    assert sum(shares.values()) == pytest.approx(100)


def test_several_steps_are_averaged_and_kernels_count_where_they_are_launched():
    events = step_of(Event("amp.forward", 0, 400)) + step_of(
        Event("amp.forward", 1000, 1200), name="ProfilerStep#1", begin=1000.0, end=3000.0
    )
    kernels = [
        Kernel("gemm", launched=100, begin=500, end=700),  # after forward has returned
        Kernel("gemm", launched=110, begin=600, end=800),  # on another stream
        Kernel("add", launched=1100, begin=1500, end=2700),
    ]
    found = summarize(events, kernels)
    assert (found.count, found.ms) == (2, 1.5)
    forward, elsewhere = found.phases
    assert (forward.ms, forward.share) == pytest.approx((0.3, 20.0))
    assert (forward.kernels, forward.device_ms) == (1.5, 0.8)
    assert (elsewhere.kernels, elsewhere.share) == (0, 80.0)
    assert found.idle == pytest.approx(50.0)
    assert summarize(events, kernels, complete=1).count == 1


@pytest.mark.parametrize(
    ("phase", "idle", "said"),
    [
        ({"name": phases.BEFORE_FORWARD, "share": 40.0}, None, "num_workers"),
        ({"name": phases.ELSEWHERE, "share": 40.0}, None, "40 % of a step is elsewhere, in no phase of amp: the loss"),
        ({"name": "Optimizer.step#Adam.step", "share": 30.0, "operators": 810.0}, None, "810 operators in"),
        ({"name": "amp.forward", "share": 50.0, "waits": 3.0, "waits_ms": 2.0}, None, "3 waits for the device"),
        ({"name": "amp.forward", "share": 50.0, "waits": 3.0, "waits_ms": 0.2}, 60.0, "computes nothing for 60 %"),
        ({"name": "amp.forward", "share": 90.0, "operators": 810.0}, 2.0, "nothing stands out; amp.forward takes 90"),
        ({"name": "Optimizer.step#Fused.step", "share": 90.0, "operators": 3.0}, None, "nothing stands out"),
    ],
)
def test_advice(phase, idle, said):
    assert said in advice_of(Steps(1, 10.0, [phases.Phase(**phase)], idle=idle))


def test_the_table():
    model, optimizer = set_up_gpt()
    p = amp.debug.profile(steps=1)
    assert str(p) == "nothing was recorded yet"
    with p:
        iterate(model, optimizer)
        p.step()
    lines = str(p).splitlines()
    assert lines[0].startswith("1 step of ")
    of_a_gpu = " kernels device ms" if DEVICE.type == "cuda" else ""
    assert " ".join(lines[2].split()) == "phase ms share operators copies waits" + of_a_gpu
    assert lines[-1].startswith("advice: ")
    assert len(lines) - lines.index(next(line for line in lines if line.startswith("operator "))) == 1 + 10 + 2
    (total,) = [line.split() for line in lines if line.startswith("all ")]
    assert total[2:4] == ["100.0", "%"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps must be a positive integer, got 0"),
        ({"steps": True}, ValueError, "steps must be a positive integer, got True"),
        ({"steps": "3"}, ValueError, "steps must be a positive integer, got '3'"),
        ({"trace": __file__}, FileExistsError, "trace must be a folder"),
        ({"trace": __file__ + "/below"}, NotADirectoryError, "trace must be a folder"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        amp.debug.profile(**arguments)


def test_a_profiler_that_is_on_already():
    with torch.profiler.profile(activities=CPU_ONLY):  # noqa: SIM117
        with pytest.raises(RuntimeError, match="entered while another profiler is on"), amp.debug.profile():
            pass
    assert settings.labels is None
