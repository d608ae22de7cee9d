# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Start Python in a folder, with the device of the tests."""

import os
import subprocess
import sys
from pathlib import Path

from devices import DEVICE, SIMULATOR

ROOT = Path(__file__).parents[2]


def start(folder: Path, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, in which torch_npu is an empty module unless the device is an npu."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    if DEVICE.type == "npu":
        (site / "sitecustomize.py").write_text(f"import {SIMULATOR.__name__} as s; s.install()")
    else:
        (site / "torch_npu.py").touch()
    paths = [str(site), str(ROOT), str(ROOT / "tests/host_cann")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, input=text, capture_output=True, text=True, timeout=300
    )
