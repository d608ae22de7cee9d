# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""fastai's Learner with the fused optimizers, and with amp."""

from functools import partial

import pytest
import torch
from devices import DEVICE
from small_programs import near
from torch import nn

from apex_npu import amp, optimizers

pytest.importorskip(
    "fastai.basics", reason="fastai is not installed: make setup-hosts HOSTS=fastai", exc_type=ImportError
)

import fastai.callback.schedule  # noqa: F401
from fastai.basics import Callback, CancelBackwardException, DataLoader, DataLoaders, Learner, OptimWrapper, params
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientAccumulation, GradientClip

from apex_npu.integrations.fastai import ApexAmp, fused

HALVES = ["O1", "O2"]


class Losses(Callback):
    order = 100

    def __init__(self):
        super().__init__()
        self.history, self.cancelled = [], []

    def after_cancel_step(self):
        self.cancelled.append(self.learn.iter)

    def after_batch(self):
        if self.training:
            self.history.append(self.learn.loss.item())


def learner(opt_func, cbs=(), splitter=None, path=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 6, generator=generator)
    data = [(x, x[:2].sin() + 0.5) for x in inputs]
    loaders = DataLoaders(DataLoader(data, bs=8), DataLoader(data[:8], bs=8), device=DEVICE)
    options = {} if splitter is None else {"splitter": splitter}
    learn = Learner(
        loaders, model.to(DEVICE), nn.MSELoss(), opt_func=opt_func, cbs=[Losses(), *cbs], path=path, **options
    )
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ in ("ProgressCallback", "Recorder")])
    return learn


def weights(learn):
    return torch.cat([value.flatten().cpu() for value in learn.model.state_dict().values()])


def torchs(cls=torch.optim.SGD, **options):
    return partial(OptimWrapper, opt=cls, **options)


@pytest.mark.parametrize(("name", "theirs"), [("NpuFusedSGD", torch.optim.SGD), ("NpuFusedAdamW", torch.optim.AdamW)])
def test_optimizer_is_torchs(name, theirs):
    found, expected = learner(fused(name)), learner(torchs(theirs))
    for learn in (found, expected):
        learn.fit(1, lr=0.02, wd=0.1)
    assert isinstance(found.opt.opt, getattr(optimizers, name))
    assert near(found.losses.history, expected.losses.history, 1e-6)
    assert near(weights(found), weights(expected), 1e-6)


@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_one_cycle_groups_and_freezing(level):
    def splitter(model):
        return [params(model[0]), params(model[2])]

    found = learner(fused("NpuFusedAdamW"), [ApexAmp(level)] if level else [], splitter)
    expected = learner(torchs(torch.optim.AdamW), splitter=splitter)
    for learn in (found, expected):
        before = weights(learn)[: 6 * 32].clone()
        learn.freeze()
        learn.fit(1, lr=0.02)
        # Frozen parameters have no masters.
        assert near(weights(learn)[: 6 * 32], before, 1e-3 if level == "O2" else 0.0)
        learn.unfreeze()
        learn.fit_one_cycle(1, lr_max=slice(1e-3, 1e-2))
        assert not near(weights(learn)[: 6 * 32], before, 3e-3)
        before = weights(learn)[: 6 * 32].clone()
        learn.freeze()
        learn.fit(1, lr=0.02)
        assert torch.equal(weights(learn)[: 6 * 32], before)
    within = 5e-3 if level else 1e-5
    assert near(found.losses.history, expected.losses.history, within)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulated", [False, True])
def test_levels_beside_float32(level, clip, accumulated):
    more = [GradientAccumulation(16)] if accumulated else []
    expected = learner(torchs(), [*more, *([GradientClip(clip)] if clip else [])])
    expected.fit(1, lr=0.1)
    found = learner(fused("NpuFusedSGD"), [*more, ApexAmp(level, clip=clip)])
    found.fit(1, lr=0.1)
    within = 2e-3 if level in HALVES else 1e-2
    assert near(found.losses.history, expected.losses.history, within)
    assert near(weights(found), weights(expected), within)
    assert found.losses.history != expected.losses.history


