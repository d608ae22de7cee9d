# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""ignite's trainers with ``amp_mode="apex"``, unchanged."""

import subprocess
import sys

import pytest
import torch
from devices import DEVICE, START_SCRIPT
from small_programs import near
from torch import nn

import apex_npu
from apex_npu import amp, optimizers

pytest.importorskip(
    "ignite.engine", reason="ignite is not installed: make setup-hosts HOSTS=ignite", exc_type=ImportError
)

from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler


@pytest.fixture(autouse=True)
def named_apex():
    apex_npu.install_as_apex()
    yield
    apex_npu.uninstall_apex()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2)).to(DEVICE)


def batches(count=8):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, 6, generator=generator)
    return list(zip(inputs, inputs[..., :2].sin() + 0.5, strict=True))


def weights(model):
    return torch.cat([value.flatten().cpu() for value in model.state_dict().values()])


def loss_fn(output, target):
    return nn.functional.mse_loss(output.float(), target)


def start(kind, level=None, **options):
    """A model, its optimizer and a trainer, whose ``losses`` it fills."""
    model = network()
    optimizer = kind(model.parameters(), lr=0.05)
    if level:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        options["amp_mode"] = "apex"
    trainer = create_supervised_trainer(model, optimizer, loss_fn, device=DEVICE, **options)
    trainer.losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.losses.append(trainer.state.output))
    return model, optimizer, trainer


@pytest.mark.parametrize(("name", "theirs"), [("NpuFusedSGD", torch.optim.SGD), ("NpuFusedAdamW", torch.optim.AdamW)])
def test_optimizer_is_torchs(name, theirs):
    model, _, trainer = start(getattr(optimizers, name))
    other, _, expected = start(theirs)
    trainer.run(batches())
    expected.run(batches())
    assert near(trainer.losses, expected.losses, 1e-6)
    assert near(weights(model), weights(other), 1e-6)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_levels(level, accumulated):
    other, _, expected = start(torch.optim.SGD, gradient_accumulation_steps=accumulated)
    expected.run(batches())
    model, _, trainer = start(optimizers.NpuFusedSGD, level, gradient_accumulation_steps=accumulated)
    trainer.run(batches())
    within = 2e-3 if level in ("O1", "O2") else 1e-2
    assert near(trainer.losses, expected.losses, within)
    assert near(weights(model), weights(other), within)
    assert trainer.losses != expected.losses


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resumed_bit_for_bit(level, tmp_path):
    model, optimizer, trainer = start(optimizers.NpuFusedAdamW, level)
    kept = {"model": model, "optimizer": optimizer, "trainer": trainer, "amp": amp}
    saver = Checkpoint(kept, DiskSaver(str(tmp_path), require_empty=False))
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), saver)
    trainer.run(batches(), max_epochs=2)
    expected = weights(model)

    model, optimizer, trainer = start(optimizers.NpuFusedAdamW, level)
    path = tmp_path / saver.last_checkpoint
    kept = {"model": model, "optimizer": optimizer, "trainer": trainer, "amp": amp}
    Checkpoint.load_objects(kept, torch.load(path, weights_only=False))
    trainer.run(batches(), max_epochs=2)
    assert torch.equal(weights(model), expected)


def test_skipped_step_is_seen():
    model, optimizer, trainer = start(optimizers.NpuFusedSGD, "O2")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    @trainer.on(Events.ITERATION_COMPLETED)
    def hold_back():
        if amp.last_step(optimizer).applied:
            schedule.step()

    data = batches(4)
    data[1] = (data[1][0] * float("inf"), data[1][1])
    trainer.run(data)
    assert amp.last_step(optimizer).skipped_steps == 1
    assert optimizer.param_groups[0]["lr"] == 0.05 * 0.5**3
    assert weights(model).isfinite().all()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_average_of_a_copied_model(level):
    model, _, trainer = start(optimizers.NpuFusedSGD, level)
    average = EMAHandler(model, momentum=0.5)
    average.attach(trainer, event=Events.ITERATION_COMPLETED)
    expected = [weights(model).double()]

    @trainer.on(Events.ITERATION_COMPLETED)
    def follow():
        expected.append(expected[-1].lerp(weights(model).double(), 0.5))

    trainer.run(batches())
    # It reads the parameters, which are the rounded weights at O2.
    assert near(weights(average.ema_model).double(), expected[-1], 1e-6 if level == "O1" else 1e-3)
    assert not near(expected[0], expected[-1], 1e-2)


def test_evaluator():
    model, _, trainer = start(optimizers.NpuFusedSGD, "O2")
    trainer.run(batches())
    evaluator = create_supervised_evaluator(model, device=DEVICE)
    evaluator.run(batches(1))
    assert evaluator.state.output[0].isfinite().all()


SCRIPT = """
import torch
from apex import amp
from ignite.engine import create_supervised_trainer
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss, amp_mode="apex")
trainer.run([(torch.ones(2, 2), torch.zeros(2, 1))] * 4)
print(trainer.state.iteration, *amp.state_dict(), model.weight.dtype)
"""


@pytest.mark.skipif(bool(START_SCRIPT), reason="once is enough")
def test_scripts_run_unchanged(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "-m", "apex_npu", "run", str(script)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.split() == ["4", "loss_scaler0", "torch.float16"]
