# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Names of Apex's that public scripts use, under the name ``apex``: each does what Apex's does."""

import collections.abc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devices import DEVICE, needs
from small_programs import vector
from torch import nn

import apex_npu

pytestmark = pytest.mark.device

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _as_apex():
    apex_npu.install_as_apex()
    yield
    apex_npu.uninstall_apex()


def named(module, name):
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("count", [1, 2])
def test_flatten_and_unflatten(count):
    tensors = [torch.arange(6.0, device=DEVICE).view(2, 3), torch.tensor([7.0, 8.0], device=DEVICE)][:count]
    flat = named("apex_C", "flatten")(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 8][: len(flat)]
    for found, expected in zip(named("apex_C", "unflatten")(flat, tensors), tensors, strict=True):
        assert torch.equal(found, expected)
    flat.zero_()  # a copy
    assert tensors[0].any()


@pytest.mark.parametrize("memory_efficient", [None, False, True])
def test_the_function_of_the_fused_layer_norm(memory_efficient):
    function = named("apex.normalization.fused_layer_norm", "FusedLayerNormAffineFunction")
    x, weight, bias = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((3, 4), (4,), (4,)))
    options = () if memory_efficient is None else (memory_efficient,)
    found = function.apply(x, weight, bias, (4,), 1e-5, *options)
    expected = nn.functional.layer_norm(x, (4,), weight, bias, 1e-5)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        *(torch.autograd.grad(y.square().sum(), (x, weight, bias)) for y in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_the_containers_of_amp_state():
    assert named("apex.amp._amp_state", "container_abcs").Mapping is collections.abc.Mapping


@pytest.mark.parametrize("bad", [False, pytest.param(True, marks=needs("inf"))])
def test_scaling_with_a_look_for_overflow(bad):
    scale_check_overflow = named("apex.amp.scaler", "scale_check_overflow_python")
    grad = vector(64.0, 128.0, torch.inf if bad else 32.0).half()
    master = vector(0.0, 0.0, 0.0)
    assert scale_check_overflow(grad, master, 1 / 64, True) is bad
    assert master.tolist() == ([0.0, 0.0, 0.0] if bad else [1.0, 2.0, 0.5])


@pytest.mark.parametrize("bad", [False, pytest.param(True, marks=needs("inf"))])
def test_adding_to_a_stashed_gradient_with_a_look_for_overflow(bad):
    axpby = named("apex.amp.scaler", "axpby_check_overflow_python")
    grad, stashed = vector(64.0, 128.0, torch.inf if bad else 32.0).half(), vector(1.0, 1.0, 1.0)
    assert axpby(grad, stashed, stashed, 1 / 64, 2.0, True) is bad
    assert stashed.tolist() == ([1.0, 1.0, 1.0] if bad else [3.0, 4.0, 2.5])


@pytest.mark.slow
def test_a_launcher_of_several_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nopen({str(tmp_path)!r} + '/' + '-'.join(sys.argv[1:]), 'w')\n")
    name = "apex.parallel.multiproc"
    run = f"import apex_npu, runpy; apex_npu.install_as_apex(); runpy.run_module({name!r}, None, '__main__')"
    command = [sys.executable, "-c", run, str(script), "--world-size", "2"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("--*")} == {f"--world-size-2---rank-{rank}" for rank in range(2)}
