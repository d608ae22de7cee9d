# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""timm: optimizers of its factory, its ApexScaler, its averages and its checkpoints."""

import copy
import subprocess
import sys

import pytest
import torch
from devices import DEVICE, START_SCRIPT
from torch import nn

from apex_npu import amp, optimizers

pytest.importorskip("timm.optim", reason="timm is not installed: make setup-hosts HOSTS=timm", exc_type=ImportError)

import timm.models
import timm.optim
import timm.utils
from timm.models import resume_checkpoint
from timm.utils import ModelEmaV3, dispatch_clip_grad

from apex_npu.integrations import timm as ours


@pytest.fixture(autouse=True)
def registered():
    ours.register()


@pytest.fixture
def apex_scaler(monkeypatch):
    """timm's own class, which looks for apex as timm is imported."""
    monkeypatch.setattr(timm.utils.cuda, "amp", amp, raising=False)
    return timm.utils.ApexScaler()


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 4)).to(
        DEVICE
    )


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        images = torch.randn(8, 3, 8, 8, generator=generator).to(DEVICE)
        yield images, torch.randint(0, 4, (8,), generator=generator).to(DEVICE)


def trained(model, optimizer, steps=5, step=None):
    """Losses."""
    losses = []
    for images, targets in batches(steps):
        loss = nn.functional.cross_entropy(model(images), targets)
        if step is None:
            loss.backward()
            optimizer.step()
        else:
            step(loss)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


SAME = [
    ("npufusedsgd", "sgd", {}),
    ("npufusedmomentum", "momentum", {}),
    ("npufusedadam", "adam", {}),
    ("npufusedadamw", "adamw", {}),
    ("npufusedadamp", "adamp", {}),
    ("npufusedadadelta", "adadelta", {}),
    ("npufusedrmsprop", "rmsprop", {}),
    ("npufusedrmsproptf", "rmsproptf", {}),
    ("fusedsgd", "sgd", {}),
    ("fusedadamw", "adamw", {}),
    ("npufusedadamw", "adamw", {"layer_decay": 0.75}),
]


@pytest.mark.parametrize(("name", "theirs", "options"), SAME)
def test_optimizers_of_the_factory(name, theirs, options):
    results = []
    for opt in (name, theirs):
        model = network()
        if options:
            model.group_matcher = lambda coarse=False: {"blocks": [(r"^(\d+)", None)]}
        optimizer = timm.optim.create_optimizer_v2(model, opt=opt, lr=1e-2, weight_decay=0.05, **options)
        results.append(trained(model, optimizer))
    assert isinstance(timm.optim.create_optimizer_v2(network(), opt=name, lr=0.1), optimizers.FusedOptimizer)
    torch.testing.assert_close(*map(torch.tensor, results), rtol=1e-5, atol=1e-5)


def test_muon_has_adamws_learning_rate_and_decay_for_all():
    model = network()
    optimizer = timm.optim.create_optimizer_v2(
        model, opt="npufusedmuon", lr=1e-2, weight_decay=0.05, momentum=0.9, betas=(0.8, 0.9), fallback_list=["4.*"]
    )
    of_muon = [(group["use_muon"], group["weight_decay"], group["lr"]) for group in optimizer.param_groups]
    assert sorted(set(of_muon)) == [(False, 0.0, 1e-2), (False, 0.05, 1e-2)]  # the only matrix is the head
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)
    optimizer = timm.optim.create_optimizer_v2(model, opt="npufusedmuon", lr=1e-2, weight_decay=0.05)
    (matrices,) = (group for group in optimizer.param_groups if group["use_muon"])
    assert (matrices["lr"], matrices["weight_decay"], matrices["adjust_lr_fn"]) == (1e-2, 0.05, "match_rms_adamw")
    assert matrices["params"] == [model[4].weight]
    losses = trained(model, optimizer, 12)
    assert losses[-1] < losses[0]


def test_registering_twice_and_lookahead(caplog):
    names = timm.optim.list_optimizers("*fused*")
    ours.register()
    assert timm.optim.list_optimizers("*fused*") == names
    assert not caplog.records
    for opt in names:
        optimizer = timm.optim.create_optimizer_v2(network(), opt=opt, lr=1e-3)
        assert isinstance(optimizer, optimizers.FusedOptimizer), opt
    model = network()
    losses = trained(model, timm.optim.create_optimizer_v2(model, opt="lookahead_npufusedadamw", lr=1e-2), 8)
    other = network()
    expected = trained(other, timm.optim.create_optimizer_v2(other, opt="lookahead_adamw", lr=1e-2), 8)
    torch.testing.assert_close(*map(torch.tensor, (losses, expected)), rtol=1e-5, atol=1e-5)


def test_unknown_name_is_timms_error():
    with pytest.raises(ValueError, match="npufusedadamx"):
        timm.optim.create_optimizer_v2(network(), opt="npufusedadamx")


