# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""accelerate's Accelerator with amp: its own loop gives what scale_loss gives, and finds its skipped steps."""

import copy
import functools
import math
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist
from devices import DEVICE, needs
from small_programs import backward
from torch import nn

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from apex_npu import amp, optimizers  # noqa: E402
from apex_npu.integrations.accelerate import ApexAccelerator  # noqa: E402

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# With an eps that float16 has, for O3.
OPTIMIZERS = {
    "torch": functools.partial(torch.optim.AdamW, eps=1e-4),
    "fused": functools.partial(optimizers.NpuFusedAdamW, eps=1e-4),
}
NOT_ON_CPU = pytest.mark.skipif(DEVICE.type == "cpu", reason="accelerate has no fp16 on a CPU")
PLACE = {"cpu": True} if DEVICE.type == "cpu" else {}


def _reset():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _fresh_state():
    yield
    _reset()


def apex(level="O1", *, steps=1, **options):
    options = {"verbosity": 0, **options}
    return ApexAccelerator(opt_level=level, amp_options=options, gradient_accumulation_steps=steps, **PLACE)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def batches(count, overflow_at=()):
    generator = torch.Generator().manual_seed(2)
    for i in range(count):
        x = torch.randn(8, 6, generator=generator)
        yield (x * math.inf if i in overflow_at else x).to(DEVICE)


def train(accelerator, model, optimizer, scheduler=None, *, xs, clip=None, seen=None):
    for x in xs:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).float().square().mean())
            if clip is not None and accelerator.sync_gradients:
                clip(accelerator, model)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        if seen is not None:
            seen.append((accelerator.optimizer_step_was_skipped, optimizer.param_groups[0]["lr"]))


def by_norm(accelerator, model):
    return accelerator.clip_grad_norm_(model.parameters(), 0.05)


def by_value(accelerator, model):
    accelerator.clip_grad_value_(model.parameters(), 0.01)


def weights(model):
    return torch.cat([v.detach().float().cpu().flatten() for v in model.state_dict().values()])


def distance(ours, theirs):
    return ((weights(ours) - weights(theirs)).norm() / weights(theirs).norm()).item()


def prepared(accelerator, kind="torch", lr=1e-2):
    model = network()
    return accelerator.prepare(model, OPTIMIZERS[kind](model.parameters(), lr=lr))


# ------------------------------------------------------------------------------------------------ what it computes


