# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lightning's Trainer and Fabric with amp, beside Lightning's own mixed precision."""

import copy
import gc
import pickle
import types
import weakref
from pathlib import Path

import pytest
import torch
from devices import DEVICE
from processes import run as run_processes
from small_programs import near
from torch import nn

from apex_npu import amp, optimizers

pytest.importorskip(
    "lightning", reason="Lightning is not installed: make setup-hosts HOSTS=lightning", exc_type=ImportError
)
if DEVICE.type == "npu":
    pytest.skip("Lightning has no accelerator npu", allow_module_level=True)

from integrations.lightning_module import Module, fabric_run, fit, loader, network, weights
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from apex_npu.integrations.lightning import ApexAmpPrecision, ApexFabricPrecision

HALF = ["O1", "O2"]
BFLOAT16 = ["O4", "O5"]


def half_mixed():
    """Lightning's 16-mixed, which it takes on a CPU as a plugin alone."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"gradient_clip_val": 0.05}, id="clipped"),
    pytest.param({"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}, id="clipped by value"),
    pytest.param({"accumulate_grad_batches": 2}, id="accumulated"),
]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_optimizer_is_torchs(precision):
    def run(kind):
        options = {"plugins": half_mixed()} if precision == "16-mixed" else {"precision": precision}
        return fit(Module(kind), **options)

    (ours, module), (theirs, other) = run(optimizers.NpuFusedAdamW), run(torch.optim.AdamW)
    within = 1e-6 if precision == "32-true" else 1e-4
    assert near(ours, theirs, within)
    assert near(weights(module), weights(other), within)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("level", HALF + BFLOAT16)
def test_levels_beside_lightnings_own(level, options):
    own = {"plugins": half_mixed()} if level in HALF else {"precision": "bf16-mixed"}
    plain, _ = fit(Module(torch.optim.SGD), **options)
    expected, other = fit(Module(torch.optim.SGD), **own, **options)
    losses, module = fit(Module(optimizers.NpuFusedSGD), plugins=ApexAmpPrecision(level), **options)
    within = 2e-3 if level in HALF else 1e-2
    assert near(losses, expected, within)
    assert near(weights(module), weights(other), within)
    assert losses != plain


def test_o0_is_float32():
    assert fit(Module(torch.optim.SGD), plugins=ApexAmpPrecision("O0"))[0] == fit(Module(torch.optim.SGD))[0]


@pytest.mark.parametrize("level", HALF)
def test_resumed_bit_for_bit(level, tmp_path):
    def run(**options):
        module = Module(optimizers.NpuFusedAdamW, schedule=True)
        ckpt_path = options.pop("ckpt_path", None)
        trainer, _ = fit(
            module,
            ckpt_path=ckpt_path,
            batches=4,
            max_steps=-1,
            plugins=ApexAmpPrecision(level),
            give_trainer=True,
            **options,
        )
        return trainer, module

    _, module = run(max_epochs=2)
    trainer, first = run(max_epochs=1)
    path = str(tmp_path / "half.ckpt")
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    assert saved["ApexAmpPrecision"] == amp.state_dict()
    resumed, second = run(max_epochs=2, ckpt_path=path)
    assert resumed.global_step == 8
    assert torch.equal(weights(second), weights(module))
    assert not torch.equal(weights(second), weights(first))


class Overflow(Callback):
    """An infinite gradient in one step."""

    def __init__(self, at):
        self.at, self.rates, self.reports = at, [], []

    def on_before_backward(self, trainer, pl_module, loss):
        pl_module.factor = float("inf") if trainer.fit_loop.total_batch_idx == self.at else 1.0

    def on_train_batch_end(self, trainer, *args):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.reports.append(amp.last_step(trainer.optimizers[0]).applied)


@pytest.mark.parametrize("level", HALF)
def test_schedule_is_held_back_after_a_skipped_step(level, tmp_path):
    seen = Overflow(at=2)
    module = Module(optimizers.NpuFusedAdamW, schedule=True, overflow_at=2)
    trainer, _ = fit(module, plugins=ApexAmpPrecision(level), callbacks=[seen], max_steps=5, give_trainer=True)
    assert seen.reports == [True, True, False, True, True]
    assert seen.rates == pytest.approx([0.05 * 0.9**k for k in (1, 2, 2, 3, 4)])
    trainer.save_checkpoint(str(tmp_path / "last.ckpt"))
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["lr_schedulers"][0]["last_epoch"] == 4
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 2}


@pytest.mark.parametrize("level", HALF)
def test_trained_twice(level):
    """Each fit makes another optimizer."""
    module = Module(optimizers.NpuFusedSGD)
    fit(module, plugins=ApexAmpPrecision(level), max_steps=4)
    losses, _ = fit(module, plugins=ApexAmpPrecision(level), max_steps=4)
    other = Module(torch.optim.SGD)
    fit(other, max_steps=4)
    expected, _ = fit(other, max_steps=4)
    assert near(losses, expected, 2e-3)


class Manual(Module):
    """Two optimizers in turn, each for its part."""

    def __init__(self, kind):
        super().__init__(kind)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [self.kind(part.parameters(), lr=0.05) for part in (self.net[0], self.net[2])]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.losses.append(loss.item())


@pytest.mark.parametrize("level", HALF)
def test_manual_optimization(level):
    expected, _ = fit(Manual(torch.optim.SGD), max_steps=8)
    losses, _ = fit(Manual(optimizers.NpuFusedSGD), plugins=ApexAmpPrecision(level), max_steps=8)
    assert near(losses, expected, 2e-3)
    assert losses != expected


class NoLoss(Module):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("level", HALF)
def test_step_without_a_loss(level, accumulated):
    """The gradients of an earlier micro batch are stepped, as with Lightning's float32."""
    expected, _ = fit(NoLoss(torch.optim.SGD), accumulate_grad_batches=accumulated)
    losses, _ = fit(NoLoss(torch.optim.SGD), plugins=ApexAmpPrecision(level), accumulate_grad_batches=accumulated)
    assert len(losses) == len(expected)
    assert near(losses, expected, 2e-3)


