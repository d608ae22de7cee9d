# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``start_on_gloo.py SCRIPT args...``: a process of torchrun that runs an example with one thread per group of gloo."""

import os
import runpy
import sys

from processes import use_one_thread_per_group

use_one_thread_per_group()
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
