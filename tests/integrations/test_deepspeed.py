# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""DeepSpeed's engine, at each stage of ZeRO, with the fused optimizers. One process on the CPU."""

from pathlib import Path

import pytest
from devices import DEVICE
from processes import run as run_processes

pytest.importorskip(
    "deepspeed", reason="DeepSpeed is not installed: make setup-hosts HOSTS=deepspeed", exc_type=ImportError
)
if DEVICE.type == "npu":
    pytest.skip("DeepSpeed's accelerator npu needs an NPU", allow_module_level=True)

from deepspeed.runtime.zero import utils

from apex_npu import optimizers
from apex_npu.integrations import deepspeed as ours


@pytest.fixture
def registry(monkeypatch):
    supported = list(utils.ZERO_SUPPORTED_OPTIMIZERS)
    monkeypatch.setattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", supported)
    return supported


def test_registered_are_those_that_treat_each_element_by_itself(registry):
    before = len(registry)
    ours.register()
    added = registry[before:]
    ours.register()
    assert registry[before:] == added
    assert optimizers.NpuFusedAdamW in added
    assert not {
        optimizers.NpuFusedLamb,
        optimizers.FusedLAMB,
        optimizers.FusedNovoGrad,
        optimizers.NpuFusedAdamP,
    } & set(added)


@pytest.mark.slow
def test_stages_of_zero():
    run_processes(Path(__file__).with_name("deepspeed_worker.py"), processes=1, DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
