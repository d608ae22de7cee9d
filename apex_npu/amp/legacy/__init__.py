# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What scripts written for Apex touch by private or side names, over the session and the optimizers' records.

Nothing else in the package knows these names; ``stash.py`` alone is imported from below, by the optimizer's mixin.
"""
