# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How a script that says ``apex`` runs on the simulated device, and what public scripts name there."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devices import DEVICE
from known_faults.common import known_fault
from torch import nn

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    DEVICE.type != "npu" or "npu_simulator" not in sys.modules, reason="needs the simulated npu"
)

TARGETS = "targets have to be int64 there, and an npu takes int32"
BIAS = "a bias has to be of the input's dtype there, and an npu takes float32 beside float16"
NOT_FOR_CHILDREN = "children that torch.multiprocessing spawns do not know the simulated device"
NO_SOURCE = "what stands for torch's factories after transfer_to_npu has no source that can be scripted"
MISSING = "the simulated device has no such name"

SCRIPT = """
import sys, torch, torch_npu
from apex import amp

def train(rank):
    model = torch.nn.Linear(3, 1).npu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    print(f"rank {rank} has {model.weight.dtype} on {model.weight.device} with {sys.argv[1:]}", flush=True)

if __name__ == "__main__":
    train(0) if "--alone" in sys.argv else torch.multiprocessing.spawn(train, nprocs=2)
"""
ORDERS = {
    "simulator first": ["-m", "npu_simulator", "-m", "apex_npu", "run"],
    "apex first": ["-m", "apex_npu", "run", "-m", "npu_simulator"],
}


def run(folder, text, *command, arguments=()):
    """What a script prints."""
    script = folder / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *command, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_script_that_says_apex_runs(order, tmp_path):
    printed = run(tmp_path, SCRIPT, *ORDERS[order], arguments=["--alone"])
    assert "rank 0 has torch.float16 on npu:0 with ['--alone']" in printed


@pytest.mark.slow
@known_fault(NOT_FOR_CHILDREN)
@pytest.mark.parametrize("order", ORDERS)
def test_the_children_that_a_script_spawns_run(order, tmp_path):
    printed = run(tmp_path, SCRIPT, *ORDERS[order])
    for rank in (0, 1):
        assert f"rank {rank} has torch.float16 on npu:0" in printed


SCRIPTED = """
import torch, torch_npu
from torch_npu.contrib import transfer_to_npu

def count(x: torch.Tensor):
    return x + torch.arange(3, device=x.device)

print(torch.jit.script(count)(torch.ones(3).npu()).tolist())
"""


@pytest.mark.slow
@known_fault(NO_SOURCE)
def test_functions_are_scripted_after_transfer_to_npu(tmp_path):
    assert "[1.0, 2.0, 3.0]" in run(tmp_path, SCRIPTED, "-m", "npu_simulator")


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@known_fault(TARGETS, RuntimeError)
@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.functional.nll_loss])
def test_losses_take_targets_in_int32(loss):
    x, targets = rand(4, 5), torch.tensor([0, 4, 2, 1])
    found = loss(x.npu(), targets.int().npu())
    torch.testing.assert_close(found.cpu(), loss(x, targets))


@known_fault(BIAS, RuntimeError)
def test_a_linear_layer_takes_a_bias_in_float32_beside_halves():
    x, weight, bias = rand(4, 5), rand(3, 5), rand(3)
    found = nn.functional.linear(x.half().npu(), weight.half().npu(), bias.npu())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float().cpu(), nn.functional.linear(x, weight, bias), rtol=1e-2, atol=1e-2)


@known_fault(BIAS, RuntimeError)
def test_a_convolution_takes_a_bias_in_float32_beside_halves():
    x, weight, bias = rand(1, 2, 4, 4), rand(3, 2, 3, 3), rand(3)
    found = nn.functional.conv2d(x.half().npu(), weight.half().npu(), bias.npu())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float().cpu(), nn.functional.conv2d(x, weight, bias), rtol=1e-2, atol=2e-2)


X, Y = rand(2, 3, 4), rand(2, 4, 5)
# Of each operator: arguments, and what torch says to them.
OPERATORS = {
    "npu_linear": ((X[0], Y[0].T, rand(5)), nn.functional.linear),
    "fast_gelu": ((X,), lambda x: x * torch.sigmoid(1.702 * x)),
    "npu_fast_gelu": ((X,), lambda x: x * torch.sigmoid(1.702 * x)),
    "npu_confusion_transpose": (
        (X, (0, 2, 1), (2, 12), True),
        lambda x, order, shape, first: x.permute(order).reshape(shape),
    ),
    "npu_bmmV2": ((X, Y, []), lambda x, y, _: x @ y),
    "npu_softmax_cross_entropy_with_logits": (
        (X[0], Y[0][:3, :4].softmax(1)),
        lambda x, targets: nn.functional.cross_entropy(x, targets, reduction="none"),
    ),
    "npu_one_hot": (
        (torch.tensor([0, 2, 1], dtype=torch.int32), -1, 4),
        lambda x, _, depth: nn.functional.one_hot(x.long(), depth).float(),
    ),
}


@known_fault(MISSING, AttributeError)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_that_public_scripts_name(name):
    arguments, expected = OPERATORS[name]
    moved = [a.npu() if isinstance(a, torch.Tensor) else a for a in arguments]
    found = getattr(importlib.import_module("torch_npu"), name)(*moved)
    torch.testing.assert_close(found.cpu(), expected(*arguments), rtol=1e-3, atol=1e-3)


@known_fault(MISSING, ModuleNotFoundError)
@pytest.mark.parametrize("name", ["DropoutWithByteMask", "NpuPreGenDropout"])
def test_layers_that_public_scripts_name(name):
    cls = getattr(importlib.import_module("torch_npu.contrib.module"), name)
    x = torch.ones(64, 64).npu()
    assert torch.equal(cls(0.5).eval()(x), x)
    assert 0.9 < cls(0.0)(x).mean().item() < 1.1