@pytest.mark.parametrize("clip", [None, by_norm, by_value])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_its_loop_gives_what_scale_loss_gives(level, kind, clip):
    """Accumulated over two batches, and clipped, bit for bit."""
    model = network().to(DEVICE)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1e-2)
    options = {} if level in ("O0", "O3", "O4", "O5") else {"dynamic_init_scale": 2.0**10}
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for i, x in enumerate(batches(6)):
        backward(model(x).float().square().mean() / 2, optimizer)
        if i % 2:
            if clip is by_norm:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.05)
            elif clip is by_value:
                nn.utils.clip_grad_value_(amp.master_params(optimizer), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    expected, expected_state = weights(model), amp.state_dict()
    amp.shutdown()

    accelerator = apex(level, steps=2, **options)
    model, optimizer = prepared(accelerator, kind)
    train(accelerator, model, optimizer, xs=batches(6), clip=clip)
    assert torch.equal(weights(model), expected)
    assert accelerator.scaler.state_dict() == expected_state


@pytest.mark.parametrize("clip", [None, by_norm])
def test_a_fused_optimizer_is_torchs(clip):
    found = []
    for kind in OPTIMIZERS:
        accelerator = Accelerator(**PLACE, gradient_accumulation_steps=2)
        model, optimizer = prepared(accelerator, kind)
        train(accelerator, model, optimizer, xs=batches(8), clip=clip)
        found.append(model)
    assert distance(*found) <= 1e-6


@pytest.mark.parametrize("clip", [None, by_norm])
@pytest.mark.parametrize(
    ("level", "precision"),
    [
        ("O4", "bf16"),
        ("O5", "bf16"),
        pytest.param("O1", "fp16", marks=NOT_ON_CPU),
        pytest.param("O2", "fp16", marks=NOT_ON_CPU),
    ],
)
def test_a_level_is_near_accelerates_own_mixed_precision(level, precision, clip):
    plain = Accelerator(**PLACE)
    model32, optimizer = prepared(plain)
    train(plain, model32, optimizer, xs=batches(8), clip=clip)
    _reset()
    theirs = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2, **PLACE)
    model, optimizer = prepared(theirs)
    train(theirs, model, optimizer, xs=batches(8), clip=clip)
    _reset()
    ours = apex(level, steps=2)
    our_model, optimizer = prepared(ours)
    train(ours, our_model, optimizer, xs=batches(8), clip=clip)
    assert distance(our_model, model) <= 5e-3
    assert distance(our_model, model32) > 1e-5


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_run_is_resumed_bit_for_bit(tmp_path, level, kind):
    options = {"loss_scale": "dynamic", "dynamic_init_scale": 2.0**8, "scale_window": 3}

    def start():
        accelerator = apex(level, **options)
        model = network()
        optimizer = OPTIMIZERS[kind](model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return accelerator, *accelerator.prepare(model, optimizer, scheduler)

    xs = list(batches(8))
    first = start()
    train(*first, xs=xs[:4])
    first[0].save_state(str(tmp_path))
    train(*first, xs=xs[4:])
    expected, scale = weights(first[1]), first[0].scaler.get_scale()
    amp.shutdown()
    _reset()
    again = start()
    again[0].load_state(str(tmp_path))
    train(*again, xs=xs[4:])
    assert torch.equal(weights(again[1]), expected)
    assert again[0].scaler.get_scale() == scale == 2.0**10


@needs("inf")
@pytest.mark.parametrize("clip", [None, by_norm])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_is_seen_and_holds_the_schedule_back(level, kind, clip):
    accelerator = apex(level)
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    train(accelerator, model, optimizer, scheduler, xs=batches(4, overflow_at=(1, 2)), clip=clip, seen=seen)
    assert seen == [(False, 0.5), (True, 0.5), (True, 0.5), (False, 0.25)]
    assert amp.last_step(optimizer).skipped_steps == 2
    assert accelerator.scaler.get_scale() == 2.0**14


# --------------------------------------------------------------------------------------- what else prepare is given


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_models_with_an_optimizer_each(level, together):
    """As those of a GAN, prepared by one call or by two, and stepped in turn."""

    def run(accelerator):
        models = [network(), network()]
        steppers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        if together:
            *models, first, second = accelerator.prepare(*models, *steppers)
            steppers = [first, second]
        else:
            pairs = [accelerator.prepare(m, o) for m, o in zip(models, steppers, strict=True)]
            models, steppers = [m for m, _ in pairs], [o for _, o in pairs]
        for x in batches(4):
            for model, optimizer in zip(models, steppers, strict=True):
                accelerator.backward(model(x).float().square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return models

    ours = run(apex(level))
    amp.shutdown()
    _reset()
    theirs = run(Accelerator(**PLACE))
    for a, b in zip(ours, theirs, strict=True):
        assert 1e-6 < distance(a, b) <= 5e-3


def test_what_was_initialized_before_is_left_as_it_is():
    model = network().to(DEVICE)
    optimizer = OPTIMIZERS["fused"](model.parameters(), lr=1e-2)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    accelerator = apex("O2")
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer, xs=batches(2))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert accelerator.scaler.get_scale() == 1.0


def test_a_model_alone_is_left_in_float32():
    model = apex("O2").prepare(network())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_again_after_free_memory(level):
    accelerator = apex(level)
    model, optimizer = prepared(accelerator, "fused")
    train(accelerator, model, optimizer, xs=batches(3))
    accelerator.free_memory()
    before = weights(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer, xs=batches(3))
    assert not torch.equal(weights(model), before)
    accelerator.free_memory()
    new = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weights(model)
    model, optimizer = accelerator.prepare(model, new)
    train(accelerator, model, optimizer, xs=batches(3))
    assert not torch.equal(weights(model), before)


def test_an_accelerator_that_exists_is_adopted():
    class Own(Accelerator):
        def greet(self):
            return "of its own"

    for kind in (Accelerator, Own):
        _reset()
        accelerator = kind(**PLACE)
        assert ApexAccelerator.adopt(accelerator, "O5", verbosity=0) is accelerator
        assert isinstance(accelerator, kind)
        assert ApexAccelerator.adopt(accelerator, "O2", verbosity=0) is accelerator
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, xs=batches(2), clip=by_norm)
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        amp.shutdown()
    assert accelerator.greet() == "of its own"


