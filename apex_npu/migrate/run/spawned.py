# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The main module of a process that a script under ``run --device npu`` spawns. It runs the script."""

from apex_npu.compat import install_as_apex
from apex_npu.migrate.run.running import start_spawned

if __name__ != "apex_npu.migrate.run.spawned":
    install_as_apex()
    start_spawned(globals())