@pytest.mark.parametrize("level", HALF)
def test_average_of_the_weights(level):
    """Lightning's callback, which copies the module and has the average in its place at the end."""
    average = WeightAveraging(use_buffers=False)
    masters = []

    class Record(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            masters.append(torch.cat([v.double().flatten() for v in pl_module.state_dict().values()]))

    module = Module(optimizers.NpuFusedSGD)
    fit(module, plugins=ApexAmpPrecision(level), callbacks=[Record(), average], max_steps=4)
    expected = torch.stack(masters).mean(0)
    found = torch.cat([v.double().flatten() for v in average._average_model.module.state_dict().values()])
    assert near(found, expected, 1e-6 if level == "O1" else 1e-3)
    assert not near(masters[-1], expected, 1e-3)
    assert near(torch.cat([v.double().flatten() for v in module.state_dict().values()]), expected, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled(level):
    expected, _ = fit(Module(torch.optim.SGD), plugins=ApexAmpPrecision(level), max_steps=4)
    module = Module(torch.optim.SGD)
    compiled = torch.compile(module, backend="aot_eager")
    fit(compiled, plugins=ApexAmpPrecision(level), max_steps=4)
    assert near(torch.tensor(module.losses), torch.tensor(expected), 2e-3)


def sharded(precision, kind):
    """What a strategy does first; these want a GPU before they do."""
    module = Module(torch.optim.SGD)
    module.trainer = types.SimpleNamespace(strategy=kind.__new__(kind))
    precision.convert_module(module)


BAD = [
    (lambda: ApexAmpPrecision("O2", fuse_unscale=True), "fuse_unscale=True keeps .* leave fuse_unscale out"),
    (lambda: ApexFabricPrecision("O2", combine_ddp=True), "combine_ddp=True .* DistributedDataParallel .* leave"),
    (lambda: Trainer(plugins=ApexAmpPrecision("O2"), precision="bf16-mixed"), "both"),
    (lambda: sharded(ApexAmpPrecision("O2"), DeepSpeedStrategy), "'O2' does not work with DeepSpeedStrategy"),
    (lambda: sharded(ApexAmpPrecision("O1"), FSDPStrategy), "'O1' does not work with FSDPStrategy.*'bf16-mixed' there"),
    (lambda: fit(Module(torch.optim.LBFGS), plugins=ApexAmpPrecision("O1")), "LBFGS calls its closure .*'O1'"),
    (lambda: fit(Module(torch.optim.SGD), plugins=ApexAmpPrecision("O9")), "optimization level 'O9'"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call, message):
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        call()


# ------------------------------------------------------------------------------------------------------------- Fabric


@pytest.mark.parametrize("level", HALF + BFLOAT16)
@pytest.mark.parametrize("clip", [None, {"max_norm": 0.05}, {"clip_val": 1e-3}])
def test_fabric(level, clip):
    own = {"precision": "bf16-mixed"} if level in BFLOAT16 else {}
    expected, other = fabric_run(torch.optim.SGD, clip=clip, **own)
    losses, model = fabric_run(optimizers.NpuFusedSGD, level, clip=clip)
    within = 2e-3 if level in HALF else 1e-2
    assert near(losses, expected, within)
    assert near(weights(model), weights(other), within)


def test_fabric_resumes_bit_for_bit(tmp_path):
    path = str(tmp_path / "fabric.ckpt")
    _, model = fabric_run(optimizers.NpuFusedAdamW, "O2", steps=8)
    fabric_run(optimizers.NpuFusedAdamW, "O2", steps=4, save=path)
    _, resumed = fabric_run(optimizers.NpuFusedAdamW, "O2", steps=8, load=path)
    assert torch.equal(weights(resumed), weights(model))


def trained_in_turn(level=None):
    """A generator and a discriminator, set up by a call each, as Fabric recommends."""
    precision = ApexFabricPrecision(level, dynamic_init_scale=1024.0) if level else None
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
    models, steppers = [network(), nn.Linear(2, 1)], []
    for i, model in enumerate(models):
        given = model, torch.optim.SGD(model.parameters(), lr=0.05)
        models[i], stepper = fabric.setup(*(precision.setup(fabric, *given) if precision else given))
        steppers.append(stepper)
    (generator, discriminator), losses = models, []
    for inputs, targets in loader():
        steppers[1].zero_grad()
        loss = discriminator(generator(inputs).detach()).square().mean() + (discriminator(targets) - 1).square().mean()
        fabric.backward(loss)
        steppers[1].step()
        steppers[0].zero_grad()
        fabric.backward((discriminator(generator(inputs)) - 1).square().mean())
        steppers[0].step()
        losses.append(loss.item())
    return losses, torch.cat([weights(model) for model in models])


@pytest.mark.parametrize("level", HALF + BFLOAT16)
def test_fabric_with_two_models(level):
    losses, values = trained_in_turn(level)
    expected, others = trained_in_turn()
    within = 2e-3 if level in HALF else 1e-2
    assert near(losses, expected, within)
    assert near(values, others, within)


def test_fabric_keeps_no_optimizer_alive():
    precision = ApexFabricPrecision("O2")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
    seen = []
    for _ in range(2):
        model = network()
        model, optimizer = fabric.setup(
            *precision.setup(fabric, model, optimizers.NpuFusedSGD(model.parameters(), lr=0.1))
        )
        fabric.backward(model(next(iter(loader()))[0]).sum())
        optimizer.step()
        seen.append(weakref.ref(optimizer.optimizer))
        del model, optimizer
        gc.collect()
    assert [reference() for reference in seen] == [None, None]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_a_plugin_has_the_copied_optimizers(copied):
    module = Module(torch.optim.SGD)
    former = ApexAmpPrecision("O2")
    fit(module, plugins=former)
    kept = former.optimizers
    precision, own = copied((former, kept))
    assert precision.optimizers == own != kept
    assert former.optimizers == kept


def test_fabric_without_setup():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=ApexFabricPrecision("O2"))
    model = network()
    model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"fabric.setup\(\*precision.setup\("):
        fabric.backward(model(next(iter(loader()))[0]).sum())


# ------------------------------------------------------------------------------------------------------ two processes


@pytest.mark.slow
def test_two_processes():
    run_processes(Path(__file__).with_name("lightning_worker.py"), "trainer", "accumulated", "sharded", "fabric")
