# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``import torch_npu`` in a process spawned by one that has called ``npu_simulator.install``."""

import npu_simulator

# Puts the stand-in into sys.modules, where Python looks once this file is done.
npu_simulator.install()