@pytest.mark.parametrize("level", HALVES)
def test_gradient_clip_of_fastai(level):
    expected = learner(torchs(), [GradientClip(0.05)])
    expected.fit(1, lr=0.1)
    found = learner(torchs(), [ApexAmp(level), GradientClip(0.05)])
    found.fit(1, lr=0.1)
    assert near(weights(found), weights(expected), 2e-3)


@pytest.mark.parametrize("level", HALVES)
def test_resumed_bit_for_bit(level, tmp_path):
    whole = learner(fused(), [ApexAmp(level)], path=tmp_path)
    whole.fit(1, lr=0.02)
    whole.save("half", with_opt=True)
    scales = amp.state_dict()
    whole.fit(1, lr=0.02)

    resumed = learner(fused(), [ApexAmp(level)], path=tmp_path)
    resumed.load("half", with_opt=True)
    resumed.fit(0, lr=0.02)
    amp.load_state_dict(scales)
    resumed.fit(1, lr=0.02)
    assert torch.equal(weights(resumed), weights(whole))


class Overflow(Callback):
    order = 9

    def before_backward(self):
        if self.iter == 2:
            self.learn.loss_grad = self.learn.loss_grad * float("inf")


@pytest.mark.parametrize("level", HALVES)
def test_skipped_step_is_cancelled(level):
    learn = learner(fused("NpuFusedSGD"), [Overflow(), ApexAmp(level, clip=1.0)])
    learn.fit(1, lr=0.1)
    assert learn.losses.cancelled == [2]
    assert amp.last_step(learn.opt).skipped_steps == 1
    assert weights(learn).isfinite().all()


class CancelBackward(Callback):
    def __init__(self, order):
        super().__init__()
        self.order = order

    def before_backward(self):
        if self.iter % 3 == 0:
            raise CancelBackwardException


@pytest.mark.parametrize("level", HALVES)
@pytest.mark.parametrize("order", [ApexAmp.order - 1, ApexAmp.order + 1])
def test_cancelled_backward(level, order):
    found = learner(fused("NpuFusedSGD"), [CancelBackward(order), ApexAmp(level)])
    expected = learner(torchs(), [CancelBackward(order)])
    for learn in (found, expected):
        learn.fit(2, lr=0.1)
    assert near(found.losses.history, expected.losses.history, 0.02)


@pytest.mark.parametrize("level", HALVES)
def test_reset_opt_trains_the_model_again(level):
    learn = learner(fused("NpuFusedSGD"), [ApexAmp(level)])
    learn.fit(1, lr=0.1)
    learn.fit(1, lr=0.1, reset_opt=True)
    assert learn.losses.history[-1] < learn.losses.history[0]


def bad(cbs, opt_func=None, **options):
    learner(opt_func or torchs(), cbs).fit(1, lr=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fused("NpuFusedAdamX"), "no optimizer 'NpuFusedAdamX'; it has FusedAdagrad, FusedAdam, "),
        (lambda: bad([ApexAmp("O2"), MixedPrecision()]), "MixedPrecision .*opt_level='O2'.*learn.to_fp32"),
        (lambda: bad([ApexAmp("O1", fuse_unscale=True), GradientClip(1.0)], fused()), "GradientClip .*fuse_unscale"),
        (lambda: bad([ApexAmp("O1")], partial(OptimWrapper, opt=torch.optim.LBFGS)), "LBFGS needs a closure"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_optimizers_of_fastai_are_refused():
    from fastai.optimizer import Adam

    with pytest.raises(ValueError, match="pass opt_func=fused"):
        bad([ApexAmp("O1")], Adam)


def test_compiled():
    def run(compiled):
        learn = learner(fused("NpuFusedSGD"), [ApexAmp("O2")])
        learn.fit(0, lr=0.1)
        if compiled:
            learn.model.forward = torch.compile(learn.model.forward, backend="aot_eager")
        learn.fit(1, lr=0.1)
        return learn.losses.history

    assert near(run(True), run(False), 1e-3)