def amp_run(scaler, level, steps=6, opt="npufusedadamw", **clip):
    model = network()
    optimizer = timm.optim.create_optimizer_v2(model, opt=opt, lr=1e-2)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = trained(
        model, optimizer, steps, lambda loss: scaler(loss, optimizer, parameters=model.parameters(), **clip)
    )
    weights = [value.clone() for value in model.state_dict().values()]
    amp.shutdown()
    return losses, weights


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_levels_beside_float32(apex_scaler, level):
    model = network()
    expected = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0), 6)
    losses, _ = amp_run(apex_scaler, level)
    half = 2e-3 if level in ("O1", "O2") else 2e-2
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=half, atol=half)
    assert losses != expected


@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_clipping(apex_scaler, mode):
    limit = {"norm": 0.1, "value": 1e-3, "agc": 1e-2}[mode]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(loss):
        loss.backward()
        dispatch_clip_grad(model.parameters(), limit, mode=mode)
        optimizer.step()

    expected = trained(model, optimizer, 6, step)
    model = network()
    optimizer = timm.optim.create_optimizer_v2(model, opt="npufusedsgd", lr=0.1, momentum=0.0, nesterov=False)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    losses = trained(model, optimizer, 6, lambda loss: apex_scaler(loss, optimizer, limit, mode))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=3e-3, atol=3e-3)


def test_accumulation(apex_scaler):
    """``need_update=False`` accumulates, as ``--grad-accum-steps`` does."""

    def run(level):
        model = network()
        optimizer = timm.optim.create_optimizer_v2(model, opt="npufusedsgd", lr=0.1)
        if level:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for i, (images, targets) in enumerate(batches(6)):
            loss = nn.functional.cross_entropy(model(images), targets) / 2
            if level:
                apex_scaler(loss, optimizer, need_update=i % 2 == 1)
            else:
                loss.backward()
                if i % 2 == 1:
                    optimizer.step()
            if i % 2 == 1:
                optimizer.zero_grad()
        return torch.cat([value.float().flatten() for value in model.state_dict().values()])

    expected = run(None)
    assert (run("O2") - expected).norm() < 5e-3 * expected.norm()


def test_skipped_step_is_seen(apex_scaler):
    model = network()
    optimizer = timm.optim.create_optimizer_v2(model, opt="npufusedadamw", lr=1e-2)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    before = copy.deepcopy(model.state_dict())
    images, targets = next(batches(1))
    apex_scaler(nn.functional.cross_entropy(model(images), targets) * float("inf"), optimizer)
    assert amp.last_step(optimizer).skipped
    assert all(
        torch.equal(value, before[name])
        for name, value in model.state_dict().items()
        if name in dict(model.named_parameters())
    )
    assert apex_scaler.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 0}}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resumed_by_timm_bit_for_bit(apex_scaler, level, tmp_path):
    def start():
        model = network()
        optimizer = timm.optim.create_optimizer_v2(model, opt="npufusedadamw", lr=1e-2)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        return model, optimizer

    def go_on(model, optimizer, steps):
        for images, targets in steps:
            apex_scaler(nn.functional.cross_entropy(model(images), targets), optimizer)
            optimizer.zero_grad()

    steps = list(batches(6))
    model, optimizer = start()
    go_on(model, optimizer, steps[:3])
    saver = timm.utils.CheckpointSaver(model, optimizer, amp_scaler=apex_scaler, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=1.0)
    go_on(model, optimizer, steps[3:])
    expected = {name: value.clone() for name, value in model.state_dict().items()}

    model, optimizer = start()
    resume_checkpoint(model, str(tmp_path / "last.pth.tar"), optimizer, apex_scaler, log_info=False)
    go_on(model, optimizer, steps[3:])
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_average_of_a_copied_model(apex_scaler, level):
    model = network()
    optimizer = timm.optim.create_optimizer_v2(model, opt="npufusedadamw", lr=1e-2)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    average = ModelEmaV3(model, decay=0.5)
    expected = {name: value.double() for name, value in model.state_dict().items()}
    for images, targets in batches(4):
        apex_scaler(nn.functional.cross_entropy(model(images), targets), optimizer)
        optimizer.zero_grad()
        average.update(model)
        for name, value in model.state_dict().items():
            expected[name] += 0.5 * (value.double() - expected[name])
    for name, value in average.module.named_parameters():
        # It reads the parameters of the model, which are the rounded weights at O2.
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-3, atol=1e-3 if level == "O2" else 1e-6)
    assert {value.dtype for value in average.module.parameters()} == {torch.float32}


def test_compiled():
    def run(compiled):
        model = network()
        optimizer = timm.optim.create_optimizer_v2(model, opt="npufusedadamw", lr=1e-2)
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
        call = torch.compile(model, backend="aot_eager") if compiled else model

        def step(loss):
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

        return trained(call, optimizer, 3, step)

    torch.testing.assert_close(torch.tensor(run(True)), torch.tensor(run(False)), rtol=1e-3, atol=1e-3)


SCRIPT = """
import sys
import timm
from timm.optim import create_optimizer_v2
from timm.utils import ApexScaler
from apex import amp
import torch
model = torch.nn.Linear(2, 2)
print(type(create_optimizer_v2(model, opt=sys.argv[1])).__name__, timm.utils.cuda.has_apex)
"""


@pytest.mark.skipif(bool(START_SCRIPT), reason="once is enough")
def test_scripts_run_with_the_host(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "-m", "apex_npu", "run", "--host", "timm", str(script), "npufusedadamw"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["NpuFusedAdamW", "True"]
