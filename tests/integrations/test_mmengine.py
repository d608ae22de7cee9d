# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""MMEngine's Runner with the fused optimizers, and its ApexOptimWrapper."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devices import DEVICE, START_SCRIPT
from processes import run as run_processes
from small_programs import near

from apex_npu import amp, optimizers

pytest.importorskip(
    "mmengine.runner", reason="MMEngine is not installed: make setup-hosts HOSTS=mmengine", exc_type=ImportError
)

from integrations.mmengine_runner import run, weights
from mmengine.hooks import Hook
from mmengine.optim import build_optim_wrapper
from mmengine.registry import OPTIMIZERS

from apex_npu.integrations import mmengine as ours
from apex_npu.integrations.optimizer_names import optimizer_classes


def apex(level, name="NpuFusedSGD", **options):
    return {"type": "ApexOptimWrapper", "opt_level": level, "loss_scale": None, "verbosity": 0} | {
        "optimizer": {"type": name, "lr": 0.1},
        **options,
    }


def plain(name="SGD", **options):
    return {"type": "OptimWrapper", "optimizer": {"type": name, "lr": 0.1}, **options}


def test_optimizers_are_registered():
    for name, cls in optimizer_classes().items():
        assert OPTIMIZERS.get(name) is cls
    ours.register()
    assert OPTIMIZERS.get("NpuFusedSGD") is optimizers.NpuFusedSGD


@pytest.mark.parametrize(("name", "theirs"), [("NpuFusedSGD", "SGD"), ("NpuFusedAdamW", "AdamW")])
def test_optimizer_is_torchs(name, theirs, tmp_path):
    options = {"lr": 0.01} if theirs == "AdamW" else {"lr": 0.1, "momentum": 0.9}
    results = [
        weights(run(plain() | {"optimizer": {"type": kind, **options}}, tmp_path / kind).model)
        for kind in (name, theirs)
    ]
    assert near(*results, 1e-5)


OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"clip_grad": {"max_norm": 0.05}}, id="clipped"),
    pytest.param({"clip_grad": {"type": "value", "clip_value": 1e-3}}, id="clipped by value"),
    pytest.param({"accumulative_counts": 2}, id="accumulated"),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_levels(level, options, tmp_path):
    expected = weights(run(plain(**options), tmp_path / "plain").model)
    found = weights(run(apex(level, **options), tmp_path / "apex").model)
    assert near(found, expected, 2e-3 if level in ("O1", "O2") else 1e-2)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resumed_bit_for_bit(level, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # MMEngine 0.10 saves objects of its own
    whole = run(apex(level, "NpuFusedAdamW"), tmp_path / "whole", epochs=2)
    run(apex(level, "NpuFusedAdamW"), tmp_path / "part", epochs=1)
    amp.shutdown()
    resumed = run(apex(level, "NpuFusedAdamW"), tmp_path / "part", epochs=2, resume=True)
    assert resumed.epoch == whole.epoch == 2
    assert torch.equal(weights(resumed.model), weights(whole.model))


class Reports(Hook):
    def __init__(self):
        self.applied = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.model.factor = float("inf") if batch_idx == 1 else 1.0

    def after_train_iter(self, runner, *args, **kwargs):
        self.applied.append(amp.last_step(runner.optim_wrapper).applied)


def test_skipped_step_is_seen(tmp_path):
    reports = Reports()
    run(apex("O2", loss_scale="dynamic"), tmp_path, epochs=1, custom_hooks=[reports])
    assert reports.applied == [True, False, True, True]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_average_of_a_copied_model(level, tmp_path):
    seen = []

    class Record(Hook):
        priority = "LOWEST"

        def after_train_iter(self, runner, *args, **kwargs):
            seen.append(weights(runner.model).double())

    hooks = [{"type": "EMAHook", "momentum": 0.5}, Record()]
    runner = run(apex(level), tmp_path, epochs=1, custom_hooks=hooks)
    average = next(hook for hook in runner.hooks if type(hook).__name__ == "EMAHook").ema_model
    expected = seen[0]  # a copy of the first
    for value in seen[1:]:
        expected = expected.lerp(value, 0.5)
    found = weights(average.module).double()
    assert near(found, expected, 1e-6 if level == "O1" else 1e-3)
    assert not near(seen[-1], expected, 2e-3)


def test_a_closure_with_masters_is_called_once():
    model = torch.nn.Linear(2, 2).to(DEVICE)
    wrapper, calls = build_optim_wrapper(model, apex("O2")), []
    with wrapper.optim_context(model):
        before = model.weight.detach().clone()
        wrapper.backward(model(torch.ones(1, 2, device=DEVICE)).float().mean() / 4)  # no overflow of the first scale
        wrapper.step(closure=lambda: calls.append(1))
    assert len(calls) == 1
    assert not torch.equal(model.weight, before)


SCRIPT = """
import sys
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
import mmengine.runner
import torch
config = Config.fromfile(sys.argv[1])
wrapper = build_optim_wrapper(torch.nn.Linear(2, 2), config.optim_wrapper)
print(type(wrapper).__name__, type(wrapper.optimizer).__name__)
"""
CONFIG = """
custom_imports = dict(imports=["apex_npu.integrations.mmengine"])
optim_wrapper = dict(type="ApexOptimWrapper", opt_level="O2", optimizer=dict(type="NpuFusedAdamW", lr=1e-3))
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(START_SCRIPT), reason="once is enough")
@pytest.mark.parametrize("by", ["the config", "--host"])
def test_a_config(tmp_path, by):
    """MMEngine is imported before the integration in the first case."""
    script, config = tmp_path / "train.py", tmp_path / "config.py"
    script.write_text(SCRIPT)
    config.write_text(CONFIG if by == "the config" else CONFIG.replace("custom_imports", "unused"))
    options = ["-m", "apex_npu", "run", "--host", "mmengine"] if by == "--host" else []
    command = [sys.executable, "-W", "ignore", *options, str(script), str(config)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-2:] == ["ApexOptimWrapper", "NpuFusedAdamW"]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "npu", reason="two processes run on gloo")
def test_two_processes(tmp_path):
    worker = Path(__file__).with_name("mmengine_worker.py")
    run_processes(worker, "levels", "accumulated", FOLDER=str(tmp_path))
