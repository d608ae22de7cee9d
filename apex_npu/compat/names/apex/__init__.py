# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``import apex`` in a process spawned by one that has called ``install_as_apex``."""

from apex_npu.compat import install_as_apex

__apex_npu__ = True
if __name__ == "apex":
    # Puts the real modules into sys.modules, including this one, where Python looks when this file is done.
    install_as_apex(force=True)
