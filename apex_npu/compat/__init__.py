# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apex's names, and everything that exists for them alone: old modules, the name ``apex``, a patched Apex.

``table.py`` says which module of ours answers to which old name, and ``finder.py`` imports by it. The rest of apex_npu
uses no old name; ``apex_npu.amp.accessors`` is where this package hangs some onto optimizers. Neither this module nor
the two named, nor the pipeline, needs torch.
"""

from apex_npu.compat.apex_name import install_as_apex, uninstall_apex
from apex_npu.compat.finder import OldModules, forget_modules
from apex_npu.compat.table import APEX as MODULES

__all__ = ["MODULES", "OldModules", "forget_modules", "install_as_apex", "uninstall_apex"]