def test_copies_for_averages_are_float32():
    accelerator = apex("O2")
    model, optimizer = prepared(accelerator, "fused")
    train(accelerator, model, optimizer, xs=batches(2))
    copied = copy.deepcopy(accelerator.unwrap_model(model))
    assert torch.equal(weights(copied), weights(model))
    assert {p.dtype for p in copied.parameters()} == {torch.float32}


# ------------------------------------------------------------------------------------------------------- bad input


def test_mixed_precision_twice(monkeypatch):
    with pytest.raises(ValueError, match=r"mixed_precision='bf16' and opt_level='O2' are two kinds"):
        ApexAccelerator(mixed_precision="bf16", opt_level="O2", **PLACE)
    _reset()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch` sets it
    with pytest.raises(ValueError, match=r"mixed_precision='bf16' and opt_level='O1' are two kinds"):
        ApexAccelerator.adopt(Accelerator(**PLACE))


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_what_keeps_parameters_of_its_own(monkeypatch, kind):
    accelerator = Accelerator(**PLACE)
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: DistributedType[kind]))
    with pytest.raises(ValueError, match=rf"opt_level='O2' does not work with .*{kind}.*mixed_precision='bf16'"):
        ApexAccelerator.adopt(accelerator, "O2")
    assert type(accelerator) is Accelerator


def test_optimizers_that_cannot_be_prepared():
    accelerator, model = apex("O2"), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"prepare\(\) was given SGD without its model.*opt_level='O2'.*pass both"):
        accelerator.prepare(optimizer)
    with pytest.raises(ValueError, match=r"LBFGS needs a closure.*opt_level='O2'"):
        accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    other = network().to(DEVICE)
    initialized = torch.optim.SGD(other.parameters(), lr=0.1)
    amp.initialize(other, initialized, opt_level="O2", verbosity=0)
    with pytest.raises(ValueError, match=r"SGD and an optimizer that has been passed to amp.initialize: pass all"):
        accelerator.prepare(model, optimizer, other, initialized)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(ValueError, match=r"has prepared an optimizer already: call adopt before prepare"):
        ApexAccelerator.adopt(accelerator, "O1")


def test_closures_and_fuse_unscale():
    norms = []
    for fuse_unscale in (False, True):
        accelerator = apex("O2", fuse_unscale=fuse_unscale)
        model, optimizer = prepared(accelerator, "fused")
        accelerator.backward(model(next(batches(1))).square().mean())
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
    torch.testing.assert_close(norms[0], norms[1])
    with pytest.raises(RuntimeError, match=r"takes no closure"):
        optimizer.step(lambda: None)
    optimizer.step()
    assert amp.last_step(optimizer).applied


# --------------------------------------------------------------------------------------------------- two processes

WAYS = [f"{level}-{kind}" for level in ("O1", "O2", "O4", "O5") for kind in OPTIMIZERS]
if DEVICE.type != "cpu":  # accelerate shards on accelerators alone
    WAYS += [f"{level}-{kind}-sharded" for level in ("O1", "O2", "O5") for kind in OPTIMIZERS]


@pytest.fixture(scope="module")
def verdicts(made_once):
    """Of each way: what both processes have told."""
    return made_once("accelerate", lambda: processes.results_of(Path(__file__).with_name("accelerate_worker.py")))


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_stay_equal(verdicts, way):
    """Accumulated under no_sync, and clipped: like one process that has the batches of both."""
    (first, near), (second, _) = verdicts[way]
    assert first == second
    assert near <= 5e-3
