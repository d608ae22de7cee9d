# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The device that tests run on: the CPU, or what ``APEX_NPU_TEST_DEVICE`` says ("npu" is simulated where none is)."""

import os

import torch

_NAME = os.environ.get("APEX_NPU_TEST_DEVICE", "cpu")

if _NAME.startswith("npu"):
    import npu_simulator

    npu_simulator.install()  # torch knows no device of that name before

DEVICE = torch.device(_NAME)
