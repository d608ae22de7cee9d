# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a process imports as its main module that a script under ``run --device npu`` has spawned: the script."""

import os

from apex_npu.compat import install_as_apex
from apex_npu.migrate.running import SCRIPT, start

if __name__ != "apex_npu.migrate.spawned":
    install_as_apex()
    _script = os.environ[SCRIPT]
    start(_script.removeprefix("-m "), is_module=_script.startswith("-m "), names=globals(), tells=False)
