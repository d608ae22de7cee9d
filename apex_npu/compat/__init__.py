# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apex's names, and everything that exists only for them: old modules, the name ``apex``, a patched Apex.

``table.py`` maps each old name to a module of this package, and ``finder.py`` imports modules by that map. The rest of
apex_npu uses no old name. This package adds some of the old names to optimizers through ``apex_npu.amp.accessors``.
This module, ``table.py``, ``finder.py`` and the pipeline do not need torch.
"""

from apex_npu.compat.apex_name import install_as_apex, uninstall_apex
from apex_npu.compat.finder import OldModules, forget_modules
from apex_npu.compat.table import APEX as MODULES

__all__ = ["MODULES", "OldModules", "forget_modules", "install_as_apex", "uninstall_apex"]
